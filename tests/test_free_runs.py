"""Runs of free rows against a map that is searched row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm import free_runs
from rapid_llm.free_runs import FreeRuns

NUM_ROWS = 40


def _runs(free: list[bool]) -> dict[int, int]:
    """First row and length of each run, the slow way."""
    found: dict[int, int] = {}
    for row, is_free in enumerate(free):
        if is_free and (row == 0 or not free[row - 1]):
            found[row] = next((n for n in range(len(free) - row) if not free[row + n]), len(free) - row)
    return found


@settings(deadline=None, max_examples=200)
@given(
    start=st.lists(st.booleans(), min_size=NUM_ROWS, max_size=NUM_ROWS),
    steps=st.lists(st.tuples(st.sampled_from(["add", "take", "lowest"]), st.integers(1, 9), st.integers(0, 2**NUM_ROWS - 1)), max_size=30),
    few=st.sampled_from([0, 32]),
)
def test_agrees_with_a_search_row_by_row(start: list[bool], steps: list[tuple[str, int, int]], few: int) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(free_runs, "_FEW", few)
    patch.setattr(free_runs, "_SPARE_ENTRIES", 3)
    patch.setattr(free_runs, "_WINDOW", 2)
    free, runs = list(start), FreeRuns(np.array(start))
    for what, count, bits in steps:
        if what == "add":
            rows = [row for row in range(NUM_ROWS) if not free[row] and bits >> row & 1]
            if rows:
                runs.add(np.array(rows))
                for row in rows:
                    free[row] = True
        elif what == "take":
            at_once, may_hold = runs.find_at_once(count), runs.may_hold(count)
            found = runs.find(count)
            assert found == at_once or (at_once is None and may_hold)
            lengths = _runs(free)
            fitting = [row for row, length in lengths.items() if length >= count]
            assert (found is None) == (fitting == [])
            if found is not None:
                assert lengths[found] >= count
                above = [row for row in fitting if lengths[row].bit_length() > count.bit_length()]
                assert found <= min(above, default=NUM_ROWS)
                runs.take(found, count)
                free[found : found + count] = [False] * count
        elif sum(free) >= count:
            expected = [row for row in range(NUM_ROWS) if free[row]][:count]
            assert runs.take_lowest(count).tolist() == expected
            for row in expected:
                free[row] = False
    patch.undo()


def test_the_lists_do_not_grow_with_what_is_gone() -> None:
    """100 rows given back and taken again 2,000 times: entries of runs that are gone are dropped."""
    runs = FreeRuns(np.arange(4000) % 2 == 0)
    for _ in range(2000):
        assert runs.find(2) is None
        runs.add(runs.take_lowest(100))
    assert sum(map(len, runs._by_class)) < 2 * 2000 + 2 * free_runs._SPARE_ENTRIES


def test_one_run_and_none() -> None:
    assert FreeRuns(np.zeros(5, bool)).find(1) is None
    runs = FreeRuns(np.ones(5, bool))
    assert (runs.find(5), runs.find(6)) == (0, None)
