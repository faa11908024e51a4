"""The layout of a baseline file, ``baselines/<device>.json``, and its strict reading and writing.

Raw values are stored, and bands recomputed from them: a band alone could not be questioned. The JSON schema generated from these
classes is `baselines/schema/baseline.schema.json`.

Runs form sets: those of `record` are set "1", each refresh adds one. A row has values of the runs of one set, which it names. A control
row has values of the runs of every set in which it was measured, so that each row is normalised by controls of its own runs. A file of
the first schema has one set; it reads as such.
"""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from ci.errors import BaselineError
from ci.jsonio import decode_json, read_bounded, read_json, strict_dumps, write_atomic
from ci.model import RowKey

SCHEMA_ID: Final = "rapid_llm/baseline/2"
OLD_SCHEMA_ID: Final = "rapid_llm/baseline/1"
"""Without run sets, anchors and replaced values: all of them have defaults."""

FIRST_SET: Final = "1"

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
    run_set: Text = FIRST_SET


class Anchor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a row stood before its first refresh; slow drift is held against it."""

    commit: Text
    time: Text
    unit: Text
    values: Annotated[list[Positive], msgspec.Meta(min_length=1)]
    """One a run of the anchor's set, in `unit`, the deviation of that run's controls taken off."""
    controls: dict[str, Positive] = {}
    """Median over those runs of each control row that serves the row, in the control's unit."""
    floors_us: dict[str, Positive] = {}
    """Level of the floors that the values of the row and of its controls are held against; empty where they were held against none."""


class Replaced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that a refresh took out of a row."""

    commit: Text
    """Of the old value."""
    time: Text
    """When the old value's last run began."""
    value: Positive
    """Median of the old runs, in `unit`."""
    unit: Text
    reason: Text
    """Why it was replaced."""
    latency_us: float | None = None


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"bottleneck": "class"}):
    """The accepted values of one row: [run][process].

    The runs are those of `run_set`, in the file's order; of a control row all runs of the file, with an empty list for each run of a set
    that did not measure it.
    """

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
    host_floors_us: Runs | None = None
    """The floor that each value is held against (`ci.host_floor`); None where there is none, empty for runs without."""
    phase: str | None = None
    kv_dtype: str | None = None
    tick_us: float | None = None
    floor_us: float | None = None
    launch_hash: str | None = None
    input_hash: str | None = None
    max_abs_diff: float | None = None
    peak_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    run_set: Text = FIRST_SET
    """The set that the values are of; of a control row the newest that measured it."""
    anchor: Anchor | None = None
    """None where the values are still those of the anchor."""
    replaced: list[Replaced] = []
    """What refreshes took out, the oldest first."""
    noisy: bool = False
    """Accepted although a run of its own set looked like a regression."""

    @property
    def key(self) -> RowKey:
        """The row's identity."""
        return RowKey(self.benchmark, tuple(self.params))


class Waiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Leave for one row to be BLIND, MISSING, REGRESSED or over 5 % from its anchor (CREEP) until a date."""

    row: Text
    change: Literal["BLIND", "CREEP", "MISSING", "REGRESSED"]
    reason: Text
    approver: Text
    reference: Text
    expires: datetime.date


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was accepted on one device."""

    schema: Literal["rapid_llm/baseline/2"]
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

    @property
    def run_sets(self) -> dict[str, list[int]]:
        """Indices of the runs of each set, in the file's order."""
        sets: dict[str, list[int]] = {}
        for index, run in enumerate(self.runs):
            sets.setdefault(run.run_set, []).append(index)
        return sets

    def runs_of(self, row: Row) -> list[Run]:
        """The runs of the row's set."""
        return [run for run in self.runs if run.run_set == row.run_set]

    def values_of(self, row: Row, run_set: str | None = None) -> Runs:
        """The row's values in a set, its own where None: [run][process]; none where the set did not measure it."""
        return self._in_set(row, row.values, run_set)

    def floors_of(self, row: Row, run_set: str | None = None) -> Runs | None:
        """The floors of `values_of`; None where the set did not measure one of them."""
        floors = None if row.host_floors_us is None else self._in_set(row, row.host_floors_us, run_set)
        return floors if floors and all(floors) and len(floors) == len(self.values_of(row, run_set)) else None

    def _in_set(self, row: Row, values: Runs, run_set: str | None) -> Runs:
        wanted = run_set or row.run_set
        if not row.control:
            return values if wanted == row.run_set else []
        return [values[index] for index in self.run_sets.get(wanted, []) if values[index]]


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
    if isinstance(parsed, dict) and parsed.get("schema") == OLD_SCHEMA_ID:
        parsed = _of_old_schema(parsed, shown)
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


def _of_old_schema(parsed: dict[str, Any], shown: str) -> dict[str, Any]:
    """A file of the first schema as one of the present.

    Raises:
        BaselineError: It has a field that only the present schema knows.
    """
    rows = parsed.get("rows")
    parts = [*(parsed.get("runs") or []), *(rows.values() if isinstance(rows, dict) else [])]
    for part in parts:
        strange = sorted({"run_set", "anchor", "replaced", "noisy", "host_floors_us"} & set(part)) if isinstance(part, dict) else []
        if strange:
            raise BaselineError(f"{shown} has the field {strange[0]!r}, which {OLD_SCHEMA_ID} does not know; record the baseline again")
    return {**parsed, "schema": SCHEMA_ID}


def _contradiction(baseline: Baseline) -> str | None:
    sets = baseline.run_sets
    for text, row in baseline.rows.items():
        if text != str(row.key):
            return f"stores the row {row.key} under the key {text!r}"
        fault = _contradiction_of_row(text, row, sets, len(baseline.runs))
        if fault is not None:
            return fault
    strange = [waiver.row for waiver in baseline.waivers if waiver.row not in baseline.rows]
    if strange:
        return f"waives the row {strange[0]!r}, which it does not have"
    return None


def _contradiction_of_row(text: str, row: Row, sets: dict[str, list[int]], num_all: int) -> str | None:
    if row.run_set not in sets:
        return f"has values of {text} of the run set {row.run_set!r}, which no run is of"
    num_runs = num_all if row.control else len(sets[row.run_set])
    if len(row.values) != num_runs:
        return f"has values of {len(row.values)} runs for {text}, but {num_runs} runs"
    empty = [not values for values in row.values]
    if row.control:
        partly = [name for name, runs in sets.items() if len({empty[index] for index in runs}) > 1]
        if partly or empty[sets[row.run_set][0]]:
            return f"has values of the control row {text} for a part of the run set {(partly or [row.run_set])[0]!r} only"
    elif any(empty):
        return f"has values of {num_runs - sum(empty)} runs for {text}, but {num_runs} runs"
    if row.latency_us is not None and [len(run) for run in row.latency_us] != [len(run) for run in row.values]:
        return f"has latencies of {text} that do not match its values one to one"
    floors = row.host_floors_us
    if floors is not None and (
        len(floors) != len(row.values) or any(run and len(run) != len(values) for run, values in zip(floors, row.values, strict=True))
    ):
        return f"has floors of {text} that do not match its values one to one"
    if row.anchor is not None and row.anchor.unit != row.unit:
        return f"has {text} in {row.unit!r} and its anchor in {row.anchor.unit!r}"
    return None


def to_json(baseline: Baseline) -> str:
    """Deterministic strict JSON with sorted keys: the same baseline is the same text."""
    return strict_dumps(msgspec.to_builtins(baseline))


def content_hash(baseline: Baseline) -> str:
    """sha256 of `to_json`, by which the next baseline names its predecessor: of the file's text, where the file is of this schema."""
    return hashlib.sha256(to_json(baseline).encode()).hexdigest()


def save(baseline: Baseline, path: Path) -> None:
    """Writes the file atomically: a reader sees the old baseline or the new one."""
    write_atomic(path, to_json(baseline))
