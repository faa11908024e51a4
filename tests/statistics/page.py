"""`page`: writes the stored tables into docs/statistics.md, between the marks of each command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.statistics import replay, resample, simulate, spreads, tables

RENDER: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "replay": replay.render,
    "spreads": spreads.render,
    "simulate": simulate.render,
    "bias": simulate.render_bias,
    "resample": resample.render,
}
"""How each command's data are shown."""


def part(name: str, data: dict[str, Any]) -> str:
    """What the page has between the marks of a command."""
    return f"{tables.told(data['made'])}\n{RENDER[name](data)}"


def stored(root: Path, name: str) -> dict[str, Any]:
    """What a command stored."""
    data: dict[str, Any] = json.loads((root / "docs" / "data" / "statistics" / f"{name}.json").read_text(encoding="utf-8"))
    return data


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with each part in its place.

    Raises:
        ValueError: The page lacks the marks of a part.
    """
    for name, text in parts.items():
        first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, started, rest = page.partition(first)
        _, ended, after = rest.partition(last)
        if not started or not ended or first in after:
            raise ValueError(f"the page has not exactly one pair of marks {first.strip()} and {last}; add them")
        page = before + first + text + last + after
    return page


def rewrite(root: Path) -> bool:
    """Brings docs/statistics.md up to date; says whether it changed."""
    path = root / "docs" / "statistics.md"
    before = path.read_text(encoding="utf-8")
    after = filled(before, {name: part(name, stored(root, name)) for name in RENDER})
    path.write_text(after, encoding="utf-8")
    return after != before
