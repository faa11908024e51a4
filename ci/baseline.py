"""Baselines: what was accepted on a device, when it may be recorded, and when it may be compared with."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ci.baseline_file import (
    SCHEMA_ID,
    Baseline,
    Device,
    Environment,
    Protocol,
    Row,
    Run,
    Waiver,
    content_hash,
    load,
    load_waivers,
    save,
    to_json,
)
from ci.errors import BaselineError
from ci.identity import device_key, device_of, environment_of, table, text_of, throttles
from ci.model import CommitResult, ProcessRecord, RowKey, RowResult

__all__ = [
    "MIN_BOOTS",
    "MIN_RUNS",
    "SCHEMA_ID",
    "Baseline",
    "Problem",
    "Waiver",
    "check",
    "content_hash",
    "describe",
    "device_key",
    "file_name",
    "load",
    "load_waivers",
    "record",
    "save",
    "to_json",
]

MIN_RUNS = 5
MIN_BOOTS = 3
"""Boots or GPUs that a baseline has to span: noise within one boot is a part of the noise only."""
MAX_AGE_DAYS = 90


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


def _same(name: str, values: Sequence[tuple[str, object]]) -> None:
    """Refuses runs that differ in `name`, as (run, value) pairs."""
    first_run, first = values[0]
    for run, value in values[1:]:
        if value != first:
            raise BaselineError(
                f"runs of one baseline must agree in {name}, but {first_run} has {first!r} and {run} has {value!r}; "
                "record runs of one device, software and protocol"
            )


def _processes(run: CommitResult) -> tuple[ProcessRecord, ...]:
    if not run.processes:
        raise BaselineError(
            f"{run.source} has no process records, so nothing says how it was measured or whether it was verified; "
            "record a baseline from runs of this project's suites"
        )
    hot = [(process, throttles(process.environment)) for process in run.processes]
    for process, reasons in hot:
        if reasons:
            raise BaselineError(
                f"process {process.process} of {run.source} was throttled ({', '.join(reasons)}); "
                "let the device cool down and measure that run again"
            )
    return run.processes


def _row_of_runs(key: RowKey, rows: Sequence[RowResult], num_processes: int) -> Row:
    for row in rows:
        over = [r.peak_fraction for r in row.records if r.peak_fraction is not None and r.peak_fraction > 1]
        if row.state != "measured" or over:
            why = row.reason or f"{max(over, default=0):.4f} of the peak"
            raise BaselineError(f"{key} is {row.state} in one of the runs ({why}); mend the row before it is accepted")
        if row.record is None:
            raise BaselineError(f"{key} has values without records; read the runs with their records_dir")
        if len(row.samples) != num_processes:
            raise BaselineError(
                f"{key} has {len(row.samples)} values in one run where the runs have {num_processes} processes; measure it again"
            )
    records = [record for row in rows for record in row.records]
    for name in ("unit", "version", "impl", "op", "control", "bottleneck", "timer", "instrument", "input_hash"):
        _same(f"{name} of {key}", [(record.process, getattr(record, name)) for record in records])
    last = records[-1]
    latencies = [[record.latency_us for record in row.records] for row in rows]
    launches = {record.launch_hash for record in records}
    diffs = [record.max_abs_diff for record in records if record.max_abs_diff is not None]
    peaks = [record.peak_fraction for record in records if record.peak_fraction is not None]
    return Row(
        benchmark=key.benchmark,
        params=list(key.params),
        metric="throughput" if rows[0].direction == "higher" else "cost",
        unit=rows[0].unit,
        direction=rows[0].direction,
        bottleneck=last.bottleneck,
        version=rows[0].version,
        values=[list(row.samples) for row in rows],
        op=last.op,
        impl=last.impl,
        control=last.control,
        timer=last.timer,
        instrument=last.instrument,
        latency_us=None
        if any(value is None for run in latencies for value in run)
        else [[float(value) for value in run if value is not None] for run in latencies],
        phase=last.phase,
        kv_dtype=last.kv_dtype,
        tick_us=last.tick_us,
        floor_us=last.floor_us,
        launch_hash=last.launch_hash if len(launches) == 1 else None,
        input_hash=last.input_hash,
        max_abs_diff=max(diffs, default=None),
        peak_fraction=max(peaks, default=None),
    )


def _run(index: int, run: CommitResult) -> Run:
    last = run.processes[-1]
    device, state = table(last.environment, "device"), table(last.environment, "state")
    controls = {
        str(key): float(np.median(row.samples))
        for key, row in run.rows.items()
        if row.samples and row.record is not None and row.record.control
    }
    return Run(
        id=f"{index + 1}-{run.commit[:12]}",
        boot=text_of(last.environment.get("boot_id")),
        gpu_uuid=text_of(device.get("uuid")),
        time=run.processes[0].started_at,
        commit=run.commit,
        sm_clock_mhz=state.get("sm_clock_mhz"),
        mem_clock_mhz=state.get("mem_clock_mhz"),
        temperature_c=state.get("temperature_c"),
        throttle_reasons=[str(reason) for reason in state.get("throttle_reasons") or []],
        controls=controls,
    )


def record(
    runs: Sequence[CommitResult],
    *,
    accepted_by: str,
    reason: str = "",
    anchor_commit: str | None = None,
    previous: Baseline | None = None,
    waivers: Sequence[Waiver] = (),
    allow_single_boot: bool = False,
) -> Baseline:
    """Makes a baseline of accepted runs.

    Args:
        runs: Each one run of K processes, joined with its records.
        accepted_by: Who answers for it.
        reason: Why it was recorded or replaced, for the reviewer.
        anchor_commit: The commit that slow drift is held against; that of the previous baseline, else of the first run, where None.
        previous: The baseline that this one replaces; its hash is stored.
        waivers: Waivers to carry.
        allow_single_boot: Accept fewer than three boots or GPUs; the baseline is then marked advisory.
    Returns:
        The baseline with raw values. Rows that every run skipped are left out.
    Raises:
        BaselineError: Too few runs or boots, a throttled run, runs that differ in device, software or protocol, or a row that failed, is
            unverified or over the peak; the message names the key and both values.
    """
    if len(runs) < MIN_RUNS:
        raise BaselineError(f"a baseline needs at least {MIN_RUNS} runs, but {len(runs)} came; measure more runs")
    processes = [process for run in runs for process in _processes(run)]
    _same("processes a run", [(run.source, len(run.processes)) for run in runs])
    for name in Device.__struct_fields__:
        _same(f"device.{name}", [(p.process, getattr(device_of(p.environment), name)) for p in processes])
    for name in Environment.__struct_fields__:
        _same(name, [(p.process, getattr(environment_of(p.environment), name)) for p in processes])
    _same("protocol", [(p.process, p.protocol) for p in processes])
    recorded = [_run(index, run) for index, run in enumerate(runs)]
    boots = {(run.boot, run.gpu_uuid) for run in recorded}
    if len(boots) < MIN_BOOTS and not allow_single_boot:
        raise BaselineError(
            f"a baseline needs runs of at least {MIN_BOOTS} boots or GPUs, but {len(boots)} came; "
            "measure after a restart, or accept an advisory baseline"
        )
    keys = sorted({key for run in runs for key in run.rows})
    rows = {}
    num_processes = len(runs[0].processes)
    for key in keys:
        found = [run.rows.get(key) for run in runs]
        present = [row for row in found if row is not None]
        if len(present) < len(runs):
            raise BaselineError(f"{key} is missing from {len(runs) - len(present)} of {len(runs)} runs; measure all rows in each")
        if all(row.state == "skipped" for row in present):
            continue
        if str(key) in rows:
            raise BaselineError(f"two rows are both written {key}; give their parameters texts that stay apart")
        rows[str(key)] = _row_of_runs(key, present, num_processes)
    if not rows:
        raise BaselineError("the runs have no measured row; run the suites on this device first")
    first = processes[0]
    return Baseline(
        schema=SCHEMA_ID,
        protocol=Protocol(
            processes=num_processes,
            estimator="fast60",
            timers=sorted({row.timer for row in rows.values()}),
            l2=sorted({record.l2 for process in processes for record in process.rows if record.l2 is not None}),
            hash=first.protocol,
        ),
        device=device_of(first.environment),
        environment=environment_of(first.environment),
        anchor_commit=anchor_commit or (previous.anchor_commit if previous is not None else runs[0].commit),
        runs=recorded,
        rows=rows,
        accepted_by=accepted_by,
        reason=reason,
        waivers=list(waivers),
        previous_hash=None if previous is None else content_hash(previous),
        advisory=len(boots) < MIN_BOOTS,
    )


def describe(baseline: Baseline) -> str:
    """The baseline for a person: device, runs, rows with their medians, waivers."""
    when = sorted(run.time for run in baseline.runs)
    boots = len({(run.boot, run.gpu_uuid) for run in baseline.runs})
    lines = [
        f"{file_name(baseline)}: {baseline.device.name}{', advisory' if baseline.advisory else ''}",
        f"accepted by {baseline.accepted_by}{f': {baseline.reason}' if baseline.reason else ''}",
        f"{len(baseline.runs)} runs of {baseline.protocol.processes} processes on {boots} boots or GPUs, {when[0]} to {when[-1]}",
        f"anchor {baseline.anchor_commit[:12]}, protocol {baseline.protocol.hash}, torch {baseline.environment.torch}, "
        f"triton {baseline.environment.triton}, driver {baseline.environment.driver}",
        "",
    ]
    for key, row in sorted(baseline.rows.items()):
        medians = [float(np.median(values)) for values in row.values]
        spread = 100 * (max(medians) / min(medians) - 1)
        lines.append(f"{key}: {float(np.median(medians)):.6g} {row.unit}, runs within {spread:.2f} %")
    lines.extend(
        f"waived: {waiver.row} may be {waiver.change} until {waiver.expires} ({waiver.approver}, {waiver.reference}): {waiver.reason}"
        for waiver in baseline.waivers
    )
    return "\n".join(lines)


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
                f"{file} is of device.{field} {there!r}, but the run of {here!r}; record this device's own",
            )
    if protocol != baseline.protocol.hash:
        text = f"{file} was measured under protocol {baseline.protocol.hash!r}, but the run under {protocol!r}; record it again"
        add("protocol", "error", text)
    software = environment_of(environment)
    pairs = [
        ("driver major", _major(baseline.environment.driver), _major(software.driver)),
        ("torch", baseline.environment.torch, software.torch),
        ("triton", baseline.environment.triton, software.triton),
    ]
    for field, there, here in pairs:
        if here != there:
            text = f"{file} was measured with {field} {there}, but the run with {here}; refresh it with runs of this environment"
            add("environment", "error", text)
    if len(baseline.runs) < MIN_RUNS:
        add("runs", "error", f"{file} has {len(baseline.runs)} runs where at least {MIN_RUNS} are needed; record more")
    boots = {(run.boot, run.gpu_uuid) for run in baseline.runs}
    if len(boots) < 2 and not baseline.advisory:
        add("runs", "error", f"{file} has runs of a single boot; record runs of at least {MIN_BOOTS} boots or GPUs")
    for waiver in baseline.waivers:
        if waiver.expires < now.date():
            text = f"{file} waives {waiver.row} ({waiver.change}) until {waiver.expires}, which is past; renew or remove the waiver"
            add("waiver", "error", text)
    hot = throttles({"state": {"throttle_reasons": [reason for run in baseline.runs for reason in run.throttle_reasons]}})
    if hot:
        add(
            "runs",
            "error",
            f"{file} has a throttled run ({', '.join(sorted(set(hot)))}); record it again on a cool device",
        )
    times = [_when(run.time) for run in baseline.runs]
    oldest = min((when for when in times if when is not None), default=None)
    if oldest is None:
        add("age", "warning", f"{file} has runs without a readable time, so that its age is unknown; record it again")
    elif (now - oldest).days > MAX_AGE_DAYS:
        add("age", "warning", f"{file} is {(now - oldest).days} days old, over {MAX_AGE_DAYS}; refresh it")
    newest = max((when for when in times if when is not None), default=None)
    if newest is not None and (newest - now).days >= 1:
        add(
            "age",
            "warning",
            f"{file} has a run of {newest:%Y-%m-%d}, after today; set the clock of this machine, waivers live longer by it",
        )
    if baseline.advisory:
        add(
            "advisory",
            "warning",
            f"{file} is advisory: its runs span fewer than {MIN_BOOTS} boots or GPUs; record more",
        )
    return sorted(problems, key=lambda problem: problem.severity != "error")


def _when(text: str) -> datetime.datetime | None:
    try:
        when = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=datetime.timezone.utc)
