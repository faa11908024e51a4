"""Small results trees, records, runs and baselines for the tests of the gate's judgement."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ci import baseline as baselines
from ci.baseline import Baseline
from ci.model import CommitResult, Direction, ProcessRecord, RowKey, RowRecord, RowResult

BASE_COMMIT = "a" * 40
HEAD_COMMIT = "b" * 40
PROTOCOL = "protocol-1"

ENVIRONMENT: dict[str, Any] = {
    "device": {
        "type": "cuda",
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "memory_bytes": 150_000_000_000,
        "l2_bytes": 62_914_560,
        "mig": None,
        "uuid": "GPU-0",
    },
    "driver": "580.159.04",
    "cuda": "13.0",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "python": "3.12.3",
    "boot_id": "boot-0",
    "env_vars": {},
    "state": {
        "sm_clock_mhz": 1980.0,
        "mem_clock_mhz": 3201.0,
        "temperature_c": 40.0,
        "throttle_reasons": ["sw_power_cap"],
        "power_limit_w": 700.0,
    },
}


def environment(**changes: Any) -> dict[str, Any]:
    """ENVIRONMENT with changes; ``device__name="x"`` reaches into a table."""
    made = copy.deepcopy(ENVIRONMENT)
    for name, value in changes.items():
        target, _, inner = name.partition("__")
        if inner:
            made[target][inner] = value
        else:
            made[target] = value
    return made


def row_record(key: RowKey, process: str, value: float | None, **changes: Any) -> RowRecord:
    """The record of one process, of a decode row unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "key": key,
        "process": process,
        "status": "ok",
        "reason": None,
        "op": "paged_decode_attention",
        "impl": "triton_paged_decode",
        "control": False,
        "bottleneck": "read-bandwidth",
        "phase": "decode",
        "kv_dtype": "float16",
        "unit": "GB/s",
        "value": value,
        "latency_us": None if value is None else 1e5 / value,
        "timer": "graph",
        "instrument": "device",
        "floor_us": 2.0,
        "samples": 50,
        "gb_per_s": value,
        "tflop_per_s": None,
        "peak_fraction": 0.7,
        "copy_fraction": 0.8,
        "max_abs_diff": 0.001,
        "explain": "",
        "version": "v1",
        "input_hash": "inputs",
        "launch_hash": None,
    }
    return RowRecord(**{**fields, **changes})


def measured(name: str, samples: Sequence[float], *params: str, direction: Direction = "higher", **changes: Any) -> RowResult:
    """A measured row of an own tree with a record a sample."""
    key = RowKey(name, params)
    records = tuple(row_record(key, f"p{i}", value, **changes) for i, value in enumerate(samples))
    first = records[0]
    return RowResult(
        key=key,
        unit=first.unit,
        direction=direction,
        version=first.version,
        state="measured",
        samples=tuple(samples),
        records=records,
        declared_version=first.version,
    )


def control(name: str, samples: Sequence[float], **changes: Any) -> RowResult:
    """A control row of class read-bandwidth."""
    return measured(name, samples, **{"control": True, "op": "copy", "phase": None, "kv_dtype": None, "impl": "torch", **changes})


def foreign(name: str, value: float, *, unit: str = "GB/s", direction: Direction = "higher", version: str = "v1") -> RowResult:
    """A measured row of a foreign tree."""
    return RowResult(RowKey(name), unit, direction, version, "measured", (value,), declared_version=version)


def commit_of(
    rows: Sequence[RowResult],
    commit: str = HEAD_COMMIT,
    *,
    env: Mapping[str, Any] | None = None,
    protocol: str = PROTOCOL,
    date_ms: int = 0,
    own: bool = True,
) -> CommitResult:
    """A commit with one process record a sample."""
    count = max((len(row.samples) for row in rows), default=1) if own else 0
    processes = tuple(
        ProcessRecord(
            process=f"p{i}",
            commit=commit,
            env_name="host",
            started_at=f"2026-11-{20 + i % 9:02d}T21:00:00Z",
            environment=dict(env if env is not None else ENVIRONMENT),
            ceilings={"copy_gb_per_s": 4000.0},
            rows=tuple(row.records[i] for row in rows if i < len(row.records)),
            source=f"p{i}.json",
            protocol=protocol,
        )
        for i in range(count)
    )
    return CommitResult(
        machine="NVIDIA_H200",
        commit=commit,
        env_name="host",
        date_ms=date_ms,
        rows={row.key: row for row in rows},
        params={},
        source="results",
        processes=processes,
        foreign=not own,
    )


def noisy(level: float, sd: float, count: int, rng: np.random.Generator) -> list[float]:
    """`count` throughputs about `level` with relative SD `sd`."""
    return [float(level * np.exp(rng.normal(0, sd))) for _ in range(count)]


ROWS = ("decode_a", "decode_b", "decode_c", "decode_d", "decode_e", "decode_f")


def a_run(
    seed: int,
    *,
    commit: str = BASE_COMMIT,
    factors: Mapping[str, float] | None = None,
    shift: float = 1.0,
    sd: float = 0.002,
    boot: str | None = None,
    controls: int = 3,
    processes: int = 3,
) -> CommitResult:
    """One run of six decode rows and three controls; `factors` multiply the throughput of rows, `shift` that of all."""
    rng = np.random.default_rng(seed)
    rows = [
        measured(name, noisy(1000.0 * (1 + i) * (factors or {}).get(name, 1.0) * shift, sd, processes, rng)) for i, name in enumerate(ROWS)
    ]
    rows += [
        control(f"control_{i}", noisy(3000.0 * (factors or {}).get(f"control_{i}", 1.0) * shift, sd, processes, rng))
        for i in range(controls)
    ]
    return commit_of(rows, commit, env=environment(boot_id=boot or f"boot-{seed % 3}"))


def a_baseline(num_runs: int = 10, **changes: Any) -> Baseline:
    """A baseline of `num_runs` runs over three boots."""
    runs = [a_run(seed, **changes) for seed in range(num_runs)]
    return baselines.record(runs, accepted_by="A. Reviewer", reason="first")


def with_row(run: CommitResult, row: RowResult) -> CommitResult:
    """`run` with one row replaced or added."""
    return replace(run, rows={**run.rows, row.key: row})


def without_row(run: CommitResult, name: str) -> CommitResult:
    """`run` without the rows of a benchmark."""
    return replace(run, rows={key: row for key, row in run.rows.items() if key.benchmark != name})


def write_tree(
    folder: Path,
    benchmarks: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, Any],
    *,
    commit: str = HEAD_COMMIT,
    machine: str = "box",
    env_name: str = "host",
    **changes: Any,
) -> Path:
    """Writes a tree of one result file and returns the file; `changes` replace keys of the file, None removes one."""
    (folder / machine).mkdir(parents=True, exist_ok=True)
    declared = {name: {"name": name, "params": [], "type": "track", "version": "v1", **entry} for name, entry in benchmarks.items()}
    (folder / "benchmarks.json").write_text(json.dumps({**declared, "version": 2}), encoding="utf-8")
    (folder / machine / "machine.json").write_text(json.dumps({"machine": machine, "version": 1}), encoding="utf-8")
    data: dict[str, Any] = {
        "commit_hash": commit,
        "env_name": env_name,
        "date": 1_795_983_555_000,
        "params": {"machine": machine},
        "python": "3.12",
        "requirements": {},
        "env_vars": {},
        "result_columns": ["result", "params", "version", "started_at", "duration", "stats_ci_99_a", "samples"],
        "results": results,
        "durations": {},
        "version": 2,
    }
    data.update(changes)
    path = folder / machine / f"{commit[:8]}-{env_name}.json"
    path.write_text(json.dumps({name: value for name, value in data.items() if value is not None}), encoding="utf-8")
    return path


def record_file(process: str, rows: Sequence[Mapping[str, Any]], **changes: Any) -> dict[str, Any]:
    """The content of a process record file."""
    return {
        "schema": "rapid_llm/process-record/1",
        "process": process,
        "commit": HEAD_COMMIT,
        "env_name": "host",
        "started_at": "2026-11-29T21:00:00Z",
        "finished_at": "2026-11-29T21:00:09Z",
        "environment": copy.deepcopy(ENVIRONMENT),
        "ceilings": {"copy_gb_per_s": 4000.0},
        "protocol": PROTOCOL,
        "rows": [dict(row) for row in rows],
        **changes,
    }


def row_file(benchmark: str, value: float | None, *params: Any, **changes: Any) -> dict[str, Any]:
    """A row of a process record file."""
    return {
        "benchmark": benchmark,
        "params": list(params),
        "status": "ok",
        "reason": None,
        "op": "paged_decode_attention",
        "impl": "triton_paged_decode",
        "control": False,
        "bottleneck": "read-bandwidth",
        "phase": "decode",
        "kv_dtype": "float16",
        "unit": "GB/s",
        "value": value,
        "latency_us": 12.5,
        "quantiles_us": [12.0, 13.0],
        "samples": 50,
        "timer": "graph",
        "instrument": "device",
        "floor_us": 2.0,
        "l2": "cold",
        "work": {"flops": None, "moved_bytes": 1e6},
        "peak_fraction": 0.7,
        "max_abs_diff": 0.001,
        "explain": "",
        "version": "v1",
        "flags": [],
        **changes,
    }
