"""The interpreter's memory replaces exactly what the interpreter itself would."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

from asv_bench.interpreter import remember_builtins


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_patch_builtin", interpreter._patch_builtin)


def _original() -> Any:
    """The interpreter's own function, whatever stands in its place here."""
    spec = importlib.util.find_spec("triton.runtime.interpreter")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh._patch_builtin


def _replaced(pkg: Any) -> list[list[str]]:
    """Names that three scopes replace: the second within the first, as a device function's is, the third after both."""
    scopes = [interpreter._LangPatchScope() for _ in range(3)]
    for scope in scopes[:2]:
        interpreter._patch_builtin(pkg, interpreter.interpreter_builder, scope)
    names = [[name for _, name, _ in scope._changes] for scope in scopes[:2]]
    for scope in reversed(scopes[:2]):
        scope.restore()
    interpreter._patch_builtin(pkg, interpreter.interpreter_builder, scopes[2])
    names.append([name for _, name, _ in scopes[2]._changes])
    scopes[2].restore()
    return names


@pytest.mark.parametrize("pkg", [tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base], ids=lambda pkg: pkg.__name__)
def test_the_same_members_are_replaced(pkg: Any) -> None:
    interpreter._patch_builtin = _original()
    own = _replaced(pkg)
    remember_builtins()
    assert interpreter._patch_builtin.__module__ == "asv_bench.interpreter"
    assert _replaced(pkg) == own
    assert own[0] == own[2]


def test_an_interpreter_of_another_form_is_left_alone() -> None:
    def other(pkg: Any, builder: Any) -> None:
        raise NotImplementedError

    interpreter._patch_builtin = other
    remember_builtins()
    assert interpreter._patch_builtin is other
