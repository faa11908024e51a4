"""Verdicts against a baseline (R21, R94, R105; cases 1, 2, 5, 7, 20, 21, 23)."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from gate_builders import (
    HEAD_COMMIT,
    ROWS,
    commit_of,
    control,
    environment,
    measured,
    row_record,
    with_row,
    without_row,
)
from gate_shortcuts import BASELINE, compare, head, outcome, verdicts

from ci import baseline as baselines
from ci.answer import next_steps
from ci.compare import RUN_ORDER, compare_baseline, section_of
from ci.errors import ExitCode
from ci.model import CommitResult, Direction, RowKey, RowOutcome, RowResult, RowVerdict, RunVerdict
from ci.rows import VERDICTS, conclude

# ---------------------------------------------------------------- the plain ways


def test_an_unchanged_commit_passes() -> None:
    result = compare(head())
    assert (result.verdict, result.exit_code) == (RunVerdict.PASS, 0)
    assert set(verdicts(result).values()) == {"PASS"}
    assert result.reason == "6 rows compared, none regressed"
    assert (result.mode, result.device, result.base, result.head) == ("baseline", "NVIDIA H200", "a" * 40, HEAD_COMMIT)
    assert (result.runs, result.processes, result.ceilings) == (1, 3, {"copy_gb_per_s": 4000.0})
    assert result.environment["torch"] == "2.11.0+cu130"


def test_a_slower_row_regresses_and_is_named_with_its_size() -> None:
    result = compare(head(factors={"decode_b": 0.9}))
    assert (result.verdict, result.exit_code) == (RunVerdict.REGRESSION, 1)
    assert verdicts(result) == {**dict.fromkeys(ROWS, "PASS"), "decode_b": "REGRESSED"}
    row = outcome(result, "decode_b")
    assert row.effect == pytest.approx(1 / 0.9 - 1, abs=0.01)
    assert row.value == pytest.approx(1800, rel=0.01)
    assert row.baseline == pytest.approx(2000, rel=0.01)
    assert row.band is not None
    assert row.value < row.band[0] < row.baseline < row.band[1]
    assert row.floor is not None
    assert 0.005 <= row.floor < 0.01
    assert row.p_value is not None
    assert row.p_value < 0.01 / 6
    assert row.mde80 is not None
    assert row.mde80 < 0.01
    assert (row.section, row.latency_us is not None, row.baseline_latency_us is not None) == ("decode-read", True, True)
    assert "1 row regressed: decode_b (+1" in result.reason


def test_a_faster_row_improves_and_does_not_fail() -> None:
    result = compare(head(factors={"decode_b": 1.1}))
    assert (result.exit_code, verdicts(result)["decode_b"]) == (0, "IMPROVED")
    assert "refresh the baseline" in result.reason


def test_at_most_three_rows_are_named() -> None:
    result = compare(head(factors=dict.fromkeys(ROWS[:5], 0.9)))
    assert result.exit_code == 1
    assert result.reason.startswith("5 rows regressed: ")
    assert result.reason.endswith(" and 2 more")


def test_equal_commits_seldom_look_different() -> None:
    """A/A: of 200 unchanged runs at most 5 are red (alpha is .01 a run, and 5 is its .999 quantile at 200 runs by chance alone)."""
    red = sum(compare(head(seed)).exit_code for seed in range(1000, 1200))
    assert red <= 6


def test_the_published_size_is_found() -> None:
    """Twice the smallest detectable regression of a row is always found."""
    size = outcome(compare(head()), "decode_c").mde80
    assert size is not None
    runs = [
        compare([head(seed, factors={"decode_c": 1 / (1 + 2 * size)}), head(seed + 1, factors={"decode_c": 1 / (1 + 2 * size)})])
        for seed in (1, 3, 5)
    ]
    assert [verdicts(result)["decode_c"] for result in runs] == ["REGRESSED"] * 3


# ---------------------------------------------------------------- direction (case 1)


def _one_row(value: float, direction: Direction, unit: str) -> list[RowResult]:
    return [
        measured("metric", [value * (1 + 1e-4 * i) for i in range(3)], direction=direction, unit=unit),
        *(control(f"control_{i}", [3000.0 + i, 3001.0, 3002.0]) for i in range(3)),
    ]


@pytest.mark.parametrize(
    ("direction", "unit", "before", "after", "verdict"),
    [
        ("higher", "GB/s", 1000.0, 500.0, "REGRESSED"),
        ("higher", "GB/s", 500.0, 1000.0, "IMPROVED"),
        ("lower", "us", 10.0, 20.0, "REGRESSED"),
        ("lower", "us", 20.0, 10.0, "IMPROVED"),
    ],
)
def test_each_row_has_its_own_direction(direction: Direction, unit: str, before: float, after: float, verdict: str) -> None:
    """Case 1: 1000 -> 500 GB/s and 10 -> 20 us are both regressions."""
    runs = [commit_of(_one_row(before, direction, unit), "a" * 40, env=environment(boot_id=f"boot-{i}")) for i in range(6)]
    result = compare(commit_of(_one_row(after, direction, unit)), baselines.record(runs, accepted_by="A"))
    row = outcome(result, "metric")
    assert row.verdict.value == verdict
    assert row.effect == pytest.approx(1.0 if verdict == "REGRESSED" else -0.5, abs=0.01)
    assert result.exit_code == (1 if verdict == "REGRESSED" else 0)


def test_a_turned_direction_is_not_comparable() -> None:
    run = head()
    row = run.rows[RowKey("decode_a")]
    result = compare(with_row(run, replace(row, direction="lower")))
    assert (verdicts(result)["decode_a"], result.exit_code) == ("NOT COMPARABLE", 3)


# ---------------------------------------------------------------- missing values (case 2)


def _state(run: CommitResult, state: Any, name: str = "decode_a", reason: str = "because") -> CommitResult:
    row = run.rows[RowKey(name)]
    return with_row(run, replace(row, state=state, samples=(), reason=reason, records=()))


@pytest.mark.parametrize(
    ("change", "verdict", "told"),
    [
        (lambda run: _state(run, "failed"), "FAILED", "because"),
        (lambda run: _state(run, "skipped"), "FAILED", "newly skipped"),
        (lambda run: _state(run, "invalid", reason="0 samples"), "INVALID", "0 samples"),
        (lambda run: without_row(run, "decode_a"), "MISSING", "the run has not"),
        (lambda run: with_row(run, replace(run.rows[RowKey("decode_a")], samples=())), "INVALID", "0 samples"),
    ],
)
def test_a_missing_value_is_incomplete_and_never_a_pass(change: Any, verdict: str, told: str) -> None:
    result = compare(change(head()))
    assert (result.verdict, result.exit_code, verdicts(result)["decode_a"]) == (RunVerdict.INCOMPLETE, 3, verdict)
    assert "decode_a" in result.reason
    assert told in outcome(result, "decode_a").reason


def test_a_run_without_rows_is_incomplete() -> None:
    result = compare(replace(head(), rows={}))
    assert (result.exit_code, set(verdicts(result).values())) == (3, {"MISSING"})


def test_an_empty_comparison_is_incomplete() -> None:
    """Nothing on either side, or nothing but controls, compares nothing."""
    only = msgspec.structs.replace(BASELINE, rows={key: row for key, row in BASELINE.rows.items() if row.control})
    run = head()
    for name in ROWS:
        run = without_row(run, name)
    result = compare(run, only)
    assert (result.exit_code, "no row could be compared" in result.reason) == (3, True)
    assert "new rows alone" not in result.reason


def test_new_rows_alone_are_told_apart_from_rows_that_failed() -> None:
    only = msgspec.structs.replace(BASELINE, rows={key: row for key, row in BASELINE.rows.items() if row.control})
    run = head()
    for name in ROWS:
        run = without_row(run, name)
    result = compare(with_row(run, measured("decode_new", [10.0, 10.0, 10.0])), only)
    assert result.exit_code == 3
    assert "new rows alone have nothing to be held against" in result.reason
    (step,) = next_steps(result)
    assert step.startswith("Measure the new rows together with others")


def test_new_and_skipped_rows_are_shown_and_do_not_fail() -> None:
    run = with_row(head(), measured("decode_new", [10.0, 10.0, 10.0]))
    run = with_row(run, replace(measured("other_device", [1.0]), state="skipped", samples=(), reason="needs a cuda device"))
    result = compare(run)
    assert (result.exit_code, verdicts(result)["decode_new"], verdicts(result)["other_device"]) == (0, "NEW", "SKIPPED")


def test_what_failed_in_either_run_failed() -> None:
    for runs in ([_state(head(1), "failed"), head(2)], [head(1), _state(head(2), "failed")], [head(1), without_row(head(2), "decode_a")]):
        result = compare(runs)
        assert result.exit_code == 3
        assert verdicts(result)["decode_a"] in ("FAILED", "MISSING")


# ---------------------------------------------------------------- wrong results (case 5, R21, R105)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("how", ["state", "record", "peak"])
def test_wrong_results_fail_in_either_direction(factor: float, how: str) -> None:
    run = head(factors={"decode_a": factor})
    row = run.rows[RowKey("decode_a")]
    if how == "state":
        run = _state(run, "violation", reason="6000 GB/s")
    elif how == "record":
        run = with_row(run, replace(row, records=(*row.records[:-1], replace(row.records[-1], status="unverified", reason="off by 3"))))
    else:
        run = with_row(run, replace(row, records=(replace(row.records[0], peak_fraction=1.25), *row.records[1:])))
    result = compare(run)
    assert (result.verdict, result.exit_code) == (RunVerdict.WRONG_RESULTS, 6)
    assert verdicts(result)["decode_a"] in ("VIOLATION", "UNVERIFIED")
    assert "decode_a" in result.reason


def test_exactly_the_peak_is_no_violation() -> None:
    run = head()
    row = run.rows[RowKey("decode_a")]
    run = with_row(run, replace(row, records=tuple(replace(record, peak_fraction=1.0) for record in row.records)))
    assert compare(run).exit_code == 0


# ---------------------------------------------------------------- what cannot be compared (cases 20, 21)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"unit": "GiB/s"}, "'GiB/s', but the other side's 'GB/s'"),
        ({"version": "v2"}, "version is 'v2'"),
        ({"input_hash": "other"}, "inputs differ"),
        ({"control": True}, "control row on one side only"),
    ],
)
def test_different_measurements_are_not_comparable(changes: dict[str, Any], told: str) -> None:
    """Case 20: no conversion, and never a silent pass."""
    run = head()
    result = compare(with_row(run, measured("decode_a", run.rows[RowKey("decode_a")].samples, **changes)))
    assert (outcome(result, "decode_a").verdict, result.exit_code) == (RowVerdict.NOT_COMPARABLE, 3)
    assert told in outcome(result, "decode_a").reason


def test_a_renamed_row_is_missing_and_new() -> None:
    """Case 21: one renamed, case changed, an axis added; the old name fails, the new one is shown."""
    run = head()
    row = run.rows[RowKey("decode_a")]
    for key in (RowKey("decode_A"), RowKey("decode_a", ("1",)), RowKey("decoder")):
        renamed = replace(row, key=key, records=tuple(replace(record, key=key) for record in row.records))
        result = compare(with_row(without_row(run, "decode_a"), renamed))
        found = {row.key: row.verdict.value for row in result.rows}
        assert (result.exit_code, found[RowKey("decode_a")], found[key]) == (3, "MISSING", "NEW")


# ---------------------------------------------------------------- validity of the baseline


@pytest.mark.parametrize(
    ("changes", "rows_shown"),
    [({"device__name": "NVIDIA H100 PCIe"}, False), ({"torch": "2.12.0"}, True)],
)
def test_a_foreign_or_outdated_baseline_is_invalid(changes: dict[str, Any], rows_shown: bool) -> None:
    """Case 7: never a comparison with another device; other software is shown, for information, and still no pass."""
    run = head(factors={"decode_a": 0.9})
    run = replace(run, processes=tuple(replace(process, environment=environment(**changes)) for process in run.processes))
    result = compare(run)
    assert (result.verdict, result.exit_code, bool(result.rows)) == (RunVerdict.BASELINE_INVALID, 4, rows_shown)
    assert "baselines/NVIDIA_H200.json" in result.reason


def test_a_run_without_records_cannot_claim_the_device() -> None:
    result = compare(replace(head(), processes=()))
    assert (result.exit_code, result.rows) == (4, ())


def test_an_old_baseline_is_a_notice() -> None:
    result = compare_baseline([head()], BASELINE, now=datetime.datetime(2027, 12, 1, tzinfo=datetime.timezone.utc))
    assert (result.exit_code, any("days old" in notice for notice in result.notices)) == (0, True)


# ---------------------------------------------------------------- run verdict


def _row(verdict: RowVerdict, *flags: str) -> RowOutcome:
    return RowOutcome(RowKey(f"row_{verdict.name}"), verdict, "why", "other", flags=flags, effect=0.1)


def test_the_order_of_run_verdicts() -> None:
    """Exit codes 4, 6, 5, 3, 1, 0: the first that applies."""
    assert [int(code) for code in RUN_ORDER] == [4, 6, 5, 3, 1, 0]
    rows = [_row(RowVerdict.VIOLATION), _row(RowVerdict.MISSING), _row(RowVerdict.REGRESSED), _row(RowVerdict.PASS)]
    seen = []
    for drop in range(4):
        for invalid, unfit in (("invalid", "unfit"), (None, "unfit"), (None, None)):
            code, reason = conclude(rows[drop:], invalid=invalid, unfit=unfit)
            assert reason
            seen.append(int(code))
    assert seen == [4, 6, 6, 4, 5, 3, 4, 5, 1, 4, 5, 0]


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (RowVerdict.PASS, 0),
        (RowVerdict.IMPROVED, 0),
        (RowVerdict.UNCONFIRMED, 0),
        (RowVerdict.NEW, 0),
        (RowVerdict.SKIPPED, 0),
        (RowVerdict.REGRESSED, 1),
        (RowVerdict.MISSING, 3),
        (RowVerdict.FAILED, 3),
        (RowVerdict.INVALID, 3),
        (RowVerdict.BLIND, 3),
        (RowVerdict.NOT_COMPARABLE, 3),
        (RowVerdict.UNVERIFIED, 6),
        (RowVerdict.VIOLATION, 6),
    ],
)
def test_what_each_row_verdict_does_to_the_run(verdict: RowVerdict, code: int) -> None:
    got, reason = conclude([_row(RowVerdict.PASS), _row(verdict)])
    assert int(got) == code
    if code:
        assert f"row_{verdict.name}" in reason
    assert VERDICTS[ExitCode(code)] is not None


def test_the_worst_regression_is_named_first() -> None:
    rows = [replace(_row(RowVerdict.REGRESSED), key=RowKey(name), effect=effect) for name, effect in (("a", 0.1), ("b", 0.5))]
    assert conclude(rows)[1].startswith("2 rows regressed: b (+50.0 % latency), a (+10.0 % latency)")


@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({}, "decode-read"),
        ({"kv_dtype": "e4m3", "bottleneck": "dequant"}, "decode-read-fp8"),
        ({"op": "kv_write", "phase": "prefill", "bottleneck": "write-bandwidth"}, "kv-write-prefill"),
        ({"op": "kv_write", "phase": "prefill", "bottleneck": "write-bandwidth", "kv_dtype": "e4m3"}, "kv-write-prefill-fp8"),
        ({"kv_dtype": "int8", "bottleneck": "dequant"}, "decode-read-fp8"),
        ({"op": "kv_write", "phase": "prefill", "bottleneck": "write-bandwidth", "kv_dtype": "int8"}, "kv-write-prefill-fp8"),
        ({"op": "kv_write", "phase": "decode", "bottleneck": "launch", "kv_dtype": "e4m3"}, "kv-write-decode"),
        ({"op": "alloc_kvcache_index", "bottleneck": "host"}, "allocator"),
        ({"op": "copy", "control": True}, "control"),
        ({"op": "matmul", "phase": None, "bottleneck": "compute"}, "other"),
    ],
)
def test_sections_by_what_bounds_a_row(changes: dict[str, Any], section: str) -> None:
    """R51, R52, R54, R95: fp8 is a bottleneck of its own, and prefill and decode are apart."""
    key = RowKey("row")
    assert section_of(row_record(key, "p", 1.0, **changes), key) == section
    assert section_of(None, key) == "other"
