"""The gate's statistics, pure functions on numpy arrays.

All work is in y = ln(latency): a slow-down is positive, whatever the direction of the stored metric.

Sources: Tukey and McLaughlin 1963 (winsorised variance); Smyth 2004, doi:10.2202/1544-6115.1027 (moderated variance, "limma");
Holm 1979 (step-down test); Fisher 1935 (sign-flip test).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import special

from ci.model import Direction

Array = npt.NDArray[np.float64]

EXACT_PAIRS = 28
"""Up to here all 2^n sign vectors are enumerated."""
MONTE_CARLO_FLIPS = 99_999
WINSORISED_RUNS = 6
"""From this many runs on the most extreme run of each side is winsorised."""
DECLARED_SD = 0.01
"""SD taken for a row with fewer than three runs, of which no noise can be learned."""
SMALLEST_SD = 0.0005
"""SD taken where the runs agree by more than that: equal values show a coarse timer, not the absence of noise."""
CENTRE_VARIANCE = 1.3
"""Variance of the median of B runs, in units of s^2 / B."""
SCREEN_ALPHA = 0.10
POWER_QUANTILE = 0.84
"""Normal quantile of .8, the power at which a smallest detectable regression is published."""
CLIPPED_MEAN = 1.25
"""Error of the mean of clipped, heavy-tailed differences, in units of the plain mean's."""
LAST_LOOK_QUANTILE = 3.3
"""Normal quantile of half the level over some ten rows: .005 / 10."""
_CLIP = 2.5 * 1.4826


def log_latency(samples: Sequence[float], direction: Direction) -> Array:
    """ln of what grows with latency: the samples of a cost, their reciprocals for a throughput.

    Args:
        samples: Positive finite values in the row's unit.
        direction: ``higher`` for a throughput.
    Raises:
        ValueError: A sample is not positive and finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not values.size or not np.all(np.isfinite(values)) or not np.all(values > 0):
        raise ValueError(f"expected positive finite samples, got {list(samples)!r}")
    return -np.log(values) if direction == "higher" else np.log(values)


def fast60(y: Array) -> Array:
    """Mean of the fastest ceil(0.6 K) of the last axis: one run's location, deaf to slow outliers."""
    keep = math.ceil(0.6 * y.shape[-1])
    return np.asarray(np.sort(y, axis=-1)[..., :keep].mean(axis=-1))


def winsorised_sd(x: Array) -> tuple[float, float]:
    """SD of a row's runs and its degrees of freedom.

    From six runs on one run a side is winsorised and the SD scaled by (B-1)/(B-3), with B-3 degrees of freedom, so that one outlier
    does not blind the row. Below, it is the plain SD with B-1.

    Args:
        x: [B], ln latency of each run.
    Returns:
        (s, nu); (nan, 0) for fewer than two runs.
    """
    num_runs = x.size
    if num_runs < 2:
        return math.nan, 0.0
    if num_runs < WINSORISED_RUNS:
        return float(x.std(ddof=1)), float(num_runs - 1)
    ordered = np.sort(x)
    ordered[0], ordered[-1] = ordered[1], ordered[-2]
    return float(ordered.std(ddof=1)) * (num_runs - 1) / (num_runs - 3), float(num_runs - 3)


def trigamma_inverse(target: float) -> float:
    """x with trigamma(x) = target, by Newton's method on 1/trigamma (Smyth 2004, appendix)."""
    if target > 1e7:
        return float(1 / math.sqrt(target))
    if target < 1e-6:
        return 1 / target
    x = 0.5 + 1 / target
    for _ in range(50):
        value = float(special.polygamma(1, x))
        step = value * (1 - value / target) / float(special.polygamma(2, x))
        x += step
        if -step / x < 1e-10:
            break
    return x


def moderate(sd: Array, nu: Array) -> tuple[Array, Array]:
    """Moderates the SDs of rows that share a timer and a class: each borrows strength from the others.

    Args:
        sd: [rows], each over its own runs.
        nu: [rows], degrees of freedom, positive.
    Returns:
        (moderated sd, total degrees of freedom), both [rows]. A single row keeps its own. Where the rows differ no more than chance
        explains, all get the pooled SD; the degrees of freedom never exceed those of all rows together.
    """
    if sd.size < 2:
        return sd.copy(), nu.copy()
    variance = np.maximum(sd, SMALLEST_SD) ** 2
    scatter = np.log(variance) - special.digamma(nu / 2) + np.log(nu / 2)
    excess = float(scatter.var(ddof=1) - special.polygamma(1, nu / 2).mean())
    pooled_nu = float(nu.sum())
    if excess <= 0:
        pooled = np.full_like(sd, math.exp(float(scatter.mean())))
        return np.sqrt(pooled), np.full_like(nu, pooled_nu)
    prior_nu = 2 * trigamma_inverse(excess)
    prior = math.exp(float(scatter.mean()) + float(special.digamma(prior_nu / 2)) - math.log(prior_nu / 2))
    moderated = (prior_nu * prior + nu * variance) / (prior_nu + nu)
    return np.sqrt(moderated), np.minimum(prior_nu + nu, pooled_nu)


def t_upper_tail(x: float, nu: float) -> float:
    """P(T > x) of Student's t at `nu` degrees of freedom; nan where `nu` is not positive.

    Of `scipy.special`, because `scipy.stats`, which calls the same function, takes longer to import than most commands to run.
    """
    return float(special.stdtr(nu, -x))


def t_upper_quantile(p: float, nu: float) -> float:
    """The x with P(T > x) = p, for p above 0 and below 1, of Student's t at `nu` degrees of freedom; nan where `nu` is not positive."""
    return float(-special.stdtrit(nu, p))


def holm(p_values: Sequence[float] | Array, alpha: float) -> npt.NDArray[np.bool_]:
    """Holm's step-down test: which hypotheses are rejected, the family being all given p-values.

    Args:
        p_values: One a hypothesis.
        alpha: Chance that any true hypothesis is rejected.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    limits = alpha / (p.size - np.arange(p.size))
    passed = np.logical_and.accumulate(p[order] <= limits) if p.size else np.zeros(0, dtype=np.bool_)
    rejected = np.zeros(p.size, dtype=np.bool_)
    rejected[order] = passed
    return rejected


def holm_level(p_values: Sequence[float], index: int, alpha: float) -> float:
    """The level at which `holm` tests one hypothesis, the others as they are: it is rejected where its p-value is no larger."""
    others = np.array(p_values, dtype=np.float64)
    others[index] = 1.0
    return alpha / (others.size - int(holm(others, alpha)[np.arange(others.size) != index].sum()))


def clip_differences(d: Array) -> Array:
    """Clips at 2.5 robust SDs about zero; the bound depends on |d| alone, so that flipping signs commutes with it."""
    bound = _CLIP * float(np.median(np.abs(d)))
    return np.clip(d, -bound, bound)


def seed_of(key: str) -> int:
    """A seed from a row's key, so that a verdict is reproducible."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def sign_flip_p(d: Array, *, key: str) -> float:
    """One-sided p-value of "the mean of the clipped differences is no larger than sign flips make it".

    Args:
        d: [n], differences of ln latency, less the margin that counts as no change.
        key: Seeds the Monte Carlo flips that stand in for enumeration beyond 28 pairs.
    Returns:
        Exact for n <= 28, with the observed signs among those counted: never under 2^-n, or 1e-5 beyond.
    """
    clipped = clip_differences(d)
    size, observed = np.abs(clipped), float(clipped.sum())
    # A flip that reproduces the observed sum up to rounding counts as reaching it.
    reach = observed - 1e-12 * max(float(size.sum()), 1e-300)
    if d.size <= EXACT_PAIRS:
        # Every sum is one of the first half's plus one of the second's: counted in sorted order, not listed.
        first, second = (_signed_sums(part) for part in np.array_split(size, 2))
        first.sort()
        return float((first.size - np.searchsorted(first, reach - second)).sum()) / (first.size * second.size)
    return (int((_sampled_sums(size, key) >= reach).sum()) + 1) / (MONTE_CARLO_FLIPS + 1)


def sign_flip_limit(d: Array, level: float, *, key: str) -> float:
    """The largest mean of clipped differences of these sizes of which `sign_flip_p` is at least `level`: up to here chance is not excluded.

    Args:
        d: [n], as for `sign_flip_p`; only the sizes matter.
        level: Between 0 and 1.
    Returns:
        inf where so few pairs never reject at this level.
    """
    if level <= smallest_p(d.size):
        return math.inf
    size = np.abs(clip_differences(d))
    if d.size > EXACT_PAIRS:
        rank = math.ceil(level * (MONTE_CARLO_FLIPS + 1)) - 1
        return float(np.sort(_sampled_sums(size, key))[-rank]) / d.size
    first, second = (_signed_sums(part) for part in np.array_split(size, 2))
    first.sort()
    wanted = math.ceil(level * first.size * second.size)
    low, high = -float(size.sum()), float(size.sum())
    for _ in range(64):  # the sum that has `wanted` sums at or above it, to the last digit
        middle = (low + high) / 2
        reached = int((first.size - np.searchsorted(first, middle - second)).sum()) >= wanted
        low, high = (middle, high) if reached else (low, middle)
    return high / d.size


def _sampled_sums(size: Array, key: str) -> Array:
    """The sums of `size` under signs that the key draws, [MONTE_CARLO_FLIPS]."""
    rng = np.random.default_rng(seed_of(key))
    sums = np.zeros(MONTE_CARLO_FLIPS)
    for part in np.array_split(size, math.ceil(size.size / 12)):
        known = _signed_sums(part)
        sums += known[rng.integers(0, known.size, MONTE_CARLO_FLIPS)]
    return sums


def _signed_sums(size: Array) -> Array:
    """The sums of `size` under all 2^n choices of signs, [2^n]."""
    sums = np.zeros(1)
    for value in size:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def smallest_p(num_pairs: int) -> float:
    """The smallest p-value that the sign-flip test of so many pairs can give."""
    return 2.0**-num_pairs if num_pairs <= EXACT_PAIRS else max(2.0**-num_pairs, 1 / (MONTE_CARLO_FLIPS + 1))


def predictive_sd(sd: float, num_baseline_runs: int, num_head_runs: int) -> float:
    """SD of the mean of the head's runs about the median of the baseline's: s sqrt(1/h + 1.3/B)."""
    return sd * math.sqrt(1 / num_head_runs + CENTRE_VARIANCE / num_baseline_runs)


def mde80_baseline(sd: float, nu: float, num_baseline_runs: int, *, floor: float, num_rows: int, alpha: float) -> float:
    """The regression that the baseline mode finds with probability .8, as a relative change.

    A regression has to pass the screen of the first run (beyond the screen floor, and beyond the .10 tail), and then, over two runs,
    the row's floor and Holm's test. With a1, a2 the predictive SDs of one and of two runs, t the upper quantile at nu degrees of
    freedom, and the first step of Holm over m rows as the (conservative) level, in ln latency::

        MDE80 = max[floor/2 + .84 a1, (t(.10) + .84) a1, floor + .84 a2, (t(alpha/m) + .84) a2]

    Args:
        sd, nu: Moderated SD and degrees of freedom of the row.
        num_baseline_runs: B.
        floor: Relative effect under which nothing counts as a regression.
        num_rows: Rows in Holm's family (m).
        alpha: Level of Holm's test.
    """
    one, two = predictive_sd(sd, num_baseline_runs, 1), predictive_sd(sd, num_baseline_runs, 2)
    margin = math.log1p(floor)
    screen_t, holm_t = t_upper_quantile(SCREEN_ALPHA, nu), t_upper_quantile(alpha / max(num_rows, 1), nu)
    found = max(
        margin / 2 + POWER_QUANTILE * one,
        (screen_t + POWER_QUANTILE) * one,
        margin + POWER_QUANTILE * two,
        (holm_t + POWER_QUANTILE) * two,
    )
    return math.expm1(min(found, 700.0))


def mde80_paired(sd: float, num_pairs: int, *, floor: float, delta0: float, num_rows: int, alpha: float) -> float:
    """The regression that `num_pairs` pairs of processes find with probability .8, as a relative change.

    There is no screen: the effect has to reach the floor, and the sign-flip test of d - delta0 has to reject at the first step of Holm over
    m rows. With b = sd / sqrt(n), the paired t quantile t at alpha/m standing for the sign-flip test's, and sqrt(1 + t^2 / 2(n-1)) for the
    scatter of the t statistic itself, in ln latency::

        MDE80 = max[floor + .84 b, delta0 + (t + .84 sqrt(1 + t^2 / 2(n-1))) b]

    Where alpha/m < 2 * 2^-n only "every pair is slower" rejects, which needs P(d > delta0)^n = .8, and so at least
    delta0 + sd Phi^-1(.8^(1/n)). Where alpha/m is less than the smallest p-value, nothing can be found, and the result is infinite.

    Args:
        sd: SD of one pair's difference of ln latency.
        num_pairs: n.
        floor: Relative effect under which nothing counts as a regression.
        delta0: Margin in ln latency that counts as no change.
        num_rows: Rows in Holm's family (m).
        alpha: Level of Holm's test.
    """
    level = alpha / max(num_rows, 1)
    if level < smallest_p(num_pairs):
        return math.inf
    error = sd / math.sqrt(num_pairs)
    quantile = t_upper_quantile(level, num_pairs - 1)
    scatter = math.sqrt(1 + quantile**2 / (2 * (num_pairs - 1)))
    found = max(math.log1p(floor) + POWER_QUANTILE * error, delta0 + (quantile + POWER_QUANTILE * scatter) * error)
    if level < 2 * 2.0**-num_pairs:
        found = max(found, delta0 + sd * float(special.ndtri(0.8 ** (1 / num_pairs))))
    return math.expm1(min(found, 700.0))


def mde80_confirmed(sd: float, nu: float, num_baseline_runs: int, *, process_sd: float, pairs: int, floor: float, delta0: float) -> float:
    """The regression that a screen and a confirmation in pairs find with probability .8, as a relative change.

    The first run has to screen the row (beyond half its floor, and beyond the .10 tail); then the pairs of the last look have to reach the
    floor, and reject. With a the predictive SD of one run, b = 1.25 sqrt(2) process_sd / sqrt(pairs) the error of the mean of clipped
    differences, and 3.3 the normal quantile of the last look's level over some ten rows, in ln latency::

        MDE80 = max[floor/2 + .84 a, (t(.10) + .84) a, floor + .84 b, delta0 + (3.3 + .84) b]

    Args:
        sd, nu: Moderated SD and degrees of freedom of the row's runs.
        num_baseline_runs: B.
        process_sd: SD of ln latency of one process.
        pairs: Of the last look.
        floor: Relative effect under which nothing counts as a regression.
        delta0: Margin in ln latency that counts as no change.
    """
    one = predictive_sd(sd, num_baseline_runs, 1)
    error = CLIPPED_MEAN * math.sqrt(2) * process_sd / math.sqrt(pairs)
    margin = math.log1p(floor)
    found = max(
        margin / 2 + POWER_QUANTILE * one,
        (t_upper_quantile(SCREEN_ALPHA, nu) + POWER_QUANTILE) * one,
        margin + POWER_QUANTILE * error,
        delta0 + (LAST_LOOK_QUANTILE + POWER_QUANTILE) * error,
    )
    return math.expm1(min(found, 700.0))


def within_run_sd(runs: Sequence[Array]) -> float:
    """SD of ln latency of one process, pooled over runs: what is left of the noise within a run.

    Args:
        runs: ln latency of the processes of each run.
    Returns:
        nan where no run has two processes; never under SMALLEST_SD.
    """
    degrees = sum(run.size - 1 for run in runs)
    if degrees < 1:
        return math.nan
    squares = sum(float(((run - run.mean()) ** 2).sum()) for run in runs)
    return max(math.sqrt(squares / degrees), SMALLEST_SD)


def control_deviation(head: Array, baseline: Array) -> float:
    """Median deviation of a class' control rows from their own medians.

    Args:
        head: [controls], ln latency of the run under test.
        baseline: [controls, B], ln latency of the baseline's runs.
    Returns:
        g, in ln latency; 0 where there are no controls.
    """
    if not head.size:
        return 0.0
    return float(np.median(head - np.median(baseline, axis=1)))


def control_normalised(rows: Array, controls: Array) -> Array:
    """Takes each baseline run's control deviation off its rows.

    Args:
        rows: [rows, B] of one class.
        controls: [controls, B] of the controls that serve the class.
    Returns:
        [rows, B].
    """
    if not controls.size:
        return np.array(rows)
    deviation: Array = np.asarray(np.median(controls - np.median(controls, axis=1, keepdims=True), axis=0))
    normalised: Array = np.subtract(rows, deviation)
    return normalised
