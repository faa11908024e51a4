"""Decision rules of other systems as pure functions, written afresh from their documentation.

Each takes ln latencies of one row, or of many rows at once, and says whether the head is called slower:

    base: [..., B, K], B earlier runs of K processes, the last run the latest.
    head: [..., K'], the processes of the run under test.
    returns: [...], bool.

Sources: asv's `continuous` (factor 1.1 against the other commit's median); pytorch's and many home-made gates (a fixed per cent); Conbench
(z-score of the run's mean; its own threshold is 5, the usual one is 3); Bencher (t prediction interval); Google Benchmark's compare.py
(Mann-Whitney test); rustc-perf (inter-quartile fence of historical differences); and the usual robust band of 3 scaled median absolute
deviations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[np.float64]
Found = npt.NDArray[np.bool_]
Rule = Callable[[Array, Array], Found]

MAD_TO_SD = 1.4826
"""SD of normal values in units of their median absolute deviation."""


def factor_against_last(base: Array, head: Array, *, factor: float = 1.1) -> Found:
    """The median latency is over `factor` times that of the last run."""
    return np.asarray(np.median(head, axis=-1) - np.median(base[..., -1, :], axis=-1) > np.log(factor))


def fixed_percent(base: Array, head: Array, *, percent: float) -> Found:
    """The median latency is over `percent` per cent above the median of the runs' medians."""
    centre = np.median(np.median(base, axis=-1), axis=-1)
    return np.asarray(np.median(head, axis=-1) - centre > np.log1p(percent / 100))


def _means(base: Array) -> tuple[Array, Array]:
    runs = base.mean(axis=-1)
    return runs.mean(axis=-1), runs.std(axis=-1, ddof=1)


def z_score(base: Array, head: Array, *, limit: float = 3.0) -> Found:
    """The mean is over `limit` SDs of the runs' means above their mean."""
    mean, sd = _means(base)
    return np.asarray(head.mean(axis=-1) - mean > limit * sd)


def t_prediction(base: Array, head: Array, *, level: float = 0.99) -> Found:
    """The mean is above the one-sided t prediction limit of the runs' means."""
    mean, sd = _means(base)
    num_runs = base.shape[-2]
    limit = stats.t.ppf(level, num_runs - 1) * sd * np.sqrt(1 + 1 / num_runs)
    return np.asarray(head.mean(axis=-1) - mean > limit)


@functools.cache
def _upper_tail(num_head: int, num_base: int) -> Array:
    """P(U >= u) for u = 0 .. num_head * num_base + 1 without ties, by counting orders."""
    size = num_head * num_base + 1
    counts = np.zeros((num_head + 1, num_base + 1, size))
    counts[0, :, 0] = counts[:, 0, 0] = 1
    for i in range(1, num_head + 1):
        for j in range(1, num_base + 1):
            counts[i, j] = counts[i, j - 1]
            counts[i, j, j:] += counts[i - 1, j, : size - j]
    chances = counts[num_head, num_base] / counts[num_head, num_base].sum()
    return np.append(np.cumsum(chances[::-1])[::-1], 0.0)


def pooled_mann_whitney(base: Array, head: Array, *, alpha: float = 0.05) -> Found:
    """The two-sided Mann-Whitney test of all processes of all runs says slower; a tie counts half, rounded down."""
    pool = base.reshape(*base.shape[:-2], -1)
    above = (head[..., :, None] > pool[..., None, :]).sum(axis=(-2, -1)) + 0.5 * (head[..., :, None] == pool[..., None, :]).sum(
        axis=(-2, -1)
    )
    tail = _upper_tail(head.shape[-1], pool.shape[-1])
    return np.asarray(tail[np.floor(above).astype(int)] < alpha / 2)


def iqr_fence(base: Array, head: Array, *, fences: float = 3.0) -> Found:
    """The step from the last run is above the upper fence of the sizes of earlier steps: q3 + `fences` (q3 - q1)."""
    medians = np.median(base, axis=-1)
    low, high = np.quantile(np.abs(np.diff(medians, axis=-1)), [0.25, 0.75], axis=-1)
    return np.asarray(np.median(head, axis=-1) - medians[..., -1] > high + fences * (high - low))


def mad_band(base: Array, head: Array, *, k: float = 3.0) -> Found:
    """The median is over `k` scaled median absolute deviations above the median of the runs' medians."""
    medians = np.median(base, axis=-1)
    centre = np.median(medians, axis=-1)
    deviation = MAD_TO_SD * np.median(np.abs(medians - centre[..., None]), axis=-1)
    return np.asarray(np.median(head, axis=-1) - centre > k * deviation)


def _with(rule: Any, **settings: float) -> Rule:
    return functools.partial(rule, **settings)


RULES: dict[str, Rule] = {
    "asv, factor 1.1 against the last run": factor_against_last,
    "fixed 5 %": _with(fixed_percent, percent=5.0),
    "fixed 2 %": _with(fixed_percent, percent=2.0),
    "z > 3": z_score,
    "t prediction interval .99": t_prediction,
    "pooled Mann-Whitney .05": pooled_mann_whitney,
    "IQR fence": iqr_fence,
    "MAD band, k = 3": mad_band,
}
"""The eight rules by the names of the tables."""
