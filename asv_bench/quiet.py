"""What keeps a measurement clean: cache flushes, CPUs to measure on, and a guard against waiting for the device."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asv_bench.environment import last_level_cache_bytes
from asv_bench.lazy import LazyModule
from asv_bench.timing import TimingError

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

FLUSH_FACTOR = 2
"""A flush writes at least this many times the cache."""

_FLUSH_MIN_BYTES = 64 << 20


class CpuFlush:
    """Writes a buffer of twice the last-level cache."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(max(_FLUSH_MIN_BYTES, FLUSH_FACTOR * last_level_cache_bytes()) // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self._buffer.fill_(1)


class DeviceFlush:
    """Writes twice the L2, so that nothing of the working sets is left in it."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(FLUSH_FACTOR * l2_bytes(device) // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()


def do_nothing() -> None:
    """Stands for a flush, a poison or a call that there is none of."""


def l2_bytes(device: torch.device) -> int:
    """L2 size from the device's properties; 0 on a CPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def each_cpu(blocks: int) -> Iterator[None]:
    """Yields `blocks` times, the calling thread bound to one CPU after the other; afterwards to all that it was allowed before.

    Where the system has no affinity, it only yields.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield from (None for _ in range(blocks))
        return
    allowed = sorted(os.sched_getaffinity(0))
    try:
        for block in range(blocks):
            os.sched_setaffinity(0, {allowed[block % len(allowed)]})
            yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def no_synchronise(message: str) -> Iterator[None]:
    """torch raises where an operation inside would wait for the device, and that becomes a `TimingError` of `message`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says at each switch that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if "synchron" not in str(error):
                raise
            raise TimingError(message) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
