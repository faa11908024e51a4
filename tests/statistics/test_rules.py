"""Each rule of another system on data small enough for a pencil, on both sides of its limit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.statistics import rules, tables
from tests.statistics.rules import RULES, Array, Rule


def column(*values: float) -> Array:
    """[B, 1]: runs of one process."""
    return np.array(values)[:, None]


def one(value: float) -> Array:
    return np.array([value])


@pytest.mark.parametrize(
    ("name", "base", "limit"),
    [
        ("asv, factor 1.1 against the last run", column(5.0, 9.0, 1.0), 1.0 + math.log(1.1)),
        ("fixed 5 %", column(1.0, 3.0, 2.0), 2.0 + math.log(1.05)),
        ("fixed 2 %", column(1.0, 3.0, 2.0), 2.0 + math.log(1.02)),
        # mean 2, SD 1
        ("z > 3", column(1.0, 2.0, 3.0), 5.0),
        # t(.99, 2) = 6.9646, times sqrt(4/3)
        ("t prediction interval .99", column(1.0, 2.0, 3.0), 2.0 + 6.964556734283583 * math.sqrt(4 / 3)),
        # steps of size 1, 2, 3, 4: quartiles 1.75 and 3.25; the last run is 3
        ("IQR fence", column(1.0, 2.0, 0.0, -3.0, 1.0), 1.0 + 3.25 + 3 * 1.5),
        # median 2, deviations 1, 0, 1, 8, 0 with the median 1
        ("MAD band, k = 3", column(1.0, 2.0, 3.0, 10.0, 2.0), 2.0 + 3 * 1.4826),
    ],
)
def test_a_rule_by_hand(name: str, base: Array, limit: float) -> None:
    """Red just beyond its limit, and not at it or below."""
    rule = RULES[name]
    assert not rule(base, one(limit - 1e-9))
    assert rule(base, one(limit + 1e-9))
    assert not rule(base, one(-100.0))


def test_medians_and_means_are_taken_over_the_processes() -> None:
    base = np.array([[0.0, 0.0, 0.0]] * 4) + np.arange(4)[:, None] * 1e-3
    outlier = np.array([0.0, 0.0, 9.0])
    assert not RULES["fixed 2 %"](base, outlier)
    assert RULES["z > 3"](base, outlier)


def test_mann_whitney_by_hand() -> None:
    """Three against three: all 20 orders are as likely; the largest U has 1/20 = .05, over the .025 a side."""
    pool = np.array([[1.0], [2.0], [3.0]])
    assert not rules.pooled_mann_whitney(pool, np.array([4.0, 5.0, 6.0]))
    assert rules.pooled_mann_whitney(pool, np.array([4.0, 5.0, 6.0]), alpha=0.11)
    wider = np.array([[1.0], [2.0], [3.0], [3.5]])
    # 1 of 35 orders, .0286
    assert not rules.pooled_mann_whitney(wider, np.array([4.0, 5.0, 6.0]))
    widest = np.array([[1.0], [2.0], [3.0], [3.5], [3.6]])
    # 1 of 56, .0179; 2 of 56 with one order fewer, .0357
    assert rules.pooled_mann_whitney(widest, np.array([4.0, 5.0, 6.0]))
    assert not rules.pooled_mann_whitney(widest, np.array([3.55, 5.0, 6.0]))


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(11)), st.integers(1, 5))
def test_mann_whitney_is_scipys(order: list[int], size: int) -> None:
    values = np.array(order, dtype=float)
    head, base = values[:size], values[size:][:, None]
    p = stats.mannwhitneyu(head, base.ravel(), alternative="greater", method="exact").pvalue
    for alpha in (0.05, 0.2, 0.5):
        assert rules.pooled_mann_whitney(base, head, alpha=alpha) == (p < alpha / 2)


def test_a_tie_counts_half() -> None:
    """Two of ten: U of 16, 15, 14 have 1/45, 2/45, 4/45; two values that tie with the largest of eight have 15."""
    pool = np.arange(8.0)[:, None]
    assert rules.pooled_mann_whitney(pool, np.array([8.0, 9.0]), alpha=0.08)
    assert not rules.pooled_mann_whitney(pool, np.array([7.0, 7.0]), alpha=0.08)
    assert rules.pooled_mann_whitney(pool, np.array([7.0, 7.0]), alpha=0.1)


@pytest.mark.parametrize("name", RULES)
def test_many_rows_at_once_are_those_rows_one_by_one(name: str) -> None:
    rng = np.random.default_rng(1)
    base, head = rng.normal(0, 0.02, (4, 5, 8, 3)), rng.normal(0.03, 0.02, (4, 5, 3))
    together = RULES[name](base, head)
    assert together.shape == (4, 5)
    assert together.tolist() == [[bool(RULES[name](base[i, j], head[i, j])) for j in range(5)] for i in range(4)]


@pytest.mark.parametrize("name", RULES)
def test_a_rule_sees_a_tenfold_slow_down_and_no_speed_up(name: str) -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(0, 0.01, (12, 3))
    rule: Rule = RULES[name]
    assert rule(base, np.full(3, math.log(10)) + rng.normal(0, 0.01, 3))
    assert not rule(base, np.full(3, -math.log(10)) + rng.normal(0, 0.01, 3))


def test_there_are_eight_rules() -> None:
    assert len(RULES) == 8


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("found", "of", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3: 81/263, 15/148, 0/20, 1/29
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(found: int, of: int, low: float, high: float) -> None:
    assert tables.wilson(found, of) == pytest.approx((low, high), abs=5e-5)


def test_wilson_is_scipys_and_mirrored() -> None:
    for found, of in ((0, 5), (3, 7), (7, 7), (11, 2000)):
        scipys = stats.binomtest(found, of).proportion_ci(method="wilson")
        assert tables.wilson(found, of) == pytest.approx((scipys.low, scipys.high), abs=1e-12)
        low, high = tables.wilson(of - found, of)
        assert tables.wilson(found, of) == pytest.approx((1 - high, 1 - low))
    with pytest.raises(ValueError, match="no share"):
        tables.wilson(3, 2)


def test_a_share_is_told_with_count_and_interval() -> None:
    assert tables.share(3, 20) == "3/20 = .150 (.052 to .360)"
    assert tables.share(0, 0) == "none to count"
    assert tables.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
