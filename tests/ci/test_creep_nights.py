"""Months and years of nights: a drift is told before it sums to 5 %, and without a drift nothing creeps (case 17)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from gate_builders import a_run
from gate_shortcuts import NOW

from ci import baseline as baselines
from ci.baseline import Baseline
from ci.compare import compare_baseline
from ci.errors import BaselineError
from ci.model import CommitResult, RowKey
from ci.references import Reference, references_of

NIGHTLY = 0.999
"""A tenth of a per cent of throughput a night."""


@pytest.fixture(autouse=True)
def _references_are_made_once_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """They follow from the baseline alone, which stays for many nights."""
    known: dict[int, tuple[Baseline, Mapping[RowKey, Reference]]] = {}

    def remembered(baseline: Baseline) -> Mapping[RowKey, Reference]:
        if id(baseline) not in known:
            known[id(baseline)] = (baseline, references_of(baseline))
        return known[id(baseline)][1]

    monkeypatch.setattr("ci.compare.references_of", remembered)


@dataclass
class _Told:
    night: int
    how: str
    total: float


def _nights(rng: np.random.Generator, drift: float, every: int | None, num_nights: int, sd: float) -> tuple[list[_Told], int]:
    """Nights of one run each against a baseline that is refreshed every so many nights by the last five runs.

    Returns:
        What was told of decode_b or of any other row, with the drift that had summed by then, and the number of refreshes.
    """
    seed = int(rng.integers(1, 1_000_000)) * 1000
    baseline = baselines.record([a_run(seed - 1 - i, sd=sd) for i in range(6)], accepted_by="A")
    last: deque[CommitResult] = deque(maxlen=5)
    told: list[_Told] = []
    refreshes = 0
    for night in range(1, num_nights + 1):
        factor = drift**night
        run = replace(a_run(seed + night, commit=f"{night:040x}", factors={"decode_b": factor}, sd=sd), source=f"night {night}")
        result = compare_baseline([run], baseline, now=NOW)
        for row in result.rows:
            if "CREEP" in row.flags or row.verdict.value == "REGRESSED":
                told.append(_Told(night, "CREEP" if "CREEP" in row.flags else "REGRESSED", 1 / factor - 1))
        last.append(run)
        if every is not None and night % every == 0 and len(last) == 5:
            try:
                made = baselines.refresh(baseline, list(last), accepted_by="cron", reason=f"night {night}")
            except BaselineError:
                continue  # a run that looks odd beside its neighbours waits for the next time
            refreshes += made.baseline is not baseline
            baseline = made.baseline
    return told, refreshes


@pytest.mark.parametrize("sd", [0.001, 0.003])
@pytest.mark.parametrize("every", [None, 1, 30])
def test_a_drift_of_a_tenth_of_a_per_cent_a_night_is_told_before_it_sums_to_five(every: int | None, sd: float) -> None:
    """49 nights: nightly refreshes swallow each step, and only the anchor sees the sum."""
    nights = math.floor(math.log(1 / 1.05) / math.log(NIGHTLY))
    told, refreshes = _nights(np.random.default_rng(int(1e4 * sd)), NIGHTLY, every, nights, sd)
    assert told
    assert told[0].total < 0.05
    if every == 1:
        assert refreshes >= 3
        (first, *_) = [one for one in told if one.how == "CREEP"]
        assert 0.025 < first.total < 0.05


def test_without_anchors_nightly_refreshes_swallow_the_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: rows forget where they came from, and nothing is told of a drift of 5 %, which shows that the anchor tells it."""
    drop: Callable[..., None] = lambda baseline, row: None  # noqa: E731
    monkeypatch.setattr("ci.baseline_refresh.anchor_of", drop)
    told, refreshes = _nights(np.random.default_rng(30), NIGHTLY, 1, 48, 0.003)
    assert refreshes >= 3
    assert not [one for one in told if one.how == "CREEP"]


def test_nothing_creeps_in_three_months_without_drift() -> None:
    told, _ = _nights(np.random.default_rng(1), 1.0, 30, 90, 0.002)
    assert not [one for one in told if one.how == "CREEP"]


@pytest.mark.slow
@pytest.mark.parametrize(("every", "years", "most"), [(None, 2, 17), (1, 1, 11), (30, 2, 17)])
def test_no_row_creeps_in_years_without_drift(every: int | None, years: int, most: int) -> None:
    """A seed and 365 nights a year, six rows each, noise .1 to .3 %: no CREEP in 730 nights a schedule, or 365 with nightly refreshes.

    REGRESSED comes in no more nights than the gate's 1 % allows (`most` is its 99.9 % quantile); one a schedule as written.
    """
    told = [
        one for seed in range(years) for one in _nights(np.random.default_rng(seed), 1.0, every, 365, (0.001, 0.002, 0.003)[seed % 3])[0]
    ]
    assert not [one for one in told if one.how == "CREEP"]
    assert len(told) <= most
