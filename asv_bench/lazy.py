"""Modules that are imported when they are first used.

asv imports every module of this package in each process that it starts, dozens of times in a run; only the measuring process needs
torch and the library under test, and importing them must not touch the device anywhere else.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module until one of its attributes is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"LazyModule({self._name!r})"
