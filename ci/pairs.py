"""One row at two commits in pairs of processes, and which rows of two measurements can be paired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ci import noise
from ci.errors import BaselineError
from ci.host_floor import floors_of, told, told_lacking
from ci.identity import device_of
from ci.model import CommitResult, RowKey, RowOutcome, RowResult, RowVerdict
from ci.rows import at_effect, describe, is_control, mismatch, stateful_outcome
from ci.sequential import Series

MIN_PAIRS = 6
DEVICE_FLOOR = 0.005
"""Effect under which nothing counts for a row timed on the device."""
WALL_CLOCK_FLOOR = 0.03
"""The same for a row timed by the host's clock, or by nothing that a record names."""
DELTA0 = 0.002
"""Margin in ln latency for the bias of a rebuild, until it is measured; none where both sides launch the same binaries."""


@dataclass(frozen=True)
class Pairs:
    """One row in pairs; `d` is ln head latency less ln base latency, [n]."""

    key: RowKey
    base: RowResult
    head: RowResult
    d: noise.Array
    truncated: bool
    least_floor: float = 0.0
    """What else the floor may not be under, as a relative change."""
    floor_d: noise.Array | None = None
    """ln floor of the host less the base's, [n], which `d` is over; None where `d` is as measured."""

    @property
    def control(self) -> bool:
        """Whether a change cannot touch the row."""
        return is_control(self.head)

    @property
    def bottleneck(self) -> str:
        """The row's class; empty for a foreign row."""
        return "" if self.head.record is None else self.head.record.bottleneck

    @property
    def on_device(self) -> bool:
        """Whether the device's clock times the row."""
        return self.head.record is not None and self.head.record.instrument == "device"

    @property
    def same_launches(self) -> bool:
        """Whether both sides launch the same binaries."""
        ours, theirs = self.head.record, self.base.record
        return ours is not None and theirs is not None and ours.launch_hash is not None and ours.launch_hash == theirs.launch_hash

    @property
    def identical(self) -> bool:
        """Whether the device is asked for exactly the same work on both sides: a control more, for the change cannot have moved it."""
        ours, theirs = self.head.record, self.base.record
        same_inputs = ours is not None and theirs is not None and ours.input_hash == theirs.input_hash
        return self.on_device and self.same_launches and same_inputs

    @property
    def floor(self) -> float:
        """Relative change under which nothing counts."""
        record = self.base.record
        ticks = 2 * record.tick_us / record.latency_us if record and record.tick_us and record.latency_us else 0.0
        return max(DEVICE_FLOOR if self.on_device else WALL_CLOCK_FLOOR, ticks, self.least_floor)

    @property
    def series(self) -> Series:
        """The row for the sign-flip test."""
        return Series(str(self.key), self.d, 0.0 if self.same_launches else DELTA0, self.floor)

    @property
    def measure(self) -> str:
        """What an effect is a change of, in words."""
        return "latency" if self.floor_d is None else "latency over its floor"


def pairs_of(base: RowResult, head: RowResult) -> Pairs:
    """Sample i of both sides is pair i; the surplus of the longer side is left out. Host rows are held against their floors, on both
    sides or on neither."""
    count = min(len(base.samples), len(head.samples))
    d = noise.log_latency(head.samples[:count], head.direction) - noise.log_latency(base.samples[:count], base.direction)
    floors = [floors_of(side) for side in (base, head)]
    before, after = (None if known is None else np.log(known[:count]) for known in floors)
    floor_d = None if before is None or after is None else after - before
    return Pairs(head.key, base, head, d if floor_d is None else d - floor_d, len(base.samples) != len(head.samples), floor_d=floor_d)


def floor_notices(pairs: Sequence[Pairs]) -> list[str]:
    """Which host rows are held against their floors, and whether some cannot be because one side lacks them."""
    one_sided = [str(row.key) for row in pairs if (floors_of(row.base) is None) != (floors_of(row.head) is None)]
    return [*told(any(row.floor_d is not None for row in pairs)), *told_lacking(one_sided, "the two commits")]


def outcome(
    row: Pairs, verdict: RowVerdict, reason: str, effect: float, p_value: float, mde80: float | None, edges: tuple[float, float]
) -> RowOutcome:
    """What the row's pairs show. The change of the pairs is what decides; HEAD's figures are the median of its processes, and the base's
    and the band's are those figures taken back by the change, so that no two figures of a row disagree.

    Args:
        edges: (fastest, slowest) relative change of latency within which the row passes.
    """
    value = float(np.median(row.head.samples[: row.d.size]))
    return at_effect(
        replace(describe(row.head, verdict, reason), floor=row.floor, num_pairs=int(row.d.size), p_value=p_value, mde80=mde80),
        value,
        effect,
        edges,
    )


def sort_out(base: CommitResult, head: CommitResult) -> tuple[list[Pairs], list[RowOutcome]]:
    """Pairs of what can be compared, and outcomes of what cannot."""
    pairs: list[Pairs] = []
    outcomes: list[RowOutcome] = []
    for key in sorted({*base.rows, *head.rows}):
        before, after = base.rows.get(key), head.rows.get(key)
        valued = before is not None and stateful_outcome(before, has_reference=False) is None
        if after is None:
            if before is not None and valued:
                gone = describe(before, RowVerdict.MISSING, "the base commit has it, HEAD has not")
                outcomes.append(replace(gone, samples=()))
            continue
        fault = stateful_outcome(after, has_reference=valued)
        if fault is not None:
            outcomes.append(fault)
        elif before is None or not valued:
            why = "the base commit does not have it"
            if before is not None:
                why = f"the base commit has no value of it ({before.state}: {before.reason})"
            outcomes.append(describe(after, RowVerdict.NEW, why))
        else:
            outcomes.extend(_compare_forms(before, after, pairs))
    return pairs, outcomes


def _compare_forms(before: RowResult, after: RowResult, pairs: list[Pairs]) -> list[RowOutcome]:
    """Appends the pair where both sides measure the same thing often enough, else gives the outcome that says why not."""
    hashed = before.record.input_hash if before.record is not None else None
    why = mismatch(after, before.unit, before.version, is_control(before), hashed)
    if why is None and before.direction != after.direction:
        why = f"better is {after.direction} here, but {before.direction} at the base commit"
    if why is not None:
        return [describe(after, RowVerdict.NOT_COMPARABLE, why)]
    pair = pairs_of(before, after)
    if pair.d.size >= MIN_PAIRS:
        pairs.append(pair)
        return []
    reason = f"{pair.d.size} pairs of processes, but at least {MIN_PAIRS} are needed; measure more rounds"
    few = describe(after, RowVerdict.INVALID, reason)
    if pair.d.size > 1:
        few = at_effect(replace(few, num_pairs=int(pair.d.size)), float(np.median(after.samples)), pair.series.effect, None)
    return [few]


def environments(base: CommitResult, head: CommitResult) -> tuple[str | None, list[str]]:
    """Why the two sides may not be compared at all, and what else differs between them."""
    if not base.processes or not head.processes:
        return None, ["no process records on at least one side: nothing says which device and software measured it"]
    ours, theirs = head.processes[-1], base.processes[-1]
    try:
        here, there = device_of(ours.environment), device_of(theirs.environment)
    except BaselineError as exc:
        return str(exc), []
    for name in ("name", "compute_capability", "multiprocessors", "memory_bytes", "mig"):
        if getattr(here, name) != getattr(there, name):
            text = f"the base commit was measured on device.{name} {getattr(there, name)!r}, HEAD on {getattr(here, name)!r}"
            return f"{text}; measure both on one device", []
    notices = [
        f"{name} differs: {theirs.environment.get(name)} at the base commit, {ours.environment.get(name)} at HEAD"
        for name in ("driver", "cuda", "torch", "triton", "python", "boot_id", "env_vars")
        if theirs.environment.get(name) != ours.environment.get(name)
    ]
    if ours.protocol != theirs.protocol:
        notices.append(f"the measuring protocol differs: {theirs.protocol!r} at the base commit, {ours.protocol!r} at HEAD")
    return None, notices
