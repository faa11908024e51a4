"""The host's clock: what a call costs the host, and wall time on a CPU device. `asv_bench.microbench` hands `bench_host` on."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from asv_bench.lazy import LazyModule
from asv_bench.quiet import do_nothing, each_cpu
from asv_bench.timing import MIN_SAMPLES, Call, Timing, quantile

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

WALL_REP_MS = 45.0
_WALL_MAX_SAMPLES = 60
_MAX_SAMPLES = 1000
_REP_MS = 192.0
BLOCKS = 48
"""Blocks of calls of `bench_host`."""
WALL_LEAST_SAMPLES = 2 * MIN_SAMPLES
"""Calls of `wall_samples`, however long they take."""
_ATTEMPTS = 4
_PAUSE_S = 0.4
_QUIET_FACTOR = 1.15
_BLOCK_QUANTILE = 0.2


def bench_host(fn: Call, reset: Call | None = None, *, device: torch.device, rep_ms: float = _REP_MS, poison: Call = do_nothing) -> Timing:
    """Times what the host waits for: perf_counter around the call and a trailing synchronise, which is part of the reading.

    A host core is shared with neighbours, who slow it down for milliseconds at a time. So the calls are timed in short blocks spread
    over all the CPUs that the process may use; a block's sample is its lower quintile, the reading the first decile of the blocks: the
    cost on a host that is left alone. While the floor is well over what this process has seen, the host is disturbed as a whole, and
    more blocks are taken after a pause; if that does not help, the result is marked `disturbed`. The floor, `bench_host(lambda: None)`,
    is measured in the same blocks by the same estimator.

    Args:
        fn: The call.
        reset: Brings the state back before each call, not timed.
        device: What to synchronise with.
        rep_ms: Time to measure, in milliseconds.
        poison: As of `bench`.
    Raises:
        TimingError: The reading is no number.
    """
    sync = torch.cuda.synchronize if device.type == "cuda" else do_nothing
    if reset is not None:
        reset()
    fn()
    poison()
    samples: list[float] = []
    floors: list[float] = []
    block_ms = (rep_ms if device.type == "cuda" else min(rep_ms, WALL_REP_MS)) / BLOCKS
    for attempt in range(_ATTEMPTS if device.type == "cuda" else 1):
        if attempt:
            time.sleep(_PAUSE_S)
        for _ in each_cpu(BLOCKS):
            floors.append(quantile(_samples(do_nothing, None, sync, 0.0), _BLOCK_QUANTILE))
            samples.append(quantile(_samples(fn, reset, sync, block_ms), _BLOCK_QUANTILE))
        floor = Timing("bench_host", "wall-clock", tuple(floors), estimator="quiet").reading_us
        # On a CPU device there is nothing to synchronise with, and the floor is the clock's own cost: no sign of a disturbance.
        disturbed = device.type == "cuda" and floor > _QUIET_FACTOR * _quiet_floor_us(device)
        if not disturbed:
            break
    timing = Timing("bench_host", "wall-clock", tuple(samples), floor, l2="untouched", estimator="quiet", disturbed=disturbed)
    timing.check()
    return timing


def wall_samples(fn: Call, flush: Call, rep_ms: float) -> tuple[float, ...]:
    """Wall times of single calls in us, each after a flush."""
    samples: list[float] = []
    spent_us = 0.0
    while len(samples) < WALL_LEAST_SAMPLES or (spent_us < min(rep_ms, WALL_REP_MS) * 1e3 and len(samples) < _WALL_MAX_SAMPLES):
        flush()
        start_s = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - start_s) * 1e6)
        spent_us += samples[-1]
    return tuple(samples)


def _samples(fn: Call, reset: Call | None, sync: Call, rep_ms: float) -> list[float]:
    samples: list[float] = []
    began_s = time.perf_counter()
    while len(samples) < MIN_SAMPLES or (time.perf_counter() - began_s < rep_ms * 1e-3 and len(samples) < _MAX_SAMPLES):
        if reset is not None:
            reset()
        sync()
        start_s = time.perf_counter()
        fn()
        sync()
        samples.append((time.perf_counter() - start_s) * 1e6)
    return samples


@functools.cache
def _quiet_floor_us(device: torch.device) -> float:
    """The floor of `bench_host` beside a CUDA device on a quiet host: the lowest of a few scans over all CPUs, spread over a second."""
    sync = torch.cuda.synchronize
    scans = []
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S / 2)
        blocks = [quantile(_samples(do_nothing, None, sync, 0.0), _BLOCK_QUANTILE) for _ in each_cpu(BLOCKS)]
        scans.append(Timing("bench_host", "wall-clock", tuple(blocks), estimator="quiet").reading_us)
    return min(scans)
