"""The registered kernel specs, and what is recorded about them.

The rows of `rapid_llm.kernels.backends` are loaded at the first look-up. The registry belongs to the process and is
changed while it starts up; it is not locked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator

from rapid_llm.errors import RegistryError
from rapid_llm.kernels.ops.spec import GoldenRecord, KernelSpec

__all__ = ["backends", "generation", "get", "isolated", "names", "record_golden", "register", "specs_for"]

_BACKENDS = "rapid_llm.kernels.backends"


class _State:
    """Specs by name; the generation counts the changes, so that a cached decision knows when it is stale."""

    def __init__(self) -> None:
        self.specs: dict[str, KernelSpec] = {}
        self.generation = 0
        self.loaded = False


_state = _State()


def _loaded() -> _State:
    if not _state.loaded:
        # Set first: a backend that looks something up while it is imported must not recurse.
        _state.loaded = True
        try:
            for spec in importlib.import_module(_BACKENDS).SPECS:
                register(spec)
        except BaseException:
            _state.loaded = False
            _state.specs.clear()
            raise
    return _state


def register(spec: KernelSpec) -> None:
    """Adds a spec; decisions made before are forgotten.

    Raises:
        RegistryError: A spec of that name is registered already.
    """
    state = _loaded()
    if spec.name in state.specs:
        taken = state.specs[spec.name].target
        raise RegistryError(f"A spec named {spec.name!r} is registered already ({taken}); choose another name.")
    state.specs[spec.name] = spec
    state.generation += 1


def get(name: str) -> KernelSpec:
    """The spec of that name, with its golden record as recorded now.

    Raises:
        RegistryError: No spec has that name.
    """
    specs = _loaded().specs
    if name not in specs:
        raise RegistryError(f"No kernel spec is named {name!r}; registered are {', '.join(sorted(specs))}.")
    return specs[name]


def names() -> tuple[str, ...]:
    """Names of all registered specs, sorted."""
    return tuple(sorted(_loaded().specs))


def backends() -> tuple[str, ...]:
    """Names of all backends with a registered spec, sorted."""
    return tuple(sorted({spec.backend for spec in _loaded().specs.values()}))


def specs_for(op: str) -> tuple[KernelSpec, ...]:
    """Specs that serve `op`, sorted by name; empty where there is none."""
    specs = _loaded().specs.values()
    return tuple(sorted((spec for spec in specs if spec.op == op), key=lambda spec: spec.name))


def record_golden(name: str, record: GoldenRecord | None) -> None:
    """Stores the outcome of a verification with its spec (None removes it); decisions made before are forgotten.

    Raises:
        RegistryError: No spec has that name.
    """
    _loaded().specs[name] = dataclasses.replace(get(name), golden=record)
    _state.generation += 1


def generation() -> int:
    """Number of changes so far; a decision made under another number is stale."""
    return _loaded().generation


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Restores the registered specs and their golden records at its end; for tests."""
    before = dict(_loaded().specs)
    try:
        yield
    finally:
        _state.specs = before
        _state.generation += 1
