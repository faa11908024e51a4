"""The confirm stage on arrays: looks, levels, Holm over the family, and what each verdict needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci import noise
from ci.model import RowVerdict
from ci.sequential import ALPHA, LOOKS, SHARES, Series, decide


def series(
    effect: float, sd: float, *, pairs: int = 48, seed: int = 0, key: str = "row", delta0: float = 0.0, floor: float = 0.005
) -> Series:
    rng = np.random.default_rng(seed)
    return Series(key, np.log1p(effect) + rng.normal(0, sd, pairs), delta0, floor)


def test_the_levels_of_the_looks_add_up() -> None:
    assert sum(SHARES) == pytest.approx(1)
    assert len(SHARES) == len(LOOKS)
    assert ALPHA == 0.01


def test_a_sure_regression_is_told_at_the_first_look() -> None:
    (found,) = decide([series(0.03, 0.001)])
    assert (found.verdict, found.pairs, found.look) == (RowVerdict.REGRESSED, 12, 1)
    assert found.effect == pytest.approx(0.03, abs=0.001)
    assert found.p_value == 2.0**-12


def test_the_first_look_has_a_fifth_of_the_level() -> None:
    """Twelve pairs of which the smallest is turned have p = 2 / 4096 = .00049, and two turned 4 / 4096: between .002 / 3 and .002."""
    d = np.full(12, 0.02)
    d[0] = -0.0001
    one = Series("row", d, 0.0, 0.005)
    assert one.p_value(1) == 2 * 2.0**-12
    rest = [series(0.0, 0.0002, key=f"flat {i}", seed=i) for i in range(3)]
    assert decide([one], looks=LOOKS[:1])[0].verdict is RowVerdict.REGRESSED
    assert decide([one, *rest], looks=LOOKS[:1])[0].verdict is RowVerdict.REGRESSED
    assert decide([one, *rest], looks=LOOKS[:1], family=5)[0].verdict is RowVerdict.UNCONFIRMED


def test_the_family_stays_as_large_as_it_was_picked() -> None:
    """Rows that were cleared at the first look still count at the second: the level a row gets does not grow."""
    d = np.full(24, 0.02)
    d[[2, 5, 9, 20]] = -0.02
    open_row = Series("row", d, 0.0, 0.005)
    cleared = [series(0.0, 0.0002, key=f"flat {i}", seed=i) for i in range(400)]
    alone = decide([open_row], looks=LOOKS[:2])[0]
    together = decide([open_row, *cleared], looks=LOOKS[:2])[0]
    assert (alone.verdict, alone.look) == (RowVerdict.REGRESSED, 2)
    assert together.verdict is RowVerdict.UNCONFIRMED


def test_a_small_sure_change_is_cleared_and_a_large_unsure_one_stays_open() -> None:
    small, unsure, faster = series(0.002, 0.0005), series(0.004, 0.03, key="b", seed=1), series(-0.05, 0.001, key="c")
    found = decide([small, unsure, faster])
    assert [decision.verdict for decision in found] == [RowVerdict.CLEARED, RowVerdict.UNCONFIRMED, RowVerdict.IMPROVED]
    assert [decision.pairs for decision in found] == [12, 48, 12]


def test_a_change_of_exactly_the_floor_counts() -> None:
    at = Series("row", np.full(12, np.log1p(0.005) + 1e-12), 0.0, 0.005)
    under = Series("row", np.full(12, np.log1p(0.005) - 1e-6), 0.0, 0.005)
    assert [decide([row])[0].verdict for row in (at, under)] == [RowVerdict.REGRESSED, RowVerdict.CLEARED]


def test_the_margin_for_a_rebuild_is_taken_off_before_the_test_and_added_back_to_the_effect() -> None:
    row = Series("row", np.full(12, 0.006), 0.007, 0.005)
    assert row.p_value(1) == 1.0
    assert row.size(1) == pytest.approx(0.006)
    assert decide([row])[0].verdict is not RowVerdict.REGRESSED


def test_a_row_with_fewer_pairs_is_tested_on_what_it_has() -> None:
    (found,) = decide([series(0.03, 0.001, pairs=10)])
    assert (found.verdict, found.pairs) == (RowVerdict.REGRESSED, 10)


def test_a_verdict_is_the_same_each_time_and_needs_no_order() -> None:
    rows = [series(0.006, 0.01, seed=i, key=f"row {i}") for i in range(6)]
    first = decide(rows)
    assert decide(rows) == first
    assert decide(rows[::-1])[::-1] == first


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.001, 0.02), st.integers(1, 6))
def test_more_looks_only_decide_what_was_open(seed: int, sd: float, rows: int) -> None:
    given_rows = [series(0.005, sd, seed=seed + i, key=f"row {i}") for i in range(rows)]
    before = decide(given_rows, looks=LOOKS[:1])
    for looks in (LOOKS[:2], LOOKS):
        after = decide(given_rows, looks=looks)
        for old, new in zip(before, after, strict=True):
            assert new == old or old.verdict is RowVerdict.UNCONFIRMED
        before = after


def test_equal_commits_are_seldom_red() -> None:
    """At most 1 in 100 families of five rows; 300 families with noise twice the floor, of which 3 would be the level."""
    red = 0
    for seed in range(300):
        rows = [series(0.0, 0.01, seed=1000 * seed + i, key=f"{seed} {i}") for i in range(5)]
        red += any(decision.verdict is RowVerdict.REGRESSED for decision in decide(rows))
    assert red <= 6


def test_the_smallest_regression_found_is_found_four_times_of_five() -> None:
    """MDE80 as published for 48 pairs, at process noise of .6 %: the confirmation alone finds it in .75 to 1 of the cases."""
    process_sd = 0.006
    mde = noise.mde80_confirmed(1e-6, 100.0, 10, process_sd=process_sd, pairs=48, floor=0.005, delta0=0.002)
    found = 0
    for seed in range(120):
        row = series(mde, process_sd * np.sqrt(2), seed=seed, key=f"{seed}", delta0=0.002)
        found += decide([row], family=10)[0].verdict is RowVerdict.REGRESSED
    assert 0.75 <= found / 120 <= 1.0


def test_the_sd_within_runs_is_pooled() -> None:
    runs = [np.array([1.0, 1.2]), np.array([5.0, 5.2]), np.array([7.0])]
    assert noise.within_run_sd(runs) == pytest.approx(np.sqrt((0.02 + 0.02) / 2))
    assert np.isnan(noise.within_run_sd([np.array([1.0])]))
    assert noise.within_run_sd([np.array([1.0, 1.0])]) == noise.SMALLEST_SD
