"""Noise models of a gate: ln latencies of whole runs, and of interleaved pairs.

`pessimistic` is the model that the rule was designed on; `measured` takes each row's spread from the process records of a device. Both are
simulations: nothing in them is a GPU measurement but the spreads of the second.

    y[gate, row, run, process] = load[row] * common[run] + placement[row, run] + burst[run, process] + process noise + slow outliers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ci.errors import InputError
from tests.statistics.ours import Indices, Layout, layout_of
from tests.statistics.records import Processes

Array = npt.NDArray[np.float64]

LOADS: Mapping[str, float] = {"read-bandwidth": 0.35, "write-bandwidth": 0.35}
"""Share of a whole-run shift that rows of a class show; 1 for the other classes."""
SHIFT = (0.02, 0.06)
"""A whole-run shift: uniform, four in five slower."""


@dataclass(frozen=True)
class World:
    """A noise model of a layout's rows.

    Attributes:
        layout: Of the rows.
        process_sd, placement_sd: [rows], SDs of a process within a run and of a run's placement; None draws them for each gate: total SD
            log-uniform in .3 to 3 %, a fifth of the variance placement.
        together: [rows, directions], rows of length 1: a placement is placement_sd x together @ normal [directions], so that rows move
            together, controls too; None moves each row by itself.
        boots: [runs], the boot of each run of a baseline, from 0. Runs of a boot share their placement; a run beyond these has its own.
        common_sd: SD of the everyday shift of a whole run.
        shift_chance: Chance of a shift of 2 to 6 % of a whole run.
        burst_chance: Chance that one process of a run is slow by 3 to 15 % in all rows.
        outlier_chance: Chance that a row's process is slow by an exponential of mean max(6 %, 4 SDs).
        pair_sd: SD of what a pair adds of its own.
    """

    layout: Layout
    process_sd: Array | None = None
    placement_sd: Array | None = None
    together: Array | None = None
    boots: tuple[int, ...] = ()
    common_sd: float = 0.0
    shift_chance: float = 0.0
    burst_chance: float = 0.0
    outlier_chance: float = 0.0
    pair_sd: float = 0.0


def pessimistic(num_rows: int) -> World:
    """The design's noise: 60 % compute rows, 40 % read rows; one row in twelve a control, three a class at least."""
    num_compute = round(0.6 * num_rows)
    bottlenecks = ["compute"] * num_compute + ["read-bandwidth"] * (num_rows - num_compute)
    control = np.zeros(num_rows, dtype=np.bool_)
    control[: max(3, num_rows // 20)] = True
    control[num_compute : num_compute + max(3, num_rows * 3 // 100)] = True
    layout = layout_of([f"row {i}" for i in range(num_rows)], bottlenecks, control.tolist())
    return World(layout, common_sd=0.003, shift_chance=0.1, burst_chance=0.1, outlier_chance=0.03, pair_sd=0.001)


def measured(processes: Processes, num_rows: int | None = None, *, seed: int = 0, leave_out: Sequence[str] = ()) -> World:
    """A device's own noise: each row's SD within runs and between boots, estimated from the runs of `processes`.

    Rows move from boot to boot together as they did in the records, with the correlations of the boots' means: what a boot does to a class
    it does to the controls of the class too, which take it off. A baseline has the records' boots, the run under test one of its own.

    Args:
        processes: Records of at least two boots, and of two processes a run.
        num_rows: Rows of the gate; beyond the real ones judged rows are drawn again. None keeps the real rows.
        seed: Of that draw.
        leave_out: Bottleneck classes without which the gate is.
    Raises:
        InputError: The records are of one boot.
    """
    runs, places = processes.runs(), processes.run_boots()
    names = list(dict.fromkeys(places))
    if len(names) < 2:
        raise InputError("records of one boot show no spread between boots; name runs of two boots or more")
    within = np.array([run.var(axis=1, ddof=1) for run in runs]).mean(axis=0)
    of_boot = [np.concatenate([run for run, place in zip(runs, places, strict=True) if place == name], axis=1) for name in names]
    means = np.array([boot.mean(axis=1) for boot in of_boot])
    share = float(np.mean([1 / boot.shape[1] for boot in of_boot]))
    between = np.maximum(means.var(axis=0, ddof=1) - share * within, 0.0)
    layout = processes.layout
    rows = np.array([row for row, name in enumerate(layout.bottlenecks) if name not in leave_out], dtype=np.intp)
    if num_rows is not None:
        extra = np.random.default_rng(seed).choice(rows[~layout.control[rows]], max(num_rows - rows.size, 0))
        rows = np.concatenate([rows, extra])[:num_rows]
    taken = layout.take(rows)
    taken = replace(taken, names=tuple(f"{name} #{i}" for i, name in enumerate(taken.names)))
    moved = (means - means.mean(axis=0)).T[rows]
    together = moved / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), np.finfo(float).tiny)
    boots = tuple(names.index(place) for place in places)
    return World(taken, process_sd=np.sqrt(within[rows]), placement_sd=np.sqrt(between[rows]), together=together, boots=boots)


def shifted(world: World) -> World:
    """The same machine where every run has a whole-run shift."""
    return replace(world, shift_chance=1.0)


class Draw:
    """Gates of one world: baselines, heads, and pairs of any of their rows."""

    def __init__(self, world: World, rng: np.random.Generator, gates: int) -> None:
        """Draws each gate's row SDs and loads."""
        self.world, self.rng, self.gates = world, rng, gates
        rows = len(world.layout.names)
        if world.process_sd is None or world.placement_sd is None:
            total = np.exp(rng.uniform(np.log(0.003), np.log(0.03), (gates, rows)))
            self.process_sd, self.placement_sd = np.sqrt(0.8) * total, np.sqrt(0.2) * total
        else:
            self.process_sd = np.broadcast_to(world.process_sd, (gates, rows))
            self.placement_sd = np.broadcast_to(world.placement_sd, (gates, rows))
        load = np.array([LOADS.get(name, 1.0) for name in world.layout.bottlenecks])
        self.load = load * rng.uniform(0.85, 1.15, (gates, rows))

    def _noise(self, sd: Array, count: tuple[int, ...]) -> Array:
        """Process noise: t(5) of the given SD, and slow outliers; sd [...], returns [..., *count]."""
        shape, wide = (*sd.shape, *count), sd.reshape(*sd.shape, *(1 for _ in count))
        made = self.rng.standard_t(5, shape) * np.sqrt(3 / 5) * wide
        if self.world.outlier_chance:
            size = np.maximum(0.06, 4 * wide / np.sqrt(0.8))
            made += (self.rng.random(shape) < self.world.outlier_chance) * self.rng.exponential(1, shape) * size
        return np.asarray(made)

    def runs(self, num_runs: int, num_processes: int, shift_chance: float | None = None) -> Array:
        """[gates, rows, num_runs, num_processes]."""
        rng, world = self.rng, self.world
        chance = world.shift_chance if shift_chance is None else shift_chance
        per_run = (self.gates, num_runs)
        common = rng.normal(0, 1, per_run) * world.common_sd
        sign = np.where(rng.random(per_run) < 0.8, 1, -1)
        common = common + (rng.random(per_run) < chance) * rng.uniform(*SHIFT, per_run) * sign
        burst = np.zeros((*per_run, num_processes))
        hit = (rng.random(per_run) < world.burst_chance) * rng.uniform(0.03, 0.15, per_run)
        np.put_along_axis(burst, rng.integers(0, num_processes, per_run)[..., None], hit[..., None], axis=2)
        boots = [*world.boots, *range(len(world.boots), num_runs)][:num_runs]
        num_boots = max(boots) + 1
        if world.together is None:
            unit = rng.normal(0, 1, (*self.load.shape, num_boots))
        else:
            unit = world.together @ rng.normal(0, 1, (self.gates, world.together.shape[1], num_boots))
        placement = unit[..., boots] * self.placement_sd[..., None]
        levels = common[:, None, :] * self.load[..., None] + placement
        return np.asarray(levels[..., None] + burst[:, None] + self._noise(self.process_sd, (num_runs, num_processes)))

    def pairs(self, gate: int, rows: Indices, num_pairs: int) -> Array:
        """[rows, num_pairs]: head less base of fresh processes measured in turn; what a run shares cancels."""
        sd = self.process_sd[gate, rows]
        difference = self._noise(sd, (num_pairs,)) - self._noise(sd, (num_pairs,))
        return np.asarray(difference + self.rng.normal(0, 1, difference.shape) * self.world.pair_sd)
