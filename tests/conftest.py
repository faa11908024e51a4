"""What all tests share: the device, the material beside the checkout, and the marks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from asv_bench.interpreter import remember_builtins

ROOT = Path(__file__).resolve().parent.parent

# Threads that wait by spinning take the cores from the other test processes, of which there are more than cores; children inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _has_cuda() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()


if not _has_cuda():
    # Triton decides while it is imported whether it interprets; the first test module that imports it decides for all.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ModuleNotFoundError):
        remember_builtins()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the GPU tests, with the reason, where there is no GPU; the longest files come first, so that no process ends with one.

    A file with slow tests is longer than one without, and one that is allowed more time (`timeout`) longer than one with less.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    allowed_s: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        allowed_s[item.path] = max(allowed_s.get(item.path, 0.0), float(limit.args[0]) if limit else 0.0)
    items.sort(key=lambda item: (item.path not in slow, -allowed_s[item.path]))
    if any(item.get_closest_marker("gpu") for item in items) and not _has_cuda():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real results trees from other projects; it lies beside the checkout and is not a part of it."""
    folder = Path(os.environ.get("RAPID_LLM_SHARED", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"the shared data are not at {folder} (set RAPID_LLM_SHARED)")
    return folder
