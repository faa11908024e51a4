"""Writes commits as the folders that a gate keeps: `results/` as asv has them and `records/` of the measuring processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gate_builders import record_file, row_file

from ci.model import CommitResult


def write_kept(folder: Path, commits: Sequence[CommitResult]) -> Path:
    """One kept run of one commit, or of the two commits of a comparison; rows have no parameters."""
    machine = folder / "results" / commits[0].machine
    machine.mkdir(parents=True)
    rows = [row for commit in commits for row in commit.rows.values()]
    benchmarks = {
        row.key.benchmark: {"name": row.key.benchmark, "params": [], "type": "track", "version": row.version, "unit": row.unit}
        for row in rows
    }
    (machine.parent / "benchmarks.json").write_text(json.dumps({**benchmarks, "version": 2}), encoding="utf-8")
    (machine / "machine.json").write_text(json.dumps({"machine": commits[0].machine, "version": 1}), encoding="utf-8")
    for commit in commits:
        results = {
            row.key.benchmark: [[sorted(row.samples)[len(row.samples) // 2]], [], row.version, 0, 0.0, [list(row.samples)]]
            for row in commit.rows.values()
            if row.samples
        }
        data = {
            "commit_hash": commit.commit,
            "env_name": commit.env_name,
            "date": commit.date_ms,
            "params": {"machine": commit.machine},
            "python": "3.12",
            "requirements": {},
            "env_vars": {},
            "result_columns": ["result", "params", "version", "started_at", "duration", "samples"],
            "results": results,
            "durations": {},
            "version": 2,
        }
        (machine / f"{commit.commit[:8]}-{commit.env_name}.json").write_text(json.dumps(data), encoding="utf-8")
        records = folder / "records" / commit.commit[:12]
        records.mkdir(parents=True)
        for index, process in enumerate(commit.processes):
            told = [row for row in commit.rows.values() if index < len(row.records)]
            written = [
                row_file(
                    row.key.benchmark,
                    row.samples[index],
                    **{
                        name: getattr(row.records[index], name)
                        for name in ("op", "impl", "control", "bottleneck", "phase", "kv_dtype", "latency_us", "timer", "instrument")
                    },
                    **{
                        name: getattr(row.records[index], name)
                        for name in ("unit", "floor_us", "estimator", "version", "input_hash", "launch_hash")
                    },
                )
                for row in told
            ]
            file = record_file(
                process.process,
                written,
                commit=commit.commit,
                environment=process.environment,
                protocol=process.protocol,
                started_at=process.started_at,
            )
            (records / f"{process.process}.json").write_text(json.dumps(file), encoding="utf-8")
    return folder


def renamed(run: CommitResult, prefix: str) -> CommitResult:
    """With process names of its own: those of two looks are of different processes."""
    rows = {
        key: replace(row, records=tuple(replace(record, process=f"{prefix}{record.process}") for record in row.records))
        for key, row in run.rows.items()
    }
    return replace(run, rows=rows, processes=tuple(replace(process, process=f"{prefix}{process.process}") for process in run.processes))
