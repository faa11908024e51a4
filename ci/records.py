"""Process records: what each measuring process wrote beside asv's samples.

One strict-JSON file a process; the layout is `ProcessFile`, its JSON schema
`baselines/schema/process-record.schema.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ci.errors import InputError
from ci.host_floor import host_floor
from ci.jsonio import read_json
from ci.keys import param_text
from ci.model import ProcessRecord, RowKey, RowRecord

SCHEMA_ID = "rapid_llm/process-record/1"

Count = Annotated[int, msgspec.Meta(ge=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Names the process' file, and therefore no other one."""

Commit = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]


class WorkFile(msgspec.Struct, frozen=True):
    """The work of one call."""

    flops: NonNegative | None = None
    moved_bytes: NonNegative | None = None
    written_bytes: NonNegative | None = None


class RowFile(msgspec.Struct, frozen=True):
    """One row of one process, as it lies in the file."""

    benchmark: Annotated[str, msgspec.Meta(min_length=1)]
    params: list[str | int | float | bool | None]
    status: Literal["ok", "failed", "unverified", "violation", "invalid", "skipped"]
    op: str
    impl: str
    control: bool
    bottleneck: str
    unit: str
    version: str
    reason: str | None = None
    phase: str | None = None
    kv_dtype: str | None = None
    value: Positive | None = None
    latency_us: Positive | None = None
    quantiles_us: list[float] | None = None
    samples: Count | None = None
    timer: str | None = None
    instrument: Literal["device", "wall-clock", ""] | None = None
    floor_us: NonNegative | None = None
    tick_us: NonNegative | None = None
    estimator: str | None = None
    host_us: NonNegative | None = None
    wall_s: NonNegative | None = None
    timed_s: NonNegative | None = None
    l2: str | None = None
    work: WorkFile | None = None
    gb_per_s: NonNegative | None = None
    tflop_per_s: NonNegative | None = None
    peak_fraction: NonNegative | None = None
    copy_fraction: NonNegative | None = None
    ceiling_fraction: NonNegative | None = None
    max_abs_diff: NonNegative | None = None
    rtol: NonNegative | None = None
    atol: NonNegative | None = None
    explain: str | None = None
    flags: list[str] = []
    input_hash: str | None = None
    launch_hash: str | None = None


class ProcessFile(msgspec.Struct, frozen=True):
    """One file: a process, its environment, its ceilings and its rows."""

    schema: Literal["rapid_llm/process-record/1"]
    process: Name
    commit: Commit
    env_name: str
    started_at: str
    environment: dict[str, Any]
    rows: list[RowFile]
    finished_at: str | None = None
    ceilings: dict[str, float | None] = {}
    protocol: str | None = None


def _row(row: RowFile, process: str, environment: dict[str, Any], source: Path) -> RowRecord:
    key = RowKey(row.benchmark, tuple(param_text(value) for value in row.params))
    if row.status == "ok" and row.value is None:
        raise InputError(f"{source} says that {key} is ok but gives no value; let the process write one or say 'failed'")
    if row.status != "ok" and not row.reason:
        raise InputError(f"{source} gives {key} the status {row.status!r} without a reason; let the process write why")
    work = row.work or WorkFile()
    return RowRecord(
        key=key,
        process=process,
        status=row.status,
        reason=row.reason,
        op=row.op,
        impl=row.impl,
        control=row.control,
        bottleneck=row.bottleneck,
        phase=row.phase,
        kv_dtype=row.kv_dtype,
        unit=row.unit,
        value=row.value,
        latency_us=row.latency_us,
        timer=row.timer or "",
        instrument=row.instrument or "",
        floor_us=row.floor_us,
        samples=row.samples or 0,
        gb_per_s=row.gb_per_s,
        tflop_per_s=row.tflop_per_s,
        peak_fraction=row.peak_fraction,
        copy_fraction=row.copy_fraction,
        max_abs_diff=row.max_abs_diff,
        explain=row.explain or "",
        version=row.version,
        flags=tuple(row.flags),
        input_hash=row.input_hash,
        launch_hash=row.launch_hash,
        quantiles_us=tuple(row.quantiles_us or ()),
        l2=row.l2,
        flops=work.flops,
        moved_bytes=work.moved_bytes,
        rtol=row.rtol,
        atol=row.atol,
        tick_us=row.tick_us,
        estimator=row.estimator,
        host_us=row.host_us,
        ceiling_fraction=row.ceiling_fraction,
        host_floor_us=host_floor(row.timer, row.estimator, row.floor_us, environment),
    )


def read_process_record(path: Path) -> ProcessRecord:
    """Reads one process record.

    Raises:
        InputError: The file cannot be read, is not strict JSON, is of another schema or misses a field; the message names it.
    """
    return process_record(read_json(path), path)


def process_record(data: object, source: Path) -> ProcessRecord:
    """A process record from what its JSON says.

    Args:
        data: What the file holds.
        source: What the messages call it.
    Raises:
        InputError: As `read_process_record`.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA_ID:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise InputError(
            f"{source} is no process record: expected the schema {SCHEMA_ID!r}, found {found!r}; keep other files out of the folder"
        )
    try:
        parsed = msgspec.convert(data, ProcessFile)
    except msgspec.ValidationError as exc:
        raise InputError(f"{source} does not follow {SCHEMA_ID}: {exc}; measure again with the suite of this checkout") from exc
    return ProcessRecord(
        process=parsed.process,
        commit=parsed.commit,
        env_name=parsed.env_name,
        started_at=parsed.started_at,
        environment=parsed.environment,
        ceilings={name: value for name, value in parsed.ceilings.items() if value is not None},
        rows=tuple(_row(row, parsed.process, parsed.environment, source) for row in parsed.rows),
        source=str(source),
        finished_at=parsed.finished_at,
        protocol=parsed.protocol or "",
    )


def read_process_records(directory: Path, *, commit: str | None = None) -> list[ProcessRecord]:
    """Reads every ``*.json`` under `directory`, in the order of their start.

    Args:
        directory: Searched recursively.
        commit: Keep only the records of this commit (a prefix of at least seven digits will do).
    Raises:
        InputError: The folder is absent, or a file in it is no valid process record.
    """
    if not directory.is_dir():
        raise InputError(f"{directory} is no folder of process records; measure first, or name the folder that the suites wrote")
    records = [read_process_record(path) for path in sorted(directory.rglob("*.json"))]
    if commit is not None:
        records = [record for record in records if record.commit.startswith(commit)]
    return sorted(records, key=lambda record: (record.started_at, record.process, record.source))
