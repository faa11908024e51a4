"""The fitness of the runner, second runs, exact edges, little history, and waivers (R94; cases 9, 17, 18)."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from gate_builders import (
    HEAD_COMMIT,
    ROWS,
    a_run,
    commit_of,
    control,
    foreign,
    measured,
    with_row,
    without_row,
)
from gate_shortcuts import BASELINE, compare, head, outcome, verdicts

from ci import baseline as baselines
from ci.baseline import Baseline, Waiver
from ci.compare import compare_baseline, compare_history, screened_rows
from ci.errors import UsageError
from ci.model import CommitResult, GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.references import Reference
from ci.screen import SCREENED, judge

# ---------------------------------------------------------------- the runner (case 9)


@pytest.mark.parametrize("shift", [0.5, 0.96, 1.04, 2.0])
def test_moved_controls_make_the_runner_unfit(shift: float) -> None:
    """Case 9: slow or fast, neither a pass nor a list of regressions; the reason names what moved and by how much."""
    result = compare(head(shift=shift))
    assert (result.verdict, result.exit_code) == (RunVerdict.RUNNER_UNFIT, 5)
    assert "control rows of class read-bandwidth moved" in result.reason
    assert "control_0" in result.reason
    assert set(verdicts(result).values()) == {"INVALID"}
    assert all(row.effect is not None for row in result.rows)


@pytest.mark.parametrize("shift", [0.985, 1.015])
def test_a_small_shift_of_the_whole_machine_is_taken_off(shift: float) -> None:
    """Without the controls each row would be far out of its band, here and in half of the baseline's runs."""
    assert compare(head(shift=shift)).exit_code == 0
    shifted = [a_run(seed, shift=1.01 if seed % 2 else 0.99) for seed in range(10)]
    result = compare(head(), baselines.record(shifted, accepted_by="A"))
    assert result.exit_code == 0
    assert all(row.mde80 is not None and row.mde80 < 0.01 for row in result.rows if not row.control)


def test_a_regression_on_a_shifted_machine_is_still_seen() -> None:
    result = compare(head(shift=1.015, factors={"decode_d": 0.97}))
    assert (result.exit_code, verdicts(result)["decode_d"]) == (1, "REGRESSED")


def test_one_moved_control_is_flagged_and_outvoted() -> None:
    result = compare(head(factors={"control_1": 0.9}))
    assert (result.exit_code, "MOVED" in outcome(result, "control_1").flags) == (0, True)


@pytest.mark.parametrize(("bottleneck", "code"), [("compute", 0), ("read-bandwidth", 5)])
def test_only_controls_that_serve_a_compared_row_decide_whether_the_runner_is_fit(bottleneck: str, code: int) -> None:
    """A matrix product at its power limit differs between boards; where no row is of its class it says nothing of the rows."""

    def run(seed: int, level: float, commit: str = "a" * 40) -> CommitResult:
        made = a_run(seed, commit=commit, controls=0)
        samples = [level * (1 + 1e-4 * (seed % 5)) for _ in range(3)]
        return with_row(made, control("matmul", samples, bottleneck=bottleneck))

    baseline = baselines.record([run(seed, 700.0) for seed in range(10)], accepted_by="A")
    result = compare(run(100, 740.0, HEAD_COMMIT), baseline)
    assert result.exit_code == code
    assert "MOVED" in outcome(result, "matmul").flags


def test_read_controls_serve_dequant_rows_and_other_classes_are_told() -> None:
    """A class without controls is named: nothing takes a shift off its rows."""

    def run(seed: int, shift: float, commit: str = "a" * 40) -> CommitResult:
        made = a_run(seed, commit=commit, shift=shift)
        for name, bottleneck in (("decode_a", "dequant"), ("decode_b", "launch")):
            made = with_row(made, measured(name, made.rows[RowKey(name)].samples, bottleneck=bottleneck))
        return made

    baseline = baselines.record([run(seed, 1.0) for seed in range(10)], accepted_by="A")
    result = compare(run(100, 0.985, HEAD_COMMIT), baseline)
    assert (verdicts(result)["decode_a"], verdicts(result)["decode_b"]) == ("PASS", "REGRESSED")
    assert any("class launch has no control rows" in notice for notice in result.notices)
    assert not any("class dequant" in notice for notice in result.notices)


@pytest.mark.parametrize(("shift", "code"), [(0.9, 5), (1.1, 5), (1.0, 0)])
def test_without_any_controls_all_rows_moving_together_is_the_machine(shift: float, code: int) -> None:
    baseline = baselines.record([a_run(seed, controls=0) for seed in range(10)], accepted_by="A")
    result = compare(head(shift=shift, controls=0), baseline)
    assert result.exit_code == code
    assert ("all rows moved together, suspect the machine" in result.reason) == (code == 5)


def test_without_controls_some_rows_moving_is_a_regression() -> None:
    baseline = baselines.record([a_run(seed, controls=0) for seed in range(10)], accepted_by="A")
    result = compare(head(factors=dict.fromkeys(ROWS[:5], 0.9), controls=0), baseline)
    assert (result.exit_code, verdicts(result)["decode_f"]) == (1, "PASS")


def test_three_rows_are_too_few_to_accuse_the_machine() -> None:
    def few(run: CommitResult) -> CommitResult:
        return replace(run, rows={key: row for key, row in run.rows.items() if key.benchmark in ROWS[:3]})

    baseline = baselines.record([few(a_run(seed, controls=0)) for seed in range(10)], accepted_by="A")
    assert compare(few(head(shift=0.9, controls=0)), baseline).exit_code == 1


# ---------------------------------------------------------------- two runs


def test_rows_that_look_slower_are_picked_unless_the_machine_is_unfit() -> None:
    assert not screened_rows(compare(head()))
    assert [str(key) for key in screened_rows(compare(head(factors={"decode_a": 0.992})))] == ["decode_a"]
    assert not screened_rows(compare(head(shift=0.9)))


def test_a_second_run_clears_what_the_first_screened() -> None:
    slow, plain = head(factors={"decode_a": 0.995}), head(7)
    first = outcome(compare(slow), "decode_a")
    assert (first.verdict, SCREENED in first.flags) == (RowVerdict.UNCONFIRMED, True)
    both = outcome(compare([slow, plain]), "decode_a")
    assert both.verdict is RowVerdict.CLEARED


def test_a_second_run_that_leaves_the_band_is_not_passed_over() -> None:
    """The family is all rows: what only the second run shows is judged as well."""
    reference = _reference(list(np.random.default_rng(4).normal(0, 0.012, 10)))
    centre = float(np.median(reference.runs))
    row = _judged([centre, centre + 0.06], reference)
    assert (row.verdict.value, SCREENED in row.flags) == ("UNCONFIRMED", False)


def test_a_second_run_confirms_a_regression() -> None:
    result = compare([head(1, factors={"decode_a": 0.99}), head(2, factors={"decode_a": 0.99})])
    assert (result.exit_code, result.runs, verdicts(result)["decode_a"]) == (1, 2, "REGRESSED")


def test_unconfirmed_rows_are_listed_and_do_not_fail() -> None:
    result = compare(head(factors={"decode_a": 0.995}))
    assert (result.exit_code, "1 unconfirmed (decode_a" in result.reason) == (0, True)


def test_runs_of_one_commit_one_or_two() -> None:
    with pytest.raises(UsageError, match="one run or two, but 0"):
        compare([])
    with pytest.raises(UsageError, match="one run or two, but 3"):
        compare([head()] * 3)
    with pytest.raises(UsageError, match="runs of one commit"):
        compare([head(), a_run(1)])


# ---------------------------------------------------------------- exact edges (case 17)


def _reference(runs: Sequence[float], **changes: Any) -> Reference:
    fields: dict[str, Any] = {"key": RowKey("row"), "unit": "GB/s", "direction": "higher", "version": "v1"}
    fields |= {"bottleneck": "launch", "timer": "graph", "control": False, "runs": np.array(runs)}
    return Reference(**{**fields, **changes})


def _judged(y: Sequence[float], reference: Reference) -> RowOutcome:
    """The row's outcome with `y` as ln latency of each run."""
    heads = [commit_of([measured("row", [1.0], bottleneck="launch")]) for _ in y]
    values = iter(y)
    (row,) = judge(heads, {RowKey("row"): reference}, estimate=lambda _: next(values)).rows
    return row


def test_exactly_the_floor_is_a_regression_and_less_is_not() -> None:
    """Case 17: REGRESSED from the floor on (>=), IMPROVED likewise; the floor here is two ticks of the timer."""
    y = math.log1p(0.02)
    effect = _judged([y], _reference([0.0] * 10)).effect
    assert effect is not None
    at = _reference([0.0] * 10, tick_us=effect / 2, latency_us=1.0)
    above = _reference([0.0] * 10, tick_us=math.nextafter(effect, 1) / 2, latency_us=1.0)
    assert [_judged([y], reference).verdict.value for reference in (at, above)] == ["REGRESSED", "UNCONFIRMED"]
    assert [_judged([-y], reference).verdict.value for reference in (at, above)] == ["IMPROVED", "PASS"]


def test_exactly_the_screen_edge_is_inside_the_band() -> None:
    """A deviation has to exceed the edge; within a tenth of it on either side the row is NEAR LIMIT."""
    reference = _reference([0.0] * 10, tick_us=0.02, latency_us=1.0)
    edge = math.log1p(0.04) / 2
    at, beyond = _judged([edge], reference), _judged([math.nextafter(edge, 1)], reference)
    assert (at.verdict.value, beyond.verdict.value) == ("PASS", "UNCONFIRMED")
    near = {share: "NEAR LIMIT" in _judged([share * edge], reference).flags for share in (0.5, 0.85, 0.95, 1.05, 1.2)}
    assert near == {0.5: False, 0.85: False, 0.95: True, 1.05: True, 1.2: False}
    assert at.band == (pytest.approx(math.exp(-edge)), pytest.approx(1.04)), "slower up to the edge, faster up to the floor"


def test_more_than_five_percent_is_screened_however_noisy_the_row() -> None:
    rng = np.random.default_rng(3)
    noisy = _reference(list(rng.normal(0, 0.2, 10)))
    centre = float(np.median(noisy.runs))
    assert SCREENED not in _judged([centre + math.log1p(0.049)], noisy).flags
    assert SCREENED in _judged([centre + math.log1p(0.051)], noisy).flags


def test_slow_drift_against_a_fixed_baseline_fails_by_the_third_step() -> None:
    """Case 17: ten drops of 2 % each; the baseline does not slide."""
    rng = np.random.default_rng(4)
    reference = _reference(list(rng.normal(0, 0.012, 10)))
    series = [_judged([-math.log(0.98) * step] * 2, reference).verdict.value for step in range(1, 6)]
    assert series[2:] == ["REGRESSED"] * 3


@pytest.mark.parametrize(("change", "screened"), [(0.049, False), (0.051, True), (0.2, True)])
def test_over_five_percent_is_looked_at_again_whatever_the_noise(change: float, screened: bool) -> None:
    """Case 17: a row of 20 % noise hides no change over 5 % from the second look."""
    runs = np.random.default_rng(7).normal(0, 0.2, 10)
    noisy = _reference(list(runs - np.median(runs)))
    assert (SCREENED in _judged([math.log1p(change)], noisy).flags) == screened


# ---------------------------------------------------------------- little history (case 18)

HISTORIES: dict[str, list[float]] = {
    "none": [],
    "one": [100.0],
    "two": [100.0, 100.0],
    "identical": [100.0] * 8,
    "one outlier": [100.0] * 7 + [5.0],
    "five": [100.0, 101.0, 99.0, 102.0, 98.0],
}


def _history(values: Sequence[float], value: float) -> GateResult:
    commits = [commit_of([foreign("row", v)], f"{i:040x}", own=False, date_ms=i) for i, v in enumerate(values)]
    tested = [commit_of([foreign("row", value)], commit * 40, own=False) for commit in "de"]
    return compare_history(commits, tested)


@pytest.mark.parametrize(
    ("history", "value", "verdict"),
    [
        ("none", 50.0, "NEW"),
        *((name, 99.9, "PASS") for name in list(HISTORIES)[1:]),
        *((name, 98.5, "PASS") for name in ("one", "two")),  # inside the declared floor
        *((name, 94.0, "REGRESSED") for name in list(HISTORIES)[1:]),
        *((name, 50.0, "REGRESSED") for name in list(HISTORIES)[1:]),
    ],
)
def test_little_history(history: str, value: float, verdict: str) -> None:
    """Case 18: no infinite score, no alarm at 0.1 %, and one outlier does not blind."""
    result = _history(HISTORIES[history], value)
    assert verdicts(result) == {"row": verdict}
    declared = "DECLARED NOISE" in outcome(result, "row").flags
    assert declared == (history in ("one", "two"))
    assert any("is declared" in notice for notice in result.notices) == declared


def test_the_commit_under_test_is_not_part_of_its_own_history() -> None:
    commits = [commit_of([foreign("row", 100.0)], f"{i:040x}", own=False, date_ms=i) for i in range(3)]
    own = commit_of([foreign("row", 50.0)], own=False, date_ms=9)
    result = compare_history([*commits, own, own, own, own], [own])
    assert outcome(result, "row").baseline == pytest.approx(100.0)
    assert result.base.startswith("3 commits")


def test_a_history_of_another_version_or_unit_is_not_comparable() -> None:
    """Case 20."""
    commits = [commit_of([foreign("row", 100.0)], f"{i:040x}", own=False) for i in range(6)]
    for changed in (foreign("row", 100.0, version="v2"), foreign("row", 100.0, unit="GiB/s")):
        result = compare_history(commits, [commit_of([changed], own=False)])
        assert (verdicts(result), result.exit_code) == ({"row": "NOT COMPARABLE"}, 3)


def test_a_row_of_the_latest_commit_is_missed_and_older_names_are_not() -> None:
    """Case 21."""
    old = [commit_of([foreign("row", 100.0), foreign("older", 1.0)], f"{i:040x}", own=False) for i in range(6)]
    latest = commit_of([foreign("row", 100.0), foreign("gone", 1.0)], "c" * 40, own=False)
    result = compare_history([*old, latest], [commit_of([foreign("row", 100.0)], own=False)])
    assert (verdicts(result), result.exit_code) == ({"row": "PASS", "gone": "MISSING"}, 3)


# ---------------------------------------------------------------- blindness and waivers


def _noisy_baseline(waivers: Sequence[dict[str, str]] = ()) -> Baseline:
    rng = np.random.default_rng(5)
    runs = []
    for seed in range(10):
        run = a_run(seed)
        factor = float(np.exp(rng.normal(0, 0.08)))
        samples = [value * factor for value in run.rows[RowKey("decode_a")].samples]
        runs.append(with_row(run, measured("decode_a", samples, timer="do_bench")))
    return baselines.record(runs, accepted_by="A", waivers=[msgspec.convert(waiver, Waiver) for waiver in waivers])


def _noisy_head() -> CommitResult:
    run = head()
    return with_row(run, measured("decode_a", run.rows[RowKey("decode_a")].samples, timer="do_bench"))


def _waiver(change: str, expires: str = "2027-01-31", row: str = "decode_a") -> dict[str, str]:
    return {"row": row, "change": change, "reason": "old", "approver": "B. Approver", "reference": "discussion", "expires": expires}


def test_a_blind_row_is_an_error_unless_waived() -> None:
    """A gate that could not see 10 % does not pass the row."""
    result = compare(_noisy_head(), _noisy_baseline())
    assert (result.exit_code, verdicts(result)["decode_a"]) == (3, "BLIND")
    assert "decode_a" in result.reason
    waived = compare(_noisy_head(), _noisy_baseline([_waiver("BLIND")]))
    row = outcome(waived, "decode_a")
    assert (waived.exit_code, row.verdict.value) == (0, "PASS")
    assert {"BLIND", "WAIVED"} <= set(row.flags)
    assert any("B. Approver" in notice and "decode_a" in notice for notice in waived.notices)


def test_an_expired_waiver_invalidates_the_baseline() -> None:
    result = compare(_noisy_head(), _noisy_baseline([_waiver("BLIND", "2026-11-29")]))
    assert (result.verdict, result.exit_code) == (RunVerdict.BASELINE_INVALID, 4)
    assert "2026-11-29" in result.reason


def test_a_clock_set_back_brings_no_waiver_to_life_again() -> None:
    """A year before the baseline's own runs a waiver that is long past would still hold: BASELINE INVALID, and the clock is named."""
    waiver = Waiver("decode_a", "REGRESSED", "r", "a", "x", datetime.date(2026, 6, 1))
    waived = msgspec.structs.replace(BASELINE, waivers=[waiver])
    slow = head(factors={"decode_a": 0.5})
    assert compare(slow, waived).exit_code == 4  # the waiver is past
    before = datetime.datetime(2026, 5, 1, tzinfo=datetime.timezone.utc)
    result = compare_baseline([slow], waived, now=before)
    assert (result.verdict, result.exit_code) == (RunVerdict.BASELINE_INVALID, 4)
    assert "set the clock of this machine" in result.reason


@pytest.mark.parametrize("change", ["MISSING", "REGRESSED"])
def test_waivers_excuse_their_own_change_only(change: str) -> None:
    baseline = msgspec.structs.replace(BASELINE, waivers=[msgspec.convert(_waiver(change), Waiver)])
    missing, slower = without_row(head(), "decode_a"), head(factors={"decode_a": 0.9})
    codes = (compare(missing, baseline).exit_code, compare(slower, baseline).exit_code)
    assert codes == ((0, 1) if change == "MISSING" else (3, 0))


def test_a_wide_row_is_flagged() -> None:
    runs = [a_run(seed, sd=0.02) for seed in range(10)]
    result = compare(head(sd=0.02), baselines.record(runs, accepted_by="A"))
    assert all("WIDE" in row.flags or "BLIND" in row.flags for row in result.rows if not row.control)
