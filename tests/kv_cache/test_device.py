"""The allocators and the device: scattered rows that were uploaded, streams, captures, and no wait."""

import pytest
import torch

from rapid_llm import staged_rows
from rapid_llm.device_state_cache import DeviceStateKVCacheManager
from rapid_llm.errors import RapidLLMError
from rapid_llm.kv_cache import KVCacheManager
from tests.kv_cache.caches import DEVICE, alloc, manager, rows_of

HOST_STATE = pytest.mark.parametrize("kind", [KVCacheManager], indirect=True)
"""Of the allocator whose state is on the host alone: the other makes nothing ready, sets no rows aside, leaves the order of streams to the
caller, and waits for the device, which a capture refuses by itself."""


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


def _with_rows_ready(path: str) -> KVCacheManager:
    """A manager whose release has made the next allocation of 64 rows ready."""
    cache = manager(1 << 14)
    rows = cache.alloc_kvcache_index(1 << 14)
    assert rows is not None
    cache.release(rows[100:400] if path == "run_search" else rows[::2])
    taken = cache.alloc_kvcache_index(64)
    assert taken is not None
    cache.release(taken)
    assert cache._search is not None
    assert cache._search._ready is not None
    assert cache._search._ready.path == path
    return cache


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
@HOST_STATE
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("path", ["run_search", "fragmented"])
def test_no_allocation_of_rows_that_a_release_made_ready_waits(path: str) -> None:
    cache = _with_rows_ready(path)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = cache.alloc_kvcache_index(64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.last_alloc_path == path
    assert rows is not None
    assert cache.ref_counts()[rows.long()].tolist() == [1] * 64


@pytest.mark.gpu
@HOST_STATE
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("path", ["run_search", "fragmented"])
def test_rows_that_are_ready_on_another_stream_and_in_a_capture(path: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scattered ones wait for the upload, which a capture cannot: it is refused and takes none; a run is handed out everywhere."""
    cache, expected = _with_rows_ready(path), _with_rows_ready(path)
    before = cache.num_free_rows
    waited: list[torch.cuda.Event] = []
    right = torch.cuda.Stream.wait_event
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda stream, event: (waited.append(event), right(stream, event))[1])
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    out = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    torch.cuda.synchronize()
    rows = None
    with torch.cuda.graph(graph, stream=other) if captured else torch.cuda.stream(other):
        waited.clear()
        if captured and path == "fragmented":
            out.add_(1)
            with pytest.raises(RapidLLMError, match="outside of a CUDA graph's capture"):
                cache.alloc_kvcache_index(64)
            assert cache.num_free_rows == before
        else:
            rows = cache.alloc_kvcache_index(64)
            assert rows is not None
            out.copy_(rows)
        num_waits = len(waited)
    if captured:
        graph.replay()
    torch.cuda.synchronize()
    assert num_waits == (path == "fragmented" and not captured)
    if rows is None:
        rows = cache.alloc_kvcache_index(64)
        assert rows is not None
        out.copy_(rows)
    same = expected.alloc_kvcache_index(64)
    assert same is not None
    assert rows.tolist() == out.tolist() == same.tolist()
    assert cache.last_alloc_path == path


@pytest.mark.gpu
@HOST_STATE
def test_the_handle_is_that_of_the_current_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    other = torch.cuda.Stream()
    assert staged_rows._raw_stream(device) == torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.stream(other):
        assert staged_rows._raw_stream(device) == other.cuda_stream
    assert other.cuda_stream != torch.cuda.current_stream(device).cuda_stream


@pytest.mark.gpu
@HOST_STATE
def test_scattered_rows_on_another_stream_are_those_that_were_uploaded() -> None:
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
@HOST_STATE
def test_an_upload_is_refused_while_a_graph_is_captured() -> None:
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
