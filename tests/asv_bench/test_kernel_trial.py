"""The trial of decode variants: what it tries, what it writes, and a run of it on Triton's interpreter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asv_bench import kernel_trial, trial_peers, trial_results, tune
from rapid_llm.kernels.configs import VARIANTS


@pytest.mark.parametrize("cell", kernel_trial.cells(quick=False), ids=lambda cell: cell.label)
def test_what_is_tried_fits_and_begins_with_the_rule(cell: kernel_trial.Cell) -> None:
    tried = kernel_trial.short_list(cell.sizes, cell.kv_dtype)
    assert tried[0] == kernel_trial.configs.DecodeConfig.default(cell.sizes, cell.kv_dtype)
    assert len(tried) == len(set(tried)) >= 15
    assert {config.variant for config in tried} == set(VARIANTS if len(cell.seq_lens) > 1 else VARIANTS[:2])


def test_the_shapes_of_the_note_come_with_both_dtypes() -> None:
    cells = kernel_trial.cells(quick=False)
    assert len(cells) == 22
    assert {len(cell.seq_lens) for cell in cells} == {1, 8, 32, 128}
    assert max(sum(cell.seq_lens) for cell in cells) == 32 * 32768


def test_what_is_compiled_beforehand_is_each_thing_once_and_guesses_first() -> None:
    entries = kernel_trial._to_compile(kernel_trial.cells(quick=False))
    assert len({(cell.kv_dtype, config, block_size, len(cell.seq_lens), cell.label) for cell, config, block_size in entries}) == len(
        entries
    )
    first = [config.variant for _, config, _ in entries[:8]]
    assert {"split", "stream"} <= set(first)


def _row(cell: str, config: Any, latency_us: float | None, *, what: str = "ours", block_size: int | None = 1) -> dict[str, Any]:
    return {
        "what": what, "cell": cell, "block_size": block_size, "config": config, "latency_us": latency_us,
        "share_of_read_ceiling": None, "max_abs_diff": 0.0, "reason": None if latency_us else "OutOfResources: shared memory",
    }  # fmt: skip


def test_the_best_is_that_of_the_smallest_median(tmp_path: Path) -> None:
    """One lucky reading of a config does not make it the best; what failed does not take part."""
    results = trial_results.Results(tmp_path / "trial.json", torch.device("cpu"), quick=True)
    steady, lucky = {"block_n": 64}, {"block_n": 128}
    for config, times in ((steady, (10.0, 10.1, 10.2)), (lucky, (5.0, 11.0, 12.0)), ({"block_n": 32}, (None,))):
        results.rows += [_row("1x1k float16", config, us) for us in times]
    results.rows.append(_row("1x1k float16", None, 20.2, what="sdpa-cudnn", block_size=None))
    results.rows.append(_row("1x1k e4m3", steady, 5.05))
    best = results.best("1x1k float16", "ours", 1)
    assert best is not None
    assert (best["config"], best["latency_us"]) == (steady, 10.1)
    summary = results.summary()
    assert "0.500x sdpa-cudnn" in summary
    assert "0.500x float16" in summary


def test_a_trial_on_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "trial.json"
    status = tune.main(["--trial", "--quick", "--json", str(path), "--seconds", "8"])
    printed = capsys.readouterr().out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0, printed
    assert (found["schema"], found["quick"], found["interpreted"]) == (trial_results.SCHEMA, True, True)
    first, *_ = found["results"]
    assert first["what"] == "ours"
    assert first["max_abs_diff"] < 1e-2
    assert {row["what"] for row in found["results"]} >= {"ours", "sdpa-math"}
    assert {row["block_size"] for row in found["results"]} >= {1, 16}


def test_a_wrong_config_is_told_and_has_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is compared before and after it is timed."""
    cell = kernel_trial.cells(quick=True)[0]
    prepared = kernel_trial.prepare(cell, torch.device("cpu"))
    trial = kernel_trial.Trial(torch.device("cpu"), trial_results.Results(tmp_path / "t.json", torch.device("cpu"), quick=True), 0.0)
    prepared.expected[1] += 1.0
    assert trial.reading(prepared, kernel_trial.short_list(cell.sizes, cell.kv_dtype)[0], 1) is None
    assert "VerificationError" in trial.results.rows[-1]["reason"]
    assert trial.results.rows[-1]["latency_us"] is None


def test_no_cell_and_a_call_of_no_kernel_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--trial", "--json", str(tmp_path / "t.json"), "--select", "nothing"]) == 2
    assert "finds no cell" in capsys.readouterr().err
    with pytest.raises(LookupError, match="launched 0 Triton kernels"):
        trial_peers.bare_launch(lambda: None)
