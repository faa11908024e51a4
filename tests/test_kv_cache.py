"""The row allocators, state on the host and on the device: three paths, references, eviction, failure without a trace (R61, R63–R66)."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from asv_bench.verify import check_allocation
from rapid_llm import staged_rows
from rapid_llm.device_state_cache import DeviceStateKVCacheManager
from rapid_llm.errors import DTypeError, RapidLLMError, ShapeError
from rapid_llm.kernels.ops import layout_tags
from rapid_llm.kv_cache import KVCacheManager

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


KINDS = (KVCacheManager, DeviceStateKVCacheManager)
made: dict[str, type[KVCacheManager]] = {"kind": KVCacheManager}


@pytest.fixture(autouse=True, params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Iterator[type[KVCacheManager]]:
    """Both allocators in turn; `manager` makes the one whose turn it is."""
    made["kind"] = request.param
    yield request.param
    made["kind"] = KVCacheManager


def manager(num_rows: int = 16, block_size: int = 4, **changes: Any) -> KVCacheManager:
    arguments = {
        "num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float16, "device": DEVICE,
        "block_size": block_size, "allocate_kv": False,
    }  # fmt: skip
    return made["kind"](num_rows, **{**arguments, **changes})


def alloc(cache: KVCacheManager, count: int) -> torch.Tensor:
    """Allocates rows that must come, and checks that they are distinct and were free (R66)."""
    free = cache.is_free(torch.arange(cache.num_rows, device=DEVICE))
    rows = cache.alloc_kvcache_index(count)
    free_after = cache.is_free(torch.arange(cache.num_rows, device=DEVICE))
    check_allocation(rows, free, free_after, count=count, state=str(cache.last_alloc_path))
    assert rows is not None
    return rows.clone()


def state(cache: KVCacheManager) -> tuple[Any, ...]:
    every = torch.arange(cache.num_rows, device=DEVICE)
    counts, free = cache.ref_counts().tolist(), cache.is_free(every).tolist()
    return counts, free, cache.num_free_rows, cache.num_cached_rows, cache.last_alloc_path


def rows_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def test_bump_hands_out_rows_in_order() -> None:
    cache = manager()
    assert cache.last_alloc_path is None
    assert alloc(cache, 5).tolist() == [0, 1, 2, 3, 4]
    assert alloc(cache, 11).tolist() == list(range(5, 16))
    assert cache.last_alloc_path == "bump"
    assert cache.num_free_rows == 0
    assert cache.ref_counts().tolist() == [1] * 16


def test_the_three_states_through_the_public_interface() -> None:
    """R63, R65: a finished request turns bump into run_search; holes shorter than the request make it fragmented."""
    cache = manager(32)
    first, second = alloc(cache, 8), alloc(cache, 8)
    assert cache.last_alloc_path == "bump"
    cache.release(first)
    assert alloc(cache, 3).tolist() == [0, 1, 2]
    assert cache.last_alloc_path == "run_search"
    alloc(cache, 16)
    cache.release(second[::2])
    assert cache.num_free_rows == 9
    assert alloc(cache, 9).tolist() == [3, 4, 5, 6, 7, 8, 10, 12, 14]
    assert cache.last_alloc_path == "fragmented"


def test_run_search_takes_the_first_run_that_is_long_enough() -> None:
    cache = manager()
    alloc(cache, 16)
    cache.release(rows_of(1, 2, 5, 6, 7, 8, 15))
    assert alloc(cache, 3).tolist() == [5, 6, 7]
    assert alloc(cache, 1).tolist() == [1]
    assert alloc(cache, 1).tolist() == [2]
    assert cache.last_alloc_path == "run_search"
    cache.release(rows_of(13, 14))
    assert alloc(cache, 3).tolist() == [13, 14, 15]


def test_only_free_all_restores_the_cursor() -> None:
    """R64: releasing everything leaves the search in place; free_all alone would measure the bump path everywhere."""
    cache = manager()
    cache.release(alloc(cache, 16))
    assert cache.num_free_rows == 16
    alloc(cache, 2)
    assert cache.last_alloc_path == "run_search"
    cache.free_all()
    assert state(cache) == state(manager())
    alloc(cache, 2)
    assert cache.last_alloc_path == "bump"


def test_a_row_that_keeps_a_reference_keeps_the_cursor() -> None:
    cache = manager()
    rows = alloc(cache, 4)
    cache.add_ref(rows)
    cache.release(rows)
    assert alloc(cache, 2).tolist() == [4, 5]
    assert cache.last_alloc_path == "bump"


def test_half_of_the_rows_free_but_no_run() -> None:
    """All of 16 taken, the even ones freed: nine do not fit and change nothing, eight come scattered, a thousand times."""
    cache = manager()
    alloc(cache, 16)
    cache.release(rows_of(*range(0, 16, 2)))
    before = state(cache)
    assert cache.alloc_kvcache_index(9) is None
    assert state(cache) == before
    assert cache.num_free_rows == 8
    assert cache.alloc_kvcache_index(0) is not None
    assert state(cache) == before
    for bad in (-1, -100):
        with pytest.raises(ValueError, match=f"num_tokens of 0 or more, got {bad}"):
            cache.alloc_kvcache_index(bad)
    for _ in range(1000):
        rows = cache.alloc_kvcache_index(8)
        assert rows is not None
        assert cache.last_alloc_path == "fragmented"
        assert cache.alloc_kvcache_index(1) is None
        cache.release(rows)
    assert state(cache)[:4] == before[:4]


def test_alloc_none_of_zero() -> None:
    empty = manager().alloc_kvcache_index(0)
    assert empty is not None
    assert (empty.shape, empty.dtype) == ((0,), torch.int32)
    blocks = manager().alloc_blocks(0)
    assert blocks is not None
    assert (blocks.shape, blocks.dtype) == ((0, 4), torch.int32)


def test_a_failure_leaves_the_bump_cursor() -> None:
    cache = manager()
    alloc(cache, 10)
    before = state(cache)
    assert cache.alloc_kvcache_index(7) is None
    assert cache.alloc_blocks(2) is None
    assert state(cache) == before
    assert alloc(cache, 6).tolist() == list(range(10, 16))
    assert cache.last_alloc_path == "bump"


@pytest.mark.parametrize("num_rows", [16, 18])
def test_blocks_are_aligned(num_rows: int) -> None:
    """The rows that aligning skips are found again by the search; a short block at the end is none."""
    cache = manager(num_rows)
    alloc(cache, 1)
    assert cache.alloc_blocks(2).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]  # type: ignore[union-attr]
    assert cache.last_alloc_path == "bump"
    assert cache.num_free_rows == num_rows - 9
    assert cache.alloc_blocks(2) is None
    assert cache.alloc_blocks(1).tolist() == [[12, 13, 14, 15]]  # type: ignore[union-attr]
    assert alloc(cache, 3).tolist() == [1, 2, 3]
    assert cache.last_alloc_path == "run_search"
    with pytest.raises(ValueError, match="num_blocks of 0 or more, got -1"):
        cache.alloc_blocks(-1)


def test_blocks_after_a_release_need_no_neighbours() -> None:
    cache = manager()
    alloc(cache, 16)
    cache.release(rows_of(0, 1, 2, 3, 5, 6, 7, 12, 13, 14, 15))
    assert cache.alloc_blocks(3) is None
    assert cache.alloc_blocks(2).tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]  # type: ignore[union-attr]
    assert cache.last_alloc_path == "run_search"
    assert cache.num_free_rows == 3


def test_blocks_evict_the_oldest_whole_ones() -> None:
    """Free blocks go first, then the block whose newest cached row is oldest; a referenced row protects its block."""
    cache = manager(20)
    alloc(cache, 20)
    cache.release(rows_of(8, 9, 10, 11), keep_cached=True)
    cache.release(rows_of(4, 5, 6), keep_cached=True)
    cache.release(rows_of(0, 1, 2, 3), keep_cached=True)
    cache.release(rows_of(12, 13, 14, 15))
    assert cache.num_cached_rows == 11
    assert cache.alloc_blocks(2).tolist() == [[12, 13, 14, 15], [8, 9, 10, 11]]  # type: ignore[union-attr]
    assert (cache.num_cached_rows, cache.num_free_rows) == (7, 0)
    before = state(cache)
    assert cache.alloc_blocks(2) is None
    assert state(cache) == before
    assert cache.alloc_blocks(1).tolist() == [[0, 1, 2, 3]]  # type: ignore[union-attr]
    assert cache.num_cached_rows == 3


def test_references() -> None:
    cache = manager()
    rows = alloc(cache, 4)
    cache.add_ref(rows[:2])
    cache.add_ref(rows_of(1, 1))
    assert cache.ref_counts()[:4].tolist() == [2, 4, 1, 1]
    cache.release(rows)
    assert cache.ref_counts()[:4].tolist() == [1, 3, 0, 0]
    assert cache.num_free_rows == 14
    cache.release(rows_of(1, 0, 1, 1))
    assert cache.num_free_rows == 16
    assert cache.is_free(rows.view(2, 2)).tolist() == [[True, True], [True, True]]


def test_the_copy_of_the_counts_is_a_copy() -> None:
    cache = manager()
    cache.ref_counts().fill_(9)
    assert cache.ref_counts().sum() == 0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([3], "row 3 has fewer references than are released"),
        ([0, 0], r"row 0 \(and 1 more\) has fewer references"),
        ([0, 16], "row 16 is not a row of this cache"),
        ([-1, 0], "row -1 is not a row of this cache"),
    ],
)
@pytest.mark.parametrize("keep_cached", [True, False])
def test_a_wrong_release_changes_nothing(numbers: list[int], message: str, keep_cached: bool) -> None:
    """Double free, one release too many in a call, foreign rows."""
    cache = manager()
    alloc(cache, 3)
    before = state(cache)
    with pytest.raises(ValueError, match=f"release expected rows that were allocated here, but {message}"):
        cache.release(rows_of(*numbers), keep_cached=keep_cached)
    assert state(cache) == before
    assert alloc(cache, 1).tolist() == [3]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0, 3], "row 3 is free, allocate it instead"),
        ([16], "row 16 is not a row"),
        ([-1], "row -1 is not a row"),
    ],
)
def test_a_wrong_add_ref_changes_nothing(numbers: list[int], message: str) -> None:
    cache = manager()
    alloc(cache, 3)
    cache.release(rows_of(2), keep_cached=True)
    before = state(cache)
    with pytest.raises(ValueError, match=message):
        cache.add_ref(rows_of(*numbers))
    assert state(cache) == before


def test_foreign_rows_have_no_state() -> None:
    with pytest.raises(ValueError, match="row 16 is not a row"):
        manager().is_free(rows_of(0, 16))


def test_rows_of_a_wrong_kind() -> None:
    cache = manager()
    with pytest.raises(DTypeError, match="rows as an int32 or int64 tensor, got list"):
        cache.release([0])  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"got torch\.float32"):
        cache.add_ref(torch.zeros(1))
    with pytest.raises(ShapeError, match=f"rows on {cache.device}, got meta"):
        cache.release(torch.zeros(1, dtype=torch.int32, device="meta"))
    cache.release(rows_of())
    cache.add_ref(rows_of())


def test_cached_rows_are_evicted_oldest_first_and_revived_by_a_reference() -> None:
    cache = manager()
    alloc(cache, 16)
    for number in (7, 3, 11):
        cache.release(rows_of(number), keep_cached=True)
    cache.release(rows_of(9, 5), keep_cached=True)
    assert (cache.num_cached_rows, cache.num_free_rows) == (5, 0)
    assert not cache.is_free(rows_of(7)).any()
    cache.add_ref(rows_of(3))
    assert cache.ref_counts()[3] == 1
    assert cache.num_cached_rows == 4
    freed = []
    every = torch.arange(16, device=DEVICE)
    for _ in range(4):
        before = cache.is_free(every)
        assert cache.evict(1) == 1
        freed += (cache.is_free(every) & ~before).nonzero().view(-1).tolist()
    assert freed == [7, 11, 9, 5]
    assert cache.evict(1) == 0
    with pytest.raises(ValueError, match="evict expected num_rows of 0 or more, got -1"):
        cache.evict(-1)


def test_evict_gives_what_there_is_and_no_referenced_row() -> None:
    cache = manager()
    alloc(cache, 16)
    cache.release(rows_of(1, 2, 3), keep_cached=True)
    assert cache.evict(100) == 3
    assert cache.num_free_rows == 3
    assert int((cache.ref_counts() > 0).sum()) == 13


def test_allocation_evicts_only_what_is_lacking() -> None:
    cache = manager()
    alloc(cache, 16)
    cache.release(rows_of(0, 1))
    cache.release(rows_of(8, 9, 10), keep_cached=True)
    assert alloc_with_eviction(cache, 3) == [0, 1, 8]
    assert cache.num_cached_rows == 2
    before = state(cache)
    assert cache.alloc_kvcache_index(3) is None
    assert state(cache) == before


def alloc_with_eviction(cache: KVCacheManager, count: int) -> list[int]:
    rows = cache.alloc_kvcache_index(count)
    assert rows is not None
    return rows.tolist()  # type: ignore[no-any-return]


def test_keeping_cached_does_not_lose_the_cursor_and_evicting_does() -> None:
    cache = manager()
    cache.release(alloc(cache, 4), keep_cached=True)
    assert alloc(cache, 4).tolist() == [4, 5, 6, 7]
    assert cache.last_alloc_path == "bump"
    cache.evict(1)
    assert alloc(cache, 1).tolist() == [0]
    assert cache.last_alloc_path == "run_search"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
def test_layer_views_are_halves_of_one_buffer(dtype: torch.dtype) -> None:
    """R45: a layer's K and V are strided views of its combined buffer, and layers share nothing."""
    cache = manager(num_layers=2, dtype=dtype, allocate_kv=True)
    k_rows, v_rows = cache.layer_views(1)
    assert k_rows.shape == v_rows.shape == (16, 2, 8)
    assert k_rows.stride() == v_rows.stride() == (32, 8, 1)
    assert v_rows.storage_offset() - k_rows.storage_offset() == 16
    assert "kv:combined" in layout_tags(k_rows, v_rows)
    assert "kv:combined" not in layout_tags(k_rows, cache.layer_views(0)[1])
    for layer in (-1, 2):
        with pytest.raises(ShapeError, match=f"a layer from 0 to 1, got {layer}"):
            cache.layer_views(layer)


def test_without_buffers_there_are_no_views() -> None:
    with pytest.raises(RapidLLMError, match="allocate_kv=False"):
        manager().layer_views(0)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(ShapeError, match=f"{name} to be a positive int32, got 0"):
        manager(**{name: 0})


def test_what_cannot_be_a_cache() -> None:
    with pytest.raises(ShapeError, match="num_rows to be a positive int32, got 2147483648"):
        manager(2**31)
    with pytest.raises(DTypeError, match=r"got torch\.float32"):
        manager(dtype=torch.float32)


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


def test_the_class_says_that_it_is_not_thread_safe() -> None:
    assert "Not thread-safe: one thread, or one lock around every call." in (KVCacheManager.__doc__ or "")


@pytest.mark.parametrize("count", [1.5, True, "2", None, torch.tensor(2), -1])
def test_what_is_no_count_is_refused_and_changes_nothing(count: object) -> None:
    cache = manager()
    cache.alloc_kvcache_index(4)
    for call in (cache.alloc_kvcache_index, cache.alloc_blocks, cache.evict):
        with pytest.raises(ShapeError, match=r"of 0 or more, got .*; pass a plain int"):
            call(count)  # type: ignore[arg-type]
    assert cache.num_free_rows == 12
    assert int(cache.ref_counts().sum()) == 4
    rows = cache.alloc_kvcache_index(2)
    assert rows is not None
    assert rows.tolist() == [4, 5]


@pytest.mark.parametrize("seed", range(3))
def test_scattered_rows_of_a_larger_pool_are_handed_out_once_each(seed: int) -> None:
    """Random holes in 5,000 rows, random sizes: each call is checked, until nothing is left."""
    cache = manager(5000)
    alloc(cache, 5000)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(5000, generator=generator).int().to(DEVICE)
    cache.release(order[:2500])
    sizes = torch.randint(1, 120, (400,), generator=generator).tolist()
    paths = set()
    for turn, size in enumerate(sizes):
        if size > cache.num_free_rows:
            assert cache.alloc_kvcache_index(size) is None
            break
        alloc(cache, size)
        paths.add(cache.last_alloc_path)
        if turn % 3 == 0:
            cache.release(order[2500 + turn * 20 : 2500 + (turn + 1) * 20])
    assert paths == {"run_search", "fragmented"}


def test_a_run_that_grows_beside_rows_set_aside_is_found() -> None:
    """Every other row free, some of them set aside for scattered calls; one freed between two of these makes a run of three."""
    cache = manager(4096)
    rows = alloc(cache, 4096)
    cache.release(rows[::2])
    alloc(cache, 64)
    assert cache.last_alloc_path == "fragmented"
    cache.release(rows_of(201))
    assert alloc(cache, 3).tolist() == [200, 201, 202]
    assert cache.last_alloc_path == "run_search"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("state", ["bump", "run_search", "fragmented"])
def test_no_allocation_waits_for_the_device(state: str, kind: type[KVCacheManager]) -> None:
    """Torch's sync debug mode refuses each wait; the manager with its state on the device waits outside of bump."""
    cache = manager(1 << 14)
    if state != "bump":
        rows = cache.alloc_kvcache_index(1 << 14)
        assert rows is not None
        cache.release(rows[100:400] if state == "run_search" else rows[::2])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if kind is DeviceStateKVCacheManager and state != "bump":
            with pytest.raises(RuntimeError, match="synchroniz"):
                cache.alloc_kvcache_index(64)
            return
        first, second = cache.alloc_kvcache_index(64), cache.alloc_kvcache_index(64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.last_alloc_path == state
    assert first is not None
    assert second is not None
    assert len(set(first.tolist()) | set(second.tolist())) == 128


@pytest.mark.gpu
def test_scattered_rows_on_another_stream_are_those_that_were_uploaded(kind: type[KVCacheManager]) -> None:
    if kind is DeviceStateKVCacheManager:
        pytest.skip("its state is on the device: calls on two streams have to be ordered by the caller")
    cache = manager(1 << 14)
    rows = cache.alloc_kvcache_index(1 << 14)
    assert rows is not None
    cache.release(rows[::2])
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    first = cache.alloc_kvcache_index(64)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        second = cache.alloc_kvcache_index(64)
        assert second is not None
        doubled = second * 2
    torch.cuda.synchronize()
    assert first is not None
    assert (first // 2).tolist() == list(range(64))
    assert doubled.tolist() == [4 * i for i in range(64, 128)]


@pytest.mark.gpu
def test_an_upload_is_refused_while_a_graph_is_captured(kind: type[KVCacheManager]) -> None:
    if kind is DeviceStateKVCacheManager:
        pytest.skip("it waits for the device, which a capture refuses by itself")
    cache = manager(1 << 14)
    rows = cache.alloc_kvcache_index(1 << 14)
    assert rows is not None
    cache.release(rows[::2])
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros(1, device=DEVICE)
    with torch.cuda.graph(graph):
        out.add_(1)
        with pytest.raises(RapidLLMError, match="outside of a CUDA graph's capture"):
            cache.alloc_kvcache_index(64)
    assert cache.num_free_rows == 1 << 13
