"""The allocators against a model of sets, over random sequences of calls (R61, R63–R66)."""

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rapid_llm import staged_rows
from rapid_llm.device_state_cache import DeviceStateKVCacheManager
from rapid_llm.errors import ShapeError
from rapid_llm.kv_cache import KVCacheManager
from tests.kv_cache.caches import DEVICE, made, manager, rows_of


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls against a model of plain Python sets and lists."""

    NUM_ROWS, BLOCK = 24, 4
    KIND: type[KVCacheManager]

    def __init__(self) -> None:
        super().__init__()
        made["kind"] = self.KIND
        self.cache = manager(self.NUM_ROWS, self.BLOCK)
        self.refs: dict[int, int] = {}
        self.cached: list[int] = []

    @property
    def free(self) -> set[int]:
        return set(range(self.NUM_ROWS)) - set(self.refs) - set(self.cached)

    def took(self, rows: list[int]) -> None:
        assert len(set(rows)) == len(rows)
        assert not set(rows) & set(self.refs)
        assert set(rows) <= set(range(self.NUM_ROWS))
        self.refs |= dict.fromkeys(rows, 1)
        self.cached = [row for row in self.cached if row not in rows]

    @rule(count=st.integers(0, 10))
    def alloc(self, count: int) -> None:
        lacking = max(0, count - len(self.free))
        rows = self.cache.alloc_kvcache_index(count)
        if count > len(self.free) + len(self.cached):
            assert rows is None
            return
        assert rows is not None
        del self.cached[:lacking]
        if count and self.cache.last_alloc_path == "fragmented":
            free = self.free
            assert not any(set(range(first, first + count)) <= free for first in range(self.NUM_ROWS)), "a run was long enough"
        assert set(rows.tolist()) <= self.free
        self.took(rows.tolist())
        if self.cache.last_alloc_path == "run_search" and count:
            assert rows.tolist() == list(range(int(rows[0]), int(rows[0]) + count))

    @rule(count=st.integers(0, 3))
    def alloc_blocks(self, count: int) -> None:
        starts = range(0, self.NUM_ROWS, self.BLOCK)
        whole = [start for start in starts if not set(self.refs) & set(range(start, start + self.BLOCK))]
        blocks = self.cache.alloc_blocks(count)
        assert (blocks is None) == (count > len(whole))
        if blocks is not None:
            expected = [list(range(block[0], block[0] + self.BLOCK)) for block in blocks.tolist()]
            assert blocks.tolist() == expected
            assert all(block[0] % self.BLOCK == 0 for block in expected)
            self.took([row for block in expected for row in block])

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), keep_cached=st.booleans())
    def release(self, data: st.DataObject, keep_cached: bool) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True, max_size=8))
        self.cache.release(rows_of(*rows), keep_cached=keep_cached)
        for row in rows:
            self.refs[row] -= 1
            if self.refs[row] == 0:
                del self.refs[row]
                self.cached += [row] * keep_cached

    @precondition(lambda self: self.refs or self.cached)
    @rule(data=st.data())
    def add_ref(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted([*self.refs, *self.cached])), max_size=6))
        self.cache.add_ref(rows_of(*rows))
        for row in rows:
            self.refs[row] = self.refs.get(row, 0) + 1
        self.cached = [row for row in self.cached if row not in rows]

    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        unowned = [-1, self.NUM_ROWS, *sorted(self.free), *self.cached]
        row = data.draw(st.sampled_from(unowned))
        rows = rows_of(*sorted(self.refs)[:2], row)
        with pytest.raises(ShapeError):
            self.cache.release(rows)
        if row not in self.cached:
            with pytest.raises(ShapeError):
                self.cache.add_ref(rows)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        assert self.cache.evict(count) == min(count, len(self.cached))
        del self.cached[:count]

    @precondition(lambda self: len(self.refs) > 12)
    @rule()
    def free_all(self) -> None:
        self.cache.free_all()
        self.refs, self.cached = {}, []

    @invariant()
    def owned_and_free_are_disjoint_and_complete(self) -> None:
        assert self.cache.ref_counts().tolist() == [self.refs.get(row, 0) for row in range(self.NUM_ROWS)]
        is_free = self.cache.is_free(torch.arange(self.NUM_ROWS, device=DEVICE))
        assert set(is_free.nonzero().view(-1).tolist()) == self.free
        assert self.cache.num_free_rows == len(self.free)
        assert self.cache.num_cached_rows == len(self.cached)


class OnHost(AllocatorMachine):
    KIND = KVCacheManager


class OnDevice(AllocatorMachine):
    KIND = DeviceStateKVCacheManager


class FewStaged(AllocatorMachine):
    """Scattered rows are set aside a few at a time, so that they run out, and are freed beside, all the time."""

    KIND = KVCacheManager

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(staged_rows, "_LEAST", 3)
        self.patch.setattr(staged_rows, "_STAGE_FACTOR", 2)
        super().__init__()

    def teardown(self) -> None:
        self.patch.undo()


@pytest.mark.parametrize("machine", [OnHost, OnDevice, FewStaged])
def test_against_a_model_of_sets(machine: type[AllocatorMachine], kind: type[KVCacheManager]) -> None:
    if kind is KVCacheManager:  # each machine names its own
        steps = settings(max_examples=60 if machine is FewStaged else 25, stateful_step_count=25, deadline=None)
        run_state_machine_as_test(machine, settings=steps)


def test_a_thousand_steps_against_a_set() -> None:
    """Case 35: one long life, in which errors would add up; the machine above takes many short ones."""
    draw = random.Random(0)
    cache = manager(64, 4)
    owned: set[int] = set()
    cached: list[int] = []
    for step in range(1000):
        free = 64 - len(owned) - len(cached)
        if draw.random() < 0.5:
            count = draw.randrange(0, 24)
            before = (cache.num_free_rows, cache.num_cached_rows, cache.ref_counts().tolist())
            rows = cache.alloc_kvcache_index(count)
            assert (rows is None) == (count > free + len(cached)), step
            if rows is None:
                assert (cache.num_free_rows, cache.num_cached_rows, cache.ref_counts().tolist()) == before, "a failed allocation changed it"
                continue
            del cached[: max(0, count - free)]
            taken = set(rows.tolist())
            assert len(taken) == count
            assert not taken & owned, "a referenced row was handed out"
            owned |= taken
        elif owned:
            given = draw.sample(sorted(owned), draw.randrange(1, len(owned) + 1))
            keep = draw.random() < 0.4
            cache.release(rows_of(*given), keep_cached=keep)
            owned -= set(given)
            cached += given if keep else []
            with pytest.raises(ShapeError):
                cache.release(rows_of(given[0]))
        assert set(cache.ref_counts().nonzero().view(-1).tolist()) == owned, step
        assert cache.num_free_rows + cache.num_cached_rows + len(owned) == 64
        assert set(cache.is_free(torch.arange(64, device=DEVICE)).nonzero().view(-1).tolist()) == set(range(64)) - owned - set(cached)
