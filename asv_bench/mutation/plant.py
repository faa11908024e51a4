"""Plants a fault: loads edited copies of the library's modules and of the suites in place of the real ones."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from asv_bench.lazy import LazyModule
from asv_bench.mutation.fault import Edit, PlantError

spec: LazyModule = LazyModule("rapid_llm.kernels.ops.spec")

ROOT = Path(__file__).resolve().parents[2]
_LIBRARY = (
    "rapid_llm.kernels.configs",
    "rapid_llm.kernels.e4m3",
    "rapid_llm.kernels.int8",
    "rapid_llm.kernels.direct_launch",
    "rapid_llm.kernels.kv_quant",
    "rapid_llm.kernels.kv_write",
    "rapid_llm.kernels.decode_tile",
    "rapid_llm.kernels.decode_merge",
    "rapid_llm.kernels.decode_split",
    "rapid_llm.kernels.decode_stream",
    "rapid_llm.kernels.decode_int8",
    "rapid_llm.kernels.workspace",
    "rapid_llm.kernels.paged_decode",
    "rapid_llm.free_runs",
    "rapid_llm.staged_rows",
    "rapid_llm.row_search",
    "rapid_llm.kv_cache",
    "rapid_llm.device_state_cache",
)
"""Modules that can be edited, each after what it imports."""

SUITE_MODULES = ("asv_bench.bench_paged_decode", "asv_bench.bench_kv_write")

# What a case on the interpreter would take minutes for: fewer and narrower heads, and the wider program for few tokens.
_SMALL = (
    Edit(
        "asv_bench/bench_paged_decode.py",
        "_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128",
        "_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 4, 2, 64",
    ),
    Edit(
        "asv_bench/bench_kv_write.py",
        "_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128",
        "_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 4, 2, 64",
    ),
    Edit("rapid_llm/kernels/configs.py", "_FEW_TOKENS, _MANY_TOKENS = 256, 8192", "_FEW_TOKENS, _MANY_TOKENS = 16, 32"),
    Edit("rapid_llm/kernels/configs.py", "_STREAMED_TOKENS = 128, 4096", "_STREAMED_TOKENS = 8, 1"),
    Edit("rapid_llm/kernels/configs.py", "_FEWEST_PROGRAMS = 16", "_FEWEST_PROGRAMS = 0"),
)


@contextmanager
def planted(edits: Sequence[Edit], folder: Path, *, small: bool) -> Iterator[dict[str, ModuleType]]:
    """The edited library in place of the real one; gives the suite modules, loaded with their edits, by name.

    Args:
        edits: Of files of `rapid_llm` or of the suites.
        folder: Empty; the edited copies are written to it and have to stay until the process ends: Triton reads them again.
        small: Also the reductions for the interpreter.
    Raises:
        PlantError: An edit does not fit, or names a file that nothing is loaded from.
    """
    edits = (*edits, *(_SMALL if small else ()))
    names = {_path(name): name for name in (*_LIBRARY, *SUITE_MODULES)}
    if strangers := {edit.path for edit in edits} - names.keys():
        raise PlantError(f"a fault edits {', '.join(sorted(strangers))}, which is not loaded anew: add it to the modules of plant.py")
    before = {name: importlib.import_module(name) for name in _LIBRARY}
    try:
        for name in _LIBRARY:
            sys.modules[name] = _load(name, edits, folder)
        spec.load_target.cache_clear()
        yield {name: _load(name, edits, folder) for name in SUITE_MODULES}
    finally:
        sys.modules.update(before)
        spec.load_target.cache_clear()


def _path(name: str) -> str:
    return f"{name.replace('.', '/')}.py"


def _load(name: str, edits: Sequence[Edit], folder: Path) -> ModuleType:
    """The module of that name from its source with the edits made, not entered among the imported ones."""
    path = _path(name)
    text = (ROOT / path).read_text(encoding="utf-8")
    for edit in edits:
        if edit.path == path:
            text = edit.apply(text)
    target = folder / f"{name.rpartition('.')[2]}.py"
    target.write_text(text, encoding="utf-8")
    found = importlib.util.spec_from_file_location(name, target)
    if found is None or found.loader is None:
        raise PlantError(f"{target} cannot be loaded as {name}")
    module = importlib.util.module_from_spec(found)
    kept = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        found.loader.exec_module(module)
    except (SyntaxError, NameError) as error:
        raise PlantError(f"the edited {path} cannot be imported: {error}") from error
    finally:
        if kept is None:
            del sys.modules[name]
        else:
            sys.modules[name] = kept
    return module


def safe_name(name: str) -> str:
    """A folder name for a fault."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())
