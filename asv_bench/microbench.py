"""The timers, and what a time is worth: the one module that measures.

Which timer:

==================  ===============================================================  ==========================================
timer               for                                                              instrument on CUDA
==================  ===============================================================  ==========================================
`bench`             idempotent calls that keep the device busy for 100 us or more    events around each call, L2 flushed before
`bench_graph`       idempotent calls that are shorter, launch-bound rows             replay of a CUDA graph of many calls
`bench_stateful`    calls that change state                                          events, a device-side reset before each
`bench_host`        calls whose cost is the host's                                   perf_counter, a trailing synchronise
==================  ===============================================================  ==========================================

On a device the samples come in short bursts with rests between them: sustained load makes the power limit lower the clocks, and the
reading would depend on what ran before. Every timer measures its own floor, what it reads for nothing, beside the result.

On a CPU device the same calls measure wall time with a cache flush, and the result says so (`Timing.instrument`). Times are in
microseconds, rates are decimal (1 GB = 1e9 bytes). The first call is never timed: it compiles and tunes.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from asv_bench.environment import collect_environment
from asv_bench.host import bench_host, wall_samples
from asv_bench.lazy import LazyModule
from asv_bench.quiet import FLUSH_FACTOR, CpuFlush, DeviceFlush, do_nothing, l2_bytes, no_synchronise
from asv_bench.table import CHECK_ORDER, Row, Work, report
from asv_bench.timing import MIN_SAMPLES, Call, Timing, TimingError

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

probes: Any = LazyModule("asv_bench.probes")

__all__ = [
    "CHECK_ORDER",
    "MIN_SAMPLES",
    "PROTOCOL",
    "Row",
    "Timing",
    "TimingError",
    "Work",
    "bench",
    "bench_graph",
    "bench_host",
    "bench_stateful",
    "metadata",
    "report",
]

PROTOCOL = "t2"
"""Version of the timers: raise it with any change that can move a number, so that old results stop being comparable."""

_REP_MS = 64.0
_BURSTS = 8
_REST_FACTOR = 3.0
_MAX_SAMPLES = 1000
_GRAPH_TARGET_US = 400.0
_SHORT_REPLAY_US = 200.0
_REPLAY_ENQUEUE_US = 60.0
_FLOOR_REP_MS = 10
_RUN_AHEAD_FACTOR = 3.0
_HOLD_LIMIT_US = 5e4


def now_s() -> float:
    """Seconds on the host's clock, to say where the time of a run goes; not for results."""
    return time.perf_counter()


def metadata(device: torch.device, *, dtype: str | None = None, shapes: dict[str, object] | None = None) -> dict[str, Any]:
    """What is needed to reproduce a row: device, versions, commit, dtype, shapes, and the variables that change which kernel runs."""
    return {**collect_environment(device), "dtype": dtype, "shapes": shapes or {}}


def bench(fn: Call, *, device: torch.device, rep_ms: float = _REP_MS, warm: bool = False, poison: Call = do_nothing) -> Timing:
    """Times an idempotent call with a cold cache.

    On CUDA: bursts of `triton.testing.do_bench`, which flushes the L2 before each call and outside the events; the flush has to be at
    least twice the L2. What the host needs to enqueue the call is measured along: where that is longer than the flush which hides it,
    and the device is not busy three times as long, the result is marked `host_limited`. On a CPU: perf_counter around each call, after
    a write to a buffer of twice the last-level cache.

    Args:
        fn: The call; its first run is not timed.
        device: Where it works.
        rep_ms: Time to measure, in milliseconds, rests not counted.
        warm: Leaves the cache as the last call left it: an optimistic bound, labelled warm (on CUDA by graph replay of the one call).
        poison: Makes the output wrong between the first call and the timed ones, so that the caller's check sees what these left.
    Raises:
        TimingError: The reading is no number, or the flush is too small for this device.
    """
    if device.type != "cuda":
        fn()
        flush = do_nothing if warm else CpuFlush()
        poison()
        return _checked(Timing("bench", "wall-clock", wall_samples(fn, flush, rep_ms), l2="warm" if warm else "cold"))
    if warm:
        # Replayed, because events around an unflushed short call would measure the host's enqueue time.
        return _checked(Timing("bench", "device", *_graph_samples([fn], device, None, rep_ms, poison), l2="warm"))
    fn()
    flush_us = _flush_us(device)
    poison()
    samples = _cold_samples(fn, rep_ms)
    host_us = _enqueue_us(fn)
    limited = host_us > flush_us and statistics.median(samples) < _RUN_AHEAD_FACTOR * host_us
    floor_us = _event_floor_us(device)
    return _checked(Timing("bench", "device", samples, floor_us, host_us=host_us, host_limited=limited))


def bench_graph(
    calls: Sequence[Call], *, device: torch.device, set_bytes: float, rep_ms: float = _REP_MS, poison: Call = do_nothing
) -> Timing:
    """Device time of a call without the host's enqueue time: replays a CUDA graph of many calls.

    The calls rotate over working sets. Where these together exceed twice the L2, each is cold when its turn comes again, and the
    graph may pass over them several times; otherwise it passes once and the L2 is flushed before each replay. On a CPU device there is
    nothing to capture and the calls are measured one by one, as in `bench`.

    Args:
        calls: Idempotent calls on different working sets, all with the same cost.
        device: Where they work.
        set_bytes: Bytes of device memory that one call touches.
        rep_ms: Time to measure, in milliseconds, rests not counted.
        poison: Makes every output wrong after the capture and before the replays, so that the caller's check sees what these left.
    Raises:
        TimingError: Nothing was captured, or the reading is no number.
    """
    if device.type != "cuda":
        for call in calls:
            call()
        poison()
        return _checked(Timing("bench", "wall-clock", wall_samples(calls[0], CpuFlush(), rep_ms)))
    return _checked(Timing("bench_graph", "device", *_graph_samples(calls, device, set_bytes, rep_ms, poison)))


def bench_stateful(fn: Call, reset: Call, *, device: torch.device, rounds: int = 50) -> Timing:
    """Times a call that changes state, with a reset before each that is not timed.

    All intervals are enqueued, behind a kernel that holds the queue, before any is read, so the reset must stay on the device: one
    that waits for it is refused.

    Args:
        fn: The call.
        reset: Brings the state back; on CUDA it may not synchronise.
        device: Where they work.
        rounds: Number of samples.
    Raises:
        TimingError: The reset synchronises, or the reading is no number.
    """
    reset()
    fn()
    if device.type != "cuda":
        samples = []
        flush = CpuFlush()
        for _ in range(rounds):
            reset()
            flush()
            start_s = time.perf_counter()
            fn()
            samples.append((time.perf_counter() - start_s) * 1e6)
        return _checked(Timing("bench_stateful", "wall-clock", tuple(samples)))
    floor_us = _event_floor_us(device)

    def step() -> None:
        _reset_without_sync(reset)
        fn()

    host_us = _enqueue_us(step)
    events = [_event_pair() for _ in range(rounds)]
    torch.cuda.synchronize()
    hold_us = min(2 * rounds * host_us, _HOLD_LIMIT_US)
    _hold(device, hold_us)
    began_s = time.perf_counter()
    for start, end in events:
        _reset_without_sync(reset)
        start.record()
        fn()
        end.record()
    enqueued_us = (time.perf_counter() - began_s) * 1e6
    torch.cuda.synchronize()
    samples_us = tuple(s.elapsed_time(e) * 1e3 for s, e in events)
    limited = enqueued_us > hold_us
    return _checked(Timing("bench_stateful", "device", samples_us, floor_us, l2="untouched", host_us=host_us, host_limited=limited))


def _checked(timing: Timing) -> Timing:
    timing.check()
    return timing


def _bursts() -> Iterator[None]:
    """Yields once a burst, and lets the device rest in between, three times as long as the burst took."""
    for burst in range(_BURSTS):
        began_s = time.perf_counter()
        yield
        if burst < _BURSTS - 1:
            torch.cuda.synchronize()
            time.sleep(_REST_FACTOR * (time.perf_counter() - began_s))


def _cold_samples(fn: Call, rep_ms: float) -> tuple[float, ...]:
    import triton.testing

    times_ms: list[float] = []
    for _ in _bursts():
        times_ms += triton.testing.do_bench(fn, warmup=1, rep=max(1, round(rep_ms / _BURSTS)), return_mode="all")
    return tuple(t * 1e3 for t in times_ms)


def _graph_samples(
    calls: Sequence[Call], device: torch.device, set_bytes: float | None, rep_ms: float, poison: Call
) -> tuple[tuple[float, ...], float]:
    """Samples in us a call and the floor; `set_bytes` None leaves the L2 as it is."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    rotates = set_bytes is None or set_bytes * len(calls) >= FLUSH_FACTOR * l2_bytes(device)
    flush = do_nothing if rotates else DeviceFlush(device)
    graph = _capture(calls, 1)
    replay_us = _graph_sample_us(graph, 3)
    passes = 1
    if rotates:
        passes = max(1, math.ceil(_GRAPH_TARGET_US / max(replay_us, 1e-3)))
        if passes > 1:
            graph = _capture(calls, passes)
    per_replay = passes * len(calls)
    replays = max(2, min(_MAX_SAMPLES // _BURSTS, round(rep_ms * 1e3 / _BURSTS / max(replay_us * passes, 1e-3))))
    poison()
    samples = []
    for _ in _bursts():
        samples += _replay_samples(graph, flush, replays, device, short=replay_us * passes < _SHORT_REPLAY_US)
    floor_us = _graph_floor_us(device, 1 << (per_replay - 1).bit_length())
    return tuple(us / per_replay for us in samples), floor_us


def _replay_samples(graph: torch.cuda.CUDAGraph, flush: Call, replays: int, device: torch.device, *, short: bool) -> list[float]:
    """Replays behind an untimed one, each after a flush; short ones behind a held queue, so that the host stays ahead."""
    if short:
        _hold(device, replays * _REPLAY_ENQUEUE_US)
    flush()
    graph.replay()
    events = [_event_pair() for _ in range(replays)]
    for start, end in events:
        flush()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [s.elapsed_time(e) * 1e3 for s, e in events]


def _capture(calls: Sequence[Call], passes: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The CUDA Graph is empty")
        try:
            with torch.cuda.graph(graph):
                for _ in range(passes):
                    for call in calls:
                        call()
        except UserWarning as warning:
            raise TimingError("bench_graph: the timed region launches nothing on the stream that is measured") from warning
    return graph


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def _graph_sample_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = _event_pair()
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / replays


def _enqueue_us(fn: Call) -> float:
    """Time in which the host enqueues one call while the device is behind."""
    torch.cuda.synchronize()
    samples = []
    for _ in range(2 * MIN_SAMPLES):
        start_s = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - start_s) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


@functools.cache
def _flush_us(device: torch.device) -> float:
    """How long the flush of `do_bench` keeps the device busy.

    Raises:
        TimingError: It is smaller than twice the L2, so that it would leave a part of the working set there.
    """
    import triton

    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()
    size = cache.numel() * cache.element_size()
    if size < FLUSH_FACTOR * l2_bytes(device):
        raise TimingError(
            f"bench: do_bench flushes with {size >> 20} MiB, and the L2 of this device has {l2_bytes(device) >> 20} MiB: use bench_graph"
        )
    events = [_event_pair() for _ in range(2 * MIN_SAMPLES)]
    for start, end in events:
        start.record()
        driver.clear_cache(cache)
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(s.elapsed_time(e) * 1e3 for s, e in events))


@functools.cache
def _event_floor_us(device: torch.device) -> float:
    """What events around a kernel that does nothing read."""
    import triton.testing

    out = torch.zeros(1, dtype=torch.int64, device=device)
    return float(triton.testing.do_bench(lambda: probes.nothing(out), warmup=1, rep=_FLOOR_REP_MS, return_mode="median")) * 1e3


@functools.cache
def _graph_floor_us(device: torch.device, calls: int) -> float:
    """What a graph of `calls` kernels that do nothing reads for one of them."""
    out = torch.zeros(1, dtype=torch.int64, device=device)
    probes.nothing(out)
    graph = _capture([lambda: probes.nothing(out)], calls)
    return statistics.median(_replay_samples(graph, DeviceFlush(device), 2 * MIN_SAMPLES, device, short=True)) / calls


def _hold(device: torch.device, hold_us: float) -> None:
    """Keeps the device busy while the host enqueues."""
    probes.spin(torch.empty(1, dtype=torch.int64, device=device), round(hold_us * 1e3))


def _reset_without_sync(reset: Call) -> None:
    with no_synchronise("bench_stateful: the reset waits for the device; keep it there (no .item(), no nonzero, no copy back)"):
        reset()
