"""Which knob slows a row down by the share that is wanted, from readings: arithmetic alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.002
"""How far a calibrated slow-down may be from the wanted one, as a share of the row's time."""
_MOST = 8.0
"""A next knob is at most so many times the largest one that was read."""


@dataclass(frozen=True)
class Reading:
    """A knob, and the relative change of latency that a pair of processes read with it."""

    knob: int
    effect: float


def effect_of(base_us: float, slowed_us: float) -> float:
    """Relative change of latency."""
    return slowed_us / base_us - 1


def curve(readings: Sequence[Reading]) -> list[tuple[float, float]]:
    """(knob, mean effect) in the order of knobs, from (0, 0) on."""
    knobs = sorted({reading.knob for reading in readings})
    means = [(float(k), math.fsum(r.effect for r in readings if r.knob == k) / sum(r.knob == k for r in readings)) for k in knobs]
    return [(0.0, 0.0), *means]


def next_knob(readings: Sequence[Reading], share: float) -> int:
    """The knob for a slow-down by `share`.

    On the line through the two neighbouring points of the curve, from (0, 0) on, between which the share is, or beyond the last point
    through the last two; where noise makes the curve fall, on the line from (0, 0) through the point whose effect is nearest the share.

    Args:
        readings: At least one, with knobs over 0.
        share: Wanted, over 0.
    """
    points = curve(readings)
    last = points[-1][0]
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        beyond = high == last and at_high < share
        if at_low < at_high and (at_low <= share <= at_high or beyond):
            return max(1, round(min(low + (share - at_low) / (at_high - at_low) * (high - low), _MOST * last)))
    knob, effect = min(points[1:], key=lambda point: abs(point[1] - share))
    if effect <= 0:
        return round(_MOST * last)
    return max(1, round(min(knob * share / effect, _MOST * last)))


def close(readings: Sequence[Reading], knob: int, share: float) -> bool:
    """Whether the readings with this knob show the share to within `TOLERANCE` in the mean."""
    found = [reading.effect for reading in readings if reading.knob == knob]
    return bool(found) and abs(math.fsum(found) / len(found) - share) <= TOLERANCE
