"""One row of an asv results tree, as the tests of reading want it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gate_builders import HEAD_COMMIT, write_tree

from ci.model import RowResult
from ci.results import load_commit

NAME = "bench.A.track_x"
GB = {"unit": "GB/s"}


def entry_of(result: object, params: object = (), samples: object = None) -> list[Any]:
    return [result, list(params) if isinstance(params, tuple) else params, "v1", None, None, None, samples]


def row_of(folder: Path, entry: object, unit: str = "GB/s", **benchmark: Any) -> RowResult:
    write_tree(folder, {NAME: {"unit": unit, **benchmark}}, {NAME: entry})
    (row,) = load_commit(folder, "box", HEAD_COMMIT).rows.values()
    return row
