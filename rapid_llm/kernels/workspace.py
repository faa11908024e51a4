# mypy: disable-error-code="import-untyped"
"""Memory that programs of one launch share: kept between calls, one piece for each stream, so that no call allocates after its first.

Calls on one stream follow each other, so they can share a piece; calls on different streams have different ones. A CUDA graph is replayed
on any stream, beside eager calls and other graphs, so every capture has its own: it is made at the capture's first call, in the graph's
own memory, and the graph sets its counters to 0 in each replay. Each kernel leaves the counters at 0.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from rapid_llm.errors import WorkspaceError

__all__ = ["Workspace", "kept", "workspace_for"]

_LEAST_FLOATS = 1 << 16
_LEAST_COUNTERS = 1 << 10
_CAPTURING = 1


@dataclass(frozen=True)
class Workspace:
    """One piece.

    Attributes:
        floats: fp32, uninitialised.
        counters: int32, all 0 between launches.
        capture: Id of the capture that it belongs to; None for eager calls.
        floats_ptr, counters_ptr: Addresses, in bytes.
    """

    floats: torch.Tensor
    counters: torch.Tensor
    capture: int | None
    floats_ptr: int
    counters_ptr: int


class _Kept:
    """The pieces by device, stream, and whether they are a capture's; of captures on a stream the last."""

    def __init__(self) -> None:
        self.pieces: dict[tuple[torch.device, int, bool], Workspace] = {}

    def cache_clear(self) -> None:
        """Forgets them; for tests, and where another device stands in."""
        self.pieces.clear()


kept = _Kept()


def workspace_for(device: torch.device, num_floats: int, num_counters: int) -> Workspace:
    """The piece of the current stream with at least that many elements; it is valid for launches on that stream from now on.

    Raises:
        WorkspaceError: The driver does not say which capture the stream takes part in.
    """
    stream, capture = _stream_and_capture(device)
    key = (device, stream, capture is not None)
    found = kept.pieces.get(key)
    if found is None or found.capture != capture or len(found.floats) < num_floats or len(found.counters) < num_counters:
        # What it replaces may still be in use by launches on this stream: its memory is given to later work of the stream only.
        floats = torch.empty(_rounded(num_floats, _LEAST_FLOATS), dtype=torch.float32, device=device)
        counters = torch.zeros(_rounded(num_counters, _LEAST_COUNTERS), dtype=torch.int32, device=device)
        found = kept.pieces[key] = Workspace(floats, counters, capture, floats.data_ptr(), counters.data_ptr())
    return found


def _rounded(count: int, least: int) -> int:
    """A power of two, so that a batch that grows by ones seldom needs a larger piece."""
    return max(least, 1 << (count - 1).bit_length() if count > 0 else 1)


def _stream_and_capture(device: torch.device) -> tuple[int, int | None]:
    """The current stream, and the id of the capture that it takes part in."""
    if device.type != "cuda":
        return 0, None
    stream = int(triton.runtime.driver.active.get_current_stream(device.index))
    return stream, _capture_id(stream) if torch.cuda.is_current_stream_capturing() else None


@functools.cache
def _capture_info() -> tuple[Any, int]:
    """The driver's function that tells a stream's capture, and how many arguments follow stream, status and id (CUDA driver API)."""
    driver = ctypes.CDLL("libcuda.so.1")
    for name, rest in (("cuStreamGetCaptureInfo_v2", 3), ("cuStreamGetCaptureInfo_v3", 4)):
        ask = getattr(driver, name, None)
        if ask is not None:
            ask.argtypes = [ctypes.c_void_p] * (3 + rest)
            return ask, rest
    raise WorkspaceError("The CUDA driver has no cuStreamGetCaptureInfo_v2 or _v3; use a driver of CUDA 11.3 or later.")


def _capture_id(stream: int) -> int:
    """The id that the driver gives the capture in which `stream` takes part."""
    status, identity = ctypes.c_int(), ctypes.c_uint64()
    ask, rest = _capture_info()
    code = ask(stream, ctypes.addressof(status), ctypes.addressof(identity), *[None] * rest)
    if code != 0 or status.value != _CAPTURING:
        raise WorkspaceError(
            f"The CUDA driver gave {code} and capture status {status.value} for a stream under capture, expected 0 and {_CAPTURING}; "
            "capture again on a stream whose capture is valid."
        )
    return identity.value
