"""The timers on a GPU, against work of a known length (R32, R33, R35, R39)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from asv_bench.microbench import TimingError, bench, bench_graph, bench_host, bench_stateful

pytestmark = pytest.mark.gpu


def _sleep(cycles: int) -> Callable[[], None]:
    return lambda: torch.cuda._sleep(cycles)


def test_r39_events_do_not_see_a_host_stall_and_bench_host_does() -> None:
    device = torch.device("cuda")
    x = torch.ones(64, device=device)

    def stall() -> None:
        until_s = time.perf_counter() + 250e-6
        while time.perf_counter() < until_s:
            pass
        x.add_(1)

    assert bench_graph([lambda: x.add_(1)] * 64, device=device, set_bytes=256.0).median_us < 10
    assert bench_host(stall, device=device).median_us > 250


def test_graph_replay_and_events_agree_on_long_calls() -> None:
    device = torch.device("cuda")
    call = _sleep(1_000_000)
    by_events = bench(call, device=device).median_us
    by_graph = bench_graph([call], device=device, set_bytes=0.0).median_us
    assert by_graph == pytest.approx(by_events, rel=0.03)


def test_r35_case_14_a_2_mib_working_set_is_slower_cold_than_warm() -> None:
    device = torch.device("cuda")
    source = torch.ones(2 << 18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    cold = bench(lambda: target.copy_(source), device=device)
    warm = bench(lambda: target.copy_(source), device=device, warm=True)
    assert cold.l2 == "cold"
    assert warm.l2 == "warm"
    assert cold.median_us > warm.median_us


def test_r33_a_reset_with_item_is_refused() -> None:
    device = torch.device("cuda")
    x = torch.ones(64, device=device)
    with pytest.raises(TimingError, match="keep it there"):
        bench_stateful(lambda: x.add_(1), lambda: x.sum().item(), device=device)
    assert bench_stateful(lambda: x.add_(1), lambda: x.fill_(0), device=device).median_us > 0


def test_both_device_timers_have_slope_one_over_known_waits() -> None:
    from asv_bench.demonstrations import known_waits

    rows = known_waits(torch.device("cuda"))
    known = [row["known_us"] for row in rows]
    for timer in ("bench", "bench_graph"):
        slope = statistics.linear_regression(known, [row[timer]["us"] for row in rows]).slope
        assert abs(slope - 1) <= 0.01


def test_a_call_that_launches_nothing_yields_no_number() -> None:
    device = torch.device("cuda")
    with pytest.raises(TimingError, match=r"launches nothing|no work"):
        bench_graph([lambda: None] * 8, device=device, set_bytes=1e9)
    with pytest.raises(TimingError, match=r"launches nothing|no work"):
        bench(lambda: None, device=device)


def test_a_long_enqueue_is_host_limited() -> None:
    device = torch.device("cuda")
    x = torch.ones(64, device=device)

    def slow_to_enqueue() -> None:
        until_s = time.perf_counter() + 200e-6
        while time.perf_counter() < until_s:
            pass
        x.add_(1)

    assert bench(slow_to_enqueue, device=device).host_limited
    assert not bench(lambda: x.add_(1), device=device).host_limited


def test_events_behind_a_held_queue_do_not_see_a_stall() -> None:
    from asv_bench.demonstrations import STALL_US, stall

    found = stall(torch.device("cuda"))
    assert found["events_behind_a_held_queue"]["us"] < 20
    assert found["bench_host"]["us"] > STALL_US
