"""Peers side by side: who is compared with whom, who never is, what peers are handed, and a run on Triton's interpreter."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asv_bench import decode_cells, flashinfer_peers, peers, trial_peers, trial_results, verify
from asv_bench.decode_cells import Cell

CPU = torch.device("cpu")
SMALL = Cell("2x20 float16", (20, 20), "float16", (4, 2, 16))


def row(what: str, us: float | None, *, cell: str = "1x1k float16", size: int | None = None, reason: str | None = None) -> dict[str, Any]:
    return {"what": what, "cell": cell, "block_size": size, "latency_us": us, "reason": reason}


def found(rows: list[dict[str, Any]], cell: str = "1x1k float16", size: int = 16) -> dict[str, Any]:
    (one,) = (one for one in peers.ratios(rows) if (one["cell"], one["block_size"]) == (cell, size))
    return one


OURS = [row("ours", us, size=16) for us in (10.0, 30.0, 11.0)]


def test_ratios_are_of_medians_and_of_the_fastest_peer_of_the_same_blocks() -> None:
    rows = [*OURS, row("a", 22.0, size=16), row("b", 10.0, size=16), row("c", 5.0, size=1), row("sdpa-cudnn", 8.0), row("sdpa-flash", 1.0)]
    one = found(rows)
    assert (one["ours_us"], one["best_peer"], one["any_peer"]) == (11.0, "b", "c blocks of 1")
    assert (one["over_best_peer"], one["over_any_peer"], one["over_cudnn"]) == (1.1, 2.2, 1.375)
    assert one["over_float16"] is None
    assert found(rows, size=1)["over_best_peer"] is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_peer_that_was_wrong_once_is_never_compared(place: int) -> None:
    """However fast it reads before or after."""
    wrong = [row("b", 1.0, size=16), row("b", 1.0, size=16)]
    wrong.insert(place, row("b", None, size=16, reason="VerificationError: 5 elements are off"))
    one = found([*OURS, row("a", 22.0, size=16), *wrong])
    assert (one["best_peer"], one["over_best_peer"]) == ("a", 0.5)
    assert found([*OURS, *wrong])["best_peer"] is None


def test_ours_that_was_wrong_has_no_ratio() -> None:
    one = found([*OURS, row("ours", None, size=16, reason="wrong"), row("a", 22.0, size=16)])
    assert (one["ours_us"], one["over_best_peer"]) == (None, None)
    assert "| 1x1k float16 | 16 | no number |" in peers.table([one])


def test_e4m3_is_held_against_its_own_float16() -> None:
    rows = [*OURS, row("ours", 5.5, cell="1x1k e4m3", size=16)]
    assert found(rows, "1x1k e4m3")["over_float16"] == 0.5


@pytest.fixture
def sitting(tmp_path: Path) -> peers.Sitting:
    return peers.Sitting(CPU, trial_results.Results(tmp_path / "p.json", CPU, quick=True, schema=peers.SCHEMA), rounds=2)


def _only(*made: peers.Contender) -> Any:
    return lambda prepared: iter(made)


def _rows_of(sitting: peers.Sitting, name: str) -> list[dict[str, Any]]:
    return [one for one in sitting.results.rows if one["what"] == name]


def test_a_wrong_peer_is_told_and_not_timed(sitting: peers.Sitting) -> None:
    """The prepared inputs are the cell's own; the peer's calls write zeros."""
    seen: list[Any] = []

    def contenders(prepared: decode_cells.Prepared) -> Iterator[peers.Contender]:
        def call() -> None:
            seen.append(prepared.outs.zero_())

        yield peers.Contender("zeros", 16, lambda: ([call], [call]))

    sitting.cell(SMALL, math.inf, contenders)
    (told,) = _rows_of(sitting, "zeros")
    assert told["reason"].startswith("VerificationError: decode over a float16 pool")
    assert told["latency_us"] is None
    assert len(seen) == 1


def test_a_peer_that_is_wrong_after_it_was_timed_is_told(sitting: peers.Sitting) -> None:
    """Right for the first comparison, and from then on nothing is written."""

    def contenders(prepared: decode_cells.Prepared) -> Iterator[peers.Contender]:
        left = [1]
        right = prepared.calls(1, "torch")[0]

        def call() -> None:
            if left:
                left.pop()
                right()

        yield peers.Contender("once", 1, lambda: ([call], [call]))

    sitting.cell(SMALL, math.inf, contenders)
    assert [one["latency_us"] for one in _rows_of(sitting, "once")] == [None]
    assert sitting.failed == 1
    assert sitting.ours_failed == 0


def test_what_cannot_be_built_is_told_at_every_shape_and_tried_once(sitting: peers.Sitting) -> None:
    tried: list[int] = []

    def build() -> Any:
        tried.append(1)
        raise OSError("nvcc is not there\nand more")

    for _ in range(2):
        sitting.cell(SMALL, math.inf, _only(peers.Contender("built", 16, build)))
    assert len(tried) == 1
    assert {one["reason"] for one in _rows_of(sitting, "built")} == {"not built: OSError: nvcc is not there"}
    assert len(_rows_of(sitting, "built")) == 2


def test_all_are_timed_in_turn_and_only_wanted_peers(sitting: peers.Sitting) -> None:
    sitting.wanted = "^b"

    def contenders(prepared: decode_cells.Prepared) -> Iterator[peers.Contender]:
        calls = prepared.calls(1, "torch")
        for name in ("a", "ours", "b"):
            yield peers.Contender(name, 1, lambda: (calls, calls))

    sitting.cell(SMALL, math.inf, contenders)
    assert [(one["what"], one["round"]) for one in sitting.results.rows] == [("ours", 0), ("b", 0), ("ours", 1), ("b", 1)]
    assert all(one["relative_error"] < 1e-3 for one in sitting.results.rows)


def test_what_this_machine_lacks_is_a_reason() -> None:
    prepared = decode_cells.prepare(SMALL, CPU)
    reasons = {(one.name, one.block_size): one.why_not for one in peers.contenders(prepared)}
    assert reasons["flashinfer-xqa", 16] == "it is measured on a GPU only"
    assert reasons["ours", 1] is None
    assert reasons["sdpa-math", None] is None
    assert trial_peers.not_contiguous(decode_cells.prepare(Cell("", (20,), "e4m3", (4, 2, 16)), CPU).pool) == "it takes no e4m3 bytes"
    uneven = decode_cells.prepare(Cell("", (20, 7), "float16", (4, 2, 16)), CPU).pool
    assert trial_peers.not_contiguous(uneven) == "it takes sequences of one length"


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_sdpa_over_what_was_gathered_is_right(kv_dtype: str) -> None:
    prepared = decode_cells.prepare(Cell("", (20, 20), kv_dtype, (4, 2, 16)), CPU)
    ((_, timed, checked),) = trial_peers.peers(prepared.q, prepared.pool, prepared.outs)
    prepared.verified(checked, 1)
    assert prepared.relative_error(1) < 1e-2
    prepared.poison()
    timed[0]()
    with pytest.raises(verify.VerificationError):
        prepared.check(1)


@given(lens=st.lists(st.integers(1, 70), min_size=1, max_size=5), size=st.sampled_from([1, 3, 16, 64]))
def test_the_form_of_tables_that_flashinfer_takes(lens: list[int], size: int) -> None:
    """Read back as FlashInfer reads it, it is the table: every sequence its blocks, and its length."""
    width = -(-max(lens) // size)
    table = torch.arange(len(lens) * width, dtype=torch.int32).view(len(lens), width) + 100
    begins, blocks, last = flashinfer_peers.pages_of(table, torch.tensor(lens, dtype=torch.int32), size)
    assert [begins.dtype, blocks.dtype, last.dtype] == [torch.int32] * 3
    for i, length in enumerate(lens):
        own = blocks[int(begins[i]) : int(begins[i + 1])]
        assert own.tolist() == table[i, : -(-length // size)].tolist()
        assert (len(own) - 1) * size + int(last[i]) == length


class _Wrapper:
    """FlashInfer's batch decode by the slow reference."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        assert (layout, use_tensor_cores) == ("NHD", True)

    def plan(self, begins: Any, blocks: Any, last: Any, *heads: int, q_data_type: Any, kv_data_type: Any) -> None:
        self.begins, self.blocks, self.last, self.heads, self.types = begins, blocks, last, heads, (q_data_type, kv_data_type)

    def run(self, q: Any, pages: Any, *, out: Any, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        *heads, size = self.heads
        assert (q.shape[1], pages[0].shape[2], q.shape[2]) == tuple(heads)
        assert self.types == (q.dtype, pages[0].dtype)
        rows = [(part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part).flatten(0, 1) for part in pages]
        for i in range(len(q)):
            own = self.blocks[int(self.begins[i]) : int(self.begins[i + 1])]
            table = (own[:, None] * size + torch.arange(size)).flatten()[None].int()
            length = torch.tensor([(len(own) - 1) * size + int(self.last[i])], dtype=torch.int32)
            out[i] = verify.decode_reference(q[i : i + 1], *rows, table, length, k_scale=k_scale, v_scale=v_scale)[0]


def _xqa(q: Any, pages: Any, workspace: Any, table: Any, lens: Any, most: int, *, out: Any, bmm1_scale: float, bmm2_scale: float) -> None:
    assert most >= int(lens.max())
    assert not workspace.any()
    size = pages[0].shape[1]
    rows = [(part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part).flatten(0, 1) for part in pages]
    as_rows = (table[:, :, None] * size + torch.arange(size, dtype=torch.int32)).flatten(1)
    out.copy_(verify.decode_reference(q, *rows, as_rows, lens, softmax_scale=bmm1_scale) * bmm2_scale)


@pytest.mark.parametrize("kv_dtype", ["float16", "e4m3"])
@pytest.mark.parametrize("size", [1, 16])
def test_what_flashinfer_is_handed_is_the_cell(monkeypatch: pytest.MonkeyPatch, kv_dtype: str, size: int) -> None:
    whole, inner = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.decode")
    whole.BatchDecodeWithPagedKVCacheWrapper = _Wrapper  # type: ignore[attr-defined]
    inner.xqa_batch_decode_with_kv_cache = _xqa  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", whole)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", inner)
    monkeypatch.setattr(flashinfer_peers, "_WORKSPACE_BYTES", 64)
    prepared = decode_cells.prepare(Cell("", (20, 33), kv_dtype, (4, 2, 16)), CPU)
    for make in (flashinfer_peers.planned, flashinfer_peers.xqa):
        prepared.verified(make(prepared, size), size)


def test_a_file_is_never_half_written(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    trial_results.write_strictly(path, {"a": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        trial_results.write_strictly(path, {"a": 2.0, "b": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1.0}
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_on_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "peers.json"
    status = peers.main(["--quick", "--json", str(path), "--select", "1x20", "--rounds", "1", "--seconds", "100"])
    printed = capsys.readouterr().out
    made = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0, printed
    assert printed.startswith("CPU: Triton's interpreter, tiny shapes, wall clock")
    assert (made["schema"], made["quick"], made["interpreted"], made["not_reached"]) == (peers.SCHEMA, True, True, [])
    assert made["environment"]["torch"] == torch.__version__
    assert made["ratios"] == peers.ratios(made["results"])
    assert {one["what"] for one in made["results"] if one["latency_us"]} == {"ours", "sdpa-math"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--quick", "--select", "nothing"], "finds no cell"),
        (["--quick", "--rounds", "0"], "--rounds expected 1 or more, got 0"),
        ([], "peers expected a CUDA device for serving shapes"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peers.main(["--json", str(tmp_path / "p.json"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_a_cell_that_was_not_reached_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "p.json"
    assert peers.main(["--quick", "--json", str(path), "--select", "1x20", "--seconds", "0"]) == 1
    assert "the time was over before 1x20 float16" in capsys.readouterr().err
    assert json.loads(path.read_text(encoding="utf-8"))["not_reached"] == ["1x20 float16", "1x20 e4m3"]
