"""The record that each measuring process leaves beside asv's samples (schema: baselines/schema/process-record.schema.json).

asv keeps the samples of a `track_` method and nothing else. The record holds the rest: latency, work, shares of peak, the difference from
the reference, which KernelSpec ran and why, and the environment. It is strict JSON and is written whole or not at all.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

SCHEMA = "rapid_llm/process-record/1"

_ROW_DEFAULTS: dict[str, Any] = {
    "reason": None,
    "impl": "",
    "value": None,
    "latency_us": None,
    "quantiles_us": None,
    "samples": 0,
    "timer": "",
    "instrument": "",
    "floor_us": None,
    "estimator": "",
    "host_us": None,
    "wall_s": None,
    "timed_s": None,
    "tick_us": None,
    "l2": "",
    "work": {"flops": None, "moved_bytes": None, "written_bytes": None},
    "gb_per_s": None,
    "tflop_per_s": None,
    "peak_fraction": None,
    "copy_fraction": None,
    "ceiling_fraction": None,
    "max_abs_diff": None,
    "explain": "",
    "flags": [],
    "input_hash": None,
    "launch_hash": None,
}


def complete(row: dict[str, Any]) -> dict[str, Any]:
    """A row's record with every field present."""
    return {**_ROW_DEFAULTS, **row}


def write(
    directory: Path,
    *,
    process: str,
    started_at: datetime.datetime,
    header: dict[str, Any],
    rows: list[dict[str, Any]],
) -> Path:
    """Writes the record of one process.

    Args:
        directory: Where records are kept; a folder a commit is made in it.
        process: Unique name of the process.
        started_at: UTC.
        header: `commit`, `environment` and `ceilings` as the process found them.
        rows: Complete row records.
    Returns:
        The file.
    Raises:
        ValueError: A value that strict JSON has no word for (NaN, infinity).
    """
    record = {
        "schema": SCHEMA,
        "process": process,
        "commit": header["commit"],
        "env_name": os.environ.get("ASV_ENV_NAME", ""),
        "started_at": f"{started_at:%Y-%m-%dT%H:%M:%SZ}",
        "finished_at": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
        "environment": header["environment"],
        "ceilings": header["ceilings"],
        "protocol": header["protocol"],
        "rows": rows,
    }
    commit: str = header["commit"]
    text = json.dumps(record, allow_nan=False, indent=1, sort_keys=True) + "\n"
    folder = directory / commit[:12]
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".writing-{process}"
    temporary.write_text(text, encoding="utf-8")
    target = folder / f"{process}.json"
    os.replace(temporary, target)
    return target
