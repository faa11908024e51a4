"""Rows made ready by a release are those that a search would find: against a manager that prepares nothing, and with planted mistakes."""

from __future__ import annotations

import random
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm import kv_cache, row_search, staged_rows
from rapid_llm.errors import RapidLLMError, ShapeError
from rapid_llm.free_runs import FreeRuns
from rapid_llm.kv_cache import KVCacheManager
from rapid_llm.row_search import RowSearch
from rapid_llm.staged_rows import StagedRows
from tests.kv_cache.caches import DEVICE, manager, rows_of, state

NUM_ROWS, BLOCK = 40, 4
CALLS = ("alloc", "alloc", "alloc", "last", "last", "release", "cache", "blocks", "add_ref", "evict", "free_all", "refused")
SIZES = (2, 2, 2, 2, 2, 2, 3, 5, 9)
EVEN = sum(1 << row for row in range(0, NUM_ROWS, 2))

Step = tuple[str, int, int]
"""A call, its size, and bits that choose rows."""


class SearchesWhenAsked(KVCacheManager):
    """Prepares nothing, and keeps the search as it is where a mistake is planted in the other's."""

    _last_count = property(lambda self: 0, lambda self, count: None)

    def _searchable(self) -> RowSearch:
        if self._search is None:
            self._cursor = None
            self._search = RowSearch(self._all_rows, self._staged, (self._refs == 0) & (self._released_at == 0))
        return self._search


class Pair:
    """The manager and one that prepares nothing, which get the same calls and have to answer alike."""

    def __init__(self) -> None:
        self.caches = [
            kind(
                NUM_ROWS, num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float16, device=DEVICE, block_size=BLOCK, allocate_kv=False
            )
            for kind in (KVCacheManager, SearchesWhenAsked)
        ]
        self.last: list[int] = []
        self.found_ready: Counter[str | None] = Counter()
        self.step(("alloc", NUM_ROWS, 0))
        self.step(("release", 0, EVEN))

    def step(self, step: Step) -> None:
        what, size, bits = step
        cache = self.caches[0]
        ready = cache._search._ready if cache._search is not None else None
        answers = [self._call(each, what, size, bits) for each in self.caches]
        assert answers[0] == answers[1], step
        assert state(self.caches[0]) == state(self.caches[1]), step
        if what in ("alloc", "blocks") and answers[0] is not None:
            self.last = answers[0]
        if ready is not None and cache._search is not None and cache._search._untold is ready:
            self.found_ready[cache.last_alloc_path] += 1

    def _call(self, cache: KVCacheManager, what: str, size: int, bits: int) -> Any:
        refs = cache.ref_counts().tolist()
        owned = [row for row in range(NUM_ROWS) if refs[row] and bits >> row & 1]
        if what in ("alloc", "blocks"):
            rows = cache.alloc_kvcache_index(size) if what == "alloc" else cache.alloc_blocks(size % 3)
            return None if rows is None else rows.view(-1).tolist()
        if what == "evict":
            return cache.evict(size)
        if what == "free_all":
            return cache.free_all() if bits % 8 == 0 else None
        if what == "refused":
            with pytest.raises(ShapeError):
                cache.release(rows_of(*owned, NUM_ROWS))
            return None
        if what == "add_ref":
            free = cache.is_free(torch.arange(NUM_ROWS, device=DEVICE)).tolist()
            return cache.add_ref(rows_of(*[row for row in range(NUM_ROWS) if not free[row] and bits >> row & 1]))
        return cache.release(
            rows_of(*(row for row in self.last if refs[row])) if what == "last" else rows_of(*owned), keep_cached=what == "cache"
        )


def _steps(seed: int) -> list[Step]:
    """Random calls; with every other seed no odd row becomes free, so that no two free rows are neighbours."""
    draw = random.Random(seed)
    among = EVEN if seed % 2 else -1
    calls = [call for call in CALLS if call not in ("blocks", "free_all")] if seed % 2 else CALLS
    steps = []
    for _ in range(40):
        bits = draw.getrandbits(NUM_ROWS) & draw.getrandbits(NUM_ROWS) & among
        steps.append((draw.choice(calls), draw.choice(SIZES), bits))
    return steps


def _run(steps: list[Step], least: int) -> Counter[str | None]:
    """Makes the calls; how many allocations found their rows ready, by path.

    Args:
        least: Scattered rows are set aside so many at a time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_rows, "_LEAST", least)
        patch.setattr(staged_rows, "_STAGE_FACTOR", 2)
        pair = Pair()
        for step in steps:
            pair.step(step)
    return pair.found_ready


def _run_many() -> Counter[str | None]:
    """Random calls from 200 seeds, as `_run`."""
    return sum((_run(_steps(seed), (3, 20)[seed // 2 % 2]) for seed in range(200)), Counter[str | None]())


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(st.tuples(st.sampled_from(CALLS), st.sampled_from(SIZES), st.integers(0, 2**NUM_ROWS - 1)), max_size=40),
    among=st.sampled_from([EVEN, -1]),
    least=st.sampled_from([3, 20]),
)
def test_agrees_with_a_manager_that_prepares_nothing(steps: list[Step], among: int, least: int) -> None:
    _run([(what, size, bits & among) for what, size, bits in steps], least)


def test_random_calls_find_rows_ready_on_both_paths() -> None:
    """Else the comparison would compare nothing."""
    found_ready = _run_many()
    assert min(found_ready["run_search"], found_ready["fragmented"]) > 50


MISTAKES = {
    "kept after a change": ("self._ready = self._untold = None\n        if untold", "self._untold = None\n        if untold"),
    "kept by a release or evict": (
        "runs = self._current()\n        self._staged.note_freed",
        "runs = self._runs\n        self._staged.note_freed",
    ),
    "handed out twice": ("self._ready, self._untold = None, ready", "self._untold = ready"),
    "run not told": ("self._runs.take(untold.numbers.start, untold.num_rows)", "pass"),
    "scattered not told": ("self._staged.advance(untold.num_rows)", "pass"),
    "of another size": ("ready.num_rows == count and", "ready.num_rows >= count and"),
    "hidden run": (" and not staged.may_hide_a_run_of(count):", ":"),
    "too few left": ("staged.num_left >= count and", "staged.num_left and"),
    "rows set aside before free_all or alloc_blocks": ("staged.drain()\n        # What", "# What"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MISTAKES[mistake]
    source = Path(row_search.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1
    planted = types.ModuleType("planted_row_search")
    exec(compile(source.replace(old, new), "planted_row_search", "exec"), planted.__dict__)
    monkeypatch.setattr(kv_cache, "RowSearch", planted.RowSearch)
    with pytest.raises((AssertionError, IndexError, ValueError, RuntimeError)):
        _run_many()


@pytest.mark.parametrize("call", ["free_all", "alloc_blocks"])
def test_a_call_that_keeps_the_search_is_seen(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`free_all` and `alloc_blocks` begin the search anew, and with it all that was ready."""
    right = getattr(KVCacheManager, call)

    def wrong(cache: KVCacheManager, *arguments: int) -> object:
        kept = cache._search
        result = right(cache, *arguments)
        if type(cache) is KVCacheManager:
            cache._search = kept
        return result

    monkeypatch.setattr(KVCacheManager, call, wrong)
    with pytest.raises((AssertionError, IndexError, ValueError, RuntimeError)):
        _run_many()


def _with_rows_ready(path: str) -> KVCacheManager:
    """A manager of 64 rows whose release has made the next allocation of 4 rows ready; all even rows, or the last 32, are free."""
    cache = manager(64)
    rows = cache.alloc_kvcache_index(64)
    assert rows is not None
    cache.release(rows[::2] if path == "fragmented" else rows[32:])
    taken = cache.alloc_kvcache_index(4)
    assert taken is not None
    cache.release(taken)
    assert cache.last_alloc_path == path
    assert cache._search is not None
    assert cache._search._ready is not None
    return cache


PATHS = pytest.mark.parametrize("path", ["run_search", "fragmented"])


@PATHS
def test_the_first_allocation_after_a_release_searches_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither runs nor the table are asked; the next one asks them again, and gets other rows."""
    cache = _with_rows_ready(path)
    with monkeypatch.context() as patch:
        for name in ("find", "find_at_once", "may_hold", "take", "take_lowest", "add"):
            patch.delattr(FreeRuns, name)
        for name in ("next", "advance", "fill", "drain"):
            patch.delattr(StagedRows, name)
        first = cache.alloc_kvcache_index(4)
        with pytest.raises(AttributeError):
            cache.alloc_kvcache_index(3)
    assert first is not None
    # Scattered rows go on behind those that came back, which are not set aside.
    expected = [range(8, 16, 2), range(16, 24, 2)] if path == "fragmented" else [range(32, 36), range(36, 40)]
    assert first.tolist() == list(expected[0])
    cache = _with_rows_ready(path)
    for numbers in expected:
        rows = cache.alloc_kvcache_index(4)
        assert rows is not None
        assert rows.tolist() == list(numbers)
        assert cache.last_alloc_path == path
    assert cache.num_free_rows == 24


@PATHS
def test_what_takes_no_free_row_leaves_what_is_ready(path: str) -> None:
    """Refused calls, none of zero, a reference to a row in use, and a release that only takes references away."""
    cache = _with_rows_ready(path)
    assert cache._search is not None
    ready = cache._search._ready
    before = state(cache)
    for refused in (lambda: cache.release(rows_of(64)), lambda: cache.add_ref(rows_of(62)), lambda: cache.evict(-1)):
        with pytest.raises(ShapeError):
            refused()
    for count in (True, 4.0, "4", -4):
        with pytest.raises(ShapeError):
            cache.alloc_kvcache_index(count)  # type: ignore[arg-type]
    assert cache.alloc_kvcache_index(33) is None
    cache.alloc_kvcache_index(0)
    assert cache.evict(5) == 0
    assert state(cache) == before
    cache.add_ref(rows_of(1))
    assert cache._search._ready is ready


def test_scattered_rows_that_are_ready_are_ordered_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams are stand-ins; what a device makes of it is in tests/kv_cache/test_device.py."""
    asked: list[str] = []
    for here in (True, False):
        cache = _with_rows_ready("fragmented")
        monkeypatch.setattr(StagedRows, "ordered_here", lambda self, here=here: here)
        monkeypatch.setattr(StagedRows, "order_here", lambda self, here=here: asked.append(f"here={here}"))
        rows = cache.alloc_kvcache_index(4)
        monkeypatch.undo()
        assert rows is not None
        assert cache.ref_counts()[rows.long()].tolist() == [1] * 4
    assert asked == ["here=False"]


def test_scattered_rows_that_are_ready_stay_free_where_a_capture_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(staged: StagedRows) -> None:
        raise RapidLLMError("captured")

    cache, other = _with_rows_ready("fragmented"), _with_rows_ready("fragmented")
    before = state(cache)
    with monkeypatch.context() as patch:
        patch.setattr(StagedRows, "ordered_here", lambda self: False)
        patch.setattr(StagedRows, "order_here", refuse)
        with pytest.raises(RapidLLMError, match="captured"):
            cache.alloc_kvcache_index(4)
    assert state(cache) == before
    rows, expected = cache.alloc_kvcache_index(4), other.alloc_kvcache_index(4)
    assert rows is not None
    assert expected is not None
    assert rows.tolist() == expected.tolist()
    assert state(cache) == state(other)


def test_what_would_have_to_be_uploaded_is_not_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release uploads nothing: rows that are freed later may be lower than those that it would set aside."""
    monkeypatch.setattr(staged_rows, "_LEAST", 4)
    monkeypatch.setattr(staged_rows, "_STAGE_FACTOR", 1)
    cache = manager(64)
    rows = cache.alloc_kvcache_index(64)
    assert rows is not None
    cache.release(rows[2::2])
    assert cache.alloc_kvcache_index(4) is not None
    assert cache.last_alloc_path == "fragmented"
    monkeypatch.delattr(StagedRows, "fill")
    cache.release(rows_of(2))
    cache.release(rows_of(0))
    monkeypatch.undo()
    taken = cache.alloc_kvcache_index(4)
    assert taken is not None
    assert taken.tolist() == [0, 2, 10, 12]


def test_a_run_that_a_short_search_misses_is_found_by_the_call() -> None:
    """Of the runs of 2 and 3 rows the lowest is too short: scattered rows are not made ready in place of the other."""
    cache = manager(64)
    rows = cache.alloc_kvcache_index(64)
    assert rows is not None
    cache.release(rows[:32:2])
    assert cache.alloc_kvcache_index(3) is not None
    assert cache.last_alloc_path == "fragmented"
    cache.release(rows_of(40, 41, 50, 51, 52))
    assert cache._search is not None
    assert cache._search._ready is None
    taken = cache.alloc_kvcache_index(3)
    assert taken is not None
    assert taken.tolist() == [50, 51, 52]
    # The long search of a call that finds none is not made again.
    assert cache.alloc_kvcache_index(3) is not None
    assert cache.last_alloc_path == "fragmented"
    cache.release(rows_of(60))
    assert cache._search._ready is not None
    assert cache._search._ready.path == "fragmented"
