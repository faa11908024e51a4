"""What the wrong timer reads: the mistakes that `asv_bench.microbench` avoids, made on purpose on a CUDA device.

    python -m asv_bench.demonstrations [--json FILE]

Prints and keeps: a 2 MiB copy cold, warm, and with a synchronise in each iteration; a host stall under events and under `bench_host`;
both device timers over waits of a known length, and on real rows, with flushes that leave the L2 in other states than do_bench's; the
scatter of a decode step under both; where the allocator waits.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asv_bench import bench_kv_write, bench_paged_decode, suite
from asv_bench.environment import collect_environment
from asv_bench.lazy import LazyModule
from asv_bench.microbench import Timing, bench, bench_graph, bench_host, bench_stateful
from asv_bench.quiet import FLUSH_FACTOR, l2_bytes

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

probes: Any = LazyModule("asv_bench.probes")

WAITS_NS = (2_000, 3_000, 5_000, 7_000, 10_000, 20_000, 50_000, 100_000, 200_000)
STALL_US = 250.0
_ITERATIONS = 200


def main(arguments: list[str]) -> int:
    """Runs every demonstration on the GPU."""
    parser = argparse.ArgumentParser(prog="python -m asv_bench.demonstrations", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("the demonstrations are about a device's timeline and need a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    found: dict[str, Any] = {"environment": collect_environment(device)}
    for name, demonstrate in (
        ("two_mib", two_mib),
        ("stall", stall),
        ("known_waits", known_waits),
        ("both_timers", both_timers),
        ("decode_scatter", decode_scatter),
        ("allocator_waits", allocator_waits),
    ):
        found[name] = demonstrate(device)
        print(f"{name}: {json.dumps(found[name])}")
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def two_mib(device: torch.device) -> dict[str, Any]:
    """A copy of 2 MiB: cold, warm, and warm with a synchronise in each iteration, by events and by the host's clock, in us."""
    source = torch.arange(1 << 19, dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def call() -> object:
        return target.copy_(source)

    by_events, by_host = _synchronised(call)
    return {
        "cold": _said(bench(call, device=device)),
        "warm": _said(bench(call, device=device, warm=True)),
        "synchronised_events_us": by_events,
        "synchronised_host_us": by_host,
        "floor_synchronised_events_us": _synchronised(lambda: None)[0],
    }


def stall(device: torch.device) -> dict[str, Any]:
    """A call that stalls the host for 250 us and launches one small kernel, under three timers."""
    x = torch.ones(4096, device=device)

    def call() -> None:
        until_s = time.perf_counter() + STALL_US * 1e-6
        while time.perf_counter() < until_s:
            pass
        x.add_(1)

    return {
        "events_behind_a_held_queue": _said(bench_stateful(call, lambda: None, device=device)),
        "kernel_alone": _said(bench_stateful(lambda: x.add_(1), lambda: None, device=device)),
        "bench_host": _said(bench_host(call, device=device)),
    }


def known_waits(device: torch.device) -> list[dict[str, Any]]:
    """Kernels that wait for a known time, which each reports itself, under both device timers."""
    outs = torch.zeros(64, dtype=torch.int64, device=device)
    rows = []
    for wait_ns in WAITS_NS:
        calls = [functools.partial(probes.spin, outs[i : i + 1], wait_ns) for i in range(outs.numel())]
        graph = bench_graph(calls, device=device, set_bytes=0.0)
        events = bench(calls[0], device=device)
        rows.append({"known_us": float(outs.double().mean()) / 1e3, "bench_graph": _said(graph), "bench": _said(events)})
    return rows


def both_timers(device: torch.device) -> list[dict[str, Any]]:
    """`bench` and `bench_graph` on the same calls of real rows; `bench` also with the L2 clean, and as the row's other sets leave it."""
    decode = bench_paged_decode.uniform
    rows = [
        (bench_paged_decode.PagedDecode, decode(64, 8192, "float16", "cuda")),
        (bench_paged_decode.PagedDecode, decode(128, 1024, "float16", "cuda")),
        (bench_paged_decode.PagedDecode, decode(8, 8192, "float16", "cuda")),
        (bench_paged_decode.PagedDecode, decode(1, 32768, "float16", "cuda")),
        *((bench_kv_write.KVWritePrefill, case) for case in bench_kv_write.KVWritePrefill.cases if case.devices == ("cuda",)),
    ]
    return [_under_both(suite_class, case, device, clean=True) for suite_class, case in rows]


def decode_scatter(device: torch.device) -> list[dict[str, Any]]:
    """The KV write of one decode step under both device timers."""
    return [_under_both(bench_kv_write.KVWriteDecode, case, device) for case in bench_kv_write.KVWriteDecode.cases]


def allocator_waits(device: torch.device) -> list[dict[str, Any]]:
    """Both allocators in three states: host time, floor, and the operations in one call that made the host wait for the device."""
    rows = []
    kinds: tuple[type[suite.Suite], ...] = (bench_kv_write.Allocator, bench_kv_write.DeviceStateAllocator)
    for kind, case in ((suite_class, case) for suite_class in kinds for case in suite_class.cases):
        prepared = kind().build(case, device)
        timing = bench_host(prepared.calls[0], prepared.reset, device=device)
        assert prepared.reset is not None
        prepared.reset()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepared.calls[0]()
        torch.cuda.set_sync_debug_mode("default")
        waits = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]
        rows.append({"case": case.label, "impl": kind.impl["cuda"], "bench_host": _said(timing), "waits": waits})
    return rows


def _under_both(suite_class: type[suite.Suite], case: suite.Case, device: torch.device, *, clean: bool = False) -> dict[str, Any]:
    prepared = suite_class().build(case, device)
    graph = bench_graph(prepared.calls, device=device, set_bytes=prepared.work.moved or 0.0)
    events = bench(prepared.calls[0], device=device)
    told = {"case": case.label, "bench_graph": _said(graph), "bench": _said(events)}
    if clean:
        with _flushed_also_by(_reads(device)):
            told["bench_after_a_clean_flush"] = _said(bench(prepared.calls[0], device=device))
        others = prepared.calls[1:]
        with _flushed_also_by(lambda: [call() for call in others]):
            told["bench_after_its_like"] = _said(bench(prepared.calls[0], device=device))
    return told


def _reads(device: torch.device) -> Callable[[], object]:
    """Reads twice the L2.

    What a flush wrote is still to be written back when it has ended, and a kernel that brings other lines in waits for that; after these
    reads the L2 is as cold, and clean.
    """
    other = torch.zeros(FLUSH_FACTOR * l2_bytes(device) // 4, dtype=torch.int32, device=device)
    return other.amax


@contextlib.contextmanager
def _flushed_also_by(more: Callable[[], object]) -> Iterator[None]:
    """do_bench's flush is followed by another call, which leaves the L2 in another state."""
    from triton.runtime import driver

    flush = driver.active.clear_cache

    def flush_and_more(cache: object) -> None:
        flush(cache)
        more()

    driver.active.clear_cache = flush_and_more
    try:
        yield
    finally:
        driver.active.clear_cache = flush


def _said(timing: Timing) -> dict[str, Any]:
    return {
        "us": timing.reading_us,
        "floor_us": timing.floor_us,
        "quantiles_us": [timing.quantile_us(0.2), timing.quantile_us(0.8)],
        "samples": len(timing.samples_us),
        "l2": timing.l2,
        "host_us": timing.host_us,
        "host_limited": timing.host_limited,
    }


def _synchronised(call: Callable[[], object]) -> tuple[float, float]:
    """Medians of events and of the host's clock around a call that is synchronised with in each iteration: the mistake itself."""
    events_us, host_us = [], []
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    for _ in range(_ITERATIONS):
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        host_us.append((time.perf_counter() - began_s) * 1e6)
        events_us.append(start.elapsed_time(end) * 1e3)
    return statistics.median(events_us), statistics.median(host_us)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
