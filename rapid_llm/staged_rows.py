"""Scattered free rows that are on the device already, so that handing some of them out is taking a view."""

from __future__ import annotations

import numpy as np
import torch

from rapid_llm.errors import RapidLLMError
from rapid_llm.free_runs import Rows

__all__ = ["StagedRows", "uploaded"]

_STAGE_FACTOR = 16
_LEAST = 1024
_NONE: Rows = np.zeros(0, np.int64)


class StagedRows:
    """Free rows set aside for scattered allocations, ascending; uploaded together, handed out from the front."""

    def __init__(self, device: torch.device) -> None:
        """Sets nothing aside."""
        self._device = device
        self._rows = _NONE
        self._on_device = torch.empty(0, dtype=torch.int32, device=device)
        self._next = 0
        self._longest = 0
        self._grown = False
        self._raw_stream = 0
        self._uploaded: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Pinning memory for the first time stops the device: done here, it is in torch's cache for the uploads.
            torch.empty(_LEAST, dtype=torch.int32, pin_memory=True)

    @property
    def num_left(self) -> int:
        """Rows that are set aside now."""
        return self._rows.size - self._next

    def wanted(self, count: int) -> int:
        """How many to set aside where `count` are asked for: the upload is shared by so many calls."""
        return max(_LEAST, _STAGE_FACTOR * count)

    def may_hide_a_run_of(self, count: int) -> bool:
        """Whether `count` neighbouring rows may be free of which some are set aside."""
        return self.num_left > 0 and (self._grown or self._longest >= count)

    def check_upload(self) -> None:
        """Refuses an upload that a CUDA graph would repeat from memory that is no longer its own.

        Raises:
            RapidLLMError: A graph is being captured.
        """
        _check_no_capture(self._device)

    def fill(self, rows: Rows) -> None:
        """Sets rows aside in place of none, and uploads them without waiting."""
        self._rows, self._next, self._grown = rows, 0, False
        ends = np.flatnonzero(np.diff(rows, append=rows[-1] + 2) != 1)
        self._longest = int(np.diff(ends, prepend=-1).max())
        self._on_device = uploaded(rows, self._device)
        if self._device.type == "cuda":
            self._raw_stream = _raw_stream(self._device)
            self._uploaded = torch.cuda.current_stream(self._device).record_event()

    def ordered_here(self) -> bool:
        """Whether work of the current stream follows the upload as it is."""
        return self._uploaded is None or _raw_stream(self._device) == self._raw_stream

    def order_here(self) -> None:
        """Orders the current stream behind the upload.

        Raises:
            RapidLLMError: It is another stream, on which a graph is being captured.
        """
        if self._uploaded is None or self.ordered_here():
            return
        self.check_upload()
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._uploaded)
        self._on_device.record_stream(stream)

    def next(self, count: int) -> tuple[Rows, torch.Tensor]:
        """The next `count` rows, as numbers and on the device: a view. They stay set aside until `advance`."""
        first = self._next
        return self._rows[first : first + count], self._on_device[first : first + count]

    def advance(self, count: int) -> None:
        """The next `count` rows have been handed out."""
        self._next += count

    def note_freed(self, rows: Rows) -> None:
        """Rows, ascending, have become free: beside one that is set aside they may make a longer run."""
        left = self._rows[self._next :]
        if left.size and not self._grown and rows[-1] >= left[0] - 1 and rows[0] <= left[-1] + 1:
            beside = np.concatenate((rows - 1, rows + 1))
            self._grown = bool((left[np.minimum(np.searchsorted(left, beside), left.size - 1)] == beside).any())

    def drain(self) -> Rows:
        """Sets nothing aside any more; returns what was left."""
        left = self._rows[self._next :]
        self._rows, self._next = _NONE, 0
        return left


def uploaded(numbers: Rows, device: torch.device) -> torch.Tensor:
    """Row numbers as an int32 tensor on the device; on CUDA the copy is enqueued on the current stream and the host does not wait.

    The pinned memory comes from torch's cache, which does not reuse it before the copy is done.

    Raises:
        RapidLLMError: A CUDA graph is being captured.
    """
    _check_no_capture(device)
    host = torch.from_numpy(numbers.astype(np.int32))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _raw_stream(device: torch.device) -> int:
    """The handle of the current stream of a CUDA device; Stream objects take some microseconds to make and to compare."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def _check_no_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RapidLLMError(
            "KVCacheManager expected an allocation of scattered rows outside of a CUDA graph's capture, since it copies from the host; "
            "allocate before capturing and copy the rows into a tensor that the graph reads."
        )
