"""Layout tags come from strides and storage, not from what a caller says (R75)."""

from collections.abc import Callable

import pytest
import torch

from rapid_llm.kernels.ops import layout_tags

Rows = tuple[torch.Tensor, torch.Tensor]
POOL = torch.zeros(10, 6, 32)
BYTES = torch.zeros(10, 6, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: (POOL[:, :3], POOL[:, 3:]), {"kv:combined", "kv:paged"}),
        (lambda: (POOL[:, 3:], POOL[:, :3]), {"kv:combined", "kv:paged"}),
        (lambda: (POOL[:, ::2], POOL[:, 1::2]), {"kv:combined", "kv:paged"}),
        (lambda: (POOL[:, :3].contiguous(), POOL[:, 3:].contiguous()), {"kv:split", "kv:paged", "kv:contiguous"}),
        (lambda: POOL.view(2, 5, 6, 32).unbind(0), {"kv:split", "kv:paged", "kv:contiguous"}),
        (lambda: POOL.view(20, 3, 32).view(2, 10, 3, 32).unbind(0), {"kv:split", "kv:paged", "kv:contiguous"}),
        (lambda: (POOL[:, :3], POOL[:, :3]), {"kv:split", "kv:paged"}),
        (lambda: (POOL[:, :3], POOL[:, 2:5]), {"kv:split", "kv:paged"}),
        (lambda: (POOL[:-1, 3:], POOL[1:, :3]), {"kv:combined", "kv:paged"}),
        (lambda: (POOL[:-1, :3], POOL[1:, 3:]), {"kv:split", "kv:paged"}),
        (lambda: (POOL[:, :3], POOL.clone()[:, 3:]), {"kv:split", "kv:paged"}),
        (lambda: (POOL.transpose(0, 1), POOL.transpose(0, 1)), {"kv:split", "kv:paged"}),
        (lambda: (POOL[:1].expand(5, 6, 32), POOL[:5]), {"kv:split"}),
        (lambda: (POOL[:, :1].expand(10, 6, 32), POOL), {"kv:split"}),
        (lambda: (POOL.transpose(1, 2), POOL.transpose(1, 2)), {"kv:split"}),
        (lambda: (POOL.as_strided((9, 6, 32), (96, 32, 1)), POOL[:9]), {"kv:split"}),
    ],
    ids=[
        "combined", "v first", "interleaved heads", "split", "halves of one buffer", "halves of one buffer again",
        "k is v", "k overlaps v", "rows from the middle on", "v in the next row", "v elsewhere", "heads outermost",
        "broadcast rows", "broadcast heads", "dim not innermost", "overlapping rows",
    ],
)  # fmt: skip
def test_tags(make: Callable[[], Rows], expected: set[str]) -> None:
    assert layout_tags(*make()) == expected | {"kv:16bit-aligned"}


@pytest.mark.parametrize(
    ("rows", "aligned"),
    [
        (BYTES, True),
        (BYTES[:, :, :31], True),
        (BYTES[:, :, 1:], False),
        (torch.zeros(10, 6, 31, dtype=torch.uint8), False),
        (torch.zeros(10, 6, 31, dtype=torch.int8), False),
        (torch.zeros(10, 193, dtype=torch.uint8)[:, :192].view(10, 6, 32), False),
        (torch.zeros(10, 6, 31, dtype=torch.float16), True),
    ],
)
def test_alignment_is_read_off_the_strides(rows: torch.Tensor, aligned: bool) -> None:
    assert ("kv:16bit-aligned" in layout_tags(rows, rows)) == aligned
    assert ("kv:16bit-aligned" in layout_tags(BYTES, rows)) == aligned


def test_row_table() -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    assert "kv:row-table" in layout_tags(POOL, POOL, table)
    assert "kv:row-table" not in layout_tags(POOL, POOL, table.long())
    assert "kv:row-table" not in layout_tags(POOL, POOL)
