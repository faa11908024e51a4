"""Anchors against creep: steps within the band that add up are told, with refreshes and without (case 17)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from gate_builders import a_run
from gate_shortcuts import BASELINE, NOW, head, outcome

from ci import baseline as baselines
from ci import staged
from ci.baseline import Baseline, Waiver
from ci.compare import compare_baseline
from ci.creep import marked
from ci.model import CommitResult, GateResult, RowVerdict, RunVerdict
from ci.references import references_of
from ci.rows import WAIVED
from ci.screen import SCREENED


def _runs(first: int, factor: float, *, shift: float = 1.0, name: str = "decode_b", sd: float = 0.002) -> list[CommitResult]:
    return [a_run(first + i, commit=f"{first:040x}", factors={name: factor}, shift=shift, sd=sd) for i in range(5)]


def _refreshed(baseline: Baseline, first: int, factor: float, **changes: Any) -> Baseline:
    shift = changes.pop("shift", 1.0)
    return baselines.refresh(baseline, _runs(first, factor, shift=shift), accepted_by="B", reason="night", **changes).baseline


def _compare(run: CommitResult, baseline: Baseline) -> GateResult:
    return compare_baseline([run], baseline, now=NOW)


TWICE = _refreshed(_refreshed(BASELINE, 200, 0.98), 300, 0.962)
"""decode_b in two accepted steps, 4 % under its anchor."""


def test_a_row_that_passes_its_band_is_flagged_by_its_distance_from_the_anchor() -> None:
    result = _compare(head(factors={"decode_b": 0.962}), TWICE)
    row = outcome(result, "decode_b")
    assert (result.exit_code, row.verdict.value) == (0, "PASS")
    assert "CREEP" in row.flags
    (told,) = [notice for notice in result.notices if notice.startswith("creep:")]
    for part in ("decode_b", "+3.8 %", "a" * 12, "PASS"):
        assert part in told
    assert not [other for other in result.rows if "CREEP" in other.flags and other.key.benchmark != "decode_b"]
    assert abs(row.effect or 0) < 0.01


def test_under_three_per_cent_nothing_is_told() -> None:
    once = _refreshed(BASELINE, 200, 0.98)
    result = _compare(head(factors={"decode_b": 0.977}), once)
    assert not [row for row in result.rows if "CREEP" in row.flags]


def test_three_per_cent_within_chance_is_not_told() -> None:
    """A row of 2 % noise that stands 4 % from its anchor: the five runs and the one cannot tell it from chance."""
    noisy = baselines.record([a_run(seed, sd=0.04) for seed in range(10)], accepted_by="A", accept_noisy=True)
    runs = _runs(200, 0.965, sd=0.04)
    made = baselines.refresh(noisy, runs, accepted_by="B", reason="r", rows="decode_b", accept_noisy=True).baseline
    assert not [row for row in _compare(head(7, sd=0.04, factors={"decode_b": 0.965}), made).rows if "CREEP" in row.flags]


FAR = _refreshed(TWICE, 400, 0.94)


def test_over_five_per_cent_it_fails_and_names_the_anchor() -> None:
    result = _compare(head(factors={"decode_b": 0.94}), FAR)
    row = outcome(result, "decode_b")
    assert (result.verdict, row.verdict.value) == (RunVerdict.REGRESSION, "REGRESSED")
    assert row.effect == pytest.approx(1 / 0.94 - 1, abs=0.005)
    assert "anchor aaaaaaaaaaaa" in row.reason
    assert row.baseline == pytest.approx(2000, rel=0.005)
    assert row.band is not None
    assert row.value is not None
    assert row.value < row.band[0] < row.baseline
    assert "decode_b (+6." in result.reason


def _waived(change: str, expires: str = "2026-12-31") -> Baseline:
    waiver = {"row": "decode_b", "change": change, "reason": "r", "approver": "a", "reference": "x", "expires": expires}
    return msgspec.structs.replace(FAR, waivers=[msgspec.convert(waiver, Waiver)])


def test_a_waiver_for_creep_lets_it_pass_and_is_told_and_no_other_waiver_does() -> None:
    run = head(factors={"decode_b": 0.94})
    result = _compare(run, _waived("CREEP"))
    assert result.exit_code == 0
    assert {"CREEP", "WAIVED"} <= set(outcome(result, "decode_b").flags)
    assert any(notice.startswith("creep: decode_b") for notice in result.notices)
    assert _compare(run, _waived("BLIND")).exit_code == 1
    assert _compare(run, _waived("REGRESSED")).exit_code == 1
    # What regresses against its band as well is not excused by the waiver for creep.
    assert _compare(head(factors={"decode_b": 0.90}), _waived("CREEP")).exit_code == 1


def test_a_row_that_is_excused_for_something_else_still_fails_by_its_creep() -> None:
    """A waiver for BLIND leaves WAIVED on a passing row, and SCREENED asks for a second look at the change: neither excuses creep."""
    passing = outcome(_compare(head(factors={"decode_b": 0.94}), _waived("CREEP")), "decode_b")
    excused = replace(passing, flags=(WAIVED, SCREENED))
    (row,), _ = marked([excused], {excused.key: (0.002, 20.0)}, FAR, 1, NOW, references_of(FAR))
    assert (row.verdict.value, row.flags) == ("REGRESSED", ("CREEP",))
    regressed = replace(excused, verdict=RowVerdict.REGRESSED)
    (row,), _ = marked([regressed], {excused.key: (0.002, 20.0)}, FAR, 1, NOW, references_of(FAR))
    assert (row.verdict.value, row.flags) == ("REGRESSED", ("CREEP",))
    blind = replace(excused, verdict=RowVerdict.BLIND)
    (row,), _ = marked([blind], {excused.key: (0.002, 20.0)}, FAR, 1, NOW, references_of(FAR))
    assert (row.verdict.value, row.flags) == ("BLIND", ("CREEP",))


def test_the_anchor_is_held_against_the_controls_of_its_own_runs() -> None:
    """A machine that is 1.5 % slower in the new runs takes nothing off the distance and adds nothing to it."""
    made = _refreshed(BASELINE, 200, 0.96, shift=0.985)
    for shift in (1.0, 0.985):
        result = _compare(head(factors={"decode_b": 0.96}, shift=shift), made)
        (told,) = [notice for notice in result.notices if notice.startswith("creep:")]
        assert "+4." in told
        assert float(told.split("+")[1].split(" ")[0]) == pytest.approx(4.2, abs=0.4)


def test_an_anchor_follows_an_improvement_and_never_a_slow_down() -> None:
    better = _refreshed(BASELINE, 200, 1.1)
    assert better.rows["decode_b"].anchor is None
    worse = _refreshed(better, 300, 1.06)
    assert worse.rows["decode_b"].anchor is not None
    assert np.median(worse.rows["decode_b"].anchor.values) == pytest.approx(2200, rel=0.005)
    # Better than the last step and still worse than the anchor: it stays.
    again = _refreshed(worse, 400, 1.075)
    assert again.rows["decode_b"].anchor == worse.rows["decode_b"].anchor
    assert _refreshed(worse, 400, 1.03, new_anchor=True).rows["decode_b"].anchor is None


def test_recording_anew_keeps_the_anchors_unless_told_otherwise() -> None:
    """Otherwise a monthly `record` would forget what a monthly `refresh` holds."""
    runs = _runs(500, 0.96)
    again = baselines.record(runs, accepted_by="A", previous=TWICE)
    assert again.rows["decode_b"].anchor == TWICE.rows["decode_b"].anchor
    assert again.anchor_commit == BASELINE.anchor_commit
    assert "CREEP" in outcome(_compare(head(factors={"decode_b": 0.96}), again), "decode_b").flags
    fresh = baselines.record(runs, accepted_by="A", previous=TWICE, new_anchor=True)
    assert fresh.rows["decode_b"].anchor is None
    assert fresh.anchor_commit == runs[0].commit
    assert fresh.previous_hash == baselines.content_hash(TWICE)


def test_an_anchor_whose_controls_are_gone_is_told() -> None:
    row = TWICE.rows["decode_b"]
    assert row.anchor is not None
    lost = msgspec.structs.replace(row, anchor=msgspec.structs.replace(row.anchor, controls={"control_9": 1.0}))
    result = _compare(head(factors={"decode_b": 0.962}), msgspec.structs.replace(TWICE, rows={**TWICE.rows, "decode_b": lost}))
    assert any("decode_b cannot be held against its anchor" in notice for notice in result.notices)


def test_pairs_with_the_merge_base_do_not_clear_what_crept() -> None:
    """The last change did nothing, and the sum of the accepted ones is still too much; another row is confirmed as ever."""
    screen = compare_baseline([head(factors={"decode_b": 0.93, "decode_c": 0.98})], FAR, now=NOW, pairs=48)
    assert [key.benchmark for key in staged.open_rows(screen, [])] == ["decode_c"]
    base, tested = (a_run(1, commit=commit * 40, processes=12, sd=0.001) for commit in "ab")
    result = staged.confirm(screen, [(base, tested)], FAR, now=NOW)
    assert (result.exit_code, outcome(result, "decode_b").verdict.value) == (1, "REGRESSED")
    assert "CREEP" in outcome(result, "decode_b").flags
    assert outcome(result, "decode_c").verdict.value == "CLEARED"
