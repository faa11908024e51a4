"""What `ci.screen` judges against: the rows of a baseline as references, each with the controls of its own runs."""

from __future__ import annotations

import numpy as np

from ci import noise
from ci.baseline_file import Baseline, Row, Runs
from ci.model import Direction, RowKey, RowResult
from ci.rows import section_for
from ci.screen import Reference


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
    return Reference(
        key=row.key,
        unit=row.unit,
        direction=row.direction,
        version=row.version,
        bottleneck=row.bottleneck,
        timer=row.timer,
        control=row.control,
        runs=estimates(baseline.values_of(row), row.direction),
        input_hash=row.input_hash,
        latency_us=float(np.median(latencies)) if latencies else None,
        tick_us=row.tick_us,
        section=section_for(row),
        run_set=row.run_set,
        by_set=by_set,
    )
