"""Merges kept runs of one commit from several runners or GPUs into one run, or refuses with the reason.

A kept run is a folder that `python -m ci run --keep` made: `results/` as asv wrote them and `records/` of the measuring processes. The
merged run has the processes of all of them, in the order given; each row has the samples of all.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ci.errors import InputError, UsageError
from ci.identity import device_of, environment_of
from ci.jsonio import read_json, write_atomic
from ci.model import CommitResult
from ci.results import load_commit, read_tree

_COLUMNS = ("result", "params", "version", "samples")
"""Columns of asv's result files that a merged one has; asv computes the others of the samples of one run."""


def load_kept(folder: Path) -> CommitResult:
    """The one commit in a kept run, joined with its records.

    Raises:
        UsageError: The folder holds no run, or several commits.
        InputError: A file in it cannot be read.
    """
    results = load_all_kept(folder)
    if len(results) != 1:
        raise UsageError(f"{folder} holds {len(results)} results and should hold one: give a folder that `python -m ci run --keep` made.")
    return results[0]


def load_all_kept(folder: Path) -> list[CommitResult]:
    """Every commit in a kept run (merge-base and HEAD of a comparison in pairs), by date, joined with its records."""
    _refuse_links(folder)
    tree = read_tree(folder / "results")
    if tree.problems:
        raise InputError(tree.problems[0])
    found = [(machine, result) for machine in tree.machines for result in tree.commits(machine)]
    return [load_commit(folder / "results", machine, result.commit, records_dir=folder / "records") for machine, result in found]


def _refuse_links(folder: Path) -> None:
    """A kept run may come from another machine: a link in it would copy a file of this one into the merged run.

    Raises:
        InputError: It holds a link, or what is neither file nor folder.
    """
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InputError(f"{path} is a link or no regular file, which a kept run has none of; keep the run again")


def merge_runs(folders: Sequence[Path], target: Path) -> None:
    """Writes one kept run that has the processes of all `folders`.

    Args:
        folders: Kept runs, in the order in which their samples shall stand.
        target: Folder to write; it may not exist yet.
    Raises:
        UsageError: `target` exists, or there is nothing to merge.
        InputError: The runs differ in what has to be the same; the message names it and both values.
    """
    if target.exists():
        raise UsageError(f"{target} exists: name a new folder for the merged run.")
    if not folders:
        raise UsageError("There is nothing to merge: name folders that `python -m ci run --keep` made.")
    runs = [(folder, load_all_kept(folder)) for folder in folders]
    _hold_together(runs)
    first = folders[0]
    for path in sorted((first / "results").rglob("*.json")):
        name = path.relative_to(first)
        if path.name in ("benchmarks.json", "machine.json"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / name)
        else:
            write_atomic(target / name, json.dumps(_merged([folder / name for folder in folders])))
    for folder in folders:
        for path in sorted((folder / "records").rglob("*.json")):
            place = target / path.relative_to(folder)
            if place.exists():
                raise InputError(f"{path} is the record of a process that another run has too: a run is merged once.")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)


def _hold_together(runs: Sequence[tuple[Path, Sequence[CommitResult]]]) -> None:
    """Refuses runs that are no parts of one."""

    def same(what: str, tell: Callable[[CommitResult], object]) -> None:
        known: tuple[object, Path] | None = None
        for folder, results in runs:
            for result in results:
                value = tell(result)
                if known is None:
                    known = value, folder
                elif value != known[0]:
                    raise InputError(
                        f"{known[1]} was measured with {what} {known[0]!r} and {folder} with {value!r}: measure both alike, or keep both."
                    )

    names = [{(result.commit, result.env_name) for result in results} for _, results in runs]
    for (folder, _), found in zip(runs, names, strict=True):
        if found != names[0] or not found:
            told = [", ".join(sorted(f"{commit[:12]} ({env})" for commit, env in group)) or "none" for group in (names[0], found)]
            raise InputError(f"{runs[0][0]} holds the commits {told[0]} and {folder} holds {told[1]}: only runs of one commit are merged.")
    for folder, results in runs:
        if any(not result.processes for result in results):
            raise InputError(
                f"{folder} has no process records, so nothing says how it was measured: keep runs with `python -m ci run --keep`."
            )
    same("the machine", lambda result: result.machine)
    first = runs[0][1][0].processes[0].environment
    for field in device_of(first).__struct_fields__:
        same(f"device.{field}", lambda result, field=field: getattr(device_of(result.processes[0].environment), field))  # type: ignore[misc]
    for field in environment_of(first).__struct_fields__:
        same(field, lambda result, field=field: getattr(environment_of(result.processes[0].environment), field))  # type: ignore[misc]
    same("the protocol", lambda result: sorted({process.protocol for process in result.processes}))
    for index, result in enumerate(runs[0][1]):
        for folder, results in runs[1:]:
            versions = [{key: row.version for key, row in one.rows.items()} for one in (result, results[index])]
            for key in sorted(set(versions[0]) | set(versions[1])):
                here, there = versions[0].get(key), versions[1].get(key)
                if here != there:
                    raise InputError(
                        f"{key} has version {here!r} in {runs[0][0]} and {there!r} in {folder}: measure both with one state of the suites."
                    )


def _merged(paths: Sequence[Path]) -> dict[str, Any]:
    """One of asv's result files from several, the samples of all behind one another."""
    parts = [read_json(path, allow_constants=True) for path in paths]
    merged: dict[str, Any] = {**parts[0], "result_columns": list(_COLUMNS), "results": {}, "durations": {}}  # type: ignore[dict-item]
    for name in parts[0]["results"]:  # type: ignore[index]
        columns = [_columns(part, name) for part in parts]
        cells = [
            _cell([(column["result"][index], (column["samples"] or {index: None})[index]) for column in columns])
            for index in range(len(columns[0]["result"]))
        ]
        merged["results"][name] = [[value for value, _ in cells], columns[0]["params"], columns[0]["version"], [some for _, some in cells]]
    return merged


def _columns(part: Any, name: str) -> dict[str, Any]:
    entry = part["results"][name]
    stored = dict(zip(part["result_columns"], entry, strict=False)) if isinstance(entry, list) else {"result": entry}
    for column in ("params", "version", "samples"):
        stored.setdefault(column, None)
    if not isinstance(stored["result"], list):
        count = 1
        for axis in stored["params"] or []:
            count *= len(axis)
        stored["result"] = [stored["result"]] * count
    return stored


def _cell(parts: Sequence[tuple[Any, Any]]) -> tuple[Any, list[float] | None]:
    """Value and samples of one row: failed where one part failed, skipped where all skipped it, else the median of all samples."""
    values = [value for value, _ in parts]
    if all(value is not None and value != value for value in values):
        return float("nan"), None
    if any(value is None or value != value for value in values):
        return None, None
    samples = [sample for value, some in parts for sample in (some or [value])]
    return statistics.median(samples), samples
