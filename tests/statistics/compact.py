"""Many process records in one small file: what they share stands once, and of each row stays what a statistic or a reader needs.

A file is strict JSON, `*.processes.json`: `schema`; `environment`, the fields that every process has alike; `rows`, the fields of each row
that are the same in all processes; and `processes`, each with the rest, and with a `label` that says where it stood in its run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.errors import InputError
from ci.jsonio import read_json, write_atomic
from ci.model import ProcessRecord
from ci.records import SCHEMA_ID, process_record

SCHEMA = "rapid_llm/compact-processes/1"
SUFFIX = ".processes.json"
DROPPED = ("explain", "work", "gb_per_s", "tflop_per_s", "peak_fraction", "copy_fraction", "ceiling_fraction", "quantiles_us")
"""Fields of a row that no statistic here reads, or that its value and its work give again."""


@dataclass(frozen=True)
class Labelled:
    """A process record as its JSON has it, and where it stood in its run: such as an arm and the number of a pair."""

    record: dict[str, Any]
    label: dict[str, Any]


def _shared(tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The items that all of the tables have."""
    first, *rest = tables
    return {name: value for name, value in first.items() if all(name in table and table[name] == value for table in rest)}


def _without(table: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in shared}


def _row_id(row: dict[str, Any]) -> str:
    return f"{row['benchmark']}({', '.join(map(str, row['params']))})"


def squeeze(processes: Sequence[Labelled]) -> dict[str, Any]:
    """The file's content; rows that were skipped are left out.

    Args:
        processes: In the order of measurement, at least one.
    """
    environment = _shared([one.record["environment"] for one in processes])
    tables = [
        {_row_id(row): _without(row, dict.fromkeys(DROPPED)) for row in one.record["rows"] if row["status"] != "skipped"}
        for one in processes
    ]
    names = list(dict.fromkeys(name for table in tables for name in table))
    shared = {name: _shared([table[name] for table in tables if name in table]) for name in names}
    made = []
    for one, table in zip(processes, tables, strict=True):
        rest = {name: value for name, value in one.record.items() if name not in ("schema", "environment", "rows")}
        rows = {str(names.index(name)): _without(row, shared[name]) for name, row in table.items()}
        made.append({**rest, "label": one.label, "environment": _without(one.record["environment"], environment), "rows": rows})
    return {"schema": SCHEMA, "environment": environment, "rows": [shared[name] for name in names], "processes": made}


def expand(data: Any, source: Path) -> list[Labelled]:
    """The process records that `squeeze` was given, without the dropped fields.

    Raises:
        InputError: It is no such file.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f"{source} is no file of compact process records ({SCHEMA}); keep other files out of the folder")
    try:
        made = []
        for one in data["processes"]:
            rest = {name: value for name, value in one.items() if name not in ("label", "environment", "rows")}
            rows = [{**data["rows"][int(number)], **row} for number, row in one["rows"].items()]
            record = {**rest, "schema": SCHEMA_ID, "environment": {**data["environment"], **one["environment"]}, "rows": rows}
            made.append(Labelled(record, one["label"]))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{source} does not follow {SCHEMA} ({type(error).__name__}: {error}); measure again") from error
    return made


def write(path: Path, processes: Sequence[Labelled]) -> None:
    """Writes a file, whole or not at all."""
    write_atomic(path, json.dumps(squeeze(processes), allow_nan=False, separators=(",", ":"), sort_keys=True) + "\n")


def read(path: Path) -> list[Labelled]:
    """Reads a file.

    Raises:
        InputError: It cannot be read, or is no such file.
    """
    return expand(read_json(path), path)


def records_of(processes: Sequence[Labelled], source: Path) -> list[ProcessRecord]:
    """The records as the gate reads them.

    Raises:
        InputError: One does not follow the schema of process records.
    """
    return [process_record(one.record, source) for one in processes]


def read_folder(folder: Path) -> list[ProcessRecord]:
    """The records of every compact file in a folder, not of those in folders within it; none where there is no such file."""
    return [record for path in sorted(folder.glob(f"*{SUFFIX}")) for record in records_of(read(path), path)]
