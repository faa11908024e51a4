"""Which runs may become part of a baseline: by what they say of themselves, and held against each other (cases 5, 9, 28)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from gate_builders import BASE_COMMIT, ROWS, a_run, environment, with_row
from gate_shortcuts import BASELINE

from ci import baseline as baselines
from ci.acceptable import untold
from ci.baseline_check import check
from ci.errors import BaselineError
from ci.model import CommitResult, RowKey

SOURCES = [f"runs/boot{i % 3}-{i}" for i in range(6)]


def _runs(change: Callable[[CommitResult], CommitResult] | None = None, **changes: Any) -> list[CommitResult]:
    """Six runs, the fifth of them changed."""
    runs = [replace(a_run(seed, **changes), source=source) for seed, source in enumerate(SOURCES)]
    return runs if change is None else [*runs[:4], change(runs[4]), runs[5]]


def _env(process: int = -1, **changes: Any) -> Callable[[CommitResult], CommitResult]:
    def change(run: CommitResult) -> CommitResult:
        made = environment(boot_id=run.processes[0].environment["boot_id"], **changes)
        processes = list(run.processes)
        processes[process] = replace(processes[process], environment=made)
        return replace(run, processes=tuple(processes))

    return change


def _at_start(**state: Any) -> Callable[[CommitResult], CommitResult]:
    return lambda run: _env(state_at_start=state)(run)


def _record(state: str) -> Callable[[CommitResult], CommitResult]:
    """The row has a value, but one of its processes did not verify it."""

    def change(run: CommitResult) -> CommitResult:
        row = run.rows[RowKey("decode_a")]
        return with_row(run, replace(row, records=(*row.records[:-1], replace(row.records[-1], status=state, reason="off by 3"))))  # type: ignore[arg-type]

    return change


REFUSED: dict[str, tuple[Callable[[CommitResult], CommitResult], str]] = {
    "modified files": (
        _env(modified_files=["rapid_llm/x.py", "asv_bench/y.py"]),
        "tracked files modified (rapid_llm/x.py, asv_bench/y.py)",
    ),
    "throttled": (_env(state__throttle_reasons=["hw_thermal_slowdown"]), "was throttled (hw_thermal_slowdown)"),
    "throttled at its start": (_at_start(throttle_reasons=["hw_slowdown"]), "was throttled (hw_slowdown)"),
    "another process": (_env(state__foreign_processes=1), "shared its device with 1 other process;"),
    "other processes at its start": (_at_start(foreign_processes=2), "shared its device with 2 other processes"),
    "another process in the first of its processes": (_env(0, state__foreign_processes=1), "process p0 of runs/boot1-4 shared"),
    "ECC errors": (_env(state__ecc_errors=3.0), "3 uncorrected ECC errors"),
    "unverified": (_record("unverified"), "decode_a is unverified in one of the runs, runs/boot1-4 (off by 3)"),
    "violation": (_record("violation"), "decode_a is violation"),
    "controls moved": (
        lambda run: replace(a_run(4, shift=0.93), source=run.source),
        "run 5 of 6, can never become part of a baseline: the control rows of class read-bandwidth moved by",
    ),
    "one row slow": (
        lambda run: replace(a_run(4, factors={"decode_c": 0.95}), source=run.source),
        "looks like a regression in 1 row(s): decode_c (+5.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_may_not_become_part_of_a_baseline_is_named(name: str) -> None:
    """By `record` and by `refresh` alike, in one sentence that says what to do next."""
    change, told = REFUSED[name]
    for accept in (
        lambda runs: baselines.record(runs, accepted_by="A"),
        lambda runs: baselines.refresh(BASELINE, runs, accepted_by="A", reason="r", rows="."),
    ):
        with pytest.raises(BaselineError) as caught:
            accept(_runs(change))
        assert "runs/boot1-4" in str(caught.value)
        if not (name == "controls moved" and "cannot refresh" in str(caught.value)):
            assert told in str(caught.value)
        assert any(word in str(caught.value) for word in ("measure", "mend", "run again"))


def test_what_is_normal_is_accepted() -> None:
    """No other process, a power cap, no ECC error, a clean tree; and what the driver does not tell."""
    clean = _env(
        modified_files=[],
        state__foreign_processes=0,
        state__ecc_errors=0.0,
        state_at_start={"foreign_processes": None, "throttle_reasons": ["sw_power_cap"]},
    )
    assert baselines.record(_runs(clean), accepted_by="A").rows


def test_records_that_are_silent_about_their_tree_are_told() -> None:
    runs = _runs(_env(modified_files=[]))
    (told,) = untold(runs)
    assert "6 of 6 runs" in told
    assert "runs/boot0-0" in told
    clean = [_env(0, modified_files=[])(_env(1, modified_files=[])(_env(2, modified_files=[])(run))) for run in runs]
    assert untold(clean) == []


# ---------------------------------------------------------------- the self-test


def test_a_noisy_row_can_be_accepted_and_is_then_marked_and_told() -> None:
    runs = _runs(lambda run: replace(a_run(4, factors={"decode_c": 0.95}), source=run.source))
    made = baselines.record(runs, accepted_by="A", accept_noisy=True)
    assert [name for name, row in made.rows.items() if row.noisy] == ["decode_c"]
    assert "accepted as noisy" in baselines.describe(made)
    (problem,) = [p for p in check(made, environment(), "protocol-1") if "noisy" in p.message]
    assert (problem.severity, "decode_c" in problem.message) == ("warning", True)
    refreshed = baselines.refresh(BASELINE, runs, accepted_by="A", reason="r", rows="decode_[cd]", accept_noisy=True).baseline
    assert [name for name, row in refreshed.rows.items() if row.noisy] == ["decode_c"]


def test_a_run_is_judged_without_its_own_values() -> None:
    """Of five runs the odd one widens the spread of all five so far that only the other four show it."""
    runs = [*_runs()[:4], replace(a_run(4, factors=dict.fromkeys(ROWS, 0.97)), source="runs/odd")]
    with pytest.raises(BaselineError, match=r"in 6 row\(s\): decode_a .*run 5, runs/odd"):
        baselines.record(runs, accepted_by="A")


def test_a_row_that_is_not_accepted_may_be_noisy() -> None:
    runs = _runs(lambda run: replace(a_run(4, factors={"decode_c": 0.95}), source=run.source))
    made = baselines.refresh(BASELINE, runs, accepted_by="A", reason="r", rows="decode_d")
    assert made.replaced == ("decode_d",)


def test_moved_controls_cannot_be_accepted_as_noise() -> None:
    runs = _runs(lambda run: replace(a_run(4, shift=0.93), source=run.source))
    with pytest.raises(BaselineError, match="can never become part of a baseline"):
        baselines.record(runs, accepted_by="A", accept_noisy=True)


@pytest.mark.slow
def test_sound_runs_are_seldom_refused() -> None:
    """The self-test has the gate's 1 % over all its runs: of 100 sets of unchanged runs at most 5 are refused (99.9 % quantile)."""
    refused = 0
    for start in range(100):
        runs = [a_run(10_000 + 10 * start + i, commit=BASE_COMMIT, sd=float(np.exp(-6 + (start % 5) / 2))) for i in range(6)]
        try:
            baselines.record(runs, accepted_by="A")
        except BaselineError:
            refused += 1
    assert refused <= 5


def test_each_validity_message_names_the_file_and_a_command() -> None:
    """What the user of another gate missed: which file to update, and how."""
    broken = msgspec.structs.replace(
        BASELINE,
        runs=[msgspec.structs.replace(run, boot="b", throttle_reasons=["hw_slowdown"], time="never") for run in BASELINE.runs[:4]],
    )
    told = check(broken, environment(device__name="X", torch="9", triton="9", driver="1.0"), "other")
    told += check(msgspec.structs.replace(BASELINE, advisory=True, runs=BASELINE.runs[:1]), environment(), "protocol-1")
    assert {problem.kind for problem in told} >= {"device", "protocol", "environment", "runs", "age", "advisory"}
    for problem in told:
        assert "baselines/NVIDIA_H200.json" in problem.message
        assert "python -m ci baseline re" in problem.message, problem.message
