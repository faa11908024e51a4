"""The tuned config of a kernel for a request: found in the config store, checked against the request, or none."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from rapid_llm.kernels.autotune import config_store
from rapid_llm.kernels.autotune.config_store import ConfigKey, get_best_config
from rapid_llm.kernels.ops.spec import KernelSpec, Request, load_target

__all__ = ["chosen_config", "config_key", "generation", "overridden"]

_COMPILERS = ("torch", "triton")
_KERNEL_IMPORT = re.compile(r"^from (rapid_llm\.kernels\.\w+) import", re.MULTILINE)

_overrides: dict[str, Any] = {}
_changes = 0


def chosen_config(spec: KernelSpec, request: Request) -> tuple[Any, str]:
    """The config to launch `spec` with, None for the kernel's own rule, and a sentence that says which.

    A stored config that does not fit the request is a miss, with a warning.
    """
    if spec.config is None:
        return None, "has no config"
    if spec.name in _overrides:
        return _overrides[spec.name], f"config overridden: {_overrides[spec.name]}"
    key = config_key(spec, request)
    stored = get_best_config(key)
    if stored is None:
        return None, "config by rule: none is stored for this key"
    try:
        config = load_target(spec.config)(**stored.config)
        problem = config.problem(dict(request.shape), request.kv_dtype)
    except TypeError as error:
        problem = str(error)
    if problem is not None:
        where = config_store.file_name(key.device)
        told = f"The stored config of {spec.name} in {where} is passed over: {problem}. Tune it again."
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return None, f"config by rule: the stored one does not fit ({problem})"
    day, commit = (str(stored.environment.get(name, "unknown")) for name in ("date", "commit"))
    return config, f"config tuned: {config}, {stored.latency_us:.4g} us when chosen, {day} at commit {commit[:12]}"


def config_key(spec: KernelSpec, request: Request) -> ConfigKey:
    """The key under which the config of `spec` for `request` is stored."""
    return ConfigKey(
        op=request.op,
        kernel=spec.name,
        q_dtype=request.q_dtype,
        kv_dtype=request.kv_dtype,
        layout_tags=tuple(sorted(request.layout_tags)),
        shape=config_store.shape_bucket(request.shape),
        device=_device_name(request.device_type),
        versions=_versions(),
        source_hash=_source_hash(spec.target.partition(":")[0]),
    )


@contextlib.contextmanager
def overridden(name: str, config: Any) -> Iterator[None]:
    """Within it the kernel of that KernelSpec name is launched with `config`, whatever is stored; for a search and for tests."""
    global _changes
    before = dict(_overrides)
    _overrides[name] = config
    _changes += 1
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
        _changes += 1


def generation() -> int:
    """Number of changes so far; a decision made under another number is stale."""
    return _changes + config_store.generation()


def _device_name(device_type: str) -> str:
    if device_type != "cuda":
        return device_type
    import torch

    # Asked for on a machine without the device, a decision is made by rule.
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for name in _COMPILERS:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, "none"))
    return tuple(found)


@functools.cache
def _source_hash(module: str) -> str:
    """Hash of a kernel's module and of the modules of rapid_llm.kernels that it imports: 16 hex digits."""
    todo, texts = [module], {}
    while todo:
        name = todo.pop()
        if name not in texts:
            origin = getattr(importlib.util.find_spec(name), "origin", None)
            texts[name] = Path(origin).read_text(encoding="utf-8") if origin else ""
            todo += _KERNEL_IMPORT.findall(texts[name])
    return hashlib.sha256("\0".join(f"{name}\0{texts[name]}" for name in sorted(texts)).encode()).hexdigest()[:16]
