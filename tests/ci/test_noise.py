"""The statistics: estimators, moderation, Holm, sign flips and smallest detectable regressions (R94; case 18)."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import special, stats
from statsmodels.stats.multitest import multipletests

from ci import noise

finite = st.floats(-5, 5).map(lambda x: round(x, 6))


def _vectors(smallest: int, largest: int) -> st.SearchStrategy[noise.Array]:
    return st.integers(smallest, largest).flatmap(lambda n: arrays(np.float64, n, elements=finite))


# ---------------------------------------------------------------- Student's t


@given(st.floats(1e-12, 1, exclude_max=True), st.floats(-60, 60), st.floats(0.5, 1e4))
def test_students_t_is_scipys_to_the_last_bit(p: float, x: float, nu: float) -> None:
    assert noise.t_upper_quantile(p, nu) == float(stats.t.isf(p, nu))
    assert noise.t_upper_tail(x, nu) == float(stats.t.sf(x, nu))


def test_students_t_without_degrees_of_freedom_is_no_number() -> None:
    assert math.isnan(noise.t_upper_tail(1.0, 0.0))
    assert math.isnan(noise.t_upper_quantile(0.1, 0.0))
    assert noise.t_upper_tail(math.inf, 4.0) == 0.0
    assert noise.t_upper_tail(-math.inf, 4.0) == 1.0


def test_a_command_starts_without_what_takes_longer_to_import_than_most_take_to_run() -> None:
    code = "import sys, ci.__main__; print(sorted({'altair', 'scipy.stats', 'statsmodels', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=Path(__file__).resolve().parents[2]
    )
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- direction and location


def test_log_latency_grows_with_latency() -> None:
    """Case 1: a halved throughput and a doubled time are the same slow-down."""
    drop = np.diff(noise.log_latency([1000.0, 500.0], "higher"))
    rise = np.diff(noise.log_latency([10.0, 20.0], "lower"))
    assert drop == pytest.approx([math.log(2)])
    assert rise == pytest.approx([math.log(2)])


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [math.nan] * 3, [math.inf]])
def test_log_latency_refuses_what_is_no_sample(bad: list[float]) -> None:
    """Case 23."""
    with pytest.raises(ValueError, match="positive finite"):
        noise.log_latency(bad, "higher")


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 2), (3, 2), (5, 3), (10, 6)])
def test_fast60_keeps_the_fastest(count: int, kept: int) -> None:
    y = np.arange(count, dtype=float)[::-1]
    assert float(noise.fast60(y)) == np.arange(kept).mean()


@given(_vectors(3, 12), finite)
def test_fast60_is_deaf_to_order_and_to_a_slow_outlier_and_moves_with_a_shift(y: noise.Array, shift: float) -> None:
    assert float(noise.fast60(y[::-1])) == pytest.approx(float(noise.fast60(y)), abs=1e-12)
    assert float(noise.fast60(y + shift)) == pytest.approx(float(noise.fast60(y)) + shift, abs=1e-9)
    worse = y.copy()
    worse[np.argmax(y)] += 100
    assert float(noise.fast60(worse)) == pytest.approx(float(noise.fast60(y)), abs=1e-12)


# ---------------------------------------------------------------- spread


def test_winsorised_sd_by_hand() -> None:
    """B >= 6: one run a side, scaled (B-1)/(B-3), nu = B-3. Below: plain, nu = B-1."""
    sd, nu = noise.winsorised_sd(np.array([7.0, 1.0, 2.0, 3.0, 4.0, 90.0]))
    assert (sd, nu) == (pytest.approx(np.std([2, 2, 3, 4, 7, 7], ddof=1) * 5 / 3), 3.0)
    sd, nu = noise.winsorised_sd(np.array([1.0, 2.0, 3.0, 4.0, 90.0]))
    assert (sd, nu) == (pytest.approx(np.std([1, 2, 3, 4, 90], ddof=1)), 4.0)
    assert noise.winsorised_sd(np.array([1.0]))[1] == 0
    assert math.isnan(noise.winsorised_sd(np.array([1.0]))[0])


def test_one_outlier_does_not_blind() -> None:
    """Case 18: [100] * 7 + [5] keeps no spread at all."""
    sd, _ = noise.winsorised_sd(noise.log_latency([100.0] * 7 + [5.0], "higher"))
    assert sd == 0


@given(_vectors(2, 14), finite, st.floats(0.1, 10))
def test_winsorised_sd_ignores_shift_and_sign_and_follows_scale(x: noise.Array, shift: float, scale: float) -> None:
    sd, nu = noise.winsorised_sd(x)
    for other, factor in ((x + shift, 1.0), (-x, 1.0), (x[::-1], 1.0), (x * scale, scale)):
        assert noise.winsorised_sd(other) == (pytest.approx(sd * factor, abs=1e-9), nu)


def test_winsorised_sd_estimates_the_sd_of_normal_noise() -> None:
    rng = np.random.default_rng(1)
    found = [noise.winsorised_sd(rng.normal(0, 1, 10))[0] for _ in range(4000)]
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("x", [0.01, 0.3, 1.0, 5.0, 300.0, 1e5])
def test_trigamma_inverse(x: float) -> None:
    assert noise.trigamma_inverse(float(special.polygamma(1, x))) == pytest.approx(x, rel=1e-6)


def test_moderation_recovers_its_own_model() -> None:
    """Smyth's model: variances with 1/s^2 ~ chi2(d0)/(d0 s0^2); the moderated variance has the least error, and nu grows by d0."""
    rng = np.random.default_rng(2)
    prior_nu, prior_sd, nu = 8.0, 0.01, 7.0
    true = prior_sd * np.sqrt(prior_nu / rng.chisquare(prior_nu, 4000))
    sd = true * np.sqrt(rng.chisquare(nu, 4000) / nu)
    moderated, total = noise.moderate(sd, np.full(4000, nu))
    assert total[0] - nu == pytest.approx(prior_nu, rel=0.2)
    raw_error, moderated_error = (np.mean(np.square(np.log(x / true))) for x in (sd, moderated))
    assert moderated_error < 0.7 * raw_error


def test_moderation_pools_rows_that_differ_by_chance_only() -> None:
    rng = np.random.default_rng(3)
    sd = 0.01 * np.sqrt(rng.chisquare(7, 50) / 7)
    moderated, total = noise.moderate(sd, np.full(50, 7.0))
    assert np.ptp(moderated) < 0.2 * np.ptp(sd)
    assert total.max() <= 350
    assert moderated.mean() == pytest.approx(0.01, rel=0.1)


def test_moderation_leaves_a_single_row_alone() -> None:
    sd, nu = noise.moderate(np.array([0.03]), np.array([7.0]))
    assert (sd.tolist(), nu.tolist()) == ([0.03], [7.0])


@given(arrays(np.float64, st.integers(2, 20), elements=st.floats(0.001, 0.1)))
def test_moderation_does_not_depend_on_order(sd: noise.Array) -> None:
    nu = np.full(sd.size, 7.0)
    order = np.argsort(np.sin(sd * 1e5))
    assert noise.moderate(sd[order], nu)[0] == pytest.approx(noise.moderate(sd, nu)[0][order])


def test_moderation_survives_zero_spread() -> None:
    sd, total = noise.moderate(np.array([0.0, 0.0, 0.01]), np.full(3, 7.0))
    assert np.isfinite(sd).all()
    assert (sd > 0).all()
    assert np.isfinite(total).all()


# ---------------------------------------------------------------- Holm


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.sampled_from([0.01, 0.05, 0.2]))
def test_holm_agrees_with_statsmodels(p: list[float], alpha: float) -> None:
    with mock.patch("gc.collect"):  # which takes longer than all the rest
        expected = multipletests(p, alpha, method="holm")[0].tolist()
    assert noise.holm(p, alpha).tolist() == expected


def test_holm_of_nothing() -> None:
    assert noise.holm([], 0.01).tolist() == []


# ---------------------------------------------------------------- sign flips


@given(_vectors(1, 8))
def test_exact_sign_flip_equals_enumeration(d: noise.Array) -> None:
    clipped = noise.clip_differences(d)
    sums = [sum(s * abs(x) for s, x in zip(signs, clipped, strict=True)) for signs in itertools.product((1, -1), repeat=d.size)]
    expected = np.mean(np.array(sums) >= clipped.sum() - 1e-9)
    assert noise.sign_flip_p(d, key="row") == pytest.approx(expected)


@given(_vectors(1, 10), st.floats(0.01, 100))
def test_sign_flip_ignores_scale_and_order(d: noise.Array, scale: float) -> None:
    p = noise.sign_flip_p(d, key="row")
    assert noise.sign_flip_p(d[::-1] * scale, key="row") == pytest.approx(p)
    assert 2.0**-d.size <= p <= 1


@given(_vectors(2, 10))
def test_both_sides_cannot_be_small(d: noise.Array) -> None:
    assert noise.sign_flip_p(d, key="row") + noise.sign_flip_p(-d, key="row") >= 1


@given(_vectors(2, 12))
def test_clipping_commutes_with_flips(d: noise.Array) -> None:
    signs = np.where(np.arange(d.size) % 3 == 0, -1.0, 1.0)
    assert noise.clip_differences(signs * d) == pytest.approx(signs * noise.clip_differences(d))


def test_monte_carlo_flips_are_reproducible_and_agree_with_the_exact_tail() -> None:
    rng = np.random.default_rng(5)
    d = rng.normal(0.5, 1, 16)
    p = noise.sign_flip_p(d, key="row")
    assert p == noise.sign_flip_p(d, key="row")
    size = np.abs(noise.clip_differences(d))
    bits = (np.arange(2**16)[:, None] >> np.arange(16)) & 1
    exact = float(((1 - 2 * bits) @ size >= noise.clip_differences(d).sum() - 1e-12).mean())
    assert p == pytest.approx(exact, abs=4 * math.sqrt(exact / noise.MONTE_CARLO_FLIPS))
    assert noise.sign_flip_p(np.ones(48), key="row") == pytest.approx(1e-5)


def test_smallest_p_is_attained() -> None:
    assert noise.sign_flip_p(np.linspace(1, 2, 12), key="row") == noise.smallest_p(12) == 2.0**-12


def test_no_change_at_all_is_no_evidence() -> None:
    assert noise.sign_flip_p(np.zeros(12), key="row") == 1


def test_sign_flip_with_holm_keeps_its_level() -> None:
    """The chance that any of several unchanged rows is rejected stays at alpha, with heavy tails and unequal noise."""
    rng = np.random.default_rng(6)
    trials, rows, alpha = 1500, 4, 0.05
    red = 0
    for _ in range(trials):
        d = rng.standard_t(3, (rows, 10)) * np.array([[0.002], [0.01], [0.03], [0.1]])
        red += bool(noise.holm([noise.sign_flip_p(row, key="r") for row in d], alpha).any())
    assert red / trials <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / trials)
    assert red / trials > alpha / 4


# ---------------------------------------------------------------- smallest detectable regression


@pytest.mark.parametrize("sd", [0.001, 0.004, 0.02])
@pytest.mark.parametrize("num_rows", [1, 10, 40])
def test_mde80_paired_is_found_about_four_times_in_five(sd: float, num_rows: int) -> None:
    """The published size is a promise: at it the rule rejects, and the effect reaches the floor, with probability .8."""
    rng = np.random.default_rng(7)
    floor, delta0, alpha, pairs = 0.005, 0.002, 0.01, 12
    size = math.log1p(noise.mde80_paired(sd, pairs, floor=floor, delta0=delta0, num_rows=num_rows, alpha=alpha))
    found = 0
    for _ in range(400):
        d = rng.normal(size, sd, pairs) - delta0
        effect = float(noise.clip_differences(d).mean()) + delta0
        found += noise.sign_flip_p(d, key="r") <= alpha / num_rows and math.expm1(effect) >= floor
    assert 0.72 <= found / 400 <= 0.88


def test_mde80_paired_is_infinite_where_nothing_can_be_rejected() -> None:
    values = [noise.mde80_paired(0.001, n, floor=0.005, delta0=0.002, num_rows=100, alpha=0.01) for n in (12, 13, 14)]
    assert [math.isinf(value) for value in values] == [True, True, False]


@pytest.mark.parametrize(("sd", "num_base"), [(0.001, 10), (0.01, 10), (0.02, 20)])
def test_mde80_baseline_is_found_at_least_about_four_times_in_five(sd: float, num_base: int) -> None:
    """Screened by the first run, then over the floor and beyond Holm's first step over two: about .8, somewhat conservative."""
    rng = np.random.default_rng(8)
    rows, alpha, nu = 30, 0.01, 60.0
    floor = max(0.005, 3 * sd)
    size = math.log1p(noise.mde80_baseline(sd, nu, num_base, floor=floor, num_rows=rows, alpha=alpha))
    centre = np.median(rng.normal(0, sd, (4000, num_base)), axis=1)
    heads = rng.normal(size, sd, (4000, 2)) - centre[:, None]
    one, two = noise.predictive_sd(sd, num_base, 1), noise.predictive_sd(sd, num_base, 2)
    screened = heads[:, 0] > max(math.log1p(floor) / 2, stats.t.isf(0.1, nu) * one)
    mean = heads.mean(axis=1)
    found = screened & (np.expm1(mean) >= floor) & (stats.t.sf(mean / two, nu) <= alpha / rows)
    assert 0.72 <= found.mean() <= 0.9


def test_mde80_grows_with_noise_and_shrinks_with_runs() -> None:
    def size(sd: float, runs: int) -> float:
        return noise.mde80_baseline(sd, 20.0, runs, floor=max(0.005, 3 * sd), num_rows=10, alpha=0.01)

    assert size(0.01, 10) < size(0.02, 10)
    assert size(0.01, 20) < size(0.01, 10)


# ---------------------------------------------------------------- controls


def test_control_deviation_and_normalisation_take_a_common_shift_off() -> None:
    rng = np.random.default_rng(9)
    shifts = rng.normal(0, 0.05, 8)
    quiet = rng.normal(0, 1e-4, (2, 8))
    controls = np.array([[1.0], [2.0], [3.0]]) + shifts + rng.normal(0, 1e-5, (3, 8))
    normalised = noise.control_normalised(quiet + shifts, controls)
    assert np.ptp(normalised - quiet, axis=1).max() < 1e-4
    assert noise.control_deviation(np.median(controls, axis=1) + 0.03, controls) == pytest.approx(0.03)
    assert noise.control_normalised(quiet, np.empty((0, 8))) == pytest.approx(quiet)
    assert noise.control_deviation(np.empty(0), np.empty((0, 8))) == 0


def test_one_moved_control_of_three_does_not_move_the_class() -> None:
    controls = np.zeros((3, 8))
    assert noise.control_deviation(np.array([0.0, 0.0, 0.5]), controls) == 0


@settings(max_examples=30)
@given(st.text(max_size=30), st.text(max_size=30))
def test_seeds_follow_the_key(one: str, two: str) -> None:
    assert (noise.seed_of(one) == noise.seed_of(two)) == (one == two)
