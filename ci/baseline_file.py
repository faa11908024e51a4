"""The layout of a baseline file, ``baselines/<device>.json``, and its strict reading and writing.

Raw values are stored, and bands recomputed from them: a band alone could not be questioned. The JSON schema generated from these
classes is `baselines/schema/baseline.schema.json`.
"""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from ci.errors import BaselineError
from ci.jsonio import decode_json, read_bounded, read_json, strict_dumps, write_atomic
from ci.model import RowKey

SCHEMA_ID: Final = "rapid_llm/baseline/1"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Runs = list[list[Positive]]


class Protocol(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the rows were measured."""

    processes: Annotated[int, msgspec.Meta(ge=1)]
    """Fresh processes a run (K)."""
    estimator: Literal["fast60"]
    timers: list[str]
    l2: list[str]
    hash: str


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes two devices the same for a baseline; neither a host name nor an ordinal is part of it."""

    type: str
    name: Text
    compute_capability: str | None = None
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    mig: str | None = None
    power_limit_w: float | None = None


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Software that decides which code runs."""

    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    triton: str | None = None
    python: str | None = None


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of K processes."""

    id: Text
    boot: str | None
    gpu_uuid: str | None
    time: Text
    commit: Text
    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: list[str] = []
    controls: dict[str, float] = {}
    """Median throughput of each control row in this run, in the row's unit."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"bottleneck": "class"}):
    """The accepted values of one row: [run][process]."""

    benchmark: Text
    params: list[str]
    metric: str
    unit: Text
    direction: Literal["higher", "lower"]
    bottleneck: str
    version: str
    values: Runs
    op: str
    impl: str
    control: bool
    timer: str
    instrument: str
    latency_us: Runs | None = None
    phase: str | None = None
    kv_dtype: str | None = None
    tick_us: float | None = None
    floor_us: float | None = None
    launch_hash: str | None = None
    input_hash: str | None = None
    max_abs_diff: float | None = None
    peak_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    @property
    def key(self) -> RowKey:
        """The row's identity."""
        return RowKey(self.benchmark, tuple(self.params))


class Waiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Leave for one row to be BLIND, MISSING or REGRESSED until a date."""

    row: Text
    change: Literal["BLIND", "MISSING", "REGRESSED"]
    reason: Text
    approver: Text
    reference: Text
    expires: datetime.date


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was accepted on one device."""

    schema: Literal["rapid_llm/baseline/1"]
    protocol: Protocol
    device: Device
    environment: Environment
    anchor_commit: Text
    runs: Annotated[list[Run], msgspec.Meta(min_length=1)]
    rows: dict[str, Row]
    accepted_by: Text
    reason: str = ""
    waivers: list[Waiver] = []
    previous_hash: str | None = None
    advisory: bool = False
    """Recorded on a single boot: it informs, and the report says so."""


def load(source: Path | bytes, *, name: str | None = None) -> Baseline:
    """Reads a baseline strictly.

    Args:
        source: The file, or its bytes (as read from another commit).
        name: What messages call it; the path where None.
    Raises:
        BaselineError: It cannot be read, is no strict JSON, misses the schema, or contradicts itself; the message names file and reason.
    """
    shown = name or (str(source) if isinstance(source, Path) else "the baseline")
    data = read_bounded(source, error=BaselineError) if isinstance(source, Path) else source
    parsed = decode_json(data, name=shown, error=BaselineError)
    if not isinstance(parsed, dict) or parsed.get("schema") != SCHEMA_ID:
        found = parsed.get("schema") if isinstance(parsed, dict) else type(parsed).__name__
        raise BaselineError(f"{shown} has the schema {found!r}, not {SCHEMA_ID!r}; record the baseline again")
    try:
        baseline = msgspec.convert(parsed, Baseline)
    except msgspec.ValidationError as exc:
        raise BaselineError(f"{shown} does not follow {SCHEMA_ID}: {exc}; record the baseline again") from exc
    fault = _contradiction(baseline)
    if fault is not None:
        raise BaselineError(f"{shown} {fault}; record the baseline again")
    return baseline


def load_waivers(path: Path) -> list[Waiver]:
    """Reads a file of waivers for `record`: a JSON array of objects with the fields of `Waiver`.

    Raises:
        BaselineError: It cannot be read or is no such array.
    """
    try:
        return msgspec.convert(read_json(path, error=BaselineError), list[Waiver])
    except msgspec.ValidationError as exc:
        raise BaselineError(f"{path} is no array of waivers: {exc}; mend the file") from exc


def _contradiction(baseline: Baseline) -> str | None:
    num_runs = len(baseline.runs)
    for text, row in baseline.rows.items():
        if text != str(row.key):
            return f"stores the row {row.key} under the key {text!r}"
        if len(row.values) != num_runs or not all(row.values):
            return f"has values of {len(row.values)} runs for {text}, but {num_runs} runs"
        if row.latency_us is not None and [len(run) for run in row.latency_us] != [len(run) for run in row.values]:
            return f"has latencies of {text} that do not match its values one to one"
    strange = [waiver.row for waiver in baseline.waivers if waiver.row not in baseline.rows]
    if strange:
        return f"waives the row {strange[0]!r}, which it does not have"
    return None


def to_json(baseline: Baseline) -> str:
    """Deterministic strict JSON with sorted keys: the same baseline is the same text."""
    return strict_dumps(msgspec.to_builtins(baseline))


def content_hash(baseline: Baseline) -> str:
    """sha256 of `to_json`, by which the next baseline names its predecessor."""
    return hashlib.sha256(to_json(baseline).encode()).hexdigest()


def save(baseline: Baseline, path: Path) -> None:
    """Writes the file atomically: a reader sees the old baseline or the new one."""
    write_atomic(path, to_json(baseline))
