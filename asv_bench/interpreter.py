"""Triton's interpreter with a memory, for checks whose time is not looked at: results are the same, and come a third sooner."""

from __future__ import annotations

import inspect
from typing import Any


def remember_builtins() -> None:
    """Makes the interpreter remember which members of `triton.language` it has to replace.

    Triton 3.7 looks through all of some 300 members at each launch and at each call of a device function, sorted, to find those that are
    builtins. Which they are does not change; whether one is replaced already is still looked at each time. Calling this again changes
    nothing, and an interpreter that does this in another way is left as it is.

    Source:
        `_patch_builtin` and `InterpretedFunction.__call__` in triton/runtime/interpreter.py.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    known: dict[Any, list[str]] = {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in known:
            known[pkg] = [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]
        for name in known[pkg]:
            member = getattr(pkg, name)
            if is_builtin(member):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    present = getattr(interpreter, "_patch_builtin", None)
    if present is None or present.__module__ == __name__:
        return
    if list(inspect.signature(present).parameters) == list(inspect.signature(patch_builtin).parameters):
        interpreter._patch_builtin = patch_builtin


__all__ = ["remember_builtins"]
