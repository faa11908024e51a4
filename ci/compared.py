"""Rows that a run and a reference both have, in numbers: deviations in ln latency, less those of host floors and controls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ci import noise
from ci.host_floor import DISTURBED, floors_of, levelled
from ci.model import RowKey, RowResult
from ci.references import Reference, run_floor
from ci.rows import serving_classes

MIN_FLOOR = 0.005
OUTRIGHT = 0.05
"""A change over this is screened whatever the row's noise."""
FLOOR_SDS = 3.0
MIN_LEARNED_RUNS = 3

Estimator = Callable[[RowResult], float]


@dataclass(frozen=True)
class Compared:
    """One comparable row in numbers, all in ln latency but `floor`."""

    key: RowKey
    head: RowResult
    reference: Reference
    centre: float
    runs: noise.Array
    deviations: tuple[float, ...]
    """z of each run under test: positive is slower."""
    shift: float
    """Deviation of floors and controls taken off, the mean of the runs."""
    sd: float = math.nan
    nu: float = 0.0
    floor_moves: tuple[float, ...] = ()
    """Deviation of the floor of each run under test, of a host row that is held against it."""

    @property
    def num_base(self) -> int:
        return int(self.runs.size)

    @property
    def z(self) -> float:
        return float(np.mean(self.deviations))

    @property
    def effect(self) -> float:
        return math.expm1(self.z)

    @property
    def floor(self) -> float:
        """Relative change under which nothing counts: the largest of 0.5 %, three SDs and two ticks of the timer."""
        return self.floor_of(self.sd)

    def floor_of(self, sd: float) -> float:
        """The floor of a difference whose SD is `sd`, in ln latency."""
        reference = self.reference
        ticks = 2 * reference.tick_us / reference.latency_us if reference.tick_us and reference.latency_us else 0.0
        return max(MIN_FLOOR, FLOOR_SDS * sd, ticks)

    def error(self, num_head_runs: int) -> float:
        return noise.predictive_sd(self.sd, self.num_base, num_head_runs)

    @property
    def edge(self) -> float:
        """Screen edge of one run: a deviation beyond it is looked at again."""
        tail = noise.t_upper_quantile(noise.SCREEN_ALPHA, self.nu) * self.error(1)
        return min(max(math.log1p(self.floor) / 2, tail), math.log1p(OUTRIGHT))

    def p_value(self, side: int) -> float:
        """One-sided p of "no slower" (side 1) or "no faster" (side -1)."""
        return noise.t_upper_tail(side * self.z / self.error(len(self.deviations)), self.nu)

    @property
    def floor_rose(self) -> bool:
        """Whether the row's floor rose so much in a run that dividing by it could hide what the row itself lost."""
        return any(moved > math.log1p(DISTURBED) for moved in self.floor_moves)

    def screened(self, side: int) -> bool:
        return side * self.deviations[0] > self.edge or (side > 0 and self.floor_rose)


def _serving(reference: Reference, controls: Sequence[Compared]) -> list[Compared]:
    """The controls of the row's class, about the level they had in the row's own runs."""
    return [c for c in in_set(controls, reference.run_set) if c.reference.bottleneck in serving_classes([reference.bottleneck])]


def in_set(controls: Sequence[Compared], run_set: str) -> list[Compared]:
    """The controls with their runs in one set; those that the set did not measure are left out."""
    found = []
    for control in controls:
        runs = control.reference.by_set.get(run_set) if control.reference.by_set else control.runs
        if runs is not None:
            centre = float(np.median(runs))
            deviations = tuple(control.centre + d - centre for d in control.deviations)
            found.append(replace(control, runs=runs, centre=centre, deviations=deviations))
    return found


def _learn_noise(rows: Sequence[Compared]) -> list[Compared]:
    """Gives each row its SD: winsorised, then moderated across rows of one timer and class; declared where it cannot be learned."""
    groups: dict[tuple[str, str, bool], list[Compared]] = defaultdict(list)
    learned: dict[RowKey, Compared] = {}
    for row in rows:
        if row.num_base < MIN_LEARNED_RUNS:
            learned[row.key] = replace(row, sd=noise.DECLARED_SD, nu=math.inf)
        else:
            groups[row.reference.timer, row.reference.bottleneck, row.reference.control].append(row)
    for group in groups.values():
        pairs = [noise.winsorised_sd(row.runs) for row in group]
        sds, nus = noise.moderate(np.array([sd for sd, _ in pairs]), np.array([nu for _, nu in pairs]))
        for row, sd, nu in zip(group, sds, nus, strict=True):
            learned[row.key] = replace(row, sd=max(float(sd), noise.SMALLEST_SD), nu=float(nu))
    return [learned[row.key] for row in rows]


def numbers(
    comparable: Sequence[tuple[Reference, list[RowResult]]], estimate: Estimator
) -> tuple[list[Compared], list[Compared], list[str]]:
    """(rows, controls, notices) with deviations from the reference; those of rows normalised by the controls of their class."""
    raw = []
    for reference, heads in comparable:
        centre = float(np.median(reference.runs))
        brought = [estimate(levelled(head, reference.level_us)) for head in heads]
        deviations = tuple(y - centre for y in brought)
        shift = 0.0
        if reference.level_us is not None:
            shift = float(np.mean([estimate(head) - y for head, y in zip(heads, brought, strict=True)]))
        last = heads[-1] if heads else _unmeasured(reference)
        moves = _floor_moves(reference, heads)
        raw.append(Compared(reference.key, last, reference, centre, reference.runs, deviations, shift, floor_moves=moves))
    controls = [row for row in raw if row.reference.control]
    rows, bare = [], set()
    for row in raw:
        if row.reference.control:
            continue
        serving = _serving(row.reference, controls)
        if not serving:
            bare.add(row.reference.bottleneck or "unknown")
            rows.append(row)
            continue
        stacked = np.stack([control.runs for control in serving])
        runs = noise.control_normalised(row.runs[None, :], stacked)[0]
        centre = float(np.median(runs))
        levels = np.array([[control.centre + d for d in control.deviations] for control in serving])
        shifts = [noise.control_deviation(levels[:, run], stacked) for run in range(levels.shape[1])]
        deviations = tuple(row.centre + d - shift - centre for d, shift in zip(row.deviations, shifts, strict=True))
        shift = row.shift + (float(np.mean(shifts)) if shifts else 0.0)
        rows.append(replace(row, centre=centre, runs=runs, deviations=deviations, shift=shift))
    notices = [f"class {name} has no control rows, so a shift of the whole machine shows in its rows" for name in sorted(bare)]
    return _learn_noise(rows), _learn_noise(controls), notices


def _floor_moves(reference: Reference, heads: Sequence[RowResult]) -> tuple[float, ...]:
    """Deviation of the floor of each run in ln; empty where the row is not held against it."""
    over = reference.over_floor
    if over is None or reference.level_us is None:
        return ()
    return tuple(run_floor(floors_of(head) or ()) - float(np.median(over.floors)) for head in heads)


def _unmeasured(reference: Reference) -> RowResult:
    return RowResult(reference.key, reference.unit, reference.direction, reference.version, "skipped")


def two_run_floors(references: Iterable[Reference]) -> dict[RowKey, float]:
    """The smallest relative change of latency that counts between two single runs, by the noise that `judge` learns of the references.

    As a row's floor, but with the SD of a difference of two runs, which is sqrt(2) times that of one: neither side is known better than
    the other, as a reference of several runs is. A caller who does not take control shifts off needs runs that were interleaved. Host rows
    count as measured, since asv, which asks for these floors, compares them so.
    """
    rows, controls, _ = numbers([(reference, []) for reference in references], lambda row: math.nan)
    return {row.key: row.floor_of(math.sqrt(2) * row.sd) for row in (*rows, *controls)}
