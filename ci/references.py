"""What `ci.screen` judges against: the rows of a baseline as references, each with the controls of its own runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ci import noise
from ci.baseline_file import Baseline, Row, Runs
from ci.host_floor import TIMER, at_level, floors_of, told, told_lacking
from ci.model import Direction, RowKey, RowResult
from ci.pairs import DELTA0, DEVICE_FLOOR, WALL_CLOCK_FLOOR
from ci.rows import section_for


@dataclass(frozen=True)
class OverFloor:
    """What a reference is where its rows are held against their floors: all at the level of `level_us`."""

    level_us: float
    """Median floor of its processes."""
    floors: noise.Array
    """[B], ln floor of each run."""
    runs: noise.Array
    process_sd: float
    by_set: Mapping[str, noise.Array]


@dataclass(frozen=True)
class Reference:
    """The accepted runs of one row: `runs` is [B], ln latency of each run."""

    key: RowKey
    unit: str
    direction: Direction
    version: str
    bottleneck: str
    timer: str
    control: bool
    runs: noise.Array
    input_hash: str | None = None
    latency_us: float | None = None
    tick_us: float | None = None
    section: str = "other"
    process_sd: float = math.nan
    """SD of ln latency of one process, where the reference knows it."""
    delta0: float = DELTA0
    """Margin that a confirmation in pairs would take off."""
    pair_floor: float = 0.0
    """Floor that such a confirmation would have, where it is the larger one."""
    run_set: str = ""
    """The set of runs that `runs` are of."""
    by_set: Mapping[str, noise.Array] = field(default_factory=dict)
    """Of a control, its runs in each set that measured it; empty where there is one set only."""
    over_floor: OverFloor | None = None
    """The same with the floors of a host row taken off, where the reference has them all."""
    level_us: float | None = None
    """Level of the floors to which `runs` were brought; None where they are as measured."""

    @property
    def held(self) -> Reference:
        """The reference with its floors taken off; itself where it has none."""
        over = self.over_floor
        if over is None:
            return self
        return replace(self, runs=over.runs, process_sd=over.process_sd, by_set=over.by_set, level_us=over.level_us)


def run_estimate(row: RowResult) -> float:
    """ln latency of a run of K processes: the mean of the fastest 60 %."""
    return float(noise.fast60(noise.log_latency(row.samples, row.direction)))


def estimates(values: Runs, direction: Direction) -> noise.Array:
    """[runs], ln latency of each run of [run][process] values."""
    return np.array([float(noise.fast60(noise.log_latency(run, direction))) for run in values])


def run_floor(floors_us: Sequence[float]) -> float:
    """ln floor of a run, by the estimator of its latency."""
    return float(noise.fast60(np.log(np.asarray(floors_us, dtype=np.float64))))


def all_held(references: Mapping[RowKey, Reference]) -> Mapping[RowKey, Reference]:
    """The references with the floors of host rows taken off, where every host row has them; else as they are."""
    whole = all(row.over_floor is not None for row in references.values() if row.timer == TIMER)
    return {key: row.held for key, row in references.items()} if whole else references


def held(comparable: Sequence[tuple[Reference, list[RowResult]]]) -> tuple[list[tuple[Reference, list[RowResult]]], list[str]]:
    """The rows with the references of host rows held against their floors, and notices.

    All host rows are, or none: a row without its floor beside a control with it would be taken off a drift that the control lacks.
    """
    hosts = [(reference, heads) for reference, heads in comparable if reference.timer == TIMER]
    sides = [(reference.over_floor is not None, [floors_of(head) is not None for head in heads]) for reference, heads in hosts]
    if all(known and all(heads) for known, heads in sides):
        return [(reference.held, heads) for reference, heads in comparable], told(bool(hosts))
    some = any(known or any(heads) for known, heads in sides)
    lacking = [str(host[0].key) for host, (known, heads) in zip(hosts, sides, strict=True) if not (known and all(heads))]
    return list(comparable), told_lacking(lacking if some else [], "the reference or the run")


def references_of(baseline: Baseline) -> dict[RowKey, Reference]:
    """One reference a row, as measured; `all_held` takes the floors off."""
    return {row.key: _reference(baseline, row) for row in baseline.rows.values()}


def _reference(baseline: Baseline, row: Row) -> Reference:
    latencies = [value for run in row.latency_us or [] for value in run]
    by_set = {}
    if row.control:
        found = {name: baseline.values_of(row, name) for name in baseline.run_sets}
        by_set = {name: estimates(values, row.direction) for name, values in found.items() if values}
    values = baseline.values_of(row)
    return Reference(
        key=row.key,
        unit=row.unit,
        direction=row.direction,
        version=row.version,
        bottleneck=row.bottleneck,
        timer=row.timer,
        control=row.control,
        runs=estimates(values, row.direction),
        input_hash=row.input_hash,
        latency_us=float(np.median(latencies)) if latencies else None,
        tick_us=row.tick_us,
        section=section_for(row),
        run_set=row.run_set,
        by_set=by_set,
        process_sd=noise.within_run_sd([noise.log_latency(run, row.direction) for run in values]),
        pair_floor=DEVICE_FLOOR if row.instrument == "device" else WALL_CLOCK_FLOOR,
        over_floor=_over_floor(baseline, row, list(by_set)),
    )


def _over_floor(baseline: Baseline, row: Row, sets: Sequence[str]) -> OverFloor | None:
    names = list(dict.fromkeys([row.run_set, *sets]))
    floors = {name: baseline.floors_of(row, name) for name in names}
    known = {name: found for name, found in floors.items() if found is not None}
    if len(known) < len(names):
        return None
    level = float(np.median([floor for found in known.values() for run in found for floor in run]))

    def brought(name: str) -> Runs:
        values = baseline.values_of(row, name)
        return [at_level(run, run_floors, level, row.direction) for run, run_floors in zip(values, known[name], strict=True)]

    own = brought(row.run_set)
    return OverFloor(
        level_us=level,
        floors=np.array([run_floor(run) for run in known[row.run_set]]),
        runs=estimates(own, row.direction),
        process_sd=noise.within_run_sd([noise.log_latency(run, row.direction) for run in own]),
        by_set={name: estimates(brought(name), row.direction) for name in sets},
    )
