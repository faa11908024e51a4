"""Making a baseline of accepted runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ci import self_test
from ci.acceptable import agree, check_row, hold_together
from ci.baseline_check import MIN_BOOTS, MIN_RUNS, boots_of
from ci.baseline_file import FIRST_SET, SCHEMA_ID, Baseline, Device, Environment, Protocol, Row, Run, Waiver, content_hash
from ci.creep import with_anchors_of
from ci.errors import BaselineError
from ci.host_floor import floors_of
from ci.identity import device_of, environment_of, table, text_of
from ci.model import CommitResult, RowKey, RowResult


def _row_of_runs(key: RowKey, rows: Sequence[RowResult], run_set: str) -> Row:
    records = [record for row in rows for record in row.records]
    for name in ("unit", "version", "impl", "op", "control", "bottleneck", "timer", "instrument", "input_hash"):
        agree(f"{name} of {key}", [(record.process, getattr(record, name)) for record in records])
    last = records[-1]
    floors = [floors_of(row) for row in rows]
    known = [list(run) for run in floors if run is not None]
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
        host_floors_us=known if len(known) == len(rows) else None,
        phase=last.phase,
        kv_dtype=last.kv_dtype,
        tick_us=last.tick_us,
        floor_us=last.floor_us,
        launch_hash=last.launch_hash if len(launches) == 1 else None,
        input_hash=last.input_hash,
        max_abs_diff=max(diffs, default=None),
        peak_fraction=max(peaks, default=None),
        run_set=run_set,
    )


def _run(index: int, run: CommitResult, run_set: str) -> Run:
    last = run.processes[-1]
    device, state = table(last.environment, "device"), table(last.environment, "state")
    controls = {
        str(key): float(np.median(row.samples))
        for key, row in run.rows.items()
        if row.samples and row.record is not None and row.record.control
    }
    return Run(
        id=f"{'' if run_set == FIRST_SET else f'{run_set}.'}{index + 1}-{run.commit[:12]}",
        boot=text_of(last.environment.get("boot_id")),
        gpu_uuid=text_of(device.get("uuid")),
        time=run.processes[0].started_at,
        commit=run.commit,
        sm_clock_mhz=state.get("sm_clock_mhz"),
        mem_clock_mhz=state.get("mem_clock_mhz"),
        temperature_c=state.get("temperature_c"),
        throttle_reasons=[str(reason) for reason in state.get("throttle_reasons") or []],
        controls=controls,
        run_set=run_set,
    )


def gathered(runs: Sequence[CommitResult], *, accepted_by: str, reason: str, allow_single_boot: bool, run_set: str = FIRST_SET) -> Baseline:
    """The runs as one set of a baseline, with its own first commit for an anchor and without a self-test.

    Raises:
        BaselineError: As `record`.
    """
    if len(runs) < MIN_RUNS:
        raise BaselineError(f"a baseline needs at least {MIN_RUNS} runs, but {len(runs)} came; measure more runs")
    processes = hold_together(runs)
    rows: dict[str, Row] = {}
    for key in sorted({key for run in runs for key in run.rows}):
        found = [run.rows.get(key) for run in runs]
        present = [row for row in found if row is not None]
        if len(present) < len(runs):
            lacking = [run.source for run, row in zip(runs, found, strict=True) if row is None]
            raise BaselineError(f"{key} is missing from {len(lacking)} of {len(runs)} runs, first {lacking[0]}; measure all rows in each")
        if all(row.state == "skipped" for row in present):
            continue
        if str(key) in rows:
            raise BaselineError(f"two rows are both written {key}; give their parameters texts that stay apart")
        check_row(key, present, runs)
        rows[str(key)] = _row_of_runs(key, present, run_set)
    if not rows:
        raise BaselineError("the runs have no measured row; run the suites on this device first")
    first = processes[0]
    made = Baseline(
        schema=SCHEMA_ID,
        protocol=Protocol(
            processes=len(runs[0].processes),
            estimator="fast60",
            timers=sorted({row.timer for row in rows.values()}),
            l2=sorted({record.l2 for process in processes for record in process.rows if record.l2 is not None}),
            hash=first.protocol,
        ),
        device=device_of(first.environment),
        environment=environment_of(first.environment),
        anchor_commit=runs[0].commit,
        runs=[_run(index, run, run_set) for index, run in enumerate(runs)],
        rows=rows,
        accepted_by=accepted_by,
        reason=reason,
    )
    boots = boots_of(made, run_set)
    if boots < MIN_BOOTS and not allow_single_boot:
        raise BaselineError(
            f"a baseline needs runs of at least {MIN_BOOTS} boots or GPUs, but {boots} came; "
            "measure after a restart, or accept an advisory baseline"
        )
    return msgspec.structs.replace(made, advisory=boots < MIN_BOOTS)


def of_one_kind(previous: Baseline, made: Baseline) -> str | None:
    """What keeps the values of two baselines from being compared, with both values, or None."""
    pairs = [
        (f"{part}.{field}", *(getattr(getattr(side, part), field) for side in (previous, made)))
        for part, fields in (("device", Device.__struct_fields__), ("environment", Environment.__struct_fields__))
        for field in fields
    ]
    pairs.append(("protocol", previous.protocol.hash, made.protocol.hash))
    pairs.append(("processes a run", previous.protocol.processes, made.protocol.processes))
    return next((f"the baseline has the {name} {old!r} and the runs have {new!r}" for name, old, new in pairs if old != new), None)


def record(
    runs: Sequence[CommitResult],
    *,
    accepted_by: str,
    reason: str = "",
    anchor_commit: str | None = None,
    previous: Baseline | None = None,
    previous_hash: str | None = None,
    waivers: Sequence[Waiver] = (),
    allow_single_boot: bool = False,
    accept_noisy: bool = False,
    new_anchor: bool = False,
) -> Baseline:
    """Makes a baseline of accepted runs.

    Args:
        runs: Each one run of K processes, joined with its records.
        accepted_by: Who answers for it.
        reason: Why it was recorded or replaced, for the reviewer.
        anchor_commit: The commit that slow drift is held against; that of the previous baseline where its anchors are carried over, else of
            the first run, where None.
        previous: The baseline that this one replaces; its hash is stored, and its anchors hold on where device, software and protocol are
            the same.
        previous_hash: sha256 of the previous file; of `previous` as it would be written where None.
        waivers: Waivers to carry.
        allow_single_boot: Accept fewer than three boots or GPUs; the baseline is then marked advisory.
        accept_noisy: Accept rows that fail the self-test, and mark them.
        new_anchor: Leave the anchors of the previous baseline behind.
    Returns:
        The baseline with raw values. Rows that every run skipped are left out.
    Raises:
        BaselineError: Too few runs or boots; a run that was throttled, shared its device, met an ECC error, measured modified files, or
            whose controls moved against the other runs'; runs that differ in device, software or protocol; a row that failed, is
            unverified, is over the peak, or looks like a regression in one run. The message names run or row, and both values.
    """
    made = gathered(runs, accepted_by=accepted_by, reason=reason, allow_single_boot=allow_single_boot)
    noisy = self_test.noisy_rows(made, runs, set(made.rows), accept=accept_noisy)
    rows = {name: msgspec.structs.replace(row, noisy=name in noisy) for name, row in made.rows.items()}
    made = msgspec.structs.replace(made, rows=rows)
    if previous is not None and not new_anchor and of_one_kind(previous, made) is None:
        made = with_anchors_of(made, previous)
    return msgspec.structs.replace(
        made,
        anchor_commit=anchor_commit or made.anchor_commit,
        waivers=list(waivers),
        previous_hash=None if previous is None else previous_hash or content_hash(previous),
    )
