"""What `ci.screen` judges against: the rows of a baseline as references, each with the controls of its own runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ci import noise
from ci.baseline_file import Baseline, Row, Runs
from ci.model import Direction, RowKey, RowResult
from ci.pairs import DELTA0, DEVICE_FLOOR, WALL_CLOCK_FLOOR
from ci.rows import section_for


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


def run_estimate(row: RowResult) -> float:
    """ln latency of a run of K processes: the mean of the fastest 60 %."""
    return float(noise.fast60(noise.log_latency(row.samples, row.direction)))


def estimates(values: Runs, direction: Direction) -> noise.Array:
    """[runs], ln latency of each run of [run][process] values."""
    return np.array([float(noise.fast60(noise.log_latency(run, direction))) for run in values])


def references_of(baseline: Baseline) -> dict[RowKey, Reference]:
    """One reference a row."""
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
    )
