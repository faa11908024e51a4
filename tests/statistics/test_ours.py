"""The gate's rule on arrays is the rule that the gate runs; noise models and draws are what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ci import noise, screen, sequential
from ci.errors import InputError
from ci.model import CommitResult, RowKey, RowResult, RowVerdict
from ci.pairs import DELTA0
from tests.statistics import ours, page, resample, simulate, spreads, tables, worlds
from tests.statistics.records import Processes, kept_runs, read_processes

CLASSES = ("read-bandwidth", "dequant", "launch", "compute", "host")


def _random_gate(seed: int) -> tuple[noise.Array, noise.Array, ours.Layout]:
    """Rows of several classes and timers, with or without controls, some of them slower, sometimes on a machine that moved."""
    rng = np.random.default_rng(seed)
    count, num_runs = int(rng.integers(5, 30)), int(rng.integers(2, 13))
    layout = ours.layout_of(
        [f"row {i:02d}" for i in range(count)],
        [str(rng.choice(CLASSES)) for _ in range(count)],
        (rng.random(count) < (0.3 if seed % 3 else 0.0)).tolist(),
        [str(rng.choice(["bench", "graph"])) for _ in range(count)],
    )
    sd = np.exp(rng.uniform(np.log(1e-4), np.log(0.03), count))
    common = rng.normal(0, 0.01, num_runs)
    runs = rng.normal(0, 1, (count, num_runs)) * sd[:, None] + common
    head = rng.normal(0, 1, count) * sd + rng.normal(0, 0.02) + (rng.random(count) < 0.2) * rng.uniform(-0.1, 0.1, count)
    return runs, head, layout


@pytest.mark.parametrize("seed", range(40))
def test_the_screen_on_arrays_is_that_of_judge(seed: int) -> None:
    """Row by row: effect, floor, p-value, and whether it is picked; and whether the runner is unfit."""
    runs, head, layout = _random_gate(seed)
    keys = [RowKey(name) for name in layout.names]
    rows = {key: RowResult(key, "us", "lower", "v1", "measured", (1.0,)) for key in keys}
    references = {
        key: screen.Reference(key, "us", "lower", "v1", layout.bottlenecks[i], layout.timers[i], bool(layout.control[i]), runs[i])
        for i, key in enumerate(keys)
    }
    levels = dict(zip(keys, head, strict=True))
    control = set(np.flatnonzero(layout.control).tolist())
    with pytest.MonkeyPatch.context() as patch:
        # A row's control flag comes with its record; here there are none.
        patch.setattr(screen, "mismatch", lambda *_: None)
        commit = CommitResult("box", "b" * 40, "host", 0, rows, {}, "results", foreign=True)
        judged = screen.judge([commit], references, estimate=lambda row: float(levels[row.key]))
    made = ours.screen(runs, head, layout)
    picked = made.picked()
    outcomes = {row.key: row for row in judged.rows}
    for i, key in enumerate(keys):
        row = outcomes[key]
        if i in control:
            assert math.isnan(made.z[i])
            continue
        assert row.effect == pytest.approx(math.expm1(made.z[i]), abs=1e-12)
        assert row.floor == pytest.approx(made.floor[i])
        one_sided = made.p_value[i] if made.z[i] >= 0 else 1 - made.p_value[i]
        assert row.p_value == pytest.approx(one_sided, rel=1e-6, abs=1e-12)
        assert (screen.SCREENED in row.flags) == picked[i]
    assert (judged.unfit is not None) == made.unfit


def test_random_gates_are_of_every_kind() -> None:
    """The test above would show little if no gate were unfit or nothing were picked."""
    made = [ours.screen(*_random_gate(seed)) for seed in range(40)]
    assert {gate.unfit for gate in made} == {True, False}
    assert sum(int(gate.picked().sum()) for gate in made) > 20


@pytest.mark.parametrize("num_pairs", [12, 24, 48])
def test_shared_flips_agree_with_the_gates_own(num_pairs: int) -> None:
    rng = np.random.default_rng(num_pairs)
    for _ in range(4):
        d = rng.standard_t(5, num_pairs) * 0.003 + 0.001
        own, shared = noise.sign_flip_p(d, key="row"), ours.shared_sign_flip_p(d, key="row")
        if num_pairs <= noise.EXACT_PAIRS:
            assert shared == own
        else:
            assert shared == pytest.approx(own, abs=5 * math.sqrt(own * (1 - own) / noise.MONTE_CARLO_FLIPS) + 1e-5)
    assert ours.shared_sign_flip_p(np.zeros(num_pairs), key="") == 1.0


def test_the_patch_of_the_flips_ends() -> None:
    before = noise.sign_flip_p
    with ours.shared_flips():
        assert noise.sign_flip_p is ours.shared_sign_flip_p
    assert noise.sign_flip_p is before


def _layout(rows: int) -> ours.Layout:
    return ours.layout_of([f"row {i}" for i in range(rows)], ["launch"] * rows, [False] * rows)


def test_confirm_goes_through_sequential() -> None:
    """A sure row of 3 %, one that does not move, and one of too much noise to say."""
    rng = np.random.default_rng(0)
    d = np.stack([rng.normal(0.03, 0.002, 48), rng.normal(0.0, 0.001, 48), rng.normal(0.012, 0.05, 48)])
    picked = np.array([4, 1, 2])
    made = ours.confirm(picked, d, np.full(5, 0.01), DELTA0, [f"row {i}" for i in range(5)])
    series = [sequential.Series(f"row {row}", d[i], DELTA0, 0.01) for i, row in enumerate(picked)]
    decisions = sequential.decide(series)
    assert [decision.verdict for decision in decisions][:2] == [RowVerdict.REGRESSED, RowVerdict.CLEARED]
    assert made.regressed.tolist() == [4]
    assert made.measurements == 2 * sum(decision.pairs for decision in decisions)
    assert made.unconfirmed.tolist() == [row for row, it in zip(picked, decisions, strict=True) if it.verdict is RowVerdict.UNCONFIRMED]


def test_an_unfit_gate_measures_no_pairs() -> None:
    runs = np.random.default_rng(1).normal(0, 0.001, (6, 8))
    screened = ours.screen(runs, runs[:, 0] + 0.04, _layout(6))

    def pairs(_: ours.Indices) -> noise.Array:
        raise AssertionError("no pairs were to be measured")

    made = ours.gate(screened, _layout(6), pairs)
    assert made.unfit
    assert made.picked.size == 6
    assert made.confirmed.regressed.size == 0


# ---------------------------------------------------------------- worlds


def test_the_pessimistic_world_has_the_spread_that_it_says() -> None:
    world = worlds.pessimistic(100)
    assert (int(world.layout.control.sum()), len(world.layout.judged)) == (8, 92)
    quiet = worlds.World(world.layout, np.full(100, 0.01), np.full(100, 0.005), common_sd=0.003)
    y = worlds.Draw(quiet, np.random.default_rng(3), 40).runs(6, 4)
    assert y.shape == (40, 100, 6, 4)
    assert float(y.var(axis=3, ddof=1).mean()) == pytest.approx(0.01**2, rel=0.1)
    between = y.mean(axis=3).var(axis=2, ddof=1)[:, :60].mean()
    assert float(between) == pytest.approx(0.005**2 + 0.01**2 / 4 + 0.003**2, rel=0.1)


def test_pairs_cancel_what_a_run_shares() -> None:
    world = worlds.shifted(worlds.pessimistic(100))
    draw = worlds.Draw(world, np.random.default_rng(4), 3)
    d = draw.pairs(1, np.array([0, 70]), 4000)
    expected = np.sqrt(2) * draw.process_sd[1, [0, 70]]
    assert np.median(d, axis=1) == pytest.approx([0, 0], abs=3e-3)
    assert (d.std(axis=1) > 0.9 * expected).all()


def test_a_shifted_world_shifts_every_run() -> None:
    calm = worlds.World(worlds.pessimistic(40).layout, np.full(40, 1e-6), np.full(40, 1e-6))
    y = worlds.Draw(worlds.shifted(calm), np.random.default_rng(5), 50).runs(1, 3)
    size = np.abs(y[:, :24].mean(axis=(1, 2, 3)))
    assert size.min() > 0.85 * 0.02
    assert size.max() < 1.15 * 0.06


@pytest.fixture(scope="module")
def own(root: Path) -> Processes:
    return read_processes(kept_runs(root / "baselines" / "asv"))


def test_the_records_are_read_whole(own: Processes) -> None:
    assert own.y.shape == (21, 44)
    assert own.device == "NVIDIA H200"
    assert [len(of_boot) for of_boot in own.boots().values()] == [9, 9, 3]
    assert [run.shape for run in own.runs()] == [(44, 3)] * 7
    assert int(own.layout.control.sum()) == 9
    assert set(own.layout.least.tolist()) == {0.005, 0.03}


def test_the_measured_world_has_the_spreads_of_the_records(own: Processes) -> None:
    """By hand for one row: the pooled SD within runs, and what is left between boots of three runs, three runs and one."""
    world = worlds.measured(own)
    row = own.layout.names.index(next(name for name in own.layout.names if "prefill T=16384 float16" in name))
    runs = np.array([run[row] for run in own.runs()])
    within = runs.var(axis=1, ddof=1).mean()
    boots = np.array([runs[:3].mean(), runs[3:6].mean(), runs[6].mean()])
    between = max(boots.var(ddof=1) - within * (1 / 9 + 1 / 9 + 1 / 3) / 3, 0.0)
    assert world.process_sd is not None
    assert world.placement_sd is not None
    assert world.process_sd[row] == pytest.approx(math.sqrt(within))
    assert world.placement_sd[row] == pytest.approx(math.sqrt(between))
    assert world.boots == (0, 0, 0, 1, 1, 1, 2)
    wide = worlds.measured(own, 100)
    assert len(wide.layout.names) == len(set(wide.layout.names)) == 100
    assert int(wide.layout.control.sum()) == 9
    on_device = worlds.measured(own, 60, leave_out=("host",))
    assert "host" not in on_device.layout.bottlenecks
    assert (len(on_device.layout.names), int(on_device.layout.control.sum())) == (60, 7)


def test_a_world_of_one_boot_is_refused(own: Processes) -> None:
    first = own.boots()[own.boot[0]]
    one = replace(own, y=own.y[first], boot=own.boot[: len(first)], run=own.run[: len(first)])
    with pytest.raises(InputError, match="name runs of two boots or more"):
        worlds.measured(one)


def test_rows_of_the_measured_world_move_together_as_in_the_records(own: Processes) -> None:
    """Over many boots the correlations are the records', controls among them; a world of rows that move alone has none of them."""
    world = worlds.measured(own)
    runs = np.array([run.mean(axis=1) for run in own.runs()])
    recorded = np.corrcoef(np.array([runs[:3].mean(axis=0), runs[3:6].mean(axis=0), runs[6]]).T)
    assert world.placement_sd is not None
    moving = np.flatnonzero(world.placement_sd > 1e-4)
    assert moving.size > 38
    apart = []
    for together in (world.together, None):
        quiet = worlds.World(world.layout, np.full(44, 1e-9), world.placement_sd, together)
        drawn = worlds.Draw(quiet, np.random.default_rng(9), 1).runs(4000, 1)[0, moving, :, 0]
        assert drawn.std(axis=1) == pytest.approx(world.placement_sd[moving], rel=0.06)
        apart.append(float(np.abs(np.corrcoef(drawn) - recorded[np.ix_(moving, moving)]).max()))
    assert apart[0] < 0.1
    assert apart[1] > 0.9


def test_runs_of_a_boot_share_their_placement_and_the_head_has_its_own() -> None:
    world = worlds.World(_layout(5), np.full(5, 1e-9), np.full(5, 0.01), boots=(0, 0, 1))
    draw = worlds.Draw(world, np.random.default_rng(10), 4)
    y, head = draw.runs(5, 1)[..., 0], draw.runs(1, 1)[..., 0]
    near = np.abs(y[:, :, :, None] - y[:, :, None, :]).max(axis=(0, 1)) < 1e-6
    assert near.tolist() == [[i == j or {i, j} == {0, 1} for j in range(5)] for i in range(5)]
    assert (np.abs(y - head) > 1e-6).any(axis=(0, 1)).all()


@pytest.mark.slow
def test_more_boots_mend_gates_that_are_unfit_without_a_shift(own: Processes) -> None:
    """As docs/statistics.md says: many with the records' three boots, few once each of as many runs has a boot of its own."""
    three = worlds.measured(own, leave_out=("host",))
    unfit = []
    for world in (three, replace(three, boots=())):
        made = simulate.batch(world, np.random.default_rng(21), 300, 7, 0.0)
        unfit.append(sum(screened.unfit for screened in simulate.screens(made)))
    assert unfit[0] > 0.05 * 300
    assert unfit[1] < 0.05 * 300


# ---------------------------------------------------------------- spreads


def _processes(y: noise.Array, boots: str, runs: str, layout: ours.Layout) -> Processes:
    return Processes(layout, y, tuple(boots), tuple(f"{i} {i}" for i in runs), "c" * 40, "box", ())


def test_spreads_are_what_a_pencil_gives() -> None:
    """A row and its control that follow boots alike, and a row's own noise within runs and boots; run 1 and 2 on boot a, 3 on boot b."""
    layout = ours.layout_of(["row", "control"], ["launch", "launch"], [False, True])
    boot = np.array([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    own = np.array([-0.01, 0.01, 0.03, 0.05, -0.01, 0.01])
    made = spreads.spreads(_processes(np.stack([boot + own, boot], axis=1), "aaaabb", "112233", layout))
    row, control = made["rows"]
    assert made["runs"] == [2, 1]
    assert row["process"] == pytest.approx(math.sqrt(6 * 0.01**2 / 3))
    assert row["run"] == pytest.approx(0.04 / math.sqrt(2))
    assert row["boot"] == pytest.approx((1 - 0.02) / math.sqrt(2))
    # The faster process of two is the slower one too: ceil(.6 x 2) = 2 processes are kept.
    assert row["all"] == pytest.approx(float(np.std([0.0, 0.04, 1.0], ddof=1)))
    assert row["normalised"] == pytest.approx(float(np.std([0.0, 0.04, 0.0], ddof=1)))
    assert row["floor"] == pytest.approx(3 * row["normalised"])
    assert (control["process"], control["run"], control["floor"]) == (0.0, 0.0, None)
    assert control["boot"] == pytest.approx(1 / math.sqrt(2))
    told = spreads.render(made)
    assert "3 runs over 2 boots (2, 1)" in told
    assert "| launch (1 rows) | 1.41 % | 2.83 % | 69.30 % |" in told


def test_runs_that_show_no_spread_are_refused() -> None:
    layout = ours.layout_of(["row"], ["launch"], [False])
    for boots, runs in (("aaaa", "1122"), ("aabb", "1122")):
        with pytest.raises(InputError, match="name two runs of a boot, and another boot"):
            spreads.spreads(_processes(np.zeros((4, 1)), boots, runs, layout))
    with pytest.raises(InputError, match="run 2 has processes of 2 boots; keep each boot's in a folder of its own"):
        spreads.spreads(_processes(np.zeros((4, 1)), "aaab", "1122", layout))


def test_the_stored_spreads_are_what_the_runs_give(own: Processes, root: Path) -> None:
    """The cheap table is computed again; and the sentences that docs/statistics.md makes of it."""
    stored = page.stored(root, "spreads")
    again = spreads.spreads(own)
    assert {name: stored[name] for name in again if name != "rows"} == {name: again[name] for name in again if name != "rows"}
    for was, now in zip(stored["rows"], again["rows"], strict=True):
        assert all(was[name] == now[name] for name in ("row", "class", "control", "host"))
        measured = spreads.LEVELS[:-1] if now["control"] else spreads.LEVELS
        assert [was[level] for level in measured] == pytest.approx([now[level] for level in measured], rel=1e-9)
    rows = [row for row in again["rows"] if not row["control"] and not row["host"]]
    within, boots, flat = (tables.decimal(100 * spreads.median(rows, level), 2) for level in ("run", "boot", "normalised"))
    text = (root / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert f"{within} % between runs of a boot and {boots} % between boots; with the controls taken off {flat} % is left" in text
    assert spreads.median(rows, "boot") > 5 * spreads.median(rows, "run")


# ---------------------------------------------------------------- draws


def test_a_drawn_gate_uses_no_process_twice_and_pairs_within_a_boot() -> None:
    """y is 1000 boot + process, so that a difference shows both."""
    boots = [0] * 40 + [1] * 57
    y = np.array([[1000.0 * boot + i] * 5 for i, boot in enumerate(boots)])
    processes = Processes(_layout(5), y, tuple(f"boot {b}" for b in boots), ("run",) * 97, "c" * 40, "box", ())
    rng = np.random.default_rng(6)
    runs = resample._runs(processes, list(range(3, 97)), rng)
    used = [i for run in runs for i in run]
    assert len(runs) == resample.MOST_RUNS
    assert len(used) == len(set(used)) == 30
    assert all(len({boots[i] for i in run}) == 1 for run in runs)
    d = resample._pairs(processes, rng, 48)
    assert d.shape == (5, 48)
    assert (np.abs(d) < 60).all()
    assert (d != 0).all()
    # 20 + 28 pairs: one pairing, and so no process twice; each difference of i - j is of a pair of its own.
    assert (d == d[0]).all()


def test_pairs_are_repeated_only_once_a_pairing_is_used_up(own: Processes) -> None:
    rng = np.random.default_rng(7)
    d = resample._pairs(own, rng, 14)
    assert len({round(abs(float(value)), 12) for value in d[0, :7]}) == 7


def test_a_persistent_bias_of_head_is_in_its_run_and_in_its_pairs() -> None:
    calm = worlds.World(worlds.pessimistic(40).layout, np.full(40, 1e-9), np.full(40, 1e-9))
    made = simulate.batch(calm, np.random.default_rng(8), 6, 5, 0.0, bias_sd=0.01)
    heads = made.head.mean(axis=2)
    assert heads == pytest.approx(made.bias, abs=1e-6)
    assert float(made.bias[:, calm.layout.judged].std()) == pytest.approx(0.01, rel=0.2)
    assert not made.bias[:, calm.layout.control].any()
    regressed, unfit, _ = simulate.judge_ours(made, 0.0)
    assert not unfit.any()
    assert regressed.any()
    assert (made.bias[regressed] >= math.log1p(0.005) - 1e-6).all()
    assert regressed[made.bias > math.log1p(0.006)].all()
