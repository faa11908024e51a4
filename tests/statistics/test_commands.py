"""The commands run, give the same figures twice, and refuse what they cannot use; the claims that can be made now."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ci import baseline as baselines
from ci import noise
from ci.errors import InputError
from ci.merge import load_kept
from ci.pairs import DELTA0
from ci.references import references_of, run_estimate
from ci.screen import judge
from ci.self_test import held_out
from tests.statistics import __main__ as command
from tests.statistics import ours, page, recorded, replay, resample, rules, simulate, tables, worlds
from tests.statistics.records import Processes, against, kept_runs, read_processes


@pytest.fixture(scope="module")
def own(root: Path) -> Processes:
    return read_processes(command.own_folders(root))


# ---------------------------------------------------------------- replay


@pytest.fixture(scope="module")
def gates(root: Path, request: pytest.FixtureRequest) -> list[recorded.Recorded]:
    return recorded.all_recorded(root, request.getfixturevalue("shared_data"))


def test_the_replayed_gates_are_all_there(gates: list[recorded.Recorded]) -> None:
    """37 runs without a regression, 64 known regressions: 45 of one machine, 8 values times .97, 11 rows of a planted slowdown."""
    assert sum(gate.clean for gate in gates) == 37
    assert {gate.source: sum(row.slower for row in gate.rows) for gate in gates if not gate.clean and "thematrix" not in gate.source} == {
        "H200, graph replay": 8,
        recorded.FIRST: 11,
    }
    assert [sum(row.slower for row in gate.rows) for gate in gates if gate.name.startswith(recorded.REGRESSED_MACHINE)] == [9] * 5
    assert all(not row.slower for gate in gates if gate.clean for row in gate.rows)


def test_the_stored_replay_is_what_the_data_give(gates: list[recorded.Recorded], root: Path) -> None:
    """The cheap table is computed again."""
    assert replay.replay(gates) == page.stored(root, "replay")["rows"]


def test_our_screen_finds_every_known_regression(gates: list[recorded.Recorded]) -> None:
    """And no rule that finds them all has fewer false reds than the gate's one-run verdict; that verdict misses at most one in ten."""
    found = {row["rule"]: row for row in replay.replay(gates)}
    screen, one_run = found[replay.SCREEN], found[replay.ONE_RUN]
    assert all(count == of for count, of in screen["found"].values())
    assert sum(count for count, _ in one_run["found"].values()) >= 0.9 * 64
    reds = {name: sum(count for count, _ in row["red"].values()) for name, row in found.items()}
    complete = [name for name in rules.RULES if all(count == of for count, of in found[name]["found"].values())]
    assert complete == ["fixed 2 %", "IQR fence"]
    assert all(reds[name] > reds[replay.ONE_RUN] for name in complete)


def test_the_gate_is_not_red_on_runs_of_its_own_suite_nor_on_a_bad_runner(gates: list[recorded.Recorded]) -> None:
    found = {row["rule"]: row for row in replay.replay(gates)}[replay.ONE_RUN]
    assert {name: count for name, (count, _) in found["red"].items() if name != "H200, do_bench"} == {
        "thematrix, GPU machines": 0,
        "thematrix, GPU machines, bad runner": 0,
        "H200, graph replay": 0,
        recorded.FIRST: 0,
        recorded.ACCEPTED: 0,
    }


def test_of_the_suites_own_runs_one_of_the_first_is_unfit(gates: list[recorded.Recorded]) -> None:
    """As docs/statistics.md says: none of the accepted runs."""
    assert [(gate.source, gate.name) for gate in gates if gate.unfit and "this suite" in gate.source] == [(recorded.FIRST, "boot1-2")]


def test_a_regression_on_an_unfit_runner_is_not_counted_as_found() -> None:
    row = recorded.RecordedRow(np.zeros((5, 1)), np.ones(1), slower=True, red=True, picked=True)
    gate = recorded.Recorded("source", "run", False, (row,), unfit=True)
    made = {entry["rule"]: entry["found"]["source"] for entry in replay.replay([gate])}
    assert made[replay.ONE_RUN] == [0, 1]
    assert made["fixed 5 %"] == [1, 1]


# ---------------------------------------------------------------- simulate


def test_simulations_are_reproducible_and_a_seed_changes_them() -> None:
    def run(seed: int) -> list[dict[str, Any]]:
        return simulate.simulate(worlds.pessimistic(20), seed=seed, runs=8, gates=12, shifted_gates=6, power_gates=6, delta0=DELTA0)

    assert run(1) == run(1) != run(2)


def test_every_rule_is_judged_on_the_same_gates() -> None:
    found = simulate.simulate(worlds.pessimistic(20), seed=3, runs=8, gates=15, shifted_gates=5, power_gates=5, delta0=DELTA0)
    assert [row["rule"] for row in found] == [*rules.RULES, simulate.OURS, simulate.LOW_FLOOR]
    assert {tuple(row["red"][1:] + row["red_shifted"][1:]) for row in found} == {(15, 5)}
    assert {row["measurements"] for row in found[:8]} == {60}
    assert found[8]["measurements"] > 60


def test_a_control_is_never_called_slower() -> None:
    world = worlds.pessimistic(20)
    made = simulate.batch(world, np.random.default_rng(4), 30, 8, 0.0, shift=1.0)
    masks = [*simulate.judge_others(made).values(), simulate.judge_ours(made, DELTA0)[0]]
    assert any(mask.any() for mask in masks)
    assert not any(mask[:, world.layout.control].any() for mask in masks)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "gates"), [(100, 600), (33, 600)])
def test_false_red_of_the_gate_is_under_a_two_hundredth_on_pessimistic_noise(num_rows: int, gates: int) -> None:
    """Another seed than the stored table's: at most .005, the interval's upper end under .01, the level of the test."""
    red = 0
    rng = np.random.default_rng(11)
    world = worlds.pessimistic(num_rows)
    with ours.shared_flips():
        for _ in range(gates // 100):
            made = simulate.batch(world, rng, 100, 10, 0.0)
            red += int(simulate.judge_ours(made, DELTA0)[0].any(axis=1).sum())
    assert red / gates <= 0.005
    assert tables.wilson(red, gates)[1] < 0.01


@pytest.mark.slow
def test_false_red_of_the_gate_on_the_h200s_spreads(own: Processes) -> None:
    world = worlds.measured(own)
    rng, runs = np.random.default_rng(12), len(own.runs())
    with ours.shared_flips():
        red = sum(int(simulate.judge_ours(simulate.batch(world, rng, 100, runs, 0.0), DELTA0)[0].any(axis=1).sum()) for _ in range(6))
    assert red / 600 <= 0.005
    assert tables.wilson(red, 600)[1] < 0.01


def test_the_claims_hold_in_the_stored_tables(root: Path) -> None:
    """In every world: false red at most .005 with its interval's upper end under .005, none on a shifted run, and power that grows."""
    for world in page.stored(root, "simulate")["worlds"]:
        row = next(row for row in world["rows"] if row["rule"] == simulate.OURS)
        red, of = row["red"]
        assert of >= 2000
        assert red / of <= 0.005
        assert tables.wilson(red, of)[1] < 0.005
        assert row["red_shifted"][0] == 0
        power = [found / fit for found, fit in row["power"].values()]
        assert power[2] >= 0.55
        assert power[3] >= 0.8
        assert all(later >= earlier - 0.05 for earlier, later in itertools.pairwise(power))
        others = [row for row in world["rows"] if row["rule"] in rules.RULES]
        rivals = [row for row in others if row["power"]["0.03"][0] / row["power"]["0.03"][1] >= power[2]]
        assert all(row["red"][0] > red for row in rivals)


def test_a_mutant_of_the_rule_is_seen() -> None:
    """Without the confirm stage, what the screen picks would be red in most gates: the simulation can tell."""
    made = simulate.batch(worlds.pessimistic(100), np.random.default_rng(5), 60, 10, 0.0)
    picked = sum(bool(screened.picked().any()) for screened in simulate.screens(made))
    assert picked > 40
    with ours.shared_flips():
        assert simulate.judge_ours(made, DELTA0)[0].any(axis=1).sum() <= 2


# ---------------------------------------------------------------- resample


def test_resampling_is_reproducible(own: Processes) -> None:
    few = own.take([row for row, name in enumerate(own.layout.names) if "Host" in name or ("PagedDecode" in name and "B=8 " in name)])
    one, two, other = (resample.resample(few, seed=seed, gates=25, power_gates=1) for seed in (1, 1, 2))
    assert one == two
    assert one["red"][1] == 25
    assert one["rows"] != other["rows"]


def test_a_shifted_row_is_found_once_it_is_large_enough(own: Processes) -> None:
    """A row of .2 % noise: never at 0, always at 10 %."""
    rng = np.random.default_rng(3)
    row = next(i for i, name in enumerate(own.layout.names) if "B=64 S=8192 float16 combined contiguous" in name)
    fit = [gate for gate in (resample.draw(own, rng) for _ in range(12)) if not gate.screened.unfit]
    with ours.shared_flips():
        assert not any(resample._found(gate, own.layout, row, 0.0) for gate in fit)
        assert all(resample._found(gate, own.layout, row, 0.1) for gate in fit)


def test_what_makes_resampled_gates_unfit_is_the_one_control_of_the_host(root: Path, own: Processes) -> None:
    """Of the first runs, which had one control of class `host`; no gate of the accepted runs, which have two, is unfit."""
    first = read_processes(kept_runs(root / "docs" / "data" / "baseline-t1" / "runs"))
    on_device = first.take([row for row, name in enumerate(first.layout.bottlenecks) if name != "host"])
    unfit = []
    for processes in (first, on_device, own):
        rng = np.random.default_rng(8)
        unfit.append(sum(resample.draw(processes, rng).screened.unfit for _ in range(60)))
    assert unfit[0] >= 2
    assert unfit[1:] == [0, 0]


def test_the_low_floor_finds_what_the_gate_finds_and_more(root: Path) -> None:
    """On the same pairs, in the stored table: row by row and size by size; and its red A/A gates are the gate's and more."""
    stored = page.stored(root, "resample")
    assert stored["red_low_floor"][0] >= stored["red"][0]
    counts = [(row["power"][size][0], row["low_floor"][size][0]) for row in stored["rows"] for size in row["power"]]
    assert all(low >= own for own, low in counts)
    assert sum(low for _, low in counts) > sum(own for own, _ in counts)


def test_the_classes_of_a_table_add_up() -> None:
    rows = [
        {"class": name, "power": {"0.01": [i, 10]}, "low_floor": {"0.01": [i + 1, 10]}, "at_mde80": [i, 10], "mde80": i / 100}
        for i, name in enumerate(("launch", "host", "launch"))
    ]
    found = {row["class"]: row for row in resample.by_class(rows)}
    assert {name: row["rows"] for name, row in found.items()} == {"host": 1, "launch": 2, "all but host": 2, "all": 3}
    assert found["all but host"] == {**found["launch"], "class": "all but host"}
    assert (found["all"]["power"], found["all"]["low_floor"]) == ({"0.01": [3, 30]}, {"0.01": [6, 30]})
    assert (found["all"]["at_mde80"], found["all"]["mde80"]) == ([3, 30], (0.0, 0.02))
    assert [row["class"] for row in resample.by_class(rows[:1])] == ["launch", "all"]


def _records(root: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(root / "baselines" / "asv" / "boot1-1" / "records", target / "records")
    if changes:
        file = sorted((target / "records").rglob("*.json"))[0]
        data = json.loads(file.read_text(encoding="utf-8"))
        for name, value in changes.items():
            if name == "device":
                data["environment"]["device"]["name"] = value
            else:
                data[name] = value
        file.write_text(json.dumps(data), encoding="utf-8")
    return target


def test_records_that_do_not_belong_together_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"of the commits .*--one-code"):
        read_processes([_records(root, tmp_path / "commit", commit="d" * 40)])
    assert len(read_processes([tmp_path / "commit"], one_code=True).y) == 3
    with pytest.raises(InputError, match="resample one device at a time"):
        read_processes([_records(root, tmp_path / "device", device="NVIDIA H100 PCIe")])
    with pytest.raises(InputError, match="2 protocols"):
        read_processes([_records(root, tmp_path / "protocol", protocol="other")])
    with pytest.raises(InputError, match="no process records"):
        read_processes([])
    with pytest.raises(InputError, match="no folder of process records"):
        read_processes([tmp_path / "absent"])


def test_too_few_processes_make_no_gate(root: Path) -> None:
    few = read_processes([root / "baselines" / "asv" / "boot1-1", root / "baselines" / "asv" / "boot2-1"])
    with pytest.raises(InputError, match="6 processes leave 1 runs as a baseline; record at least 12"):
        resample.draw(few, np.random.default_rng(0))


def test_a_stored_baseline_is_screened_against_but_not_by_its_own_processes(root: Path, own: Processes) -> None:
    file = root / "baselines" / "NVIDIA_H200.json"
    with pytest.raises(InputError, match=r"21 of the 21 processes are in .* itself"):
        against(own, file)
    later = replace(own, y=own.y + 0.001)
    kept, runs = against(later, file)
    assert kept.layout.names == own.layout.names
    assert runs.shape == (44, 7, 3)
    expected = [run.T for run in own.runs()]
    assert pytest.approx(expected[0]) == runs[:, 0].T
    made = resample.resample(kept, seed=1, gates=20, power_gates=0, baseline=runs)
    assert made["red"][1] == 20
    with pytest.raises(InputError, match="no row of these processes in the same version"):
        against(replace(own, versions=("v0",) * 44), file)
    part = later.take([2, 5])
    assert part.y.shape == (21, 2)
    assert len(part.left_out) == 42
    kept, runs = against(part, file)
    assert runs.shape == (2, 7, 3)


def test_host_rows_are_over_their_floors_in_arrays_as_in_the_gate(root: Path, own: Processes) -> None:
    """Effect and floor of each row of a held-out H200 run, from arrays and from `judge`."""
    stored = baselines.load(root / "baselines" / "NVIDIA_H200.json")
    values = noise.fast60(np.stack(own.runs(), axis=1))
    for i, folder in enumerate(command.own_folders(root)[:2]):
        judged = judge([load_kept(folder)], references_of(held_out(stored, i)), estimate=run_estimate)
        made = ours.screen(np.delete(values, i, axis=1), values[:, i], own.layout)
        effects = {str(row.key): (row.effect, row.floor) for row in judged.rows if not row.control and row.effect is not None}
        assert len(effects) == 35
        for row in own.layout.judged:
            assert effects[own.layout.names[row]] == pytest.approx((np.expm1(made.z[row]), made.floor[row]), abs=1e-9)


def test_floors_come_off_host_rows_alone_and_on_both_sides_or_on_neither(root: Path, own: Processes, tmp_path: Path) -> None:
    raw = own.as_measured()
    host = np.array([timer == "bench_host" for timer in own.layout.timers])
    moved = np.abs(own.y - raw.y).max(axis=0)
    assert (moved[host] > 0.01).all()
    assert (moved[~host] == 0).all()
    stored = json.loads((root / "baselines" / "NVIDIA_H200.json").read_text(encoding="utf-8"))
    stored["rows"][own.layout.names[int(np.flatnonzero(host)[0])]]["host_floors_us"] = None
    file = tmp_path / "without.json"
    file.write_text(json.dumps(stored), encoding="utf-8")
    later = replace(own, y=own.y + 0.001)
    kept, runs = against(later, file)
    assert kept.y == pytest.approx(raw.y + 0.001)
    assert pytest.approx(raw.runs()[0].T) == runs[:, 0].T
    kept, runs = against(later, root / "baselines" / "NVIDIA_H200.json")
    assert kept.y == pytest.approx(later.y)
    assert pytest.approx(own.runs()[0].T) == runs[:, 0].T


# ---------------------------------------------------------------- the command and the page


@pytest.mark.parametrize("name", ["spreads", "simulate", "bias", "resample"])
@pytest.mark.slow
def test_a_command_runs_quickly_and_stores_what_it_shows(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--quick", "--json", str(tmp_path / "x.json"), name]) == 0
    told = capsys.readouterr().out
    assert page.part(name, json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))) in told
    assert f"python -m tests.statistics {name}" in told


def test_a_world_is_put_among_the_others_of_the_same_making(tmp_path: Path) -> None:
    path = tmp_path / "x.json"

    def found(title: str, seed: int) -> dict[str, Any]:
        return {"worlds": [{"title": title}], "made": tables.made_with("simulate", seed)}

    assert command.with_others(found("2. b", 1), path) == found("2. b", 1)
    tables.store(path, found("2. b", 1))
    tables.store(path, command.with_others(found("1. a", 1), path))
    merged = command.with_others(found("2. c", 1), path)
    assert [world["title"] for world in merged["worlds"]] == ["1. a", "2. c"]
    with pytest.raises(InputError, match="make all of it anew"):
        command.with_others(found("2. c", 2), path)
    lines = {"rows": [{"bias_sd": 0.0, "delta0": delta0, "red": [0, 1]} for delta0 in (0.0, 0.01)], "made": tables.made_with("bias", 1)}
    tables.store(path, lines)
    one = {**lines, "rows": [{"bias_sd": 0.0, "delta0": 0.01, "red": [1, 1]}, {"bias_sd": 0.0, "delta0": 0.004, "red": [1, 1]}]}
    assert [(row["delta0"], row["red"][0]) for row in command.with_others(one, path)["rows"]] == [(0.0, 0), (0.004, 1), (0.01, 1)]


def test_a_command_that_cannot_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["resample", str(tmp_path)]) == 2
    assert "no process records under" in capsys.readouterr().err
    assert command.main(["replay", "--data", str(tmp_path / "absent")]) == 2
    assert "name their folder with --data" in capsys.readouterr().err


@pytest.mark.parametrize("name", page.RENDER)
def test_the_page_has_the_stored_tables(name: str, root: Path) -> None:
    text = (root / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert page.part(name, page.stored(root, name)) in text
    assert page.filled(text, {name: page.part(name, page.stored(root, name))}) == text
    assert page.filled(text, {name: "other\n"}) != text


def test_the_prose_has_the_figures_of_the_tables(root: Path) -> None:
    """Those that decide something: what a rebuild's bias does, and what is found of the rows that the device times."""
    text = " ".join((root / "docs" / "statistics.md").read_text(encoding="utf-8").split())
    bias = {(row["bias_sd"], row["delta0"]): row for row in page.stored(root, "bias")["rows"]}
    own, low = (
        [tables.decimal(table[line]["red"][0] / table[line]["red"][1]) for line in ((0.002, 0.002), (0.005, 0.015))]
        for table in (bias, {line: row["low_floor"] for line, row in bias.items()})
    )
    assert f"At .2 % it leaves {own[0]}, and {low[0]} with the low floor" in text
    assert f"(1.5 %) bring it to {own[1]}, and to {low[1]} with the low floor" in text
    found = next(row for row in resample.by_class(page.stored(root, "resample")["rows"]) if row["class"] == "all but host")
    power, what_if = (
        [tables.decimal(found[floor][size][0] / found[floor][size][1], 2) for size in ("0.01", "0.02", "0.03")]
        for floor in ("power", "low_floor")
    )
    assert "{} are found at 1 %, {} at 2 %, {} at 3 %. This is less".format(*power) in text
    assert "{} of these rows are found at 1 %, {} at 2 %, {} at 3 %".format(*what_if) in text


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="exactly one pair of marks"):
        page.filled("text", {"replay": "x"})
