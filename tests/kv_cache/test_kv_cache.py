"""The row allocators, state on the host and on the device: three paths, references, eviction, failure without a trace (R61, R63–R66)."""

import pytest
import torch

from rapid_llm.errors import DTypeError, RapidLLMError, ShapeError
from rapid_llm.kernels.ops import layout_tags
from rapid_llm.kv_cache import KVCacheManager
from tests.kv_cache.caches import DEVICE, alloc, manager, rows_of, state


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.int8])
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
