"""The trial of KV writes: what it tries, what it writes, what it refuses, and a run of it on Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asv_bench import bench_kv_write, trial_results, tune, verify, write_trial
from asv_bench.table import Ceilings, Work
from rapid_llm.kernels.configs import WriteConfig

CPU = torch.device("cpu")
SIZES = {"num_kv_heads": 8, "head_dim": 128}


@pytest.fixture
def trial(tmp_path: Path) -> write_trial.Trial:
    return write_trial.Trial(CPU, trial_results.Results(tmp_path / "t.json", CPU, quick=True), Ceilings(10.0, 10.0, 10.0))


def test_every_shape_comes_with_every_dtype() -> None:
    cells = write_trial.cells(quick=False)
    wanted = {(tokens, dtype) for tokens in (1, 8, 64, 4096, 16384, 32768) for dtype in ("float16", "bfloat16", "e4m3")}
    assert {(cell.num_tokens, cell.kv_dtype) for cell in cells} == wanted
    assert len(cells) == len(wanted)


@pytest.mark.parametrize("cell", write_trial.cells(quick=False), ids=lambda cell: cell.label)
def test_what_is_tried_fits_and_begins_with_the_rule(cell: write_trial.Cell) -> None:
    sizes = {"num_tokens": cell.num_tokens, **SIZES}
    tried = write_trial.short_list(sizes, cell.kv_dtype)
    assert tried[0] == WriteConfig.default(sizes, cell.kv_dtype)
    assert set(tried) >= set(WriteConfig.candidates(sizes, cell.kv_dtype))
    assert len(tried) == len(set(tried))
    assert {config.halves for config in tried[:6]} == {1, 2}
    assert all(config.problem(sizes, cell.kv_dtype) is None for config in tried)


def test_a_trial_on_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tried = write_trial.short_list
    monkeypatch.setattr(write_trial, "short_list", lambda *of: tried(*of)[:2])  # so that the work ends it, and not the time
    path = tmp_path / "trial.json"
    status = tune.main(["--trial-write", "--quick", "--json", str(path), "--seconds", "100"])
    printed = capsys.readouterr().out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0, printed
    assert (found["quick"], found["interpreted"]) == (True, True)
    for cell in write_trial.cells(quick=True):
        rows = [row for row in found["results"] if row["cell"] == cell.label]
        assert {row["what"] for row in rows} == {"ours", write_trial.PLAIN, write_trial.TORCH}
        assert all(row["latency_us"] > 0 and row["share_of_ceiling"] > 0 for row in rows)
        assert f"{cell.label}: tokens=" in printed


@pytest.mark.parametrize("good_checks", [0, 1])
def test_what_is_wrong_before_or_after_the_timing_has_no_number(trial: write_trial.Trial, good_checks: int) -> None:
    answers = iter([0.0] * good_checks)

    def check() -> float:
        if (answer := next(answers, None)) is None:
            raise verify.VerificationError("wrong")
        return answer

    cell = write_trial.Cell(1, "float16")
    assert trial.reading(cell, "ours", None, [lambda: None], lambda: None, check, Work(moved=8.0, written=4.0)) is None
    assert trial.results.rows[-1]["reason"] == "VerificationError: wrong"
    assert trial.results.rows[-1]["latency_us"] is None
    assert trial.failed == 1


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "e4m3"])
def test_peers_write_what_they_are_to_write(kv_dtype: str) -> None:
    """Both peers pass their check after their calls, and are refused after their poison."""
    cell = write_trial.Cell(5, kv_dtype)
    sets = bench_kv_write.write_sets(cell.case, CPU)
    plain = write_trial.plain_copy(sets)
    scattered = bench_kv_write.prepared_write(cell.case, sets)
    peers: list[tuple[Any, Any, Any]] = [
        ([plain.call(0)], plain.poison, plain.check),
        (write_trial.index_copies(sets), scattered.poison, scattered.check),
    ]
    for calls, poison, check in peers:
        poison()
        with pytest.raises(verify.VerificationError):
            check()
        for call in calls:
            call()
        check()
    assert plain.sources[0].nbytes + plain.outs[0].nbytes + 4 * 5 == sets.work.moved


def test_a_config_that_is_wrong_on_edge_values_is_told(trial: write_trial.Trial) -> None:
    cell = write_trial.Cell(3, "e4m3")
    prepared = bench_kv_write.prepared_write(cell.case, bench_kv_write.write_sets(cell.case, CPU))
    prepared.calls = [lambda: None]
    trial.verified(cell, WriteConfig(1, 1024), prepared)
    assert (trial.failed, trial.results.rows[-1]["what"]) == (1, "ours on edge values")


def _row(config: dict[str, int] | None, latency_us: float | None, what: str = "ours") -> dict[str, Any]:
    share = None if latency_us is None else 5.0 / latency_us
    return {"what": what, "cell": "T=64 float16", "config": config, "latency_us": latency_us, "share_of_ceiling": share}


def test_the_best_is_that_of_the_smallest_median() -> None:
    steady, lucky = {"tokens": 1}, {"tokens": 2}
    rows = [_row(None, 5.0, write_trial.PLAIN), _row({"tokens": 4}, 20.0)]
    rows += [_row(steady, us) for us in (10.2, 10.0, 10.1)] + [_row(lucky, us) for us in (5.0, 11.0, 12.0)] + [_row({"tokens": 8}, None)]
    (line,) = write_trial.summary(rows)
    assert line == ("T=64 float16: tokens=1: 10.10 us, 49.5% of the ceiling for its bytes; 2.020x plain copy; 0.505x the rule's config")
    assert list(write_trial.summary(rows[:1])) == ["T=64 float16: nothing was measured"]


def test_no_cell_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--trial-write", "--json", str(tmp_path / "t.json"), "--select", "nothing"]) == 2
    assert "finds no cell" in capsys.readouterr().err


def test_configs_are_compiled_without_a_device(tmp_path: Path) -> None:
    """In a process of its own, since here Triton interprets."""
    code = (
        "from asv_bench import write_trial as w; own = dict(name='NVIDIA H200', capability=[9, 0], multiprocessors=132, l2_bytes=60 << 20);"
        "print(w.compile_some([w.Cell(64, 'e4m3')], own, 0, 5))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 3
    assert len(list(tmp_path.rglob("kv_write_kernel.cubin"))) == 3
