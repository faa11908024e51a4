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
    for name in ("_patch_builtin", "_patch_lang"):
        monkeypatch.setattr(interpreter, name, getattr(interpreter, name))


def _original() -> Any:
    """The interpreter's own functions, whatever stands in their place here."""
    spec = importlib.util.find_spec("triton.runtime.interpreter")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


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
    interpreter._patch_builtin = _original()._patch_builtin
    own = _replaced(pkg)
    remember_builtins()
    assert interpreter._patch_builtin.__module__ == "asv_bench.interpreter"
    assert _replaced(pkg) == own
    assert own[0] == own[2]


def _names_tl() -> Any:
    return tl.range


def test_a_device_function_finds_all_replaced_within_a_launch_and_a_launch_replaces_all() -> None:
    fresh = _original()
    interpreter._patch_builtin, interpreter._patch_lang = fresh._patch_builtin, fresh._patch_lang
    remember_builtins()
    before = dict(vars(tl))
    launch = interpreter._patch_lang(_names_tl)
    replaced = [name for _, name, _ in launch._changes]
    assert len(replaced) > 100
    within = dict(vars(tl))
    assert interpreter._patch_lang(_names_tl)._changes == []
    assert dict(vars(tl)) == within
    launch.restore()
    assert dict(vars(tl)) == before
    again = interpreter._patch_lang(_names_tl)
    assert [name for _, name, _ in again._changes] == replaced
    again.restore()


def test_an_interpreter_of_another_form_is_left_alone() -> None:
    def other(pkg: Any, builder: Any) -> None:
        raise NotImplementedError

    interpreter._patch_builtin = other
    remember_builtins()
    assert interpreter._patch_builtin is other
