"""Change points: each at its place, and none of outliers or correlated noise."""

from __future__ import annotations

import numpy as np
import pytest

from ci.history import steps

Array = steps.Array


def noise(rng: np.random.Generator, count: int, sd: float, rho: float = 0.0, outliers: float = 0.01) -> Array:
    """Correlated noise around 1 with outliers of up to 30 %."""
    raw = rng.normal(0, sd * np.sqrt(1 - rho**2), count)
    made = np.empty(count)
    made[0] = raw[0]
    for index in range(1, count):
        made[index] = rho * made[index - 1] + raw[index]
    values: Array = 1 + made
    away = rng.random(count) < outliers
    values[away] *= 1 + rng.choice([-1, 1], away.sum()) * rng.uniform(0.05, 0.3, away.sum())
    return values


@pytest.mark.parametrize("count", [40, 300, 700, 3000])
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_a_step_is_found_at_its_place(count: int, factor: float) -> None:
    rng = np.random.default_rng(count)
    at = int(count * 0.6)
    values = noise(rng, count, 0.004)
    values[at - 1 : at + 1] = 1.0  # an outlier just there could belong to either side
    values[at:] *= factor
    assert steps.change_points(values) == [at]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_outliers_and_correlated_noise_are_no_steps(rho: float) -> None:
    rng = np.random.default_rng(1)
    found = [steps.change_points(noise(rng, 3000, 0.005, rho)) for _ in range(10)]
    assert found == [[]] * 10


def cusum(values: Array) -> int:
    """Alarms of a plain CUSUM that starts again after each: what the detector is held against."""
    sd = float(np.std(np.diff(values)) / np.sqrt(2))
    centre, up, down, alarms = values[0], 0.0, 0.0, 0
    for value in values:
        up, down = max(0.0, up + value - centre - 0.5 * sd), max(0.0, down - value + centre - 0.5 * sd)
        if max(up, down) > 5 * sd:
            centre, up, down, alarms = value, 0.0, 0.0, alarms + 1
    return alarms


def test_a_plain_cusum_would_raise_many_alarms_there() -> None:
    rng = np.random.default_rng(1)
    assert sum(cusum(noise(rng, 3000, 0.005, 0.9)) for _ in range(10)) > 300


def test_the_newest_step_is_seen_after_a_few_commits() -> None:
    values = noise(np.random.default_rng(3), 3000, 0.003, outliers=0.0)
    values[-4:] *= 0.9
    assert steps.change_points(values) == [2996]


def test_a_kept_answer_for_the_finished_part_changes_nothing() -> None:
    values = noise(np.random.default_rng(4), 2900, 0.004)
    values[700:] *= 0.97
    values[2850:] *= 1.05
    known = steps.finished(values[: steps.frozen_length(values.size)])
    assert steps.change_points(values, known) == steps.change_points(values) == [700, 2850]


def test_levels_cover_the_series() -> None:
    values = np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    assert [(level.start, level.end, level.value) for level in steps.levels(values, [3])] == [(0, 3, 1.0), (3, 6, 2.0)]
