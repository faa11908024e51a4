"""Runs of neighbouring free rows, kept on the host so that an allocation looks at a few numbers and not at every row.

Each run is tagged at both ends (Knuth, The Art of Computer Programming 1, 2.5: boundary tags), so that freed rows find their neighbours;
runs of a length from 2^c to 2^(c+1) - 1 are in the c-th of some lists ordered by address (segregated fit; Wilson et al. 1995, Dynamic
storage allocation: a survey). An entry of such a list is dropped when it is met and its run is gone.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

__all__ = ["FreeRuns", "Rows"]

Rows = npt.NDArray[np.int64]
"""Row numbers, ascending and distinct."""

_FEW = 32
_BULK = 16
_SPARE_ENTRIES = 1024
_WINDOW = 1024


class FreeRuns:
    """Which rows are free, by runs."""

    def __init__(self, free: npt.NDArray[np.bool_]) -> None:
        """Takes over a map of the free rows, bool, [num_rows]."""
        num_rows = free.size
        self._free = free
        self._length = np.zeros(num_rows, np.int64)  # at the first row of a run, elsewhere 0
        self._first = np.zeros(num_rows, np.int64)  # at the last row of a run, elsewhere anything
        self._by_class: list[list[int]] = [[] for _ in range(num_rows.bit_length())]
        self._longest = [0] * num_rows.bit_length()  # no run of the class is longer
        self._present = 0  # bit c is set where the c-th list has entries
        self._limits = [_SPARE_ENTRIES] * num_rows.bit_length()
        self._lowest = 0  # no row before it is free
        edges = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0))
        self._enter(edges[::2], edges[1::2] - 1)

    def add(self, rows: Rows) -> None:
        """Rows that were not free are now, and grow together with the free rows beside them."""
        free, length = self._free, self._length
        free[rows] = True
        self._lowest = min(self._lowest, int(rows[0]))
        gaps = np.flatnonzero(np.diff(rows) != 1)
        first = rows[np.concatenate(([0], gaps + 1))]
        last = rows[np.concatenate((gaps, [rows.size - 1]))]
        joins_left = (first > 0) & free[first - 1]
        after = np.minimum(last + 1, free.size - 1)
        joins_right = (last + 1 < free.size) & free[after]
        starts = np.where(joins_left, self._first[first - 1], first)
        ends = np.where(joins_right, last + length[after], last)
        length[after[joins_right]] = 0
        # Two groups with a free run between them both reach over it: they are one.
        apart = np.flatnonzero(starts[1:] > ends[:-1])
        self._enter(starts[np.concatenate(([0], apart + 1))], ends[np.concatenate((apart, [starts.size - 1]))])

    def find(self, count: int) -> int | None:
        """First row of a run of at least `count` free rows, None where there is none.

        The lowest run of each class above that of `count` and, where it is long enough, that of its own class compete, and the lowest
        address wins. Where none of these is long enough, the lowest of its own class that is: found by a look at all of that class.
        """
        best = self.find_at_once(count)
        if best is None and self.may_hold(count):
            own = count.bit_length() - 1
            lengths = {start: self._length.item(start) for start in self._by_class[own]}
            fitting = [start for start, length in lengths.items() if length >= count and length.bit_length() - 1 == own]
            best = min(fitting, default=None)
            if best is None:
                self._longest[own] = count - 1
        return best

    def find_at_once(self, count: int) -> int | None:
        """What `find` gives by a look at the lowest run of each class; None where that is not enough to find a run."""
        own = count.bit_length() - 1
        best: int | None = None
        classes = self._present >> own << own
        while classes:
            number = (classes & -classes).bit_length() - 1
            classes &= classes - 1
            start = self._top(number)
            if start is None or (best is not None and start > best):
                continue
            if number > own or self._length.item(start) >= count:
                best = start
        return best

    def may_hold(self, count: int) -> bool:
        """Whether `find` may give a run where `find_at_once` gives none."""
        own = count.bit_length() - 1
        return own < len(self._longest) and self._longest[own] >= count

    def take(self, start: int, count: int) -> None:
        """Takes `count` rows from the front of the run that starts at `start`."""
        length = self._length.item(start)
        self._length[start] = 0
        self._free[start : start + count] = False
        self._leave(start + count, start + length - 1)

    def take_lowest(self, count: int) -> Rows:
        """Takes the `count` lowest free rows, wherever they are; so many are free."""
        width = max(_WINDOW, 4 * count)
        rows = np.flatnonzero(self._free[self._lowest : self._lowest + width])
        while rows.size < count:
            width *= 4
            rows = np.flatnonzero(self._free[self._lowest : self._lowest + width])
        rows = rows[:count] + self._lowest
        last = int(rows[-1])
        start = int(rows[self._length[rows] > 0][-1])
        end = start + self._length.item(start) - 1
        self._length[rows] = 0
        self._free[rows] = False
        self._lowest = last + 1
        self._leave(last + 1, end)
        return rows

    def _leave(self, start: int, end: int) -> None:
        """What is left of a run that was taken from, if anything."""
        if start <= end:
            self._length[start] = end - start + 1
            self._first[end] = start
            self._push(start, end - start + 1)

    def _enter(self, starts: Rows, ends: Rows) -> None:
        lengths = ends - starts + 1
        self._length[starts] = lengths
        self._first[ends] = starts
        if starts.size <= _FEW:
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                self._push(start, length)
            return
        classes = np.frexp(lengths)[1] - 1
        for number in np.flatnonzero(np.bincount(classes)).tolist():
            chosen = classes == number
            entries = starts[chosen].tolist()
            self._present |= 1 << number
            self._longest[number] = max(self._longest[number], int(lengths[chosen].max()))
            if len(entries) < len(self._by_class[number]) // _BULK:
                for start in entries:
                    heapq.heappush(self._by_class[number], start)
            else:  # a sorted list is a heap
                self._by_class[number] = sorted(self._by_class[number] + entries)
            self._tidy(number)

    def _push(self, start: int, length: int) -> None:
        number = length.bit_length() - 1
        heapq.heappush(self._by_class[number], start)
        self._present |= 1 << number
        if length > self._longest[number]:
            self._longest[number] = length
        if len(self._by_class[number]) > self._limits[number]:
            self._tidy(number)

    def _top(self, number: int) -> int | None:
        """First row of the lowest run of a class."""
        heap = self._by_class[number]
        while heap:
            if self._length.item(heap[0]).bit_length() - 1 == number:
                return heap[0]
            heapq.heappop(heap)
        self._present &= ~(1 << number)
        return None

    def _tidy(self, number: int) -> None:
        """Drops the entries of a class whose runs are gone, when they may be half of it."""
        if len(self._by_class[number]) > self._limits[number]:
            starts = np.sort(np.array(self._by_class[number], np.int64), kind="stable")  # which is quick where most are in order
            again = np.diff(starts, prepend=-1) == 0
            alive = starts[((self._length[starts] >> number) == 1) & ~again].tolist()
            self._by_class[number] = alive
            self._limits[number] = 2 * len(alive) + _SPARE_ENTRIES
