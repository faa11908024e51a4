"""The parts of the actions that only compute: time, calibration, the build effect, the verdict on records, compact files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.errors import InputError
from ci.model import RowKey
from tests.live import rebuild, walls
from tests.live.asked import Asked
from tests.live.calibrate import Reading, close, next_knob
from tests.live.judged import judge
from tests.live.pairs import order
from tests.live.power import in_order, verdicts
from tests.live.watch import OutOfTimeError, Watch
from tests.live.whole_gate import Ended, phases, summary
from tests.statistics import compact
from tests.statistics.__main__ import own_folders
from tests.statistics.records import read_processes

PLANTED = Path(__file__).parents[2] / "docs/data/planted-h200/gate-planted.verdict.json"
"""A gate's verdict on an H200; exit code 1."""

# ---------------------------------------------------------------- time


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_that_does_not_fit_is_not_begun() -> None:
    clock = Clock()
    watch = Watch(60, now=clock)
    with watch.step("process", ""):
        clock.now_s += 25
    with watch.step("process", ""):
        clock.now_s += 10
    assert watch.longest_s["process"] == 25
    with pytest.raises(OutOfTimeError, match="process took 25 s before"):
        with watch.step("process", ""):
            raise AssertionError
    assert watch.has_room_for("another kind")
    clock.now_s += 20  # five seconds are left, the margin
    assert not watch.has_room_for("another kind")


@given(st.dictionaries(st.sampled_from(["compiled", "1", "look-1", "look-2", "pairs"]), st.floats(0, 100)), st.floats(100, 200))
def test_the_phases_of_a_gate_add_up(seen: dict[str, float], wall_s: float) -> None:
    made = phases(seen, wall_s)
    assert math.isclose(sum(seconds for _, seconds in made), wall_s, abs_tol=0.05)
    assert all(seconds >= 0 for _, seconds in made)
    assert made[-1][0] == "report"


@pytest.mark.parametrize(("exit_code", "told"), [(1, None), (3, "ValueError: it broke")])
def test_what_a_gate_said_is_kept_where_it_ended_otherwise_than_its_verdict(tmp_path: Path, exit_code: int, told: str | None) -> None:
    (tmp_path / "verdict.json").write_bytes(PLANTED.read_bytes())
    kept = summary(Ended(tmp_path, exit_code, 1.0, {}, "ValueError: it broke", False))
    assert (kept["exit_code"], kept["verdict"], kept.get("said")) == (exit_code, "REGRESSION", told)


def test_phases_are_told_in_the_order_in_which_they_ended() -> None:
    assert phases({"look-1": 50.0, "compiled": 10.0, "1": 30.0}, 52.0) == [
        ("compiled", 10.0),
        ("screen", 20.0),
        ("look-1", 20.0),
        ("report", 2.0),
    ]


def test_a_process_of_few_rows_takes_what_is_left_of_a_whole_one() -> None:
    rows = [{"row": name, "control": name == "c", "wall_s": seconds} for name, seconds in (("a", 5.0), ("b", 3.0), ("c", 2.0))]
    assert walls.process_of(20.0, rows, "b") == 15.0
    assert walls.process_of(20.0, rows, "") == 20.0
    told = [(name, processes) for name, processes, *_ in walls.plan(Asked("walls", Path("x"), pairs=3))]
    assert told[1:] == [("3 pairs of five rows", 6), ("a run of three processes", 3), ("asv continuous of five rows", 14)]


def test_a_drift_favours_no_arm() -> None:
    """ABBA: over two pairs the arms stand equally far from the start; over two rounds so do the sizes."""
    places: dict[str, int] = dict.fromkeys("ab", 0)
    for place, arm in enumerate(arm for number in range(2) for arm in order(number)):
        places[arm] += place
    assert places["a"] == places["b"]
    arms = ["base", "1", "2", "3"]
    sums = {arm: sum(in_order(arms, number).index(arm) for number in range(2)) for arm in arms}
    assert len(set(sums.values())) == 1


# ---------------------------------------------------------------- calibration


@given(st.floats(0.005, 0.03), st.floats(0.2, 5.0), st.floats(0.8, 1.25), st.floats(-0.002, 0.002))
@settings(max_examples=200)
def test_three_readings_calibrate(share: float, wrong: float, power: float, offset: float) -> None:
    """Whatever the first guess is wrong by, of a row whose response is bent and has an offset, if the knob is fine enough."""
    guess = 10_000

    def effect(knob: int) -> float:
        return float(share * (wrong * knob / guess) ** power + offset)

    readings: list[Reading] = []
    knob = guess
    for _ in range(3):
        readings.append(Reading(knob, effect(knob)))
        if close(readings, knob, share):
            break
        knob = next_knob(readings, share)
    assert abs(effect(knob) - share) <= 0.002


def test_readings_that_show_nothing_turn_the_knob_up() -> None:
    assert next_knob([Reading(10, -0.01)], 0.02) == 80
    assert next_knob([Reading(10, 0.0005)], 0.02) == 80, "at most eight times as far"


def test_readings_of_one_knob_are_averaged() -> None:
    readings = [Reading(100, 0.010), Reading(100, 0.030)]
    assert close(readings, 100, 0.02)
    assert not close(readings[:1], 100, 0.02)
    assert not close(readings, 50, 0.02)
    assert next_knob(readings, 0.01) == 50


# ---------------------------------------------------------------- the build effect


def drawn(rng: np.random.Generator, groups: int, processes: int, build_sd: float, within_sd: float) -> tuple[Any, Any]:
    old = rng.normal(0, within_sd, (groups, processes))
    fresh = rng.normal(0, within_sd, (groups, processes)) + rng.normal(0, build_sd, (groups, 1))
    return old, fresh


@pytest.mark.parametrize("build_sd", [0.0, 0.002, 0.01])
def test_the_interval_holds_the_build_effect(build_sd: float) -> None:
    """At least nine times in ten of 400, where it should be 95 in a hundred."""
    rng = np.random.default_rng(5)
    held, middle = 0, []
    for _ in range(400):
        found = rebuild.build_effect(*drawn(rng, 6, 3, build_sd, 0.002))
        held += found["low"] <= build_sd <= found["high"]
        middle.append(found["build_sd"] ** 2 if found["build_sd"] > 0 else 0.0)
    assert held / 400 >= 0.9
    if build_sd == 0.01:
        assert held / 400 <= 0.985, "an interval that always holds it says nothing"
        assert math.isclose(math.sqrt(float(np.mean(middle))), build_sd, rel_tol=0.1)


def test_the_build_effect_of_a_small_example() -> None:
    """Three groups of three: each has a variance of 1, which gives a difference one of 2/3; the differences 2, 10, 18 have 64."""
    old = np.array([[0.0, 2.0, 1.0], [1.0, 3.0, 2.0], [0.0, 2.0, 1.0]])
    fresh = old + np.array([[2.0], [10.0], [18.0]])
    found = rebuild.build_effect(old, fresh)
    assert found["mean"] == pytest.approx(10)
    assert found["mean_error"] == pytest.approx(8 / math.sqrt(3))
    assert found["within_sd"] == pytest.approx(1)
    assert found["build_sd"] == pytest.approx(math.sqrt(64 - 2 / 3))
    # Quantiles of F with 2 and 12 degrees of freedom, from a table: 5.0959 (.975) and .025371 (.025).
    assert found["low"] == pytest.approx(math.sqrt((96 / 5.0959 - 1) * 2 / 3), rel=1e-4)
    assert found["high"] == pytest.approx(math.sqrt((96 / 0.025371 - 1) * 2 / 3), rel=1e-4)


def test_builds_that_differ_by_nothing_have_no_effect() -> None:
    same = np.array([[1.0, 1.1], [1.0, 1.1]])
    found = rebuild.build_effect(same, same)
    assert (found["mean"], found["build_sd"], found["low"]) == (0.0, 0.0, 0.0)
    assert found["within_sd"] == pytest.approx(np.std([1.0, 1.1], ddof=1))
    flat = np.ones((3, 2))
    assert rebuild.build_effect(flat, flat)["high"] == 0.0


# ---------------------------------------------------------------- records


Make = Callable[..., compact.Labelled]


@pytest.fixture(scope="module")
def make(root: Path) -> Make:
    """Makes a process of a recorded one, with each row's latency times a factor."""
    path = sorted((root / "docs" / "data" / "baseline-t1" / "runs").rglob("records/*/*.json"))[0]
    recorded = json.loads(path.read_text(encoding="utf-8"))

    def made(label: dict[str, Any], factor: Callable[[dict[str, Any]], float], commit: str = "a" * 40) -> compact.Labelled:
        rows = []
        for row in recorded["rows"]:
            if not row["control"] and "KVWritePrefill" not in row["benchmark"]:
                continue
            if row["status"] == "ok":
                by = factor(row)
                row = {**row, "latency_us": row["latency_us"] * by, "value": row["value"] / by, "launch_hash": commit[:8]}
            rows.append(row)
        name = "-".join(map(str, label.values()))
        return compact.Labelled({**recorded, "process": f"p-{name}", "commit": commit, "rows": rows}, label)

    return made


ROW = "bench_kv_write.KVWritePrefill.track_bandwidth(prefill T=16384 float16 combined fragmented cold)"


def power_file(make: Make, slower: float, controls: float = 0.0, pairs: int = 12) -> list[compact.Labelled]:
    """Pairs of a base and a commit, with .1 % of noise; `slower` is of one row, `controls` of all controls."""
    rng = np.random.default_rng(3)

    def factor(of_row: dict[str, Any], arm: str) -> float:
        noise = 1 + float(rng.normal(0, 0.001))
        if arm == "base":
            return noise
        if of_row["control"]:
            return noise * (1 + controls)
        return noise * (1 + slower) if ROW.endswith(f"({of_row['params'][0]})") else noise

    return [
        make({"pair": number, "arm": arm}, lambda row, arm=arm: factor(row, arm), ("a" if arm == "base" else "b") * 40)
        for number in range(pairs)
        for arm in ("base", "2")
    ]


def test_a_slower_row_is_judged_as_the_gate_does(make: Make) -> None:
    found = verdicts(power_file(make, 0.02), Path("power"), {})["sizes"]["2"]
    row = found["rows"][ROW]
    assert (row["verdict"], row["pairs"], found["unfit"]) == ("REGRESSED", 12, None)
    assert row["effect"] == pytest.approx(0.02, abs=0.002)
    assert row["p"] < 0.01 * 0.2
    others = {one["verdict"] for name, one in found["rows"].items() if name != ROW}
    assert others == {"CLEARED"}
    assert not any("Control" in name or "bench_controls" in name for name in found["rows"])


def test_floors_of_a_baseline_count(make: Make) -> None:
    benchmark, _, case = ROW.partition("(")
    floors = {RowKey(benchmark, (case.removesuffix(")"),)): 0.03}
    row = verdicts(power_file(make, 0.02), Path("power"), floors)["sizes"]["2"]["rows"][ROW]
    assert (row["verdict"], row["floor"]) == ("CLEARED", 0.03)


def test_controls_that_moved_make_it_unfit_and_few_pairs_give_no_verdict(make: Make) -> None:
    assert "moved between the commits" in verdicts(power_file(make, 0.02, 0.05), Path("power"), {})["sizes"]["2"]["unfit"]
    few = verdicts(power_file(make, 0.02, pairs=2), Path("power"), {})["sizes"]["2"]["rows"][ROW]
    assert few["verdict"] == "INVALID"
    assert "at least 6 are needed" in few["reason"]


def test_judged_needs_no_more_than_the_records(make: Make) -> None:
    processes = compact.records_of(power_file(make, 0.0), Path("power"))
    base = [record for record in processes if record.commit == "a" * 40]
    assert judge(base, base, {})["rows"][ROW]["effect"] == 0.0


def test_effects_of_builds_are_found_row_by_row(make: Make) -> None:
    rng = np.random.default_rng(9)
    found = []
    for group in range(4):
        for build in ("old", "fresh"):
            for number in range(2):
                label = {"build": build, "group": group, "process": number}
                shift = 0.01 if build == "fresh" and group % 2 else 0.0
                found.append(make(label, lambda row, shift=shift: 1 + float(rng.normal(0, 0.0005)) + (0 if row["control"] else shift)))
    rows = {row["row"]: row for row in rebuild.effects(found)}
    assert rows[ROW]["groups"] == 4
    assert rows[ROW]["build_sd"] == pytest.approx(0.0058, abs=0.001)
    assert rows[ROW]["mean"] == pytest.approx(0.005, abs=0.001)
    assert rows[ROW]["low"] > 0
    control = next(row for row in rows.values() if row["control"])
    assert control["build_sd"] < 0.001
    assert [row["class"] for row in rebuild.pooled(list(rows.values()))] == ["write-bandwidth"]
    assert rebuild.effects(found[:4]) == [], "one group of each shows no effect"
    assert rebuild.effects(found[:-1])[0]["groups"] == 3, "a group that is not whole is left out"


# ---------------------------------------------------------------- compact files


def test_compact_files_hold_what_the_statistics_read(root: Path, tmp_path: Path) -> None:
    """The kept runs as compact files give the same processes, and are a quarter as large."""
    folders, size = [], 0
    for number, folder in enumerate(own_folders(root)):
        paths = sorted((folder / "records").rglob("*.json"), key=lambda path: path.name)
        target = tmp_path / f"run-{number}"
        target.mkdir()
        found = [compact.Labelled(json.loads(path.read_text(encoding="utf-8")), {"pair": i}) for i, path in enumerate(paths)]
        compact.write(target / f"pairs{compact.SUFFIX}", found)
        assert [one.label for one in compact.read(target / f"pairs{compact.SUFFIX}")] == [{"pair": i} for i in range(len(paths))]
        folders.append(target)
        size += sum(path.stat().st_size for path in paths)
    kept, read = read_processes(own_folders(root)), read_processes(folders)
    assert np.array_equal(kept.y, read.y)
    assert (kept.boot, kept.commit, kept.device, kept.versions) == (read.boot, read.commit, read.device, read.versions)
    assert kept.layout.names == read.layout.names
    for field in ("ticks", "least", "control"):
        assert np.array_equal(getattr(kept.layout, field), getattr(read.layout, field))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.json")) < size / 4


def test_what_is_no_compact_file_is_refused(tmp_path: Path, make: Make) -> None:
    path = tmp_path / f"x{compact.SUFFIX}"
    data = compact.squeeze([make({"pair": 0}, lambda row: 1.0)])
    for broken in ({}, {**data, "schema": "other/1"}, {**data, "rows": []}, {**data, "processes": [{}]}, {**data, "processes": 3}):
        path.write_text(json.dumps(broken), encoding="utf-8")
        with pytest.raises(InputError, match=r"x\.processes\.json"):
            compact.read_folder(tmp_path)
