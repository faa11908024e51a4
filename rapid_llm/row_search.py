"""Rows for allocations once the bump cursor is gone: a run, else scattered rows that were uploaded ahead; the next one made ready early.

A release waits for the device and changes what is free. At its end the manager has the next allocation prepared here: searched for, and
its view made. Handing it out is then a few assignments. What is ready is what a search would find: whatever changes the free rows makes
it void, and preparing changes nothing that a search of another size could see.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rapid_llm.free_runs import FreeRuns, Rows
from rapid_llm.staged_rows import StagedRows

__all__ = ["AllocPath", "Found", "RowSearch"]

AllocPath = Literal["bump", "run_search", "fragmented"]
"""How an allocation found its rows, see `KVCacheManager.alloc_kvcache_index`."""


class Found(NamedTuple):
    """Rows of one allocation.

    Attributes:
        num_rows: How many.
        numbers: The same rows on the host: a slice, or [num_rows], ascending.
        rows: int32, [num_rows], a view of a table on the device.
        path: "run_search" or "fragmented".
    """

    num_rows: int
    numbers: slice | Rows
    rows: torch.Tensor
    path: AllocPath


class RowSearch:
    """Which rows are free, by runs, and those of them that are set aside."""

    def __init__(self, all_rows: torch.Tensor, staged: StagedRows, free: npt.NDArray[np.bool_]) -> None:
        """Sets nothing aside, and prepares nothing.

        Args:
            all_rows: Table of all row numbers: int32, [num_rows], on the device where rows are handed out.
            staged: Where rows are set aside; of what it holds from an earlier search nothing is left.
            free: A map of the free rows, bool, [num_rows], which is taken over.
        """
        self._all_rows = all_rows
        self._runs = FreeRuns(free)
        self._staged = staged
        staged.drain()
        # What `take(ready.num_rows)` would find; None where nothing is prepared, or what was is void.
        self._ready: Found | None = None
        # What was ready and has been handed out, while runs and staged rows still count it as free.
        self._untold: Found | None = None

    def add(self, rows: Rows) -> None:
        """Rows, ascending, have become free."""
        runs = self._current()
        self._staged.note_freed(rows)
        runs.add(rows)

    def prepare(self, count: int) -> None:
        """Makes `take(count)` ready where a short search finds it; a long one, regrouping, and uploading are left to the call.

        Args:
            count: 1 or more.
        """
        runs, staged = self._current(), self._staged
        start = runs.find_at_once(count)
        if start is not None:
            self._ready = self._run(start, count)
        elif staged.num_left >= count and not runs.may_hold(count) and not staged.may_hide_a_run_of(count):
            self._ready = Found(count, *staged.next(count), "fragmented")

    def take(self, count: int, num_free: int) -> Found:
        """Takes rows; see `KVCacheManager.alloc_kvcache_index` for which.

        Args:
            count: 1 to num_free.
            num_free: All that are free.

        Raises:
            RapidLLMError: Rows would have to be uploaded, or the upload be waited for, while a CUDA graph is captured; then none is taken.
        """
        ready = self._ready
        if ready is not None and ready.num_rows == count and (ready.path == "run_search" or self._staged.ordered_here()):
            self._ready, self._untold = None, ready
            return ready
        runs = self._current()
        start = runs.find(count)
        if start is None and self._staged.may_hide_a_run_of(count):
            self._unstage(runs)
            start = runs.find(count)
        if start is not None:
            runs.take(start, count)
            return self._run(start, count)
        if self._staged.num_left < count:
            self._staged.check_upload()
            self._unstage(runs)
            self._staged.fill(runs.take_lowest(min(num_free, self._staged.wanted(count))))
        self._staged.order_here()
        found = Found(count, *self._staged.next(count), "fragmented")
        self._staged.advance(count)
        return found

    def _current(self) -> FreeRuns:
        """The runs, with what was handed out taken from them; they are about to be asked or changed, so nothing is ready any more."""
        untold = self._untold
        self._ready = self._untold = None
        if untold is not None:
            if isinstance(untold.numbers, slice):
                self._runs.take(untold.numbers.start, untold.num_rows)
            else:
                self._staged.advance(untold.num_rows)
        return self._runs

    def _run(self, start: int, count: int) -> Found:
        return Found(count, slice(start, start + count), self._all_rows[start : start + count], "run_search")

    def _unstage(self, runs: FreeRuns) -> None:
        rows = self._staged.drain()
        if rows.size:
            runs.add(rows)
