"""When a baseline may be compared with: validity of a file for the device, protocol and software of a run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ci.baseline_file import Baseline
from ci.identity import device_key, device_of, environment_of, throttles

MIN_RUNS = 5
MIN_BOOTS = 3
"""Boots or GPUs that a set of runs has to span: noise within one boot is a part of the noise only."""
MAX_AGE_DAYS = 90

RECORD = "`python -m ci baseline record RUN... --reason R`"
REFRESH = "`python -m ci baseline refresh RUN... --reason R`"


@dataclass(frozen=True)
class Problem:
    """Why a baseline may not be used, or should be refreshed. `kind` says what differs."""

    kind: Literal["device", "protocol", "environment", "runs", "waiver", "age", "advisory"]
    severity: Literal["error", "warning"]
    message: str

    def __str__(self) -> str:
        return self.message


def file_name(baseline: Baseline) -> str:
    """Where the baseline belongs, relative to the repository root."""
    return f"baselines/{device_key(baseline.device.name, mig=baseline.device.mig)}.json"


def boots_of(baseline: Baseline, run_set: str) -> int:
    """Boots or GPUs that the runs of a set span."""
    return len({(run.boot, run.gpu_uuid) for run in baseline.runs if run.run_set == run_set})


def _major(version: str | None) -> str | None:
    return None if version is None else version.split(".")[0]


def check(
    baseline: Baseline,
    environment: Mapping[str, Any],
    protocol: str,
    *,
    now: datetime.datetime | None = None,
    name: str | None = None,
) -> list[Problem]:
    """Whether a run in `environment` under `protocol` may be compared with the baseline.

    Args:
        baseline: As loaded.
        environment: Of a process of the run under test.
        protocol: Hash of the measuring protocol of that process.
        now: For the age of the baseline and the expiry of waivers, UTC; the present where None.
        name: What the messages call the file; its place in the repository where None.
    Returns:
        Errors first, then warnings; each one sentence that names the file to update.
    """
    file = name or file_name(baseline)
    now = now or datetime.datetime.now(datetime.timezone.utc)
    problems: list[Problem] = []

    def add(kind: Any, severity: Any, text: str) -> None:
        problems.append(Problem(kind, severity, text))

    ours, theirs = device_of(environment), baseline.device
    for field in ("name", "compute_capability", "multiprocessors", "memory_bytes", "mig"):
        here, there = getattr(ours, field), getattr(theirs, field)
        if here != there:
            add(
                "device",
                "error",
                f"{file} is of device.{field} {there!r}, but the run of {here!r}; record this device's own file with {RECORD}",
            )
    if protocol != baseline.protocol.hash:
        text = f"{file} was measured under protocol {baseline.protocol.hash!r}, but the run under {protocol!r}; replace it with {RECORD}"
        add("protocol", "error", text)
    software = environment_of(environment)
    pairs = [
        ("driver major", _major(baseline.environment.driver), _major(software.driver)),
        ("torch", baseline.environment.torch, software.torch),
        ("triton", baseline.environment.triton, software.triton),
    ]
    for field, there, here in pairs:
        if here != there:
            text = (
                f"{file} was measured with {field} {there}, but the run with {here}; replace it by runs of this environment with {RECORD}"
            )
            add("environment", "error", text)
    for run_set, indices in baseline.run_sets.items():
        which = "" if len(baseline.run_sets) == 1 else f" in the run set {run_set}"
        if len(indices) < MIN_RUNS:
            text = f"{file} has {len(indices)} runs{which} where at least {MIN_RUNS} are needed; record more with {RECORD}"
            add("runs", "error", text)
        if boots_of(baseline, run_set) < 2 and not baseline.advisory:
            text = f"{file} has runs of a single boot{which}; replace it by runs of at least {MIN_BOOTS} boots or GPUs with {RECORD}"
            add("runs", "error", text)
    for waiver in baseline.waivers:
        if waiver.expires < now.date():
            text = (
                f"{file} waives {waiver.row} ({waiver.change}) until {waiver.expires}, which is past; renew or remove the waiver in {file}"
            )
            add("waiver", "error", text)
    hot = throttles({"state": {"throttle_reasons": [reason for run in baseline.runs for reason in run.throttle_reasons]}})
    if hot:
        add(
            "runs",
            "error",
            f"{file} has a throttled run ({', '.join(sorted(set(hot)))}); replace it by runs of a cool device with {RECORD}",
        )
    times = [_when(run.time) for run in baseline.runs]
    oldest = min((when for when in times if when is not None), default=None)
    if oldest is None:
        add("age", "warning", f"{file} has runs without a readable time, so that its age is unknown; replace it with {RECORD}")
    elif (now - oldest).days > MAX_AGE_DAYS:
        add(
            "age",
            "warning",
            f"{file} is {(now - oldest).days} days old, over {MAX_AGE_DAYS}; measure it anew: {REFRESH} --rows . replaces every row",
        )
    newest = max((when for when in times if when is not None), default=None)
    if newest is not None and (newest - now).days >= 1:
        add("age", "error", f"{file} has a run of {newest:%Y-%m-%d}, after today; set the clock of this machine, waivers live longer by it")
    if baseline.advisory:
        add(
            "advisory",
            "warning",
            f"{file} is advisory: its runs span fewer than {MIN_BOOTS} boots or GPUs; record more with {RECORD}",
        )
    noisy = sorted(name for name, row in baseline.rows.items() if row.noisy)
    if noisy:
        add(
            "advisory",
            "warning",
            f"{file} has {len(noisy)} row(s) accepted as noisy (a run of theirs looked like a regression), first {noisy[0]}; "
            f"measure them better and replace them: {REFRESH} --rows ROW",
        )
    return sorted(problems, key=lambda problem: problem.severity != "error")


def _when(text: str) -> datetime.datetime | None:
    try:
        when = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=datetime.timezone.utc)
