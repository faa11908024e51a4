"""The gate's rule on arrays: the screen as `ci.screen.judge` makes it, then the paired confirm of `ci.sequential`.

The screen's numbers come from `ci.noise`, its limits from `ci.screen`; a test holds `screen` against `judge` row by row. Only the sign-flip
p-value is computed another way here (`shared_flips`), since a thousand gates with fresh flips for each row would take long.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import numpy.typing as npt
from scipy import stats

from ci import compared, noise, sequential
from ci import screen as screening
from ci.model import RowVerdict
from ci.pairs import DELTA0
from ci.rows import serving_classes

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

LOOKS = sequential.LOOKS
FLIPS_SEED = 7


@dataclass(frozen=True)
class Layout:
    """What is known of the rows of a gate beside their values; every field has one entry a row."""

    names: tuple[str, ...]
    bottlenecks: tuple[str, ...]
    timers: tuple[str, ...]
    control: Mask
    ticks: Array
    """Two ticks of the timer as a share of the latency; 0 where unknown."""
    least: Array
    """Floor of the instrument, as a relative change."""

    @property
    def judged(self) -> Indices:
        """Rows that are no controls."""
        return np.flatnonzero(~self.control)

    def take(self, rows: Sequence[int] | Indices) -> Layout:
        """The layout of some rows, in this order."""
        kept = np.asarray(rows, dtype=np.intp)
        names, bottlenecks, timers = (tuple(all_of[i] for i in kept) for all_of in (self.names, self.bottlenecks, self.timers))
        return Layout(names, bottlenecks, timers, self.control[kept], self.ticks[kept], self.least[kept])

    def served_by(self, bottlenecks: Sequence[str]) -> Indices:
        """The controls that serve rows of these classes."""
        serving = serving_classes(bottlenecks)
        return np.array([i for i in np.flatnonzero(self.control) if self.bottlenecks[i] in serving], dtype=np.intp)


def layout_of(names: Sequence[str], bottlenecks: Sequence[str], control: Sequence[bool], timers: Sequence[str] | None = None) -> Layout:
    """A layout of rows timed on the device, with a timer so fine that its ticks do not count."""
    count = len(names)
    least = np.full(count, compared.MIN_FLOOR)
    return Layout(
        tuple(names), tuple(bottlenecks), tuple(timers or ["graph"] * count), np.array(control, dtype=np.bool_), np.zeros(count), least
    )


@dataclass(frozen=True)
class Screened:
    """The screen's numbers, one a row; those of controls are NaN."""

    z: Array
    """ln latency of the head less the centre of the runs, controls taken off."""
    sd: Array
    nu: Array
    floor: Array
    edge: Array
    error: Array
    p_value: Array
    """One-sided, of "no slower"."""
    unfit: bool

    def picked(self, shift: Array | float = 0.0) -> Mask:
        """The rows that the screen picks, once `shift` (ln latency, [rows] or one for all) is added to the head."""
        return np.asarray(self.z + shift > self.edge)


def _learn(runs: Array, rows: Indices, layout: Layout) -> tuple[Array, Array]:
    """(sd, nu) of some rows, moderated across those of one timer and class; declared where there are too few runs."""
    sd, nu = np.full(len(layout.names), math.nan), np.full(len(layout.names), math.nan)
    if runs.shape[1] < compared.MIN_LEARNED_RUNS:
        sd[rows], nu[rows] = noise.DECLARED_SD, math.inf
        return sd, nu
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        groups[layout.timers[row], layout.bottlenecks[row]].append(int(row))
    for group in groups.values():
        own = [noise.winsorised_sd(runs[row]) for row in group]
        made, freedom = noise.moderate(np.array([s for s, _ in own]), np.array([n for _, n in own]))
        sd[group], nu[group] = np.maximum(made, noise.SMALLEST_SD), freedom
    return sd, nu


def screen(runs: Array, head: Array, layout: Layout) -> Screened:
    """Screens one run against a baseline.

    Args:
        runs: [rows, B], ln latency of the baseline's runs.
        head: [rows], ln latency of the run under test.
        layout: Of the rows.
    """
    rows, controls = layout.judged, np.flatnonzero(layout.control)
    flat, z = np.array(runs), np.full(len(head), math.nan)
    for name in sorted({layout.bottlenecks[row] for row in rows}):
        of_class = np.array([row for row in rows if layout.bottlenecks[row] == name], dtype=np.intp)
        serving = layout.served_by([name])
        flat[of_class] = noise.control_normalised(runs[of_class], runs[serving])
        shift = noise.control_deviation(head[serving], runs[serving])
        z[of_class] = head[of_class] - shift - np.median(flat[of_class], axis=1)
    sd, nu = _learn(flat, rows, layout)
    error = noise.predictive_sd(1.0, runs.shape[1], 1) * sd
    floor = np.maximum(np.maximum(compared.MIN_FLOOR, compared.FLOOR_SDS * sd), layout.ticks)
    tail = stats.t.isf(noise.SCREEN_ALPHA, nu) * error
    edge = np.minimum(np.maximum(np.log1p(floor) / 2, tail), math.log1p(compared.OUTRIGHT))
    unfit = _unfit(runs, head, z, edge, layout, rows, controls)
    return Screened(z, sd, nu, floor, edge, error, stats.t.sf(z / error, nu), unfit)


def _unfit(runs: Array, head: Array, z: Array, edge: Array, layout: Layout, rows: Indices, controls: Indices) -> bool:
    deviations = head - np.median(runs, axis=1)
    sd, _ = _learn(runs, controls, layout)
    for name in serving_classes(layout.bottlenecks[row] for row in rows):
        group = [row for row in controls if layout.bottlenecks[row] == name]
        if group:
            limit = max(math.log1p(screening.UNFIT_SHIFT), screening.UNFIT_SDS * float(np.median(sd[group])))
            if abs(float(np.median(deviations[group]))) > limit:
                return True
    if controls.size or rows.size < screening.UNFIT_MIN_ROWS:
        return False
    return any(bool(np.all(side * z[rows] > edge[rows])) for side in (1, -1))


_own_sign_flip_p = noise.sign_flip_p


@functools.cache
def _drawn_signs(num_pairs: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng([FLIPS_SEED, num_pairs])
    return (1 - 2 * rng.integers(0, 2, (noise.MONTE_CARLO_FLIPS, num_pairs), dtype=np.int8)).astype(np.float32)


def shared_sign_flip_p(d: Array, *, key: str) -> float:
    """`noise.sign_flip_p` with the same flips for every row: exact where that is exact, else another draw of as many flips."""
    if d.size <= noise.EXACT_PAIRS:
        return _own_sign_flip_p(d, key=key)
    clipped = noise.clip_differences(d)
    size, observed = np.abs(clipped), float(clipped.sum())
    reach = observed - 1e-6 * float(size.sum())
    hits = int((_drawn_signs(d.size) @ size.astype(np.float32) >= reach).sum())
    return (hits + 1) / (noise.MONTE_CARLO_FLIPS + 1)


@contextlib.contextmanager
def shared_flips() -> Iterator[None]:
    """Within it `ci.sequential` tests with `shared_sign_flip_p`."""
    with mock.patch.object(noise, "sign_flip_p", shared_sign_flip_p):
        yield


@dataclass(frozen=True)
class Confirmed:
    """What the confirm stage made of the rows that were picked."""

    regressed: Indices
    unconfirmed: Indices
    measurements: int
    """Rows times processes that the pairs took."""


def confirm(picked: Indices, d: Array, floor: Array, delta0: float | Array, names: Sequence[str]) -> Confirmed:
    """Confirms picked rows by pairs, through `ci.sequential.decide`.

    Args:
        picked: [picked], indices of the rows.
        d: [picked, 48], ln latency of head less base.
        floor: [rows].
        delta0: Margin that counts as no change, for all rows or [rows].
        names: Of all rows.
    """
    margins = np.broadcast_to(np.asarray(delta0, dtype=np.float64), floor.shape)
    series = [sequential.Series(names[row], d[i], float(margins[row]), float(floor[row])) for i, row in enumerate(picked)]
    decisions = sequential.decide(series)
    slow = [decision.verdict is RowVerdict.REGRESSED for decision in decisions]
    left = [decision.verdict is RowVerdict.UNCONFIRMED for decision in decisions]
    cost = sum(2 * decision.pairs for decision in decisions)
    return Confirmed(picked[np.array(slow, dtype=np.bool_)], picked[np.array(left, dtype=np.bool_)], cost)


@dataclass(frozen=True)
class Gate:
    """One whole gate."""

    unfit: bool
    picked: Indices
    confirmed: Confirmed


def gate(
    screened: Screened,
    layout: Layout,
    pairs: Callable[[Indices], Array],
    *,
    delta0: float | Array = DELTA0,
    shift: Array | float = 0.0,
    spread_floor: bool = True,
) -> Gate:
    """Screens and confirms; a run on an unfit machine stops before the pairs.

    Args:
        screened: The screen's numbers.
        layout: Of the rows.
        pairs: Gives [picked, 48] differences for the picked rows.
        delta0: Margin that counts as no change.
        shift: Added to the head's rows in the screen; `pairs` adds its own.
        spread_floor: Whether the pairs have to reach three SDs of the row's runs, as in the gate, or the floor of the instrument alone.
    """
    picked = np.flatnonzero(screened.picked(shift))
    if screened.unfit or not picked.size:
        nothing = np.zeros(0, dtype=np.intp)
        return Gate(screened.unfit, picked, Confirmed(nothing, nothing, 0))
    floor = np.maximum(screened.floor if spread_floor else layout.ticks, layout.least)
    return Gate(False, picked, confirm(picked, pairs(picked), floor, delta0, layout.names))
