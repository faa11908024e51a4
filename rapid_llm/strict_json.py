"""Reading a JSON file that somebody else may have written: strict, of bounded size, and refused with one kind of error."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["MAX_BYTES", "read_strict_json"]

MAX_BYTES = 64 << 20
"""Of one file; baselines and files of configs have under 1 MiB."""


def read_strict_json(path: Path) -> Any:
    """The value in a UTF-8 file of strict JSON.

    Raises:
        OSError: The file cannot be opened, or is no regular file, which could be waited for without end.
        ValueError: It is over `MAX_BYTES`, nested too deeply, or no strict JSON: NaN, Infinity and numbers beyond a float are none.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is over {MAX_BYTES:,} bytes")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(token: str) -> float:
    if not math.isfinite(value := float(token)):
        raise ValueError(f"{token[:30]} is beyond what a float can hold")
    return value
