"""Results of every commit as columns of numbers, read once: a file that has not changed since the last time is not read again.

A tree is an asv `results_dir`. One `Line` is what the site draws together: one device and one set of versions; it has a column for each row
of `benchmarks.json` and a line for each commit. Several files of one commit (the runs of a baseline) become one line by their median.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ci.errors import InputError, one_line
from ci.jsonio import read_bounded, read_json
from ci.results import MOST_MS, RESULT_VERSION, direction_of

Array = npt.NDArray[np.float64]

CACHE_VERSION = 2
_MAX_ROWS = 1_000_000
"""Of one benchmark; parameter axes multiply, and a damaged file could ask for any number."""
_PER_MACHINE = ("arch", "cpu", "gpu", "num_cpu", "os", "ram")
"""Parameters that describe a machine; they may change without the device changing, and make no line of their own."""

Params = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Benchmark:
    """One entry of benchmarks.json: `entry` as asv wrote it, `rows` the parameter texts of each column."""

    name: str
    entry: dict[str, Any]
    rows: tuple[tuple[str, ...], ...]
    version: str
    higher_is_better: bool

    @property
    def unit(self) -> str:
        return str(self.entry.get("unit", ""))


@dataclass
class Line:
    """The results of one device and one set of versions.

    Attributes:
        params: What asv calls the parameters of a graph.
        commits: Hashes, by `revisions`.
        revisions: [n], places in the history.
        values: Benchmark name to [n, rows]; NaN where there is no number.
    """

    params: Params
    commits: list[str]
    revisions: npt.NDArray[np.int64]
    values: dict[str, Array]

    @property
    def machine(self) -> str:
        return dict(self.params)["machine"]


@dataclass
class History:
    """All lines, and what is common to them."""

    benchmarks: dict[str, Benchmark]
    lines: list[Line]
    machines: dict[str, dict[str, str]]
    dates_ms: dict[str, int]
    revisions: dict[str, int]
    problems: list[str] = field(default_factory=list)


@dataclass
class _Folder:
    """What is kept of one machine's folder: the files by name, and the numbers of each in one line of `numbers`."""

    stamps: dict[str, tuple[int, int]]
    lines: dict[str, int]
    heads: list[tuple[str, int, Params]]
    numbers: Array


def read_benchmarks(trees: Sequence[Path]) -> dict[str, Benchmark]:
    """The benchmarks of all trees; where two describe one name differently, the last tree counts.

    Raises:
        InputError: A tree has no readable benchmarks.json, or a benchmark whose direction nothing tells.
    """
    found: dict[str, Benchmark] = {}
    for tree in trees:
        path = tree / "benchmarks.json"
        data = read_json(path, allow_constants=True)
        if not isinstance(data, dict):
            raise InputError(f"{path} is no table of benchmarks; run asv again to write it")
        for name, entry in data.items():
            if name == "version" or not isinstance(entry, dict):
                continue
            axes = entry.get("params") or []
            if not isinstance(axes, list) or not all(isinstance(axis, list) for axis in axes):
                raise InputError(f"{path}: the parameters of {name} are no lists; run asv again to write it")
            if math.prod(len(axis) for axis in axes) > _MAX_ROWS:
                raise InputError(f"{path}: the parameters of {name} make over {_MAX_ROWS:,} rows; give it fewer")
            direction = direction_of(str(entry.get("unit", "")), str(entry.get("type", "")), entry.get("higher_is_better"))
            if direction is None:
                raise InputError(
                    f"{path}: nothing says which way is better for {name} in {entry.get('unit')!r}; set higher_is_better on it"
                )
            rows = tuple(itertools.product(*(tuple(map(str, axis)) for axis in axes)))
            known = {"param_names": [], **entry, "params": axes, "name": name, "higher_is_better": direction == "higher"}
            found[name] = Benchmark(name, known, rows, str(entry.get("version", "")), direction == "higher")
    return found


def read_history(trees: Sequence[Path], cache: Path, order: Mapping[str, int] | None = None) -> History:
    """Reads trees.

    Args:
        trees: asv results folders.
        cache: File that remembers what was read; written anew.
        order: Place of each commit in the history; commits that it lacks are left out. By date where None.
    Raises:
        InputError: A tree cannot be read, or holds nothing.
    """
    benchmarks = read_benchmarks(trees)
    offsets = dict(zip(benchmarks, itertools.accumulate((len(b.rows) for b in benchmarks.values()), initial=0), strict=False))
    width = sum(len(b.rows) for b in benchmarks.values())
    layout = [(name, b.rows, b.version) for name, b in benchmarks.items()]
    kept = _load(cache, layout)
    problems: list[str] = []
    machines: dict[str, dict[str, str]] = {}
    folders: dict[str, _Folder] = {}
    for tree in trees:
        for path in sorted(entry for entry in tree.iterdir() if (entry / "machine.json").is_file()):
            described = read_json(path / "machine.json", allow_constants=True)
            if isinstance(described, dict):
                machines[path.name] = {str(key): str(value) for key, value in described.items() if key != "version"}
                machines[path.name]["machine"] = path.name
            folders[str(path)] = _read_folder(path, benchmarks, offsets, width, kept.get(str(path)), problems)
    _save(cache, layout, folders)
    return _assemble(benchmarks, offsets, width, list(folders.values()), machines, order, problems)


class _Stored(msgspec.Struct):
    """A `_Folder` as it lies in the cache: `numbers` as its shape and bytes."""

    stamps: dict[str, tuple[int, int]]
    lines: dict[str, int]
    heads: list[tuple[str, int, Params]]
    shape: tuple[int, int]
    numbers: bytes


_Layout = list[tuple[str, tuple[tuple[str, ...], ...], str]]


def _load(cache: Path, layout: _Layout) -> dict[str, _Folder]:
    """What an earlier run kept; nothing where it was of other benchmarks or cannot be read."""
    try:
        version, stored, folders = msgspec.msgpack.decode(cache.read_bytes(), type=tuple[int, _Layout, dict[str, _Stored]])
        if version != CACHE_VERSION or stored != layout:
            return {}
        return {
            name: _Folder(kept.stamps, kept.lines, kept.heads, np.frombuffer(kept.numbers).reshape(kept.shape))
            for name, kept in folders.items()
        }
    except (OSError, msgspec.MsgspecError, ValueError):  # a cache is only ever a shortcut
        return {}


def _save(cache: Path, layout: _Layout, folders: Mapping[str, _Folder]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    beside = cache.with_name(f"{cache.name}.{os.getpid()}")
    stored = {
        name: _Stored(kept.stamps, kept.lines, kept.heads, (kept.numbers.shape[0], kept.numbers.shape[1]), kept.numbers.tobytes())
        for name, kept in folders.items()
    }
    beside.write_bytes(msgspec.msgpack.encode((CACHE_VERSION, layout, stored)))
    beside.replace(cache)


def _read_folder(
    path: Path, benchmarks: Mapping[str, Benchmark], offsets: Mapping[str, int], width: int, kept: _Folder | None, problems: list[str]
) -> _Folder:
    stamps = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(".json") and entry.name != "machine.json":
                stat = entry.stat()
                stamps[entry.name] = (stat.st_mtime_ns, stat.st_size)
    names = sorted(stamps)
    made = _Folder({}, {}, [], np.full((len(names), width), np.nan))
    for name in names:
        line = len(made.heads)
        if kept is not None and kept.stamps.get(name) == stamps[name]:
            old = kept.lines[name]
            made.heads.append(kept.heads[old])
            made.numbers[line] = kept.numbers[old]
        else:
            try:
                head, numbers = _read_file(path / name, benchmarks, offsets, width)
            except InputError as error:
                problems.append(str(error))
                continue
            except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
                problems.append(one_line(f"{path / name} is no asv result ({error}); measure it again"))
                continue
            made.heads.append(head)
            made.numbers[line] = numbers
        made.stamps[name], made.lines[name] = stamps[name], line
    made.numbers = made.numbers[: len(made.heads)]
    return made


def _read_file(
    path: Path, benchmarks: Mapping[str, Benchmark], offsets: Mapping[str, int], width: int
) -> tuple[tuple[str, int, Params], Array]:
    try:
        data = json.loads(read_bounded(path))
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be read; measure it again") from error
    if not isinstance(data, dict) or data.get("version") != RESULT_VERSION:
        raise InputError(f"{path} is no asv result of version {RESULT_VERSION}; measure it again, or move it elsewhere")
    columns = data["result_columns"]
    at, at_params, at_version = (columns.index(name) for name in ("result", "params", "version"))
    numbers = np.full(width, np.nan)
    for name, entry in data["results"].items():
        benchmark = benchmarks.get(name)
        if benchmark is None or not isinstance(entry, list):
            continue
        version = entry[at_version] if len(entry) > at_version else None
        if version is not None and str(version) != benchmark.version:
            continue
        values, axes = entry[at], entry[at_params] if len(entry) > at_params else []
        if not isinstance(values, list):
            continue
        rows = tuple(itertools.product(*(map(str, axis) for axis in axes or [])))
        found = dict(zip(rows, values, strict=False)) if rows != benchmark.rows else None
        cells = values if found is None else [found.get(row) for row in benchmark.rows]
        start = offsets[name]
        for index, value in enumerate(cells[: len(benchmark.rows)]):
            if isinstance(value, int | float) and math.isfinite(value):
                numbers[start + index] = value
    params = {str(key): "" if value is None else str(value) for key, value in data["params"].items() if key not in _PER_MACHINE}
    params.update({f"env-{key}": str(value) for key, value in (data.get("env_vars") or {}).items()})
    params["machine"] = path.parent.name
    date = data["date"]
    if not 0 <= date < MOST_MS:
        raise InputError(f"{path} has the date {date!r}, which is no time in milliseconds; measure it again")
    return (str(data["commit_hash"]), int(date), tuple(sorted(params.items()))), numbers


def _assemble(
    benchmarks: dict[str, Benchmark],
    offsets: Mapping[str, int],
    width: int,
    folders: Sequence[_Folder],
    machines: dict[str, dict[str, str]],
    order: Mapping[str, int] | None,
    problems: list[str],
) -> History:
    dates: dict[str, int] = {}
    lines: dict[Params, dict[str, list[Array]]] = {}
    left_out: set[str] = set()
    for folder in folders:
        for (commit, date, params), numbers in zip(folder.heads, folder.numbers, strict=True):
            if order is not None and commit not in order:
                left_out.add(commit)
                continue
            dates[commit] = date
            lines.setdefault(params, {}).setdefault(commit, []).append(numbers)
    if order is None:
        ordered = sorted(dates, key=lambda commit: (dates[commit], commit))
        revisions = {commit: index for index, commit in enumerate(ordered)}
    else:
        revisions = {commit: order[commit] for commit in dates}
    if left_out:
        problems.append(
            f"{len(left_out)} commits are not on the branch and are not shown: {', '.join(sorted(c[:8] for c in left_out)[:5])}"
        )
    made = []
    keys = {key for params in lines for key, _ in params}
    for params, by_commit in sorted(lines.items()):
        commits = sorted(by_commit, key=revisions.__getitem__)
        table = np.empty((len(commits), width))
        for index, commit in enumerate(commits):
            several = by_commit[commit]
            table[index] = several[0] if len(several) == 1 else _median(several)
        values = {name: table[:, offsets[name] : offsets[name] + len(b.rows)] for name, b in benchmarks.items()}
        values = {name: part for name, part in values.items() if np.isfinite(part).any()}
        full = tuple(sorted({**dict.fromkeys(keys, ""), **dict(params)}.items()))
        made.append(Line(full, commits, np.array([revisions[c] for c in commits], dtype=np.int64), values))
    return History(benchmarks, made, machines, dates, revisions, problems)


def _median(several: Sequence[Array]) -> Array:
    stacked = np.vstack(several)
    result = np.full(stacked.shape[1], np.nan)
    known = np.isfinite(stacked).any(axis=0)
    result[known] = np.nanmedian(stacked[:, known], axis=0)
    return result
