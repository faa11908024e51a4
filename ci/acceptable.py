"""Which runs may become part of a baseline, and which rows of them: each refusal is one sentence that names the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ci.baseline_file import Device, Environment
from ci.errors import BaselineError
from ci.identity import device_of, environment_of, throttles
from ci.model import CommitResult, ProcessRecord, RowKey, RowResult
from ci.runner_state import number_of, states_of

_NAMED_FILES = 3


def agree(name: str, values: Sequence[tuple[str, object]]) -> None:
    """Refuses runs that differ in `name`, as (run, value) pairs.

    Raises:
        BaselineError: They do; the message names both runs and both values.
    """
    first_run, first = values[0]
    for run, value in values[1:]:
        if value != first:
            raise BaselineError(
                f"runs of one baseline must agree in {name}, but {first_run} has {first!r} and {run} has {value!r}; "
                "record runs of one device, software and protocol"
            )


def _faults(process: ProcessRecord) -> Iterable[str]:
    """What in a process' own record keeps its run out, with what to do next."""
    states = states_of(process.environment)
    reasons = dict.fromkeys(reason for state in states for reason in throttles({"state": state}))
    if reasons:
        yield f"was throttled ({', '.join(reasons)}); let the device cool down and measure that run again"
    foreign = int(max((number_of(state.get("foreign_processes")) or 0 for state in states), default=0))
    if foreign:
        yield f"shared its device with {foreign} other process{'' if foreign == 1 else 'es'}; measure that run again on a device of its own"
    errors = int(max((number_of(state.get("ecc_errors")) or 0 for state in states), default=0))
    if errors:
        yield f"ran on a device with {errors} uncorrected ECC error{'' if errors == 1 else 's'}; replace the device and measure again"
    modified = process.environment.get("modified_files")
    if modified:
        named = ", ".join(str(name) for name in modified[:_NAMED_FILES]) if isinstance(modified, list) else str(modified)
        yield f"was measured with tracked files modified ({named}); commit or undo them and measure that run again"


def processes_of(run: CommitResult) -> tuple[ProcessRecord, ...]:
    """The processes of a run that may be accepted by what they say of themselves.

    Raises:
        BaselineError: There are none, or one was throttled, shared its device, met an ECC error, or measured modified files.
    """
    if not run.processes:
        raise BaselineError(
            f"{run.source} has no process records, so nothing says how it was measured or whether it was verified; "
            "record a baseline from runs of this project's suites"
        )
    for process in run.processes:
        for fault in _faults(process):
            raise BaselineError(f"process {process.process} of {run.source} {fault}")
    return run.processes


def untold(runs: Sequence[CommitResult]) -> list[str]:
    """What the records of runs are silent about, for a person: records of an earlier instrument know less."""
    silent = [run.source for run in runs if any(process.environment.get("modified_files") is None for process in run.processes)]
    if not silent:
        return []
    return [
        f"{len(silent)} of {len(runs)} runs do not say whether tracked files were modified (first {silent[0]}): nobody has checked that"
    ]


def hold_together(runs: Sequence[CommitResult]) -> list[ProcessRecord]:
    """All processes of runs that are each acceptable, and of one device, software and protocol.

    Raises:
        BaselineError: They are not.
    """
    processes = [process for run in runs for process in processes_of(run)]
    agree("processes a run", [(run.source, len(run.processes)) for run in runs])
    for name in Device.__struct_fields__:
        agree(f"device.{name}", [(p.process, getattr(device_of(p.environment), name)) for p in processes])
    for name in Environment.__struct_fields__:
        agree(name, [(p.process, getattr(environment_of(p.environment), name)) for p in processes])
    agree("protocol", [(p.process, p.protocol) for p in processes])
    return processes


def check_row(key: RowKey, rows: Sequence[RowResult], runs: Sequence[CommitResult]) -> None:
    """Refuses a row that one of the runs did not measure, verify or complete.

    Args:
        key: The row.
        rows: Of each run.
        runs: In the same order.
    Raises:
        BaselineError: The message names row and run.
    """
    for row, run in zip(rows, runs, strict=True):
        over = [r.peak_fraction for r in row.records if r.peak_fraction is not None and r.peak_fraction > 1]
        wrong = [record for record in row.records if record.status != "ok"]
        if row.state != "measured" or over or wrong:
            told = row.state if row.state != "measured" or not wrong else wrong[0].status
            reason = row.reason or (wrong[0].reason if wrong else None)
            why = reason or f"{max(over, default=0):.4f} of the peak"
            raise BaselineError(f"{key} is {told} in one of the runs, {run.source} ({why}); mend the row before it is accepted")
        if row.record is None:
            raise BaselineError(f"{key} has values without records in {run.source}; read the runs with their records_dir")
        if len(row.samples) != len(run.processes):
            raise BaselineError(
                f"{key} has {len(row.samples)} values in {run.source}, where the runs have {len(run.processes)} processes; measure it again"
            )
