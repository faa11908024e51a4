"""Host rows against the floor of their own blocks: on both sides or on neither, and never so that a slow-down is hidden."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gate_builders import BASE_COMMIT, HEAD_COMMIT, commit_of, environment, measured, record_file, row_file
from gate_shortcuts import NOW, outcome
from kept_runs import write_kept

from ci import baseline as baselines
from ci import noise, staged
from ci.baseline import Baseline
from ci.compare import baseline_floors, compare_baseline
from ci.confirm import compare_pairs
from ci.creep import anchor_of, standing
from ci.errors import BaselineError
from ci.host_floor import floors_of, host_floor, levelled
from ci.merge import load_kept
from ci.model import CommitResult, GateResult, RowKey, RowResult, RowVerdict, RunVerdict
from ci.records import process_record
from ci.references import references_of
from ci.screen import SCREENED
from ci.self_test import held_out

LATENCIES_US = {"alloc_a": 9.0, "alloc_b": 19.0, "alloc_c": 200.0, "host_control": 12.0}
FLOOR_US = 6.0
CUDA = {"device": {"type": "cuda"}}
HELD = "host rows are held against the floor of their own blocks"
ONE_SIDED = "host rows are compared without their floors"


def _host_row(name: str, latencies: list[float], floors: list[float] | None) -> RowResult:
    """A row of an allocator in calls/s; None leaves the floors out."""
    control = {"control": True, "op": "copy"} if "control" in name else {"op": "alloc"}
    fixed = {"bottleneck": "host", "timer": "bench_host", "instrument": "wall-clock", "estimator": "quiet", "unit": "calls/s"}
    row = measured(name, [1e6 / value for value in latencies], **{**fixed, **control, "phase": None, "peak_fraction": None})
    told = [None] * len(latencies) if floors is None else floors
    records = zip(row.records, latencies, told, strict=True)
    return replace(row, records=tuple(replace(record, latency_us=us, floor_us=floor, host_floor_us=floor) for record, us, floor in records))


def _run(
    seed: int,
    *,
    commit: str = BASE_COMMIT,
    slow: Mapping[str, float] | None = None,
    floor: Mapping[str, float] | None = None,
    without: tuple[str, ...] = (),
    drift: float = 0.05,
    level: float = 1.0,
    processes: int = 3,
) -> CommitResult:
    """A run on a drifting host: each row and process meets a host of its own, which moves the row and its floor alike.

    `slow` and `floor` multiply latencies and floors of rows, `level` both of all rows; rows in `without` lack their floors.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for name, latency in LATENCIES_US.items():
        host = level * np.exp(rng.normal(0, drift, processes))
        own = np.exp(rng.normal(0, 0.004, processes))
        floors = FLOOR_US * host * (floor or {}).get(name, 1.0)
        values = latency * host * own * (slow or {}).get(name, 1.0)
        rows.append(_host_row(name, values.tolist(), None if name in without else floors.tolist()))
    return commit_of(rows, commit, env=environment(boot_id=f"boot-{seed % 3}"))


def _baseline(first: int = 0, **changes: object) -> Baseline:
    return baselines.record([_run(first + i, **changes) for i in range(10)], accepted_by="A", reason="first")  # type: ignore[arg-type]


BASELINE = _baseline()
BARE = msgspec.structs.replace(
    BASELINE, rows={name: msgspec.structs.replace(row, host_floors_us=None) for name, row in BASELINE.rows.items()}
)
"""The same values without their floors, as a file of before has them."""


def _against(run: CommitResult, stored: Baseline = BASELINE) -> GateResult:
    return compare_baseline([run], stored, now=NOW)


def _paired(pairs: int = 12, base: Mapping[str, object] | None = None, **head: object) -> GateResult:
    before = _run(70, processes=pairs, **(base or {}))  # type: ignore[arg-type]
    return compare_pairs(before, _run(71, commit=HEAD_COMMIT, processes=pairs, **head))  # type: ignore[arg-type]


# ---------------------------------------------------------------- which floors count


@pytest.mark.parametrize(
    ("timer", "estimator", "floor_us", "device", "held"),
    [
        ("bench_host", "quiet", 6.0, "cuda", 6.0),
        ("bench_host", "quiet", 6.0, "cpu", None),
        ("bench_host", "quiet", None, "cuda", None),
        ("bench_host", "quiet", 0.0, "cuda", None),
        ("bench_host", None, 6.0, "cuda", None),
        ("bench_host", "median", 6.0, "cuda", None),
        ("bench_graph", "median", 6.0, "cuda", None),
        (None, None, 6.0, "cuda", None),
    ],
)
def test_a_floor_counts_where_bench_host_read_it_in_the_rows_own_blocks_beside_a_cuda_device(
    timer: str | None, estimator: str | None, floor_us: float | None, device: str, held: float | None
) -> None:
    assert host_floor(timer, estimator, floor_us, {"device": {"type": device}}) == held


@pytest.mark.parametrize(("device", "held"), [("cuda", 6.0), ("cpu", None)])
def test_a_record_file_says_it_by_its_device(device: str, held: float | None) -> None:
    row = row_file("alloc", 1e5, timer="bench_host", instrument="wall-clock", estimator="quiet", floor_us=6.0)
    file = record_file("p0", [row], environment=environment(device__type=device))
    (read,) = process_record(file, Path("p0.json")).rows
    assert (read.floor_us, read.host_floor_us) == (6.0, held)


# ---------------------------------------------------------------- against a baseline


def test_a_host_that_drifts_by_five_per_cent_leaves_rows_that_are_told_apart_to_less_than_that() -> None:
    with_floors, bare = _against(_run(53)), _against(_run(53, without=tuple(LATENCIES_US)), BARE)
    for name in ("alloc_a", "alloc_b", "alloc_c"):
        held, raw = outcome(with_floors, name), outcome(bare, name)
        assert held.mde80 is not None
        assert raw.mde80 is not None
        assert held.mde80 < 0.02 < 0.10 < raw.mde80
        assert "over its floor" in held.reason
        assert "over its floor" not in raw.reason
    assert any(HELD in notice for notice in with_floors.notices)
    assert not any("floor of their own" in notice or ONE_SIDED in notice for notice in bare.notices)


def test_ten_per_cent_slower_over_the_same_floor_is_seen() -> None:
    row = outcome(_against(_run(53, slow={"alloc_b": 1.10})), "alloc_b")
    assert row.verdict is RowVerdict.REGRESSED
    assert SCREENED in row.flags
    assert row.effect == pytest.approx(0.10, abs=0.015)


def test_ten_per_cent_slower_on_a_host_that_is_so_is_none_and_people_read_what_was_measured() -> None:
    """All rows and floors 10 % up: the host. The value shown is the measured one, the base's is what it would have read on this host."""
    run = _run(53, level=1.10, drift=0.02)
    result = _against(run)
    row = outcome(result, "alloc_b")
    assert (result.exit_code, row.verdict) == (0, RowVerdict.PASS)
    assert row.effect == pytest.approx(0, abs=0.015)
    assert row.value == pytest.approx(math.exp(-noise.fast60(noise.log_latency(row.samples, "higher"))), rel=1e-9)
    assert row.baseline == pytest.approx(row.value, rel=0.02)
    assert row.band is not None
    assert row.band[0] < row.value < row.band[1]
    assert row.latency_us == pytest.approx(1e6 / row.value, rel=1e-9)


@pytest.mark.parametrize("without", [("alloc_b",), ("host_control",), tuple(LATENCIES_US)])
@pytest.mark.parametrize("side", ["run", "baseline"])
def test_a_floor_that_one_side_lacks_is_taken_off_on_neither_and_told(side: str, without: tuple[str, ...]) -> None:
    """The result is that of the same values without any floor, to the last digit."""
    run, stored = _run(53), BASELINE
    if side == "run":
        run = _run(53, without=without)
    else:
        rows = {n: msgspec.structs.replace(row, host_floors_us=None) if n in without else row for n, row in stored.rows.items()}
        stored = msgspec.structs.replace(stored, rows=rows)
    result = _against(run, stored)
    raw = _against(_run(53, without=tuple(LATENCIES_US)), BARE)
    for name in LATENCIES_US:
        assert (outcome(result, name).effect, outcome(result, name).mde80) == (outcome(raw, name).effect, outcome(raw, name).mde80)
        assert outcome(result, name).effect != outcome(_against(_run(53)), name).effect
    (told,) = [notice for notice in result.notices if ONE_SIDED in notice]
    assert any(name in told for name in without)
    assert not any(HELD in notice for notice in result.notices)


def test_one_process_without_its_floor_is_a_side_without() -> None:
    run = _run(53)
    row = run.rows[RowKey("alloc_b")]
    lacking = replace(row, records=(replace(row.records[0], host_floor_us=None), *row.records[1:]))
    result = _against(replace(run, rows={**run.rows, row.key: lacking}))
    assert any(ONE_SIDED in notice and "alloc_b" in notice for notice in result.notices)
    with pytest.raises(ValueError, match="without floors"):
        levelled(lacking, FLOOR_US)


@pytest.mark.parametrize(("level", "word"), [(1.25, "+25"), (0.80, "-20")])
def test_floors_that_moved_further_than_the_instrument_allows_are_not_divided_away(level: float, word: str) -> None:
    result = _against(_run(53, level=level, drift=0.0), _baseline(drift=0.0))
    assert (result.verdict, result.exit_code) == (RunVerdict.RUNNER_UNFIT, 5)
    assert f"floors of the 4 host rows moved by {word}" in result.reason


def test_a_row_whose_own_floor_rose_as_much_as_it_did_is_picked_for_pairs_and_not_passed() -> None:
    """What a call leaves running would slow down the floor beside it."""
    result = _against(_run(53, slow={"alloc_b": 1.25}, floor={"alloc_b": 1.25}))
    row = outcome(result, "alloc_b")
    assert row.verdict is RowVerdict.UNCONFIRMED
    assert "floor rose by" in row.reason
    assert staged.open_rows(result, []) == [RowKey("alloc_b")]
    assert SCREENED not in outcome(result, "alloc_a").flags


def test_what_asv_compares_is_measured_and_so_are_the_floors_of_its_bands() -> None:
    held, bare = baseline_floors(BASELINE), baseline_floors(BARE)
    assert held == bare


# ---------------------------------------------------------------- in pairs


def test_pairs_tell_a_slower_row_from_a_slower_host() -> None:
    slower = _paired(slow={"alloc_b": 1.10})
    assert outcome(slower, "alloc_b").verdict is RowVerdict.REGRESSED
    assert outcome(slower, "alloc_b").effect == pytest.approx(0.10, abs=0.01)
    assert "over its floor" in outcome(slower, "alloc_b").reason
    assert any(HELD in notice for notice in slower.notices)
    same = _paired()
    assert same.verdict is RunVerdict.PASS
    assert (outcome(same, "alloc_b").mde80 or 1) < 0.05 < 0.08 < (outcome(_bare_pairs(), "alloc_b").mde80 or 0)


def _bare_pairs() -> GateResult:
    bare = tuple(LATENCIES_US)
    return _paired(base={"without": bare}, without=bare)


def test_a_row_and_its_floor_that_moved_alike_in_pairs_are_no_regression_and_no_pass() -> None:
    result = _paired(slow={"alloc_b": 1.10}, floor={"alloc_b": 1.10})
    assert outcome(result, "alloc_b").verdict is RowVerdict.INVALID
    assert (result.verdict, result.exit_code) == (RunVerdict.RUNNER_UNFIT, 5)
    assert "floors that host rows are held against moved between the commits: alloc_b" in result.reason


@pytest.mark.parametrize("side", ["base", "head"])
def test_pairs_take_a_floor_off_on_both_sides_or_on_neither(side: str) -> None:
    lacking = {"without": ("alloc_b",)}
    result = _paired(base=lacking if side == "base" else None, **({} if side == "base" else lacking))
    bare = _bare_pairs()
    assert outcome(result, "alloc_b").effect == outcome(bare, "alloc_b").effect
    assert outcome(result, "alloc_a").effect != outcome(bare, "alloc_a").effect
    assert any(ONE_SIDED in notice and "alloc_b" in notice for notice in result.notices)
    assert not any(ONE_SIDED in notice for notice in bare.notices)


def test_the_band_in_pairs_lies_where_the_base_would_be_on_heads_host() -> None:
    row = outcome(_paired(base={"drift": 0.0}, level=1.02, drift=0.0), "alloc_c")
    assert row.band is not None
    assert row.baseline == pytest.approx(1e6 / 200.0 / 1.02, rel=0.005)
    assert row.band[0] < row.baseline < row.band[1]


@pytest.mark.parametrize(
    ("base", "verdict", "exit_code"),
    [({}, RowVerdict.INVALID, 5), ({"slow": {"alloc_b": 1.25}, "floor": {"alloc_b": 1.25}}, RowVerdict.CLEARED, 0)],
)
def test_pairs_say_whether_a_floor_rose_with_the_change_or_with_the_host(
    base: Mapping[str, object], verdict: RowVerdict, exit_code: int
) -> None:
    """The screen picks the row for its floor; where the merge-base has it too, it was the host."""
    rose = {"slow": {"alloc_b": 1.25}, "floor": {"alloc_b": 1.25}}
    screen = _against(_run(53, commit=HEAD_COMMIT, **rose))  # type: ignore[arg-type]
    look = (_run(80, processes=12, **base), _run(81, commit=HEAD_COMMIT, processes=12, **rose))  # type: ignore[arg-type]
    result = staged.confirm(screen, [look], BASELINE, now=NOW)
    assert (outcome(result, "alloc_b").verdict, result.exit_code) == (verdict, exit_code)


def test_a_slower_row_is_confirmed_in_pairs_over_its_floor() -> None:
    screen = _against(_run(53, commit=HEAD_COMMIT, slow={"alloc_b": 1.10}))
    look = (_run(80, processes=12), _run(81, commit=HEAD_COMMIT, processes=12, slow={"alloc_b": 1.10}))
    row = outcome(staged.confirm(screen, [look], BASELINE, now=NOW), "alloc_b")
    assert row.verdict is RowVerdict.REGRESSED
    assert "latency over its floor against the merge-base" in row.reason


# ---------------------------------------------------------------- the stored baseline


def test_floors_come_back_from_the_files_of_a_kept_run(tmp_path: Path) -> None:
    run = _run(53)
    read = load_kept(write_kept(tmp_path / "kept", [run]))
    for key, row in run.rows.items():
        assert floors_of(read.rows[key]) == floors_of(row) is not None


def test_a_baseline_keeps_the_floor_of_each_value_and_only_of_host_rows() -> None:
    row = BASELINE.rows["alloc_b"]
    runs = [_run(i) for i in range(10)]
    assert row.host_floors_us == [[record.floor_us for record in run.rows[row.key].records] for run in runs]
    bare = _baseline(without=("alloc_b",), drift=0.002)
    assert bare.rows["alloc_b"].host_floors_us is None
    assert bare.rows["alloc_a"].host_floors_us is not None
    assert baselines.load(baselines.to_json(BASELINE).encode()) == BASELINE
    left = held_out(BASELINE, 2).rows["alloc_b"].host_floors_us
    assert left == [floors for i, floors in enumerate(row.host_floors_us or []) if i != 2]


@pytest.mark.parametrize("cut", ["a run", "a process"])
def test_floors_that_are_not_one_to_one_with_the_values_are_refused(cut: str) -> None:
    row = BASELINE.rows["alloc_b"]
    floors = list(row.host_floors_us or [])
    changed = floors[:-1] if cut == "a run" else [floors[0][:-1], *floors[1:]]
    bad = msgspec.structs.replace(BASELINE, rows={**BASELINE.rows, "alloc_b": msgspec.structs.replace(row, host_floors_us=changed)})
    with pytest.raises(BaselineError, match="floors of alloc_b that do not match"):
        baselines.load(baselines.to_json(bad).encode())


def _refreshed(stored: Baseline, **changes: object) -> Baseline:
    runs = [_run(200 + i, commit="c" * 40, **changes) for i in range(7)]  # type: ignore[arg-type]
    return baselines.refresh(stored, runs, accepted_by="B", reason="slower on purpose").baseline


def test_a_refresh_carries_the_floors_of_both_sets_and_creep_is_held_against_them() -> None:
    """The new runs are on a host 10 % slower, the row itself is 8 % slower: creep is the 8 %."""
    made = _refreshed(BASELINE, slow={"alloc_b": 1.08}, level=1.10)
    assert baselines.load(baselines.to_json(made).encode()) == made
    row, control = made.rows["alloc_b"], made.rows["host_control"]
    assert row.run_set == "2"
    assert made.rows["alloc_a"].run_set == "1"
    assert [len(run) for run in control.host_floors_us or []] == [3] * 17
    assert row.anchor is not None
    assert set(row.anchor.floors_us) == {"alloc_b", "host_control"}
    found = standing(made, row, references_of(made))
    assert found is not None
    assert found.offset == pytest.approx(math.log(1.08), abs=0.01)
    again = _against(_run(60, slow={"alloc_b": 1.08}, level=1.10), made)
    assert outcome(again, "alloc_b").verdict is RowVerdict.REGRESSED
    assert "from its anchor" in outcome(again, "alloc_b").reason
    assert outcome(again, "alloc_a").verdict is RowVerdict.PASS


def test_an_anchor_without_floors_is_held_as_measured_on_both_sides() -> None:
    """Old runs without floors, new ones with: the control alone takes the host off, and no floor comes off on one side."""
    bare = _baseline(without=tuple(LATENCIES_US), drift=0.002)
    made = _refreshed(bare, slow={"alloc_b": 1.08}, level=1.015, drift=0.002)
    row = made.rows["alloc_b"]
    assert row.host_floors_us is not None
    assert [bool(run) for run in made.rows["host_control"].host_floors_us or []] == [False] * 10 + [True] * 7
    assert row.anchor is not None
    assert row.anchor.floors_us == {}
    found = standing(made, row, references_of(made))
    assert found is not None
    assert found.offset == pytest.approx(math.log(1.08), abs=0.01)
    told = _against(_run(60, slow={"alloc_b": 1.08}, level=1.015, drift=0.002), made).notices
    assert any(ONE_SIDED in notice for notice in told)


def test_an_anchor_with_floors_says_its_level() -> None:
    anchor = anchor_of(BASELINE, BASELINE.rows["alloc_b"])
    floors = [value for run in BASELINE.rows["alloc_b"].host_floors_us or [] for value in run]
    assert anchor.floors_us["alloc_b"] == pytest.approx(float(np.median(floors)))
    assert anchor_of(BARE, BARE.rows["alloc_b"]).floors_us == {}


def test_a_row_beside_a_control_without_floors_has_an_anchor_as_measured() -> None:
    """All host rows are held against their floors or none: a drift that comes off the row alone would be put on by the control."""
    control = msgspec.structs.replace(BASELINE.rows["host_control"], host_floors_us=None)
    partly = msgspec.structs.replace(BASELINE, rows={**BASELINE.rows, "host_control": control})
    made = anchor_of(partly, partly.rows["alloc_b"])
    assert made == anchor_of(BARE, BARE.rows["alloc_b"])
    assert made.floors_us == {}
