"""Host rows are held against the floor that the same blocks of calls read.

A host's clock drifts, and its neighbours slow it down. `bench_host` times a call that does nothing, and the synchronise, in the very blocks
of the row: what moves both of them is the host. So what is compared is ln latency less ln floor, process by process, with no fitted
parameter. A row's own call is not in the floor, so that a change that slows it down still shows.

The floors of one reference share a level, their median. Only the deviation from it is taken off, so that what is shown stays in the row's
unit. On a CPU device there is nothing to synchronise with: the floor is the cost of reading the clock, and says nothing of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ci.identity import table
from ci.model import Direction, RowResult

TIMER = "bench_host"
"""The timer whose floor is a sign of the host."""
ESTIMATOR = "quiet"
"""How that timer makes the readings of row and floor from the same blocks."""
DISTURBED = 0.15
"""Change of a floor beyond which it is not divided away any more: what the timer itself calls a disturbed host."""


def host_floor(timer: str | None, estimator: str | None, floor_us: float | None, environment: Mapping[str, object]) -> float | None:
    """The floor, in us, that a process' row is held against; None where there is none, or where it is no sign of the row's own blocks.

    The timers of protocol t1 read their floor elsewhere and by another estimator than the row.
    """
    own_blocks = timer == TIMER and estimator == ESTIMATOR
    on_cuda = table(environment, "device").get("type") == "cuda"
    return floor_us if own_blocks and on_cuda and floor_us else None


def floors_of(row: RowResult) -> tuple[float, ...] | None:
    """The floor, in us, of each sample; None where one of them lacks it."""
    known = [record.host_floor_us for record in row.records if record.host_floor_us is not None]
    return tuple(known) if known and len(known) == len(row.samples) == len(row.records) else None


def at_level(values: Sequence[float], floors_us: Sequence[float], level_us: float, direction: Direction) -> list[float]:
    """Values of processes, in the row's unit, as they would be with all floors at one level.

    Args:
        values: One a process.
        floors_us: Of the same processes.
        level_us: Of the reference.
        direction: ``higher`` for a throughput.
    """
    sign = 1 if direction == "higher" else -1
    return [value * (floor / level_us) ** sign for value, floor in zip(values, floors_us, strict=True)]


def levelled(row: RowResult, level_us: float | None) -> RowResult:
    """The row with its samples at the reference's level of floors; as it is where the reference is not held against floors.

    Raises:
        ValueError: A sample lacks its floor.
    """
    if level_us is None:
        return row
    floors = floors_of(row)
    if floors is None:
        raise ValueError(f"{row.key} has samples without floors, so that it cannot be held against a reference that has them")
    return replace(row, samples=tuple(at_level(row.samples, floors, level_us, row.direction)))


def told(any_held: bool) -> list[str]:
    """The notice where there are rows whose change is one of latency over floor."""
    return ["host rows are held against the floor of their own blocks: a change of theirs is one of latency over floor"] if any_held else []


def told_lacking(names: Sequence[str], sides: str) -> list[str]:
    """The notice on rows that have floors on one side only, so that nothing is taken off on either; none without such rows."""
    if not names:
        return []
    return [f"host rows are compared without their floors, which {sides} have for {names[0]} on one side only; measure both sides alike"]
