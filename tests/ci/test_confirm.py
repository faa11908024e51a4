"""Paired comparison (R94, R96; cases 1, 2, 5, 7, 20, 21, 23)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_builders import BASE_COMMIT, HEAD_COMMIT, commit_of, control, environment, foreign, measured, with_row, without_row

from ci.confirm import ALPHA, compare_pairs, pairs_needed
from ci.model import CommitResult, GateResult, RowKey, RowOutcome, RunVerdict
from ci.results import load_commit

NAMES = ("row_a", "row_b", "row_c", "row_d")


def arms(
    factors: Mapping[str, float] | None = None,
    *,
    pairs: int = 12,
    sd: float = 0.002,
    drift: float = 0.0,
    seed: int = 1,
    direction: Any = "higher",
    **changes: Any,
) -> tuple[CommitResult, CommitResult]:
    """Base and head of four rows and a control; `factors` multiply the head's latency, `drift` moves both arms from pair to pair."""
    rng = np.random.default_rng(seed)
    together = np.exp(drift * rng.normal(0, 1, pairs))
    sign = -1 if direction == "higher" else 1

    def samples(name: str, head: bool) -> list[float]:
        latency = 10.0 * together * np.exp(rng.normal(0, sd, pairs)) * ((factors or {}).get(name, 1.0) if head else 1.0)
        return [float(1000 * value**sign) for value in latency]

    def arm(head: bool) -> CommitResult:
        rows = [measured(name, samples(name, head), direction=direction, **changes) for name in NAMES]
        kept = {name: value for name, value in changes.items() if name == "instrument"}
        rows.append(control("copy", samples("copy", head), **kept))
        return commit_of(rows, HEAD_COMMIT if head else BASE_COMMIT)

    return arm(False), arm(True)


def outcome(result: GateResult, name: str) -> RowOutcome:
    (row,) = [row for row in result.rows if row.key.benchmark == name]
    return row


def verdicts(result: GateResult) -> dict[str, str]:
    return {row.key.benchmark: row.verdict.value for row in result.rows if not row.control}


# ---------------------------------------------------------------- the plain ways


def test_equal_commits_pass() -> None:
    result = compare_pairs(*arms(), mode="aa")
    assert (result.verdict, result.exit_code, result.mode) == (RunVerdict.PASS, 0, "aa")
    assert set(verdicts(result).values()) == {"PASS"}
    assert (result.base, result.head, result.device) == (BASE_COMMIT, HEAD_COMMIT, "NVIDIA H200")
    assert all(row.num_pairs == 12 and row.mde80 is not None and row.mde80 < 0.01 for row in result.rows if not row.control)


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_a_slower_row_regresses_in_either_metric(direction: str) -> None:
    """Case 1, R96: a throughput drop and a time's rise are one thing."""
    result = compare_pairs(*arms({"row_b": 1.03}, direction=direction))
    assert (result.exit_code, verdicts(result)) == (1, {**dict.fromkeys(NAMES, "PASS"), "row_b": "REGRESSED"})
    row = outcome(result, "row_b")
    assert row.effect == pytest.approx(0.03, abs=0.003)
    assert row.p_value == 2.0**-12
    assert row.floor == 0.005
    assert "row_b (+" in result.reason


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_a_faster_row_improves(direction: str) -> None:
    result = compare_pairs(*arms({"row_b": 1 / 1.03}, direction=direction))
    assert (result.exit_code, verdicts(result)["row_b"]) == (0, "IMPROVED")
    assert outcome(result, "row_b").effect == pytest.approx(1 / 1.03 - 1, abs=0.003)


def test_what_moves_both_arms_of_a_pair_cancels() -> None:
    """The point of pairing: 5 % of common noise hides neither a 2 % regression nor makes one."""
    result = compare_pairs(*arms({"row_b": 1.02}, drift=0.05))
    assert verdicts(result) == {**dict.fromkeys(NAMES, "PASS"), "row_b": "REGRESSED"}


def test_equal_commits_seldom_look_different() -> None:
    red = sum(compare_pairs(*arms(seed=seed, sd=0.01)).exit_code for seed in range(150))
    assert red <= 5


def test_noise_that_looks_slow_is_unconfirmed() -> None:
    """Beyond the screen, but not beyond Holm's level: listed, not failing."""
    results = [compare_pairs(*arms({"row_b": 1.006}, sd=0.008, seed=seed)) for seed in range(12)]
    found = {verdicts(result)["row_b"] for result in results}
    assert "UNCONFIRMED" in found
    assert all(result.exit_code == 0 for result in results if verdicts(result)["row_b"] == "UNCONFIRMED")


def test_a_sure_but_small_change_is_under_the_floor() -> None:
    result = compare_pairs(*arms({"row_b": 1.004}, sd=0.0002))
    assert outcome(result, "row_b").verdict.value == "CLEARED"
    assert result.exit_code == 0


# ---------------------------------------------------------------- margins and floors


def _steady(latencies: Sequence[float], **changes: Any) -> CommitResult:
    """Rows of twelve equal samples, so that effects are exact."""
    rows = [measured(name, [latency] * 12, direction="lower", **changes) for name, latency in zip(NAMES, latencies, strict=True)]
    return commit_of(rows)


def test_the_margin_for_a_rebuild_holds_unless_the_launches_are_the_same() -> None:
    """delta0: 0.2 % may be the layout of a rebuilt binary; with equal launch hashes there was no rebuild."""
    for hashes, tested in (((None, None), True), (("x", "y"), True), (("x", None), True), (("x", "x"), False)):
        base = _steady([1000.0] * 4, launch_hash=hashes[0], tick_us=0.0)
        head = _steady([1001.9] * 4, launch_hash=hashes[1], tick_us=0.0)
        p = outcome(compare_pairs(base, head), "row_a").p_value
        assert p is not None
        assert (p == 1.0) == tested


@pytest.mark.parametrize(("instrument", "below", "above"), [("device", 1004.9, 1005.1), ("wall-clock", 1029.0, 1031.0)])
def test_floors_by_instrument(instrument: str, below: float, above: float) -> None:
    """0.5 % on the device, 3 % on the wall clock, from the floor on."""
    base = _steady([1000.0] * 4, instrument=instrument)
    result = compare_pairs(base, _steady([below, above, 1000.0, 1000.0], instrument=instrument))
    assert [verdicts(result)[name] for name in NAMES[:2]] == ["CLEARED", "REGRESSED"]
    faster = compare_pairs(_steady([below, above, 1000.0, 1000.0], instrument=instrument), base)
    assert [verdicts(faster)[name] for name in NAMES[:2]] == ["PASS", "IMPROVED"]


def test_exactly_the_floor_is_a_regression() -> None:
    base = _steady([1000.0] * 4)
    head = _steady([1010.0, 1000.0, 1000.0, 1000.0])
    effect = outcome(compare_pairs(base, head), "row_a").effect
    assert effect is not None
    got = []
    for tick in (effect / 2, math.nextafter(effect, 1) / 2):
        got.append(verdicts(compare_pairs(_steady([1000.0] * 4, tick_us=tick, latency_us=1.0), head))["row_a"])
    assert got == ["REGRESSED", "CLEARED"]


def test_rows_near_the_floor_say_so() -> None:
    result = compare_pairs(_steady([1000.0] * 4), _steady([1005.2, 1004.8, 1003.0, 1008.0]))
    assert ["NEAR LIMIT" in outcome(result, name).flags for name in NAMES] == [True, True, False, False]


# ---------------------------------------------------------------- number of pairs


def test_pairs_needed_lets_the_test_reject() -> None:
    """2^-n <= alpha / rows, and never fewer than 12."""
    for rows in (1, 2, 40, 41, 82, 100, 1000):
        needed = pairs_needed(rows)
        assert 2.0**-needed <= ALPHA / rows
        assert needed == 12 or 2.0 ** -(needed - 1) > ALPHA / rows
    assert (pairs_needed(40), pairs_needed(41), pairs_needed(0)) == (12, 13, 12)


def test_too_few_pairs_for_the_rows_are_incomplete_and_no_pass() -> None:
    """Six pairs are accepted and their effects shown, but 2^-6 can reject nothing at .01."""
    result = compare_pairs(*arms({"row_b": 2.0}, pairs=6))
    assert (result.verdict, result.exit_code) == (RunVerdict.INCOMPLETE, 3)
    assert "6 pairs cannot show a regression over 4 rows" in result.reason
    assert "measure 12 pairs" in result.reason
    assert any("only 6 pairs where 12 are asked for" in notice for notice in result.notices)
    row = outcome(result, "row_b")
    assert (row.verdict.value, "BLIND" in row.flags) == ("UNCONFIRMED", True)
    assert row.effect == pytest.approx(1.0, abs=0.02)
    assert compare_pairs(*arms(pairs=6), mode="aa").exit_code == 0


def test_five_pairs_are_invalid() -> None:
    """Case 23: n is printed."""
    result = compare_pairs(*arms(pairs=5))
    assert (result.exit_code, set(verdicts(result).values())) == (3, {"INVALID"})
    assert "5 pairs of processes, but at least 6" in outcome(result, "row_a").reason


def test_surplus_samples_are_left_out_and_told() -> None:
    base, head = arms({"row_a": 1.05})
    row = head.rows[RowKey("row_a")]
    longer = with_row(head, measured("row_a", [*row.samples, 1.0, 1.0]))
    result = compare_pairs(base, longer)
    assert outcome(result, "row_a").effect == outcome(compare_pairs(base, head), "row_a").effect
    assert outcome(result, "row_a").num_pairs == 12
    assert any("more samples on one side" in notice for notice in result.notices)


def test_a_noisy_row_is_flagged_blind_but_no_error() -> None:
    """Nobody has promised a band here, and no file could carry a waiver."""
    result = compare_pairs(*arms(sd=0.1, seed=2), mode="aa")
    assert result.exit_code == 0
    assert all("BLIND" in row.flags for row in result.rows if not row.control)
    assert any("are BLIND" in notice for notice in result.notices)


# ---------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("instrument", "factor", "code"),
    [("device", 1.03, 5), ("device", 0.97, 5), ("device", 1.015, 0), ("wall-clock", 1.12, 5), ("wall-clock", 1.05, 0)],
)
def test_a_control_that_moves_between_the_arms_makes_the_runner_unfit(instrument: str, factor: float, code: int) -> None:
    result = compare_pairs(*arms({"copy": factor}, instrument=instrument))
    assert result.exit_code == code
    if code:
        assert "copy (" in result.reason
        assert set(verdicts(result).values()) == {"INVALID"}


def test_a_control_that_serves_no_compared_row_is_shown_and_decides_nothing() -> None:
    base, head = arms({"copy": 1.05})

    def other_class(result: CommitResult) -> CommitResult:
        (copy,) = [row for row in result.rows.values() if row.record is not None and row.record.control]
        return with_row(result, replace(copy, records=tuple(replace(record, bottleneck="compute") for record in copy.records)))

    result = compare_pairs(other_class(base), other_class(head))
    assert result.exit_code == 0
    assert "MOVED" in outcome(result, "copy").flags


def test_a_control_that_is_only_noisy_does_not() -> None:
    base, head = arms(sd=0.05, seed=3)
    assert compare_pairs(base, head, mode="aa").verdict is not RunVerdict.RUNNER_UNFIT


def test_another_device_is_refused_and_other_software_is_told() -> None:
    """Case 7."""
    base, head = arms()

    def on(result: CommitResult, **changes: Any) -> CommitResult:
        return replace(result, processes=tuple(replace(p, environment=environment(**changes)) for p in result.processes))

    other = compare_pairs(base, on(head, device__name="NVIDIA H100 PCIe"))
    assert (other.verdict, other.exit_code) == (RunVerdict.BASELINE_INVALID, 4)
    assert "NVIDIA H100 PCIe" in other.reason
    newer = compare_pairs(base, on(head, triton="3.7.0"))
    assert newer.exit_code == 0
    assert "triton differs: 3.6.0 at the base commit, 3.7.0 at HEAD" in newer.notices


# ---------------------------------------------------------------- what is not there, or wrong


def _state(result: CommitResult, state: Any, **changes: Any) -> CommitResult:
    row = result.rows[RowKey("row_a")]
    return with_row(result, replace(row, **{"state": state, "samples": (), "records": (), "reason": "because", **changes}))


@pytest.mark.parametrize(
    ("base_state", "head_state", "verdict", "code"),
    [
        ("measured", "failed", "FAILED", 3),
        ("measured", "skipped", "FAILED", 3),
        ("measured", "invalid", "INVALID", 3),
        ("measured", "unverified", "UNVERIFIED", 6),
        ("measured", "violation", "VIOLATION", 6),
        ("measured", "absent", "MISSING", 3),
        ("failed", "measured", "NEW", 0),
        ("unverified", "measured", "NEW", 0),
        ("skipped", "measured", "NEW", 0),
        ("absent", "measured", "NEW", 0),
        ("failed", "failed", "FAILED", 3),
        ("skipped", "skipped", "SKIPPED", 0),
        ("failed", "absent", None, 0),
    ],
)
def test_rows_without_a_pair(base_state: str, head_state: str, verdict: str | None, code: int) -> None:
    """Case 2: null, NaN and absence on either side; both null is a failure and not "equal"."""
    sides = []
    for side, state in zip(arms(), (base_state, head_state), strict=True):
        if state == "absent":
            side = without_row(side, "row_a")
        elif state != "measured":
            side = _state(side, state)
        sides.append(side)
    result = compare_pairs(*sides)
    assert (verdicts(result).get("row_a"), result.exit_code) == (verdict, code)


def test_more_than_the_peak_on_head_is_wrong_however_fast() -> None:
    """Case 5."""
    base, head = arms({"row_a": 0.5})
    row = head.rows[RowKey("row_a")]
    head = with_row(head, replace(row, records=tuple(replace(record, peak_fraction=1.3) for record in row.records)))
    assert compare_pairs(base, head).exit_code == 6


@pytest.mark.parametrize("changes", [{"unit": "GiB/s"}, {"version": "v2"}, {"input_hash": "other"}, {"control": True}])
def test_different_measurements_are_not_comparable(changes: dict[str, Any]) -> None:
    """Case 20."""
    base, head = arms()
    result = compare_pairs(base, with_row(head, measured("row_a", head.rows[RowKey("row_a")].samples, **changes)))
    assert (outcome(result, "row_a").verdict.value, result.exit_code) == ("NOT COMPARABLE", 3)


def test_no_common_row_is_incomplete() -> None:
    """Case 21: all renamed."""
    base, head = arms()
    renamed = replace(head, rows={})
    for key, row in head.rows.items():
        renamed = with_row(renamed, measured(f"new_{key.benchmark}", row.samples))
    result = compare_pairs(base, renamed)
    assert result.exit_code == 3
    assert set(verdicts(result).values()) == {"NEW", "MISSING"}
    assert compare_pairs(replace(base, rows={}), replace(head, rows={})).exit_code == 3


def test_rows_without_records_are_judged_by_the_wider_floor_and_told() -> None:
    base = commit_of([replace(foreign("row", 1000.0), samples=(1000.0,) * 12)], BASE_COMMIT, own=False)
    head = commit_of([replace(foreign("row", 975.0), samples=(975.0,) * 12)], own=False)
    result = compare_pairs(base, head)
    assert (outcome(result, "row").floor, result.exit_code) == (0.03, 0)
    assert any("without a named instrument" in notice for notice in result.notices)


# ---------------------------------------------------------------- a real tree


def test_five_real_pairs_show_the_planted_change_and_claim_nothing(shared_data: Path) -> None:
    """Eight Decode values were multiplied by 0.97, eleven rows are an A/A; five pairs are under the minimum of six."""
    folder = shared_data / "h200_asv"
    base, head = load_commit(folder, "H200", "302f5103"), load_commit(folder, "H200", "04ba6b59")
    result = compare_pairs(base, head)
    assert (result.exit_code, len(result.rows), {row.verdict.value for row in result.rows}) == (3, 19, {"INVALID"})
    for row in result.rows:
        assert row.effect is not None
        assert row.reason.startswith("5 pairs of processes")
        planted = row.key.benchmark == "bench_k.Decode.track_read"
        assert row.effect == pytest.approx(1 / 0.97 - 1 if planted else 0.0, abs=0.002)


def test_enough_pairs_of_that_noise_name_exactly_the_planted_rows(shared_data: Path) -> None:
    """Pairs drawn from the real processes of each side (a resampled run, for want of twelve measured ones)."""
    folder = shared_data / "h200_asv"
    rng = np.random.default_rng(10)
    sides = []
    for commit in ("302f5103", "04ba6b59"):
        result = load_commit(folder, "H200", commit)
        rows = {key: replace(row, samples=tuple(rng.choice(row.samples, 12))) for key, row in result.rows.items()}
        sides.append(replace(result, rows=rows))
    result = compare_pairs(*sides)
    named = {row.key.benchmark for row in result.rows if row.verdict.value == "REGRESSED"}
    assert named == {"bench_k.Decode.track_read"}
    assert sum(row.verdict.value == "REGRESSED" for row in result.rows) == 8
    assert result.exit_code == 1


def test_a_row_whose_launches_did_not_change_is_a_control_more() -> None:
    """The device was asked for the same work: what moved is the machine. In an A/A that holds of every row, and it is judged as ever."""
    base, head = arms({"row_a": 1.1}, launch_hash="same")
    result = compare_pairs(base, head)
    row = outcome(result, "row_a")
    assert result.exit_code == 5
    assert "rows whose launches did not change moved" in result.reason
    assert {"IDENTICAL", "MOVED"} <= set(row.flags)
    assert compare_pairs(base, head, mode="aa").exit_code == 1
    small = compare_pairs(*arms({"row_a": 1.012}, sd=0.0005, launch_hash="same"))
    assert (small.exit_code, outcome(small, "row_a").verdict.value) == (0, "UNCONFIRMED")


@pytest.mark.parametrize("changes", [{"launch_hash": None}, {"launch_hash": "same", "instrument": "wall-clock"}])
def test_rows_without_a_launch_record_or_by_the_hosts_clock_are_judged_as_ever(changes: dict[str, Any]) -> None:
    result = compare_pairs(*arms({"row_a": 1.1}, **changes))
    assert result.exit_code == 1
    assert "IDENTICAL" not in outcome(result, "row_a").flags
