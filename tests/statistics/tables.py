"""Shares with their intervals, Markdown tables, and what a table was made with."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy


def wilson(found: int, of: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """The 95 % Wilson interval of a share (Wilson 1927)."""
    if not 0 <= found <= of:
        raise ValueError(f"{found} of {of} is no share")
    if of == 0:
        return 0.0, 1.0
    share = found / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, middle - half) if found else 0.0, min(1.0, middle + half) if found < of else 1.0


def share(found: int, of: int) -> str:
    """A share as "3/20 = .150 (.052 to .360)"."""
    if of == 0:
        return "none to count"
    low, high = wilson(found, of)
    return f"{found}/{of} = {decimal(found / of)} ({decimal(low)} to {decimal(high)})"


def decimal(value: float, places: int = 3) -> str:
    """A share in [0, 1] without its leading zero."""
    text = f"{value:.{places}f}"
    return text[1:] if text.startswith("0.") else text


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its end a newline."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def made_with(command: str, seed: int) -> dict[str, Any]:
    """What a table was made with: command, seed, versions, date."""
    return {
        "command": f"python -m tests.statistics {command}",
        "seed": seed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def told(made: dict[str, Any]) -> str:
    """`made_with` as a sentence."""
    return (
        f"`{made['command']}`, seed {made['seed']}, {made['date']}, on a CPU with Python {made['python']}, numpy {made['numpy']}, "
        f"scipy {made['scipy']}.\n"
    )


def store(path: Path, data: dict[str, Any]) -> None:
    """Writes what a command found as strict JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
