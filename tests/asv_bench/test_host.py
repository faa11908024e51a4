"""The host's clock: the quiet estimator, disturbed hosts, and the CPUs that it uses."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asv_bench import host, quiet
from asv_bench.microbench import (
    Timing,
    bench_host,
)
from asv_bench.timing import quantile

CPU = torch.device("cpu")


def test_the_quiet_estimator_is_the_first_decile_and_the_others_the_median() -> None:
    samples = tuple(float(v) for v in range(11))
    assert Timing("bench_host", "wall-clock", samples, estimator="quiet").reading_us == 1.0
    assert Timing("bench", "device", samples).reading_us == 5.0
    assert quantile([3.0], 0.1) == 3.0


def test_bench_host_reads_the_undisturbed_cost_on_a_host_that_is_slowed_down_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 20 us and of 35 us in a mix of 45 to 55, as on a shared host: the reading stays at 20."""
    blocks = iter([35.0 if n % 20 < 11 else 20.0 for n in range(1000)])

    def samples(fn: object, reset: object, sync: object, rep_ms: float) -> list[float]:
        return [1.0] * 5 if fn is quiet.do_nothing else [next(blocks)] * 5

    monkeypatch.setattr(host, "_samples", samples)
    monkeypatch.setattr(host, "_quiet_floor_us", lambda device: 1.0)
    timing = bench_host(lambda: None, device=CPU)
    assert timing.reading_us == 20.0
    assert timing.median_us == 35.0
    assert timing.floor_us == 1.0


@pytest.mark.parametrize(("floors", "attempts", "disturbed"), [([1.6, 1.0], 2, False), ([1.6] * 9, 4, True), ([1.1], 1, False)])
def test_bench_host_goes_on_while_the_whole_host_is_disturbed(
    monkeypatch: pytest.MonkeyPatch, floors: list[float], attempts: int, disturbed: bool
) -> None:
    pauses: list[float] = []
    passes = 0

    def samples(fn: object, reset: object, sync: object, rep_ms: float) -> list[float]:
        return [floors[len(pauses)]] * 5 if fn is quiet.do_nothing else [20.0 * floors[len(pauses)]] * 5

    def each_cpu(blocks: int) -> Any:
        nonlocal passes
        passes += 1
        return range(blocks)

    monkeypatch.setattr(host, "_samples", samples)
    monkeypatch.setattr(host, "_quiet_floor_us", lambda device: 1.0)
    monkeypatch.setattr(host, "each_cpu", each_cpu)
    monkeypatch.setattr(host.time, "sleep", pauses.append)
    monkeypatch.setattr(host, "torch", SimpleNamespace(cuda=SimpleNamespace(synchronize=quiet.do_nothing)))
    timing = bench_host(lambda: None, device=torch.device("cuda"))
    assert (passes, timing.disturbed) == (attempts, disturbed)
    assert timing.reading_us == pytest.approx(20.0 * min(floors))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no CPU affinity")
def test_bench_host_uses_every_cpu_and_gives_them_back_even_after_a_fault() -> None:
    allowed = os.sched_getaffinity(0)
    seen: set[int] = set()
    bench_host(lambda: seen.update(os.sched_getaffinity(0)), device=CPU, rep_ms=1)
    assert seen == allowed
    assert os.sched_getaffinity(0) == allowed
    calls = 0

    def fails_later() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        bench_host(fails_later, device=CPU, rep_ms=1)
    assert os.sched_getaffinity(0) == allowed
