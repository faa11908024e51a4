"""Change points of every series of a history, kept where a series only grew."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ci.history import steps
from ci.history.store import Benchmark, History, Line, Params

CACHE_VERSION = 2


@dataclass(frozen=True)
class Series:
    """One row on one line: points without gaps and their levels."""

    line: Line
    benchmark: Benchmark
    index: int
    revisions: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    levels: list[steps.Level]

    @property
    def params(self) -> tuple[str, ...]:
        return self.benchmark.rows[self.index]

    @property
    def name(self) -> str:
        return f"{self.benchmark.name}({', '.join(self.params)})" if self.params else self.benchmark.name

    def changes(self) -> Iterator[Change]:
        """Where a new level begins."""
        for before, after in zip(self.levels, self.levels[1:], strict=False):
            last, first = int(self.revisions[before.end - 1]), int(self.revisions[after.start])
            yield Change(self, last, first, before.value, after.value)


@dataclass(frozen=True)
class Change:
    """Between the commits of two revisions a series came to another level."""

    series: Series
    last: int
    first: int
    before: float
    after: float

    @property
    def speed(self) -> float:
        """Relative change of speed: negative is slower, whichever way the metric counts."""
        return (self.after / self.before if self.series.benchmark.higher_is_better else self.before / self.after) - 1

    @property
    def worse(self) -> bool:
        return self.speed < 0


_Key = tuple[Params, str, tuple[str, ...]]
_Known = tuple[int, int, list[int]]
"""Length and checksum of a finished part, and its change points."""


def all_series(history: History, cache: Path) -> list[Series]:
    """Every series with its levels, by line, benchmark and row.

    Args:
        cache: File that remembers the change points of finished parts; written anew.
    """
    kept = _load(cache)
    found: dict[_Key, _Known] = {}
    made = []
    for line in history.lines:
        for name, table in line.values.items():
            benchmark = history.benchmarks[name]
            for index in range(table.shape[1]):
                present = np.isfinite(table[:, index])
                if not present.any():
                    continue
                values = np.ascontiguousarray(table[present, index])
                key = (line.params, name, benchmark.rows[index])
                length = steps.frozen_length(values.size)
                check = zlib.crc32(values[:length].tobytes())
                known = kept.get(key)
                if length and (known is None or known[:2] != (length, check)):
                    known = (length, check, steps.finished(values[:length]))
                if length and known is not None:
                    found[key] = known
                starts = steps.change_points(values, known[2] if length and known is not None else None)
                made.append(Series(line, benchmark, index, line.revisions[present], values, steps.levels(values, starts)))
    cache.parent.mkdir(parents=True, exist_ok=True)
    beside = cache.with_name(f"{cache.name}.{os.getpid()}")
    beside.write_bytes(msgspec.msgpack.encode((CACHE_VERSION, list(found.items()))))
    beside.replace(cache)
    return made


def _load(cache: Path) -> dict[_Key, _Known]:
    try:
        version, found = msgspec.msgpack.decode(cache.read_bytes(), type=tuple[int, list[tuple[_Key, _Known]]])
    except (OSError, msgspec.MsgspecError, ValueError):  # a cache is only ever a shortcut
        return {}
    return dict(found) if version == CACHE_VERSION else {}
