"""Address arithmetic past 2**31 elements, without the memory: the pools are sparse files of which few pages exist.

The same on a real pool is in test_gpu.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from asv_bench.verify import check_decode, check_write, decode_reference
from rapid_llm.kernels.decode_tile import row_offsets
from rapid_llm.kernels.ops import kv_write, paged_decode_attention, rope_norm_kv_write
from rapid_llm.kernels.paged_decode import fits_32_bits

NUM_KV_HEADS, HEAD_DIM = 8, 128
ROW_ELEMENTS = 2 * NUM_KV_HEADS * HEAD_DIM

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="host memory is not the GPU's; test_gpu.py covers it")


@triton.jit
def _offset_kernel(rows_ptr, out_ptr, stride, ROWS: tl.constexpr, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, ROWS)
    tl.store(out_ptr + lane, row_offsets(tl.load(rows_ptr + lane), stride, NARROW))


def test_row_offsets_are_64_bit(device: str) -> None:
    rows = torch.tensor([0, 1_048_575, 1_048_576, 2**31 - 1], dtype=torch.int32, device=device)
    out = torch.empty(4, dtype=torch.int64, device=device)
    _offset_kernel[(1,)](rows, out, 2048, ROWS=4, NARROW=False)
    assert out.tolist() == [0, 2_147_481_600, 2_147_483_648, (2**31 - 1) * 2048]


@pytest.mark.parametrize(("num_rows", "row_stride", "fits"), [(1_048_575, 2048, True), (1_048_576, 2048, False), (2**31 - 1, 1, True)])
def test_offsets_stay_in_32_bits_only_where_each_fits(num_rows: int, row_stride: int, fits: bool, device: str) -> None:
    """Where they are said to fit, the last row's is right in 32 bits, and so is that of the row after it."""
    assert fits_32_bits(num_rows, row_stride) == fits
    if fits:
        rows = torch.tensor([num_rows - 1, num_rows], dtype=torch.int64, device=device).clamp(max=2**31 - 1).int()
        out = torch.empty(2, dtype=torch.int64, device=device)
        _offset_kernel[(1,)](rows, out, row_stride, ROWS=2, NARROW=True)
        assert out.tolist() == [row * row_stride for row in rows.tolist()]


@pytest.fixture(params=["float16", "e4m3", "int8"])
def sparse_pool(request: pytest.FixtureRequest, tmp_path: Path) -> torch.Tensor:
    """A combined pool whose last rows lie past 2**31: elements of fp16, pairs of bytes."""
    dtype = {"float16": torch.float16, "e4m3": torch.uint8, "int8": torch.int8}[request.param]
    num_rows = 1_048_580 if dtype == torch.float16 else 2_097_156
    memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=num_rows * ROW_ELEMENTS, dtype=dtype)
    return memory.view(num_rows, 2 * NUM_KV_HEADS, HEAD_DIM)


@needs_cpu
def test_write_then_attend_past_two_to_the_31(sparse_pool: torch.Tensor, backend: str) -> None:
    """Only slots {0, n - 5, n - 4, n - 1} are written and attended; their neighbours stay zero."""
    num_rows = sparse_pool.shape[0]
    k_rows, v_rows = sparse_pool[:, :NUM_KV_HEADS], sparse_pool[:, NUM_KV_HEADS:]
    slots = [0, num_rows - 5, num_rows - 4, num_rows - 1]
    assert slots[2] * ROW_ELEMENTS // (2 if sparse_pool.element_size() == 1 else 1) == 2**31
    scales: dict[str, Any] = {"k_scale": 0.02, "v_scale": 0.01} if sparse_pool.dtype == torch.uint8 else {}
    if sparse_pool.dtype == torch.int8:
        scales = {"k_scale": torch.full((NUM_KV_HEADS,), 0.02), "v_scale": torch.full((NUM_KV_HEADS,), 0.01)}
    mapping = torch.tensor(slots, dtype=torch.int32)
    k, v = (torch.randn(4, NUM_KV_HEADS, HEAD_DIM).half() for _ in range(2))
    kv_write(k, v, mapping, k_rows, v_rows, **scales, backend=backend)
    check_write(k, v, mapping, k_rows, v_rows, **scales)
    neighbours = torch.tensor([1, 2, num_rows - 6, num_rows - 3, num_rows - 2])
    assert not sparse_pool[neighbours].any()

    q = torch.randn(2, NUM_KV_HEADS, HEAD_DIM).half()
    table = torch.stack([mapping, mapping.flip(0)])
    lens = torch.tensor([4, 2], dtype=torch.int32)
    out = paged_decode_attention(q, k_rows, v_rows, table, lens, **scales, backend=backend)
    reference = decode_reference(q, k_rows, v_rows, table, lens, **scales)
    check_decode(out, reference, kv_dtype=str(sparse_pool.dtype))


@needs_cpu
@pytest.mark.parametrize("sparse_pool", ["float16", "e4m3"], indirect=True)
def test_rotate_and_write_past_two_to_the_31(sparse_pool: torch.Tensor, backend: str) -> None:
    """What is written past 2**31 is what the call writes to the first rows of a small pool, bit for bit; the neighbours stay zero."""
    num_rows = sparse_pool.shape[0]
    slots = torch.tensor([0, num_rows - 5, num_rows - 4, num_rows - 1], dtype=torch.int32)
    q, k, v = (torch.randn(4, NUM_KV_HEADS, HEAD_DIM).half() for _ in range(3))
    positions, cos_sin = torch.arange(4), torch.randn(4, HEAD_DIM)
    scales: dict[str, Any] = {"k_scale": 0.02, "v_scale": 0.01} if sparse_pool.dtype == torch.uint8 else {}
    small = torch.zeros(4, 2 * NUM_KV_HEADS, HEAD_DIM, dtype=sparse_pool.dtype)
    for pool, rows in ((sparse_pool, slots), (small, torch.arange(4, dtype=torch.int32))):
        halves = pool.split(NUM_KV_HEADS, dim=1)
        rope_norm_kv_write(q, k, v, positions, cos_sin, rows, *halves, **scales, backend=backend)
    assert torch.equal(sparse_pool[slots.long()], small)
    assert small.any(dim=2).all()
    assert not sparse_pool[torch.tensor([1, 2, num_rows - 6, num_rows - 3, num_rows - 2])].any()
