"""A row's change, throughput, latency, both bases and band are of one estimator: no two figures of a row disagree, in no mode."""

from __future__ import annotations

import datetime
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gate_builders import BASE_COMMIT, HEAD_COMMIT, commit_of, control, measured
from hypothesis import given, settings
from hypothesis import strategies as st

from ci import baseline as baselines
from ci import noise
from ci.compare import compare_baseline
from ci.confirm import compare_pairs
from ci.merge import load_kept
from ci.model import CommitResult, Direction, GateResult, RowOutcome, RowVerdict
from ci.templates.sections import band_picture, changes_of, has_number

SLOWER = (RowVerdict.REGRESSED, RowVerdict.UNCONFIRMED)


def held(result: GateResult) -> list[RowOutcome]:
    """The rows whose figures were held against each other."""
    rows = [row for row in result.rows if row.effect is not None]
    for row in rows:
        assert row.value is not None
        assert row.baseline is not None
        assert row.effect is not None
        slower = row.value / row.baseline if row.direction == "lower" else row.baseline / row.value
        assert slower == pytest.approx(1 + row.effect, rel=1e-9), "the throughputs say what the change says"
        if row.record is not None and row.record.latency_us is not None and row.record.value is not None:
            assert row.latency_us is not None
            assert row.baseline_latency_us is not None
            assert row.latency_us / row.baseline_latency_us == pytest.approx(1 + row.effect, rel=1e-9), "and so do the latencies"
            work = row.record.value * row.record.latency_us if row.direction == "higher" else row.record.latency_us / row.record.value
            own = row.value * row.latency_us if row.direction == "higher" else row.latency_us / row.value
            assert own == pytest.approx(work, rel=1e-9), "a latency is that of the throughput beside it"
        at = changes_of(row)
        if not has_number(row):  # of an unfit runner: the picture would be believed
            assert at is None
            continue
        assert at is not None
        change, (fastest, slowest) = at
        assert change == pytest.approx(row.effect, rel=1e-9), "the dot is where the change says"
        picture = band_picture(row)
        assert picture is not None
        if row.verdict is RowVerdict.PASS and "MOVED" not in row.flags:
            assert fastest - 1e-9 <= change <= slowest + 1e-9, f"{row.key} passes outside its band"
            assert picture.low - 0.1 <= picture.point <= picture.high + 0.1
        if row.verdict is RowVerdict.REGRESSED:
            assert change >= slowest - 1e-9, f"{row.key} regressed inside its band"
            assert picture.point > 50
        if row.verdict is RowVerdict.IMPROVED:
            assert change <= fastest + 1e-9, f"{row.key} improved inside its band"
            assert picture.point < 50
    return rows


def arms(seed: int, pairs: int, sd: float, moved: list[float], direction: Direction, drift: float) -> tuple[CommitResult, CommitResult]:
    """Rows and a control in pairs, heavy-tailed, with one drift in both arms; `moved` is each row's true change in ln latency."""
    rng = np.random.default_rng(seed)
    together = drift * rng.normal(0, 1, pairs)
    sign = -1 if direction == "higher" else 1

    def samples(change: float) -> list[float]:
        y = together + sd * rng.standard_t(2, pairs) + change
        return [float(1000 * math.exp(sign * value)) for value in y]

    def arm(head: bool) -> CommitResult:
        rows = [measured(f"row_{i}", samples(change if head else 0.0), direction=direction) for i, change in enumerate(moved)]
        return commit_of([*rows, control("copy", samples(0.0))], HEAD_COMMIT if head else BASE_COMMIT)

    return arm(False), arm(True)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([6, 12, 20]),
    st.sampled_from([0.001, 0.02, 0.3]),
    st.lists(st.sampled_from([-0.7, -0.05, 0.0, 0.004, 0.02, 0.2, 0.7]), min_size=1, max_size=7),
    st.sampled_from(["higher", "lower"]),
)
def test_in_pairs_whatever_their_scatter(seed: int, pairs: int, sd: float, moved: list[float], direction: Direction) -> None:
    """Heavy tails and a drift: the medians of the arms and the change of the pairs lie far apart, and only the latter is told."""
    assert len(held(compare_pairs(*arms(seed, pairs, sd, moved, direction, drift=0.2)))) == len(moved) + 1


def test_medians_that_point_the_other_way_are_not_shown() -> None:
    """What a newcomer saw: a row 15 % slower by its pairs, whose base stood beside it as no faster at all."""
    latencies = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5]
    base, head = ([1 / value for value in arm] for arm in (latencies, [value * 1.15 for value in latencies[1:]] + [1.15]))
    (row,) = compare_pairs(commit_of([measured("row", base)], BASE_COMMIT), commit_of([measured("row", head)])).rows
    medians = float(np.median(base) / np.median(head))
    assert row.effect is not None
    assert abs(row.effect - (medians - 1)) > 0.03, "the two estimators differ here"
    assert row.baseline is not None
    assert row.value is not None
    assert row.value == pytest.approx(float(np.median(head)))
    assert row.baseline / row.value == pytest.approx(1 + row.effect)


@pytest.mark.parametrize("old", [False, True])
def test_on_the_h200_s_runs_against_their_baseline(root: Path, old: bool) -> None:
    """Over floors and controls, each of which moves the base to the host and the clocks that the run had."""
    folder = root / "docs" / "data" / "baseline-t1" if old else root / "baselines"
    stored = baselines.load(folder / "NVIDIA_H200.json")
    if old:
        stored = replace_waivers(stored)
    for path in sorted((folder / ("runs" if old else "asv")).iterdir())[:3]:
        result = compare_baseline([load_kept(path)], stored, now=datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc))
        assert len(held(result)) > 30


def replace_waivers(stored: baselines.Baseline) -> baselines.Baseline:
    return msgspec.structs.replace(stored, waivers=[])


def test_an_old_verdict_with_figures_of_several_estimators_would_be_found() -> None:
    """The check itself: a base from elsewhere, a latency of another process, and a row that passes outside its band."""
    result = compare_pairs(*arms(1, 12, 0.02, [0.0, 0.3], "higher", 0.0))
    (row, *rest) = result.rows
    assert row.value is not None
    assert row.latency_us is not None
    assert row.baseline is not None
    for fault in ({"baseline": row.value * 1.4}, {"latency_us": row.latency_us * 1.3}, {"band": (row.baseline * 1.1, row.baseline * 1.2)}):
        with pytest.raises(AssertionError):
            held(replace(result, rows=(replace(row, **fault), *rest)))


@given(st.lists(st.sampled_from([1e-5, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 0.01, 0.2]), min_size=1, max_size=8), st.data())
def test_the_level_of_one_row_among_others(p_values: list[float], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(p_values) - 1))
    assert bool(noise.holm(p_values, 0.01)[i]) == (p_values[i] <= noise.holm_level(p_values, i, 0.01))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([4, 7, 12, 16, 33]), st.sampled_from([0.001, 0.01, 0.1, 0.4]))
def test_the_edge_of_chance_is_where_the_test_turns(seed: int, pairs: int, level: float) -> None:
    """Signs of the same sizes: `sign_flip_p` is at least `level` exactly where the mean does not exceed the limit."""
    rng = np.random.default_rng(seed)
    size = np.abs(rng.standard_t(3, pairs))
    limit = noise.sign_flip_limit(size, level, key="k")
    for _ in range(20):
        d = size * rng.choice([-1.0, 1.0], pairs, p=[0.25, 0.75])
        mean = float(noise.clip_differences(d).mean())
        if abs(mean - limit) > 1e-9:
            assert (noise.sign_flip_p(d, key="k") >= level) == (mean <= limit)
    assert (limit == math.inf) == (level <= noise.smallest_p(pairs))
