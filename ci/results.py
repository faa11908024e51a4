"""asv results trees: ``<results>/benchmarks.json`` and ``<results>/<machine>/<hash8>-<env>.json``.

The reader accepts asv's dialect (bare NaN and Infinity, dropped trailing nulls, a result that is null as a whole, columns in any order
or fewer of them, a scalar in place of a list) and nothing else. A file of a history that cannot be read is named and skipped; the file
that is the subject of a comparison must be whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ci.errors import InputError
from ci.join import join_records
from ci.jsonio import read_json
from ci.keys import KeyNormaliser, key_fault, param_text, without_mappings
from ci.model import CommitResult, Direction, RowKey, RowResult
from ci.records import read_process_records

__all__ = ["Benchmark", "ResultsTree", "direction_of", "drop_params", "load_commit", "read_tree", "without_mappings"]

_MAX_ROWS = 1_000_000
"""Of one benchmark; parameter axes multiply, and a damaged file could ask for any number."""

RESULT_VERSION = 2
"""The only version of asv's result files that is read."""
MOST_MS = 1 << 53
"""No time of a commit, in milliseconds, is so large."""

_TIME_UNITS = frozenset({"seconds", "s", "ms", "us", "µs", "ns", "runtime (s)"})
_RATE_UNITS = frozenset({"gflopss", "gpointss", "flops/s", "gflops", "tflops", "gflop/s", "tflop/s", "tflop_per_s", "gb_per_s"})


@dataclass(frozen=True)
class Benchmark:
    """What benchmarks.json declares of one benchmark; `direction` is None where nothing says which way is better."""

    name: str
    unit: str
    direction: Direction | None
    version: str


@dataclass(frozen=True)
class ResultsTree:
    """A results tree read as a history."""

    root: Path
    benchmarks: Mapping[str, Benchmark]
    machines: tuple[str, ...]
    results: Mapping[str, tuple[CommitResult, ...]]
    problems: tuple[str, ...]
    """One sentence for each file that could not be read and was skipped."""

    def commits(self, machine: str, env_name: str | None = None) -> list[CommitResult]:
        """The commits of a machine by date (commits of one date by hash), of one environment where it is named.

        Raises:
            InputError: The tree has no such machine.
        """
        if machine not in self.results:
            raise InputError(f"{self.root} has no machine {machine!r}; it has {', '.join(self.machines) or 'none'}")
        return [result for result in self.results[machine] if env_name is None or result.env_name == env_name]

    @property
    def orphans(self) -> tuple[str, ...]:
        """Names with results that benchmarks.json no longer declares."""
        return tuple(sorted({name for results in self.results.values() for result in results for name in result.orphans}))


def direction_of(unit: str, kind: str, higher_is_better: object) -> Direction | None:
    """Which way is better: as declared, else from the unit where it can mean one thing only, else None."""
    if isinstance(higher_is_better, bool):
        return "higher" if higher_is_better else "lower"
    plain = unit.strip().lower()
    if plain.endswith("/s") or plain in _RATE_UNITS:
        return "higher"
    if kind == "time" or plain in _TIME_UNITS:
        return "lower"
    return None


def read_benchmarks(results_dir: Path) -> dict[str, Benchmark]:
    """Reads benchmarks.json.

    Raises:
        InputError: The file is absent or is not asv's.
    """
    path = results_dir / "benchmarks.json"
    data = read_json(path, allow_constants=True)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}, not a table of benchmarks; run asv again to write it")
    benchmarks = {}
    for name, entry in data.items():
        if name == "version":
            continue
        if not isinstance(entry, dict):
            raise InputError(f"{path} describes {name} by a {type(entry).__name__}, not by a table; run asv again to write it")
        unit, kind = str(entry.get("unit", "")), str(entry.get("type", ""))
        direction = direction_of(unit, kind, entry.get("higher_is_better"))
        benchmarks[name] = Benchmark(name, unit, direction, str(entry.get("version", "")))
    return benchmarks


def _number_state(
    value: object, samples: object
) -> tuple[Literal["measured", "failed", "skipped", "invalid"], tuple[float, ...], str | None]:
    """State, samples and reason of one stored value."""
    if value is None:
        return "failed", (), "asv stored null: the benchmark crashed, timed out or could not be set up"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "invalid", (), f"the stored value is a {type(value).__name__}, not a number"
    if math.isnan(value):
        return "skipped", (), "asv stored NaN: the benchmark skipped itself"
    raw = [value] if samples is None else samples
    if not isinstance(raw, list) or not raw:
        return "invalid", (), "the row has a value but 0 samples"
    bad = [item for item in raw if isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item) or item <= 0]
    if bad or not math.isfinite(value):
        shown = bad[0] if bad else value
        return (
            "invalid",
            (),
            f"{max(1, len(bad))} of {len(raw)} samples is no positive finite number (the first is {shown!r})",
        )
    return "measured", tuple(float(item) for item in raw), None


def _cells(column: object, count: int, what: str, where: str) -> list[object]:
    """A column of one benchmark as one cell a parameter combination."""
    if column is None:
        return [None] * count
    if not isinstance(column, list):
        if count == 1 and what == "result":
            return [column]
        raise InputError(f"{where} has a {type(column).__name__} as {what}, not a list of {count}; measure it again")
    if len(column) != count:
        raise InputError(f"{where} has {len(column)} entries as {what} for {count} parameter combinations; measure it again")
    return column


def _keys(name: str, params: object, where: str) -> list[RowKey]:
    if params is None or params == []:
        return [RowKey(name)]
    if not isinstance(params, list) or not all(isinstance(axis, list) and all(isinstance(text, str) for text in axis) for axis in params):
        raise InputError(f"{where} has parameters that are no lists of texts; measure it again")
    if math.prod(len(axis) for axis in params) > _MAX_ROWS:
        raise InputError(f"{where} has parameters that make over {_MAX_ROWS:,} rows; give it fewer")
    keys = [RowKey(name, tuple(param_text(text) for text in combination)) for combination in itertools.product(*params)]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"{where} has the row {twice} twice; give each parameter value once")
    return keys


def _rows(name: str, entry: object, columns: Sequence[str], benchmark: Benchmark, where: str) -> dict[RowKey, RowResult]:
    cells = entry if isinstance(entry, list) else [entry]
    if isinstance(entry, dict) or len(cells) > len(columns):
        raise InputError(f"{where} does not fit the columns that the file declares; measure it again")
    stored = dict(zip(columns, cells, strict=False)) if isinstance(entry, list) else {"result": entry}
    keys = _keys(name, stored.get("params"), where)
    values = _cells(stored.get("result"), len(keys), "result", where)
    samples = _cells(stored.get("samples"), len(keys), "samples", where)
    version = stored.get("version")
    rows = {}
    for key, value, sample in zip(keys, values, samples, strict=True):
        state, numbers, reason = _number_state(value, sample)
        row = RowResult(
            key=key,
            unit=benchmark.unit,
            direction=benchmark.direction or "higher",
            version=benchmark.version if version is None else str(version),
            state=state,
            samples=numbers,
            reason=reason,
            declared_version=benchmark.version,
        )
        fault = key_fault(key)
        if benchmark.direction is None:
            fault = f"the direction of unit {benchmark.unit!r} is unknown, set higher_is_better on the benchmark"
        rows[key] = row if fault is None else replace(row, state="invalid", samples=(), reason=fault)
    return rows


def _read_result(path: Path, benchmarks: Mapping[str, Benchmark], machine: str) -> CommitResult:
    """Reads one result file as a foreign one (values only).

    Raises:
        InputError: It is no result file of version 2, or belongs to another machine; the message names file and reason.
    """
    data = read_json(path, allow_constants=True)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}, not an asv result; measure again")
    if not all(name in data for name in ("commit_hash", "results")):
        raise InputError(f"{path} is JSON, but no asv result: it lacks 'commit_hash' or 'results'; move it elsewhere")
    if data.get("version") != RESULT_VERSION:
        raise InputError(
            f"{path} has version {data.get('version')!r}, but only asv result files of version {RESULT_VERSION} "
            "are read; run 'asv update' on the tree or measure again"
        )
    missing = [name for name in ("date", "params", "result_columns") if name not in data]
    if missing:
        raise InputError(f"{path} lacks the key {missing[0]!r} of an asv result; measure again")
    commit, date, params, results, columns = (data[name] for name in ("commit_hash", "date", "params", "results", "result_columns"))
    whole = (
        isinstance(commit, str)
        and isinstance(date, int | float)
        and 0 <= date < MOST_MS
        and isinstance(params, dict)
        and isinstance(results, dict)
        and isinstance(columns, list)
        and all(isinstance(column, str) for column in columns)
    )
    if not whole or "result" not in columns or len(set(columns)) != len(columns):
        raise InputError(f"{path} has keys of an asv result with contents of another kind; measure again")
    if params.get("machine") != machine:
        raise InputError(f"{path} is of machine {params.get('machine')!r}, but lies in the folder of {machine!r}; move it")
    rows: dict[RowKey, RowResult] = {}
    orphans = []
    for name, entry in results.items():
        if name in benchmarks:
            rows.update(_rows(name, entry, columns, benchmarks[name], f"{path}: {name}"))
        else:
            orphans.append(name)
    return CommitResult(
        machine=machine,
        commit=commit,
        env_name=str(data.get("env_name") or ""),
        date_ms=int(date),
        rows=rows,
        params={str(name): str(value) for name, value in params.items()},
        source=str(path),
        foreign=True,
        orphans=tuple(sorted(orphans)),
    )


def _machine_folders(results_dir: Path) -> list[Path]:
    return sorted(path for path in results_dir.iterdir() if path.is_dir() and (path / "machine.json").is_file())


def _result_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if path.name != "machine.json")


def read_tree(results_dir: Path) -> ResultsTree:
    """Reads a whole tree as a history: what cannot be read is listed in `problems` and skipped, and no file is ever written.

    Raises:
        InputError: The folder or its benchmarks.json cannot be read.
    """
    if not results_dir.is_dir():
        raise InputError(f"{results_dir} is no folder of asv results; run asv first, or name the results_dir of its configuration")
    benchmarks = read_benchmarks(results_dir)
    results: dict[str, tuple[CommitResult, ...]] = {}
    problems = []
    for folder in _machine_folders(results_dir):
        found = []
        for path in _result_files(folder):
            try:
                found.append(_read_result(path, benchmarks, folder.name))
            except InputError as exc:
                problems.append(str(exc))
        results[folder.name] = tuple(sorted(found, key=lambda result: (result.date_ms, result.commit, result.env_name)))
    return ResultsTree(results_dir, benchmarks, tuple(results), results, tuple(problems))


def load_commit(results_dir: Path, machine: str, commit: str, env_name: str | None = None, records_dir: Path | None = None) -> CommitResult:
    """Reads the subject of a comparison: one commit on one machine in one environment.

    Args:
        results_dir: asv's results_dir.
        machine: The folder's name.
        commit: A commit hash, or at least its first seven digits.
        env_name: Needed where the commit was measured in several environments.
        records_dir: The process records of this run. Each sample must then have the record of the same value. None reads a foreign
            tree, of which only values are known.
    Raises:
        InputError: Nothing or more than one thing answers to the arguments, or the file is not whole; the message names it.
    """
    benchmarks = read_benchmarks(results_dir)
    folder = results_dir / machine
    if not folder.is_dir():
        known = ", ".join(path.name for path in _machine_folders(results_dir))
        raise InputError(f"{results_dir} has no results of machine {machine!r}; it has {known or 'none'}")
    if len(commit) < 7:
        raise InputError(f"{commit!r} is too short to name a commit in {folder}; give at least seven digits")
    candidates = [path for path in _result_files(folder) if path.name.split("-")[0] == commit[:8] or path.name.startswith(commit)]
    read = [_read_result(path, benchmarks, machine) for path in candidates]
    matching = [result for result in read if result.commit.startswith(commit) and env_name in (None, result.env_name)]
    if not matching:
        place = f"{folder}" if env_name is None else f"{folder} in environment {env_name}"
        raise InputError(f"{place} has no result of commit {commit}; measure it first")
    if len(matching) > 1:
        listed = ", ".join(f"{result.commit[:8]} in {result.env_name}" for result in matching)
        raise InputError(f"{folder} has more than one result for {commit} ({listed}); name the commit in full and its environment")
    if records_dir is None:
        return matching[0]
    return join_records(matching[0], read_process_records(records_dir, commit=matching[0].commit))


def drop_params(result: CommitResult, normalise: KeyNormaliser) -> CommitResult:
    """Rewrites the keys of a foreign result, e.g. by `without_mappings`.

    Raises:
        InputError: Two rows get the same key.
    """
    rows: dict[RowKey, RowResult] = {}
    for key, row in result.rows.items():
        new = normalise(key)
        if new in rows:
            raise InputError(f"{result.source} has two rows that become {new} when keys are normalised; use a finer normaliser")
        rows[new] = replace(row, key=new)
    return replace(result, rows=rows)
