"""The gate's rule on arrays is the rule that the gate runs; noise models and draws are what they say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ci import noise, screen, sequential
from ci.model import CommitResult, RowKey, RowResult, RowVerdict
from ci.pairs import DELTA0
from tests.statistics import ours, resample, simulate, worlds
from tests.statistics.records import Processes, read_processes

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
    return read_processes(sorted((root / "baselines" / "asv").iterdir()))


def test_the_records_are_read_whole(own: Processes) -> None:
    assert own.y.shape == (15, 33)
    assert own.device == "NVIDIA H200"
    assert [len(of_boot) for of_boot in own.boots().values()] == [6, 6, 3]
    assert [run.shape for run in own.runs()] == [(33, 3)] * 5
    assert int(own.layout.control.sum()) == 7
    assert set(own.layout.least.tolist()) == {0.005, 0.03}


def test_the_measured_world_has_the_spreads_of_the_records(own: Processes) -> None:
    """By hand for one row: the pooled SD within runs, and what is left between them."""
    world = worlds.measured(own)
    row = own.layout.names.index(next(name for name in own.layout.names if "prefill T=16384 float16" in name))
    runs = np.array([run[row] for run in own.runs()])
    within = runs.var(axis=1, ddof=1).mean()
    between = max(runs.mean(axis=1).var(ddof=1) - within / 3, 0.0)
    assert world.process_sd is not None
    assert world.placement_sd is not None
    assert world.process_sd[row] == pytest.approx(math.sqrt(within))
    assert world.placement_sd[row] == pytest.approx(math.sqrt(between))
    wide = worlds.measured(own, 100)
    assert len(wide.layout.names) == len(set(wide.layout.names)) == 100
    assert int(wide.layout.control.sum()) == 7
    on_device = worlds.measured(own, 60, leave_out=("host",))
    assert "host" not in on_device.layout.bottlenecks
    assert (len(on_device.layout.names), int(on_device.layout.control.sum())) == (60, 6)


def test_runs_of_one_boot_agree_tenfold_better_than_boots(own: Processes, root: Path) -> None:
    """The SDs that docs/statistics.md quotes: between two runs of a boot, and between boots, median over the judged device-timed rows."""
    means = np.array([run.mean(axis=1) for run in own.runs()])
    within = np.sqrt(((means[0] - means[1]) ** 2 + (means[2] - means[3]) ** 2) / 4)
    between = np.array([means[:2].mean(axis=0), means[2:4].mean(axis=0), means[4]]).std(axis=0, ddof=1)
    rows = [row for row in own.layout.judged if own.layout.bottlenecks[row] != "host"]
    told = f"{100 * np.median(within[rows]):.2f} % between runs of a boot, {100 * np.median(between[rows]):.2f} % between boots"
    assert told.replace("0.", ".") in (root / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert np.median(between[rows]) > 5 * np.median(within[rows])


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
