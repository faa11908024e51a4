"""Triton's interpreter in place of a GPU, and with a memory: where times are not looked at, results are the same and a third sooner."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asv_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


def remember_builtins() -> None:
    """Makes the interpreter remember which members of `triton.language` it has to replace, and that it has replaced them.

    Triton 3.7 looks through all of some 300 members at each launch and at each call of a device function, sorted, to find those that are
    builtins. Which they are does not change; whether one is replaced already is still looked at at each launch. A device function is called
    within a launch, where the modules that it names are replaced already, but for one that only it names. Calling this again changes
    nothing, and an interpreter that does this in another way is left as it is.

    Source:
        `_patch_builtin`, `_patch_lang` and `InterpretedFunction.__call__` in triton/runtime/interpreter.py.
    """
    from triton import language
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

    whole: Any = getattr(interpreter, "_patch_lang", None)

    def patch_lang(fn: Any) -> Any:
        named = [module for module in fn.__globals__.values() if module is language or module is language.core]
        # What a launch replaces `range` with is no class.
        if named and not any(inspect.isclass(module.range) for module in named):
            return interpreter._LangPatchScope()
        return whole(fn)

    for name, ours in (("_patch_builtin", patch_builtin), ("_patch_lang", patch_lang)):
        present = getattr(interpreter, name, None)
        if present is None or present.__module__ == __name__:
            continue
        if list(inspect.signature(present).parameters) == list(inspect.signature(ours).parameters):
            setattr(interpreter, name, ours)


@contextlib.contextmanager
def device_or_interpreter(*, forced: bool = True) -> Iterator[torch.device]:
    """The GPU, or the CPU with Triton's interpreter turned on.

    Args:
        forced: Whether the interpreter is the backend that dispatch has to take.
    """
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    variables = {"TRITON_INTERPRET": "1", **({"RAPID_LLM_FORCE_BACKEND": "triton"} if forced else {})}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield torch.device("cpu")
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


__all__ = ["device_or_interpreter", "remember_builtins"]
