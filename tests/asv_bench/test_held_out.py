"""Held-out shapes: what is drawn, how a choice is judged, what stops a file from being gone on with, and a run on Triton's interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asv_bench import decode_cells, held_out
from asv_bench.kv_pool import pool_dtype
from rapid_llm.kernels.ops import dispatch as dispatcher
from rapid_llm.kernels.ops import registry

CPU = torch.device("cpu")


def test_the_draw_is_the_same_every_time_and_a_smaller_one_is_its_beginning() -> None:
    whole = held_out.draw(200, quick=False)
    assert held_out.draw(200, quick=False) == whole
    assert held_out.draw(50, quick=False) == whole[:50]
    assert held_out.draw(50, quick=False, seed=1) != whole[:50]
    assert whole[0].told == {
        "batch": 40, "max_seq_len": 2447, "num_q_heads": 7, "num_kv_heads": 1, "head_dim": 256, "kv_dtype": "float16", "block_size": 64,
    }  # fmt: skip


def test_the_draw_reaches_every_class_and_keeps_its_bounds() -> None:
    shapes = held_out.draw(200, quick=False)
    assert {shape.block_size for shape in shapes} == {1, 16, 64}
    assert {shape.cell.kv_dtype for shape in shapes} == {"float16", "bfloat16", "e4m3"}
    assert {shape.cell.heads[2] for shape in shapes} == {64, 96, 128, 192, 256}
    assert {shape.cell.heads[0] // shape.cell.heads[1] for shape in shapes} == {1, 2, 3, 4, 5, 7, 8, 16}
    batches, lengths = ([shape.told[name] for shape in shapes] for name in ("batch", "max_seq_len"))
    assert min(batches) == 1
    assert max(batches) > 100
    assert min(lengths) < 128
    assert max(lengths) > 16384
    assert max(shape.cell.heads[0] for shape in shapes) <= 64
    for shape in shapes:
        moved = sum(shape.cell.seq_lens) * shape.cell.row_elements * pool_dtype(shape.cell.kv_dtype).itemsize
        assert 0 < moved <= 1 << 30
    assert len({json.dumps(shape.told) for shape in shapes}) == 200


def candidate(spec: str, us: float | None, **more: Any) -> dict[str, Any]:
    return {"spec": spec, "latency_us": us, "rough": False, "max_abs_diff": None, "reason": None if us else "wrong", **more}


@pytest.mark.parametrize(
    ("times", "fastest", "ratio", "near"),
    [
        ((10.0, 12.0), "a", 1.0, True),
        ((10.0, 9.85), "b", 10.0 / 9.85, True),
        ((10.0, 9.7), "b", 10.0 / 9.7, False),
        ((10.0, None), "a", 1.0, True),
        ((None, 10.0), "b", None, False),
        ((None, None), None, None, False),
    ],
)
def test_a_choice_is_judged_by_the_fastest(times: tuple[float | None, ...], fastest: str | None, ratio: float | None, near: bool) -> None:
    """A choice that is wrong is never right, and without any time nothing is."""
    found = held_out.judged([candidate(name, us) for name, us in zip("ab", times, strict=True)])
    assert found == {"fastest": fastest, "ratio": ratio, "near": near}


def test_totals_count_choices_without_a_rival() -> None:
    rows = [
        {"candidates": [candidate("a", 1.0), candidate("b", 2.0)], "near": True, "by_measurement": True},
        {"candidates": [candidate("a", 1.0), candidate("b", None)], "near": True, "by_measurement": False},
        {"candidates": [candidate("a", 3.0), candidate("b", 2.0)], "near": False, "by_measurement": True},
    ]
    assert held_out.totals(rows) == {"measured": 3, "near": 2, "near_share": 2 / 3, "without_rival": 1, "by_measurement": 2}
    assert held_out.totals([])["near_share"] is None


@pytest.fixture
def shape() -> held_out.HeldOut:
    return held_out.HeldOut(decode_cells.Cell("tiny", (20, 20), "float16", (4, 2, 16)), 4)


def _clock(monkeypatch: pytest.MonkeyPatch, *readings: float) -> list[int]:
    """A timer that makes the calls and gives these readings; what it was handed is counted."""
    given, left = [], list(readings)

    def bench_graph(calls: Any, *, poison: Callable[[], None], **known: Any) -> Any:
        poison()
        for call in calls:
            call()
        given.append(len(calls))
        return type("Timing", (), {"reading_us": left.pop(0)})

    monkeypatch.setattr(held_out, "bench_graph", bench_graph)
    return given


def test_what_is_chosen_comes_first_and_a_far_slower_candidate_is_read_once(
    monkeypatch: pytest.MonkeyPatch, shape: held_out.HeldOut
) -> None:
    _clock(monkeypatch, 10.0, 16.0)
    row = held_out.measured(shape, CPU)
    assert (row["chosen"], row["by_measurement"]) == ("torch_paged_decode", False)
    assert [(one["spec"], one["latency_us"], one["rough"]) for one in row["candidates"]] == [
        ("torch_paged_decode", 10.0, False),
        ("triton_paged_decode", 16.0, True),
    ]
    assert (row["fastest"], row["near"]) == ("torch_paged_decode", True)


def test_a_candidate_that_may_be_faster_is_read_as_the_choice_was(monkeypatch: pytest.MonkeyPatch, shape: held_out.HeldOut) -> None:
    _clock(monkeypatch, 10.0, 14.0, 9.0)
    row = held_out.measured(shape, CPU)
    assert [(one["latency_us"], one["rough"]) for one in row["candidates"]] == [(10.0, False), (9.0, False)]
    assert (row["fastest"], row["near"]) == ("triton_paged_decode", False)


def test_dispatch_is_asked_with_the_provider_that_is_installed(monkeypatch: pytest.MonkeyPatch, shape: held_out.HeldOut) -> None:
    _clock(monkeypatch, 9.0, 10.0, 10.0)
    with registry.isolated():
        for name in ("torch_paged_decode", "triton_paged_decode"):
            registry.record_golden(name, registry.GoldenRecord(True, 0.0))
        before = dispatcher.set_perf_provider(lambda spec, request: 1.0 if spec.backend == "triton" else 2.0)
        try:
            row = held_out.measured(shape, CPU)
        finally:
            dispatcher.set_perf_provider(before)
    assert (row["chosen"], row["by_measurement"], row["why"]) == ("triton_paged_decode", True, "measured and verified")


def test_a_wrong_candidate_has_no_time(monkeypatch: pytest.MonkeyPatch, shape: held_out.HeldOut) -> None:
    _clock(monkeypatch, 10.0)
    original = decode_cells.Prepared.calls

    def calls(prepared: decode_cells.Prepared, block_size: int, backend: str = "triton") -> Any:
        return [prepared.outs.zero_] if backend == "triton" else original(prepared, block_size, backend)

    monkeypatch.setattr(decode_cells.Prepared, "calls", calls)
    row = held_out.measured(shape, CPU)
    assert [one["latency_us"] for one in row["candidates"]] == [10.0, None]
    assert row["candidates"][1]["reason"].startswith("VerificationError: decode over a float16 pool")


def run(path: Path, *more: str) -> int:
    return held_out.main(["--quick", "--json", str(path), *more])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(held_out, "dispatch_us", lambda request, device: 0.5)


def test_a_run_that_ended_early_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time is over after the first shape; the second run measures the second shape, and a third one nothing."""
    path, seen = tmp_path / "h.json", []

    def measured(shape: held_out.HeldOut, device: torch.device) -> dict[str, Any]:
        seen.append(shape)
        found = [candidate("a", 1.0), candidate("b", 2.0)]
        return {"shape": shape.told, "chosen": "a", "by_measurement": False, "why": "w", "candidates": found, **held_out.judged(found)}

    monkeypatch.setattr(held_out, "measured", measured)
    monkeypatch.setattr(held_out, "prepare", lambda *args: type("Nothing", (), {"request": lambda self, size: None})())
    now = iter([0.0, 0.0, 1.0])
    with monkeypatch.context() as patched:
        patched.setattr(held_out, "now_s", lambda: next(now))
        assert run(path, "--count", "2", "--seconds", "0.5") == 1
    assert "the time was over before shape 1" in capsys.readouterr().err
    assert json.loads(path.read_text("utf-8"))["measured"] == 1
    assert run(path, "--count", "2") == 0
    assert run(path, "--count", "2") == 0
    assert seen == held_out.draw(2, quick=True)
    made = json.loads(path.read_text("utf-8"))
    assert [row["shape"] for row in made["results"]] == [shape.told for shape in seen]
    assert (made["measured"], made["near"], made["near_share"], len(made["dates"]), made["dispatch_us"]) == (2, 2, 1.0, 3, 0.5)
    assert "2 of 2 shapes measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda made: made.update(seed=1), "seed 1 is not 20261130"),
        (lambda made: made.update(count=3), "count 3 is not 1"),
        (lambda made: made["environment"].update(commit="another"), "commit 'another' is not"),
        (lambda made: made["environment"]["device"].update(name="another"), "device 'another' is not"),
        (lambda made: made.pop("results"), "is no file of this command (KeyError"),
        (lambda made: made.update(schema="rapid_llm/trial/1"), "schema 'rapid_llm/trial/1' is not"),
    ],
)
def test_other_code_or_shapes_are_not_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Callable[[Any], None], says: str
) -> None:
    path = tmp_path / "h.json"
    monkeypatch.setattr(held_out, "prepare", lambda *args: type("Nothing", (), {"request": lambda self, size: None})())
    assert run(path, "--count", "1", "--seconds", "-1") == 1
    made = json.loads(path.read_text("utf-8"))
    change(made)
    text = json.dumps(made)
    path.write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert run(path, "--count", "1") == 2
    assert says in capsys.readouterr().err
    assert path.read_text("utf-8") == text


def test_the_command_on_the_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "h.json"
    assert run(path, "--count", "2") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CPU: Triton's interpreter, tiny shapes, wall clock")
    made = json.loads(path.read_text("utf-8"))
    assert (made["schema"], made["quick"], made["interpreted"], made["baseline"]) == (held_out.SCHEMA, True, True, None)
    assert [row["chosen"] for row in made["results"]] == ["torch_paged_decode"] * 2
    assert all(one["latency_us"] > 0 and one["reason"] is None for row in made["results"] for one in row["candidates"])
    assert "a dispatch() whose decision is cached takes 0.50 us of the host" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--count", "0", "--quick"], "--count expected 1 or more, got 0"),
        ([], "held_out expected a CUDA device"),
        (["--quick", "--baseline", "baselines/NVIDIA_H200.json"], "was measured on NVIDIA H200, and this device is cpu"),
        (["--quick", "--baseline", "nothing.json"], "nothing.json cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(root)
    assert held_out.main(["--json", str(tmp_path / "h.json"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "h.json").exists()


def test_the_time_of_a_cached_decision(monkeypatch: pytest.MonkeyPatch, shape: held_out.HeldOut) -> None:
    monkeypatch.undo()
    request = decode_cells.prepare(shape.cell, CPU, (4,)).request(4)
    seen = []
    monkeypatch.setattr(held_out, "_CALLS_A_SAMPLE", 10)
    monkeypatch.setattr(dispatcher, "dispatch", lambda asked: seen.append(asked))
    assert 0 < held_out.dispatch_us(request, CPU) < 1000
    assert len(seen) % 10 == 0
    assert {id(one) for one in seen} == {id(request)}
