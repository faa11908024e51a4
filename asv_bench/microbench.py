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

On a CPU device the same calls measure wall time with a cache flush, and the result says so (`Timing.instrument`). Times are in
microseconds, rates are decimal (1 GB = 1e9 bytes). The first call is never timed: it compiles and tunes.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from asv_bench.environment import collect_environment, last_level_cache_bytes
from asv_bench.lazy import LazyModule
from asv_bench.table import CHECK_ORDER, Row, Work, report

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

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

PROTOCOL = "t1"
"""Version of the timers: raise it with any change that can move a number, so that old results stop being comparable."""

MIN_SAMPLES = 5
_MAX_SAMPLES = 1000
_FLOOR_FACTOR = 1.5
_WARMUP_MS = 25.0
_REP_MS = 100.0
_WALL_REP_MS = 45.0
_WALL_MAX_SAMPLES = 60
_GRAPH_TARGET_US = 400.0
_FLUSH_MIN_BYTES = 64 << 20

Call = Callable[[], object]


class TimingError(RuntimeError):
    """A timer could not give an honest number; the message says why."""


@dataclass(frozen=True)
class Timing:
    """Result of a timer: samples in microseconds a call, and how they were taken."""

    timer: str
    instrument: Literal["device", "wall-clock"]
    samples_us: tuple[float, ...]
    floor_us: float | None = None
    l2: Literal["cold", "warm", "untouched"] = "cold"

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    def quantile_us(self, q: float) -> float:
        """Sample quantile by linear interpolation."""
        ordered = sorted(self.samples_us)
        place = q * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    @property
    def tick_us(self) -> float:
        """Resolution of the samples: the clock's on the host, the smallest step between two samples on a device; 0 where none shows."""
        if self.instrument == "wall-clock":
            return time.get_clock_info("perf_counter").resolution * 1e6
        distinct = sorted(set(self.samples_us))
        return min((high - low for low, high in itertools.pairwise(distinct)), default=0.0)

    @property
    def near_floor(self) -> bool:
        """Whether the reading is within 1.5x of what the instrument reads for nothing."""
        return self.floor_us is not None and self.median_us <= _FLOOR_FACTOR * self.floor_us

    def check(self) -> None:
        """Refuses a reading that is no number.

        Raises:
            TimingError: Fewer samples than the minimum, or one that is NaN, infinite, zero or negative.
        """
        if len(self.samples_us) < MIN_SAMPLES:
            raise TimingError(f"{self.timer} took {len(self.samples_us)} samples, fewer than {MIN_SAMPLES}: raise its rep_ms")
        bad = [s for s in self.samples_us if not math.isfinite(s) or s <= 0]
        if bad:
            raise TimingError(f"{self.timer} read {bad[0]!r} us: the timed region holds no work that this instrument can see")


def metadata(device: torch.device, *, dtype: str | None = None, shapes: dict[str, object] | None = None) -> dict[str, Any]:
    """What is needed to reproduce a row: device, versions, commit, dtype, shapes, and the variables that change which kernel runs."""
    return {**collect_environment(device), "dtype": dtype, "shapes": shapes or {}}


def bench(
    fn: Call,
    *,
    device: torch.device,
    warmup_ms: float = _WARMUP_MS,
    rep_ms: float = _REP_MS,
    warm: bool = False,
    poison: Call | None = None,
) -> Timing:
    """Times an idempotent call with a cold cache.

    On CUDA: `triton.testing.do_bench`, which flushes the L2 before each call and outside the events. On a CPU: perf_counter around
    each call, after a write to a buffer of twice the last-level cache.

    Args:
        fn: The call; its first run is not timed.
        device: Where it works.
        warmup_ms: Time to run before measuring, in milliseconds.
        rep_ms: Time to measure, in milliseconds.
        warm: Leaves the cache as the last call left it: an optimistic bound, labelled warm (on CUDA by graph replay of the one call).
        poison: Makes the output wrong between the first call and the timed ones, so that the caller's check sees what these left.
    Raises:
        TimingError: The reading is no number.
    """
    if device.type == "cuda" and warm:
        # Replayed, because events around an unflushed short call would measure the host's enqueue time.
        return replace(bench_graph([fn], device=device, rep_ms=rep_ms, poison=poison), l2="warm")
    fn()
    if poison is not None:
        poison()
    if device.type == "cuda":
        timing = Timing("bench", "device", _cold_samples(fn, warmup_ms, rep_ms))
    else:
        flush = _no_flush if warm else _CpuFlush()
        timing = Timing("bench", "wall-clock", _wall_samples(fn, flush, rep_ms), l2="warm" if warm else "cold")
    timing.check()
    return timing


def bench_graph(calls: Sequence[Call], *, device: torch.device, rep_ms: float = _REP_MS, poison: Call | None = None) -> Timing:
    """Device time of a call without the host's enqueue time: replays a CUDA graph of many calls.

    The calls rotate over working sets that together exceed the L2 several times, which keeps them cold without a flush; the caller
    builds them so. On a CPU device there is nothing to capture and the calls are measured one by one, as in `bench`.

    Args:
        calls: Idempotent calls on different working sets, all with the same cost.
        device: Where they work.
        rep_ms: Time to measure, in milliseconds.
        poison: Makes every output wrong after the capture and before the replays, so that the caller's check sees what these left.
    Raises:
        TimingError: Nothing was captured, or the reading is no number.
    """
    for call in calls:
        call()
    if device.type != "cuda":
        timing = Timing("bench", "wall-clock", _wall_samples(calls[0], _CpuFlush(), rep_ms))
        timing.check()
        return timing
    torch.cuda.synchronize()
    single_us = _graph_sample_us(_capture(calls, 1), 3) / len(calls)
    rounds = max(1, math.ceil(_GRAPH_TARGET_US / max(single_us * len(calls), 1e-3)))
    graph = _capture(calls, rounds)
    per_replay = rounds * len(calls)
    replays = min(_MAX_SAMPLES, max(MIN_SAMPLES * 3, math.ceil(rep_ms * 1e3 / max(single_us * per_replay, 1e-3))))
    events = [_event_pair() for _ in range(replays)]
    if poison is not None:
        poison()
    graph.replay()
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    timing = Timing("bench_graph", "device", tuple(s.elapsed_time(e) * 1e3 / per_replay for s, e in events))
    timing.check()
    return timing


def bench_stateful(fn: Call, reset: Call, *, device: torch.device, rounds: int = 50) -> Timing:
    """Times a call that changes state, with a reset before each that is not timed.

    All intervals are enqueued before any is read, so the reset must stay on the device: one that waits for it is refused.

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
        flush = _CpuFlush()
        for _ in range(rounds):
            reset()
            flush()
            start_s = time.perf_counter()
            fn()
            samples.append((time.perf_counter() - start_s) * 1e6)
        timing = Timing("bench_stateful", "wall-clock", tuple(samples))
        timing.check()
        return timing
    events = [_event_pair() for _ in range(rounds)]
    torch.cuda.synchronize()
    for start, end in events:
        _reset_without_sync(reset)
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    timing = Timing("bench_stateful", "device", tuple(s.elapsed_time(e) * 1e3 for s, e in events), l2="untouched")
    timing.check()
    return timing


def bench_host(fn: Call, reset: Call | None = None, *, device: torch.device, rep_ms: float = _REP_MS, poison: Call | None = None) -> Timing:
    """Times what the host waits for: perf_counter around the call and a trailing synchronise, which is part of the reading.

    The floor, `bench_host(lambda: None)`, is measured along and printed beside results that come near it.

    Args:
        fn: The call.
        reset: Brings the state back before each call, not timed.
        device: What to synchronise with.
        rep_ms: Time to measure, in milliseconds.
        poison: As of `bench`.
    Raises:
        TimingError: The reading is no number.
    """
    sync = torch.cuda.synchronize if device.type == "cuda" else _no_flush
    if reset is not None:
        reset()
    fn()
    floor = statistics.median(_host_samples(_no_flush, None, sync, rep_ms / 20))
    if poison is not None:
        poison()
    timing = Timing("bench_host", "wall-clock", _host_samples(fn, reset, sync, rep_ms), floor_us=floor, l2="untouched")
    timing.check()
    return timing


def _no_flush() -> None:
    return None


class _CpuFlush:
    """Writes a buffer of twice the last-level cache."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(max(_FLUSH_MIN_BYTES, 2 * last_level_cache_bytes()) // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self._buffer.fill_(1)


def _cold_samples(fn: Call, warmup_ms: float, rep_ms: float) -> tuple[float, ...]:
    import triton.testing

    times_ms = triton.testing.do_bench(fn, warmup=int(warmup_ms), rep=int(rep_ms), return_mode="all")
    return tuple(t * 1e3 for t in times_ms)


def _wall_samples(fn: Call, flush: Call, rep_ms: float) -> tuple[float, ...]:
    samples: list[float] = []
    spent_us = 0.0
    while len(samples) < MIN_SAMPLES * 2 or (spent_us < min(rep_ms, _WALL_REP_MS) * 1e3 and len(samples) < _WALL_MAX_SAMPLES):
        flush()
        start_s = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - start_s) * 1e6)
        spent_us += samples[-1]
    return tuple(samples)


def _host_samples(fn: Call, reset: Call | None, sync: Call, rep_ms: float) -> tuple[float, ...]:
    samples: list[float] = []
    began_s = time.perf_counter()
    while len(samples) < MIN_SAMPLES * 4 or (time.perf_counter() - began_s < rep_ms * 1e-3 and len(samples) < _MAX_SAMPLES):
        if reset is not None:
            reset()
        sync()
        start_s = time.perf_counter()
        fn()
        sync()
        samples.append((time.perf_counter() - start_s) * 1e6)
    return tuple(samples)


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
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


def _reset_without_sync(reset: Call) -> None:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says at each switch that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            reset()
        except RuntimeError as error:
            if "synchron" not in str(error):
                raise
            message = "bench_stateful: the reset waits for the device; keep it there (no .item(), no nonzero, no copy back)"
            raise TimingError(message) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
