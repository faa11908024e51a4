"""What moved besides the controls (case 28): told with the reason of an unfit runner, against a baseline and in pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gate_builders import a_run, environment
from gate_shortcuts import compare, head

from ci.confirm import compare_pairs
from ci.model import CommitResult
from ci.runner_state import State, difference, of_process

CALM = State(1980.0, 3201.0, 40.0, (), None)


def _env(run: CommitResult, **changes: Any) -> CommitResult:
    return replace(run, processes=tuple(replace(p, environment=environment(**changes)) for p in run.processes))


@pytest.mark.parametrize(
    ("changes", "told", "untold"),
    [
        ({"state__sm_clock_mhz": 1410.0}, "SM clock 1410 MHz against 1980 MHz", "temperature"),
        ({"state__mem_clock_mhz": 2619.0}, "memory clock 2619 MHz against 3201 MHz", "SM clock"),
        ({"state__temperature_c": 84.0}, "temperature 84 C against 40 C", "clock 1980"),
        ({"state__throttle_reasons": ["hw_thermal_slowdown"]}, "throttle bits set: hw_thermal_slowdown", "against"),
        ({"state__foreign_processes": 2}, "2 other processes on the device", "against"),
        ({"state_at_start": {"foreign_processes": 1}}, "1 other process on the device", "against"),
        ({}, "clocks, throttle bits and temperature are as on the other side", "besides"),
        ({"state": {}}, "clocks and temperature are not known on both sides", "besides"),
    ],
)
def test_an_unfit_runner_says_what_else_moved(changes: dict[str, Any], told: str, untold: str) -> None:
    result = compare(_env(head(shift=0.9), **changes))
    assert result.exit_code == 5
    reason = result.reason.partition("run again; ")[2]
    assert told in reason
    assert untold not in reason
    assert reason.endswith("run the same command again")


def test_pairs_say_it_too_and_a_fit_runner_says_nothing() -> None:
    base, moved = a_run(1, processes=12), _env(a_run(2, shift=0.9, processes=12), state__sm_clock_mhz=1410.0)
    result = compare_pairs(base, moved)
    assert result.exit_code == 5
    assert "besides: SM clock 1410 MHz against 1980 MHz; run the same command again" in result.reason
    fit = compare_pairs(base, _env(a_run(2, processes=12), state__sm_clock_mhz=1410.0))
    assert "SM clock" not in fit.reason


@pytest.mark.parametrize(("clock", "moved"), [(1950.0, False), (1930.0, True), (2010.0, False), (2030.0, True), (None, False)])
def test_a_clock_within_two_per_cent_of_the_range_has_not_moved(clock: float | None, moved: bool) -> None:
    told = difference([replace(CALM, sm_clock_mhz=clock)], [CALM, replace(CALM, sm_clock_mhz=1990.0)])
    assert ("SM clock" in told) == moved


def test_strange_states_are_unknown() -> None:
    """A state with other types than numbers stops nothing."""
    run = _env(head(), state={"sm_clock_mhz": "fast", "foreign_processes": "many", "temperature_c": True, "throttle_reasons": None})
    assert of_process(run.processes[0]) == State()
