"""Change points of a long series: asv's detector where it is affordable, on medians of blocks before that.

asv fits a piecewise constant function (`asv.step_detect`), which is accurate and costs .9 s for 10,000 points. Here the finished part of a
series is reduced to medians of blocks first, which a single outlier cannot move; what is found there is put to its exact place in the full
series; and only the newest points go through the detector as they are. A finished part never changes, so that its answer can be kept.

Two neighbouring levels are one unless they differ by more than their scatter, inflated for correlation, allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from asv import step_detect

Array = npt.NDArray[np.float64]

FROZEN = 128
"""The finished part of a series ends at a multiple of this many points."""
OVERLAP = 96
"""Points before the end of the finished part that the newest are fitted with."""
MAX_BLOCKS = 640
MIN_LENGTH = 3
"""Points of a level, so that one or two outliers are none."""
MIN_CHANGE = 0.01
"""Relative change under which two levels are one."""
Z = 5.0
"""Standard errors by which two levels differ, among some hundred series of some thousand points."""


@dataclass(frozen=True)
class Level:
    """Points [start, end) around one level: median, smallest value, and mean deviation from the median."""

    start: int
    end: int
    value: float
    least: float
    error: float


def _fit(values: Array) -> list[int]:
    """Starts of the pieces that asv's detector finds, without 0."""
    if values.size < 2 * MIN_LENGTH:
        return []
    pieces = step_detect.detect_steps(values.tolist(), None)
    return [int(left) for left, *_ in pieces[1:]]


def _place(values: Array, near: int, reach: int, low: int, high: int) -> int:
    """The place within `reach` of `near` that splits [low, high) best, by absolute deviation from the medians of both sides."""
    low, high = max(low, near - 8 * reach, 0), min(high, near + 8 * reach, values.size)
    first, last = max(low + 1, near - reach), min(high - 1, near + reach)
    if first >= last:
        return near
    before, after = float(np.median(values[low : max(first, low + 1)])), float(np.median(values[min(last, high - 1) : high]))
    part = values[low:high]
    gain = np.concatenate(([0.0], np.cumsum(np.abs(part - before) - np.abs(part - after))))
    return first + int(np.argmin(gain[first - low : last - low + 1]))


def finished(values: Array) -> list[int]:
    """Change points of a finished part, from block medians.

    Args:
        values: [n], without gaps; n is a multiple of FROZEN.
    """
    block = max(1, 2 ** math.ceil(math.log2(max(values.size / MAX_BLOCKS, 1))))
    if block == 1:
        return _fit(values)
    blocks: Array = np.median(values[: values.size // block * block].reshape(-1, block), axis=1)
    coarse = [start * block for start in _fit(blocks)]
    edges = [0, *coarse, values.size]
    return [_place(values, near, 2 * block, edges[i], edges[i + 2]) for i, near in enumerate(coarse)]


def frozen_length(count: int) -> int:
    """Length of the finished part of a series of `count` points."""
    return count // FROZEN * FROZEN if count >= 2 * FROZEN else 0


def change_points(values: Array, known: Sequence[int] | None = None) -> list[int]:
    """Indices at which a new level begins.

    Args:
        values: [n], without gaps.
        known: What `finished` said of the first `frozen_length(n)` points, where it was kept.
    """
    done = frozen_length(values.size)
    if done == 0:
        return _merged(values, _fit(values))
    old = finished(values[:done]) if known is None else known
    seam = done - OVERLAP // 2
    start = done - OVERLAP
    new = [start + index for index in _fit(values[start:])]
    return _merged(values, [*(index for index in old if index < seam), *(index for index in new if index >= seam)])


def _merged(values: Array, starts: Sequence[int]) -> list[int]:
    """The change points that the scatter of the series does not explain, the weakest taken out first."""
    edges = [0, *sorted({start for start in starts if 0 < start < values.size}), int(values.size)]
    if len(edges) == 2:
        return []
    residuals = np.concatenate([values[a:b] - np.median(values[a:b]) for a, b in itertools.pairwise(edges)])
    scatter = 1.4826 * float(np.median(np.abs(residuals)))
    inflation = _inflation(residuals, scatter)
    while len(edges) > 2:
        weakest, weakest_at = math.inf, 0
        for at in range(1, len(edges) - 1):
            left, right = values[edges[at - 1] : edges[at]], values[edges[at] : edges[at + 1]]
            here = _strength(left, right, scatter, inflation)
            if here < weakest:
                weakest, weakest_at = here, at
        if weakest >= 1.0:
            break
        del edges[weakest_at]
    return edges[1:-1]


def _inflation(residuals: Array, scatter: float) -> float:
    """How many times larger the variance of a mean is than that of independent points, from the correlation of neighbours."""
    if residuals.size < 16 or scatter == 0.0:
        return 1.0
    clipped = np.clip(residuals, -3 * scatter, 3 * scatter)
    power = float(np.dot(clipped, clipped))
    rho = float(np.dot(clipped[1:], clipped[:-1])) / power if power else 0.0
    rho = min(max(rho, 0.0), 0.95)
    return (1 + rho) / (1 - rho)


def _strength(left: Array, right: Array, scatter: float, inflation: float) -> float:
    """Difference of two levels over what counts as one; under 1 they are one level."""
    shorter = min(left.size, right.size)
    if shorter < MIN_LENGTH:
        return 0.0
    a, b = float(np.median(left)), float(np.median(right))
    error = 1.2533 * scatter * math.sqrt(inflation * (1 / left.size + 1 / right.size))
    needed = max(MIN_CHANGE * abs(a), Z * error, 1e-300)
    return abs(b - a) / needed


def levels(values: Array, starts: Sequence[int]) -> list[Level]:
    """The levels between change points."""
    edges = [0, *starts, int(values.size)]
    made = []
    for start, end in itertools.pairwise(edges):
        part = values[start:end]
        if part.size:
            middle = float(np.median(part))
            made.append(Level(start, end, middle, float(np.min(part)), float(np.mean(np.abs(part - middle)))))
    return made
