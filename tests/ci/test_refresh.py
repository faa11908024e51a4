"""Refreshing a baseline: what changes, what stays bit for bit, and what is refused (cases 9, 17, 28)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from gate_builders import ROWS, a_baseline, a_run, environment, measured, with_row, without_row
from gate_shortcuts import BASELINE, NOW, head, outcome, verdicts
from hypothesis import given, settings
from hypothesis import strategies as st

from ci import baseline as baselines
from ci.baseline import Baseline, Refreshed
from ci.compare import compare_baseline
from ci.errors import BaselineError, UsageError
from ci.model import CommitResult, GateResult, RowKey
from ci.references import references_of
from ci.schemas import SCHEMA_DIR

NEW_COMMIT = "d" * 40


def _new(first: int = 200, count: int = 5, **changes: Any) -> list[CommitResult]:
    return [replace(a_run(first + i, commit=NEW_COMMIT, **changes), source=f"runs/{i + 1}") for i in range(count)]


def _refresh(runs: list[CommitResult], previous: Baseline = BASELINE, **changes: Any) -> Refreshed:
    return baselines.refresh(previous, runs, **{"accepted_by": "B", "reason": "split-K", **changes})


def _compare(runs: list[CommitResult], baseline: Baseline) -> GateResult:
    return compare_baseline(runs, baseline, now=NOW)


SLOWER = _refresh(_new(factors={"decode_b": 0.98}))
"""decode_b is 2 % slower, and accepted."""


def test_only_the_row_that_changed_is_replaced_and_all_else_stays_bit_for_bit() -> None:
    made = SLOWER.baseline
    assert (SLOWER.replaced, SLOWER.added) == (("decode_b",), ())
    for name in ROWS:
        if name != "decode_b":
            assert made.rows[name] == BASELINE.rows[name]
    assert made.runs[:10] == BASELINE.runs
    assert [run.run_set for run in made.runs] == ["1"] * 10 + ["2"] * 5
    row = made.rows["decode_b"]
    assert (row.run_set, len(row.values)) == ("2", 5)
    for name in ("control_0", "control_1", "control_2"):
        assert made.rows[name].values[:10] == BASELINE.rows[name].values
        assert len(made.rows[name].values) == 15


def test_a_replaced_row_says_what_it_was_why_and_when() -> None:
    made = SLOWER.baseline
    old = BASELINE.rows["decode_b"]
    (entry,) = made.rows["decode_b"].replaced
    assert entry.value == np.median([value for run in old.values for value in run])
    assert old.latency_us is not None
    assert entry.latency_us == np.median([value for run in old.latency_us for value in run])
    assert (entry.commit, entry.unit, entry.reason) == ("a" * 40, "GB/s", "split-K")
    assert entry.time == max(run.time for run in BASELINE.runs)
    assert (made.reason, made.accepted_by, made.anchor_commit) == ("split-K", "B", BASELINE.anchor_commit)
    assert made.previous_hash == baselines.content_hash(BASELINE)
    shown = baselines.describe(made)
    assert "replaced: split-K" in shown
    assert "run set 2" in shown


def test_a_refreshed_baseline_follows_its_schema_and_reads_back() -> None:
    text = baselines.to_json(SLOWER.baseline)
    assert baselines.load(text.encode()) == SLOWER.baseline
    jsonschema.validate(json.loads(text), json.loads((SCHEMA_DIR / "baseline.schema.json").read_text(encoding="utf-8")))


def test_the_new_level_passes_and_the_old_one_is_an_improvement() -> None:
    again = _compare([head(factors={"decode_b": 0.98})], SLOWER.baseline)
    assert (again.exit_code, set(verdicts(again).values())) == (0, {"PASS"})
    back = _compare([head()], SLOWER.baseline)
    assert verdicts(back) == {**dict.fromkeys(ROWS, "PASS"), "decode_b": "IMPROVED"}
    worse = _compare([head(factors={"decode_b": 0.96})], SLOWER.baseline)
    assert verdicts(worse)["decode_b"] == "REGRESSED"


def test_nothing_that_changed_beyond_chance_changes_nothing() -> None:
    unchanged = _refresh(_new())
    assert unchanged.baseline is BASELINE
    assert (unchanged.replaced, unchanged.added) == ((), ())


def test_rows_are_normalised_by_the_controls_of_their_own_runs() -> None:
    """The machine ran 1.5 % slower for the new runs: a row that only followed it is not replaced, and the mixed file judges alike."""
    made = _refresh(_new(shift=0.985, factors={"decode_b": 0.98}))
    assert made.replaced == ("decode_b",)
    for shift in (1.0, 0.985):
        result = _compare([head(shift=shift, factors={"decode_b": 0.98})], made.baseline)
        assert set(verdicts(result).values()) == {"PASS"}
        assert abs(outcome(result, "decode_b").effect or 0) < 0.005
    # A mutant that takes the controls of the wrong set sees the shift in decode_b.
    wrong = msgspec.structs.replace(
        made.baseline,
        rows={
            name: msgspec.structs.replace(row, values=[*row.values[5:10], *row.values[:5], *row.values[:5]]) if row.control else row
            for name, row in made.baseline.rows.items()
        },
    )
    assert verdicts(_compare([head(factors={"decode_b": 0.98})], wrong))["decode_b"] != "PASS"


def test_controls_that_moved_from_any_set_in_use_make_the_runner_unfit() -> None:
    """2.4 % from the first set's level and within 1 % of the second's: rows of the first could not be judged."""
    made = _refresh(_new(shift=0.985, factors={"decode_b": 0.98})).baseline
    assert _compare([head(shift=0.976)], made).exit_code == 5
    assert _compare([head(shift=0.993)], made).exit_code == 0


def test_named_rows_are_replaced_and_no_others() -> None:
    made = _refresh(_new(factors={"decode_b": 0.98}), rows="decode_[ac]")
    assert made.replaced == ("decode_a", "decode_c")
    assert made.baseline.rows["decode_b"] == BASELINE.rows["decode_b"]
    with pytest.raises(UsageError, match="'nope' finds no row"):
        _refresh(_new(), rows="nope")


def test_all_rows_replaced_leave_no_trace_of_the_old_runs() -> None:
    made = _refresh(_new(), rows=".").baseline
    assert {run.run_set for run in made.runs} == {"2"}
    assert all(len(row.values) == 5 for row in made.rows.values())
    assert baselines.load(baselines.to_json(made).encode()) == made
    third = _refresh(_new(300), made, rows="decode_a").baseline
    assert list(third.run_sets) == ["2", "3"]
    assert len(third.rows["decode_a"].replaced) == 2


def test_runs_of_a_part_of_the_rows_refresh_that_part() -> None:
    """`run --select` leaves the other rows out, and the controls of other classes."""
    partial = [
        replace(run, rows={k: v for k, v in run.rows.items() if k.benchmark == "decode_b" or v.records[0].control}) for run in _new()
    ]
    made = _refresh(partial, rows="decode_b")
    assert made.replaced == ("decode_b",)
    with pytest.raises(BaselineError, match="lack the control row control_1"):
        _refresh([without_row(run, "control_1") for run in partial], rows="decode_b")


def test_new_rows_and_rows_measured_in_another_way() -> None:
    runs = [
        with_row(with_row(run, measured("decode_new", [10.0, 10.01, 10.02])), measured("decode_c", [5.0, 5.01, 5.02], version="v2"))
        for run in _new()
    ]
    made = _refresh(runs)
    assert (made.replaced, made.added) == (("decode_c",), ("decode_new",))
    assert made.baseline.rows["decode_c"].anchor is None
    assert made.baseline.rows["decode_c"].version == "v2"
    assert any("that of decode_c moves" in notice for notice in made.notices)


# ---------------------------------------------------------------- refusals


def _env(run: CommitResult, **changes: Any) -> CommitResult:
    made = environment(boot_id=run.processes[0].environment["boot_id"], **changes)
    return replace(run, processes=tuple(replace(process, environment=made) for process in run.processes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device__name": "NVIDIA H100 PCIe"}, ["device.name", "'NVIDIA H200'", "'NVIDIA H100 PCIe'"]),
        ({"torch": "2.12.0"}, ["environment.torch", "2.11.0", "2.12.0", "baseline record"]),
        ({"driver": "580.200"}, ["environment.driver", "580.159.04", "580.200"]),
    ],
)
def test_other_devices_and_software_are_refused(changes: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(BaselineError) as caught:
        _refresh([_env(run, **changes) for run in _new()])
    assert all(part in str(caught.value) for part in told)


def test_another_protocol_moved_controls_and_too_few_runs_are_refused() -> None:
    other = [replace(run, processes=tuple(replace(p, protocol="protocol-2") for p in run.processes)) for run in _new()]
    with pytest.raises(BaselineError, match="protocol 'protocol-1' and the runs have 'protocol-2'"):
        _refresh(other)
    with pytest.raises(BaselineError, match=r"runs/1 cannot refresh the baseline: the control rows .* moved"):
        _refresh(_new(shift=0.95))
    with pytest.raises(BaselineError, match="at least 5 runs, but 3"):
        _refresh(_new(count=3))
    with pytest.raises(UsageError, match="needs a reason"):
        _refresh(_new(), reason=" ")
    changed = [with_row(run, replace(run.rows[RowKey("control_0")], version="v2")) for run in _new()]
    with pytest.raises(BaselineError, match="control_0 is measured in another way"):
        _refresh(changed)
    turned = [with_row(run, measured("control_0", run.rows[RowKey("control_0")].samples)) for run in _new()]
    with pytest.raises(BaselineError, match="control_0 is measured in another way"):
        _refresh(turned)


def test_one_boot_makes_the_whole_file_advisory() -> None:
    runs = _new(boot="boot-9", factors={"decode_b": 0.98})
    with pytest.raises(BaselineError, match="3 boots or GPUs, but 1"):
        _refresh(runs)
    assert _refresh(runs, allow_single_boot=True).baseline.advisory


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["rows"]["decode_b"].update(run_set="7"), "run set '7', which no run is of"),
        (lambda d: d["rows"]["decode_b"].update(run_set="1"), "values of 5 runs for decode_b, but 10"),
        (lambda d: d["rows"]["control_0"]["values"].pop(), "values of 14 runs for control_0, but 15"),
        (lambda d: d["rows"]["control_0"]["values"].__setitem__(3, []), "a part of the run set '1' only"),
        (lambda d: d["rows"]["decode_b"]["anchor"].update(unit="s"), "its anchor in 's'"),
        (lambda d: d["rows"]["decode_b"]["anchor"].update(values=[]), "anchor"),
        (lambda d: d["rows"]["decode_b"]["replaced"][0].update(reason=""), "reason"),
        (lambda d: d.update(schema="rapid_llm/baseline/1"), "does not know"),
    ],
)
def test_a_file_whose_run_sets_contradict_each_other_is_refused(change: Any, told: str) -> None:
    data = json.loads(baselines.to_json(SLOWER.baseline))
    change(data)
    with pytest.raises(BaselineError) as caught:
        baselines.load(json.dumps(data).encode(), name="x.json")
    assert told in str(caught.value)
    assert "x.json" in str(caught.value)


@settings(max_examples=8, deadline=None)
@given(st.sets(st.sampled_from(ROWS), min_size=1), st.sets(st.sampled_from(ROWS), min_size=1), st.sampled_from([0.99, 1.0, 1.01]))
def test_any_two_refreshes_keep_what_they_do_not_name(first: set[str], second: set[str], shift: float) -> None:
    """Values, runs and controls that a row's reference rests on survive any sequence of refreshes, bit for bit."""
    start = a_baseline(5)
    one = _refresh(_new(400, shift=shift), start, rows=f"^({'|'.join(first)})$").baseline
    two = _refresh(_new(500), one, rows=f"^({'|'.join(second)})$").baseline
    before, after = references_of(one), references_of(two)
    for name in ROWS:
        if name not in second:
            assert two.rows[name] == one.rows[name]
            key, run_set = RowKey(name), one.rows[name].run_set
            assert two.runs_of(two.rows[name]) == one.runs_of(one.rows[name])
            assert (after[key].runs == before[key].runs).all()
            for i in range(3):
                control = RowKey(f"control_{i}")
                assert (after[control].by_set[run_set] == before[control].by_set[run_set]).all()
    assert baselines.load(baselines.to_json(two).encode()) == two
