"""What else moved when the controls moved: clocks, throttle bits, temperature and other processes, held against the other side's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ci.baseline_file import Run
from ci.identity import table, throttles
from ci.model import CommitResult, ProcessRecord

CLOCK_SHARE = 0.02
"""A clock counts as moved where it is further than this outside the other side's range."""
TEMPERATURE_C = 5.0
"""A temperature counts as moved where it is further than this outside the other side's range."""


@dataclass(frozen=True)
class State:
    """A device while a process measured; None is unknown."""

    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttles: tuple[str, ...] = ()
    foreign_processes: int | None = None


def states_of(environment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states that a process record holds: at the end of the process, and at its start where that was recorded."""
    return [state for name in ("state", "state_at_start") if (state := table(environment, name))]


def number_of(value: object) -> float | None:
    """A number of a record, None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def of_process(process: ProcessRecord) -> State:
    """The state of a measuring process: clocks and temperature at its end, throttle bits and other processes at any time."""
    states = states_of(process.environment)
    last = states[0] if states else {}
    foreign = [found for state in states if (found := number_of(state.get("foreign_processes"))) is not None]
    reasons = [reason for state in states for reason in throttles({"state": state})]
    return State(
        sm_clock_mhz=number_of(last.get("sm_clock_mhz")),
        mem_clock_mhz=number_of(last.get("mem_clock_mhz")),
        temperature_c=number_of(last.get("temperature_c")),
        throttles=tuple(dict.fromkeys(reasons)),
        foreign_processes=int(max(foreign)) if foreign else None,
    )


def of_run(run: Run) -> State:
    """The state that a baseline keeps of a run; no run with another process on the device was accepted."""
    reasons = throttles({"state": {"throttle_reasons": run.throttle_reasons}})
    return State(run.sm_clock_mhz, run.mem_clock_mhz, run.temperature_c, tuple(reasons), None)


def explained(unfit: str, heads: Sequence[CommitResult], known: Sequence[State]) -> str:
    """The reason of an unfit runner with what moved besides the controls, and what to do.

    Args:
        unfit: What shows that the machine moved.
        heads: The runs under test.
        known: States of the other side: the baseline's runs, or the base commit's processes.
    """
    return (
        f"{unfit}; {difference([of_process(process) for head in heads for process in head.processes], known)}; run the same command again"
    )


def difference(ours: Sequence[State], theirs: Sequence[State]) -> str:
    """What differs between two sides, in words; says so where nothing does, or where nothing is known."""
    parts = [
        told
        for name, unit, label, relative in (
            ("sm_clock_mhz", "MHz", "SM clock", True),
            ("mem_clock_mhz", "MHz", "memory clock", True),
            ("temperature_c", "C", "temperature", False),
        )
        if (told := _moved(_known(ours, name), _known(theirs, name), unit, label, relative=relative))
    ]
    new = sorted({reason for state in ours for reason in state.throttles} - {reason for state in theirs for reason in state.throttles})
    if new:
        parts.append(f"throttle bits set: {', '.join(new)}")
    foreign = max((state.foreign_processes or 0 for state in ours), default=0)
    if foreign:
        parts.append(f"{foreign} other process{'' if foreign == 1 else 'es'} on the device")
    if parts:
        return f"besides: {', '.join(parts)}"
    if not any(_known(ours, name) and _known(theirs, name) for name in ("sm_clock_mhz", "mem_clock_mhz", "temperature_c")):
        return "clocks and temperature are not known on both sides"
    return "clocks, throttle bits and temperature are as on the other side, so look for other tenants"


def _known(states: Sequence[State], name: str) -> list[float]:
    return [value for state in states if (value := getattr(state, name)) is not None]


def _moved(ours: Sequence[float], theirs: Sequence[float], unit: str, label: str, *, relative: bool) -> str | None:
    if not ours or not theirs:
        return None
    low, high = min(theirs), max(theirs)
    slack_low, slack_high = (CLOCK_SHARE * low, CLOCK_SHARE * high) if relative else (TEMPERATURE_C, TEMPERATURE_C)
    outside = [value for value in ours if value < low - slack_low or value > high + slack_high]
    if not outside:
        return None
    return f"{label} {_range(outside, unit)} against {_range(theirs, unit)}"


def _range(values: Sequence[float], unit: str) -> str:
    low, high = min(values), max(values)
    return f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"
