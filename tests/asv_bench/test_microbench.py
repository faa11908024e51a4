"""The timers and the table (R18–R22, R31–R37, R39–R41, R55, R99, R100)."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asv_bench import microbench, quiet
from asv_bench.microbench import (
    CHECK_ORDER,
    MIN_SAMPLES,
    Row,
    Timing,
    TimingError,
    Work,
    bench,
    bench_graph,
    bench_host,
    bench_stateful,
    report,
)
from asv_bench.table import Ceilings

CPU = torch.device("cpu")
GOLD = Path(__file__).parent / "gold"


def _row(**changes: Any) -> Row:
    known: dict[str, Any] = {
        "impl": "triton_paged_decode",
        "case": "decode B=8 S=8192 float16",
        "us": 80.0,
        "work": Work(flops=1.0e9, moved=2.684e8, written=0.0),
        "peak_gb_per_s": 4814.0,
        "ceilings": Ceilings(read=4500.0, write=4650.0, copy=4250.0),
        "max_abs_diff": 1.2e-4,
    }
    return Row(**{**known, **changes})


def test_r18_r19_row_derives_decimal_rates_from_microseconds() -> None:
    row = Row("k", "c", us=10.0, work=Work(flops=2.0e9, moved=1.0e6))
    assert row.gb_per_s == pytest.approx(100.0)  # 1e6 bytes in 1e-5 s are 1e11 B/s
    assert row.tflop_per_s == pytest.approx(200.0)  # 2e9 in 1e-5 s are 2e14
    assert row.calls_per_s == pytest.approx(1e5)


def test_r20_r22_report_prints_throughput_before_latency_and_the_check_order_of_a_violation() -> None:
    rows = [
        _row(),
        _row(case="decode B=8 S=8192 float16 too good", us=40.0),
        _row(impl="triton_kv_write", case="decode T=8 float16", us=4.5, work=Work(moved=1e5), bottleneck="launch"),
        _row(impl="vendor:matmul", case="matmul", us=1400.0, work=Work(flops=1.0995e12), bottleneck="compute", max_abs_diff=None),
    ]
    text = report(rows, floor_us=7.25)
    gold = GOLD / "report.txt"
    assert text == gold.read_text(encoding="utf-8")
    places = [text.index(item) for item in CHECK_ORDER]
    assert places == sorted(places)
    assert text.index("throughput") < text.index("latency")


def test_r21_a_row_above_peak_is_a_violation_and_exactly_at_peak_is_not() -> None:
    at_peak = _row(us=2.684e8 / 4814.0 / 1e3)
    assert at_peak.peak_fraction == pytest.approx(1.0)
    assert not _row(us=at_peak.us * 1.0001).violation
    assert _row(us=at_peak.us * 0.999).violation


@pytest.mark.parametrize("bottleneck", ["launch", "host"])
def test_r55_launch_and_host_rows_have_no_share_of_a_bandwidth(bottleneck: str) -> None:
    row = _row(bottleneck=bottleneck, us=1e-3)
    assert row.peak_fraction is None
    assert row.copy_fraction is None
    assert not row.violation
    assert "%" not in report([row])
    assert "calls/s" in report([row])


def test_r25_an_unknown_peak_gives_a_rate_without_a_percentage() -> None:
    row = _row(peak_gb_per_s=None, ceilings=None)
    assert row.peak_fraction is None
    assert "%" not in report([row])
    assert "GB/s" in report([row])


def test_r36_a_warm_row_has_no_percentage() -> None:
    row = _row(flags=("WARM",), us=1.0)
    assert row.peak_fraction is None
    assert row.copy_fraction is None
    assert "WARM" in report([row])


def test_r41_the_first_call_is_not_timed() -> None:
    calls = 0

    def slow_at_first() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(0.2)

    for timing in (bench(slow_at_first, device=CPU, rep_ms=1), bench_host(slow_at_first, device=CPU, rep_ms=1)):
        assert max(timing.samples_us) < 1e5


def test_r34_bench_host_reads_a_host_stall() -> None:
    def stall() -> None:
        until_s = time.perf_counter() + 250e-6
        while time.perf_counter() < until_s:
            pass

    timing = bench_host(stall, device=CPU, rep_ms=20)
    assert 250.0 <= timing.median_us < 300.0
    assert timing.floor_us is not None
    assert timing.floor_us < 10.0
    assert timing.instrument == "wall-clock"


@pytest.mark.parametrize(("reading_us", "refused"), [(0.5, True), (1.69, True), (1.71, False), (2.0, False)])
def test_case_23_a_device_reading_under_that_of_an_empty_kernel_is_refused(reading_us: float, refused: bool) -> None:
    """Under .85 of what an empty kernel reads, nothing was launched; the host's clock has no such floor."""
    timing = Timing("bench_graph", "device", (reading_us,) * MIN_SAMPLES, floor_us=2.0)
    if refused:
        with pytest.raises(TimingError, match="launches nothing"):
            timing.check()
    else:
        timing.check()
    Timing("bench_host", "wall-clock", (reading_us,) * MIN_SAMPLES, floor_us=2.0).check()


def test_r99_a_reading_near_the_floor_says_so() -> None:
    assert bench_host(lambda: None, device=CPU, rep_ms=5).near_floor
    assert Timing("bench_host", "wall-clock", (14.9,) * 5, floor_us=10.0).near_floor
    assert not Timing("bench_host", "wall-clock", (15.1,) * 5, floor_us=10.0).near_floor


def test_bench_on_a_cpu_flushes_before_each_call_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(microbench, "CpuFlush", lambda: lambda: events.append("flush"))
    timing = bench(lambda: events.append("call"), device=CPU, rep_ms=1)
    assert timing.instrument == "wall-clock"
    assert timing.l2 == "cold"
    assert events[0] == "call"  # the untimed one
    assert events[1:] == ["flush", "call"] * (len(events) // 2)
    events.clear()
    assert bench(lambda: events.append("call"), device=CPU, rep_ms=1, warm=True).l2 == "warm"
    assert "flush" not in events


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ((), "took 0 samples"),
        ((5.0,) * (MIN_SAMPLES - 1), f"fewer than {MIN_SAMPLES}"),
        ((float("nan"),) * 5, "nan"),
        ((5.0, 5.0, 5.0, 5.0, 0.0), "read 0.0 us"),
        ((5.0, 5.0, 5.0, 5.0, -1.0), "read -1.0 us"),
        ((float("inf"),) * 6, "inf"),
    ],
)
def test_case_23_degenerate_samples_are_refused(samples: tuple[float, ...], why: str) -> None:
    with pytest.raises(TimingError, match=why):
        Timing("bench", "device", samples).check()


def test_quantiles_interpolate() -> None:
    timing = Timing("bench", "device", (5.0, 1.0, 3.0, 2.0, 4.0))
    assert timing.median_us == 3.0
    assert timing.quantile_us(0.2) == pytest.approx(1.8)
    assert timing.quantile_us(1.0) == 5.0


class FakeCuda:
    """Records the order of what a timer does with a device whose work takes 7 us a call."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.mode = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                fake.log.append("record")

            def elapsed_time(self, other: Event) -> float:
                fake.log.append("read")
                return 7e-3

        cuda = SimpleNamespace(
            Event=Event,
            synchronize=lambda: fake.log.append("sync"),
            get_sync_debug_mode=lambda: fake.mode,
            set_sync_debug_mode=self._set_mode,
        )
        monkeypatch.setattr(microbench, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(quiet, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(microbench, "_event_floor_us", lambda device: 2.0)
        monkeypatch.setattr(microbench, "_hold", lambda device, hold_us: self.log.append("hold"))

    def _set_mode(self, mode: Any) -> None:
        self.mode = mode


def test_r32_r37_stateful_intervals_are_all_enqueued_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    fake.install(monkeypatch)
    log = fake.log
    timing = bench_stateful(lambda: log.append("call"), lambda: log.append("reset"), device=torch.device("cuda"), rounds=8)
    assert timing.samples_us == pytest.approx((7.0,) * 8)
    timed = log[log.index("hold") + 1 :]
    assert timed[: 8 * 4] == ["reset", "record", "call", "record"] * 8
    assert timed[8 * 4] == "sync"
    assert timed.count("sync") == 1
    assert "read" not in timed[: 8 * 4]


def test_r33_a_reset_that_waits_for_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    fake.install(monkeypatch)

    def waits() -> None:
        if fake.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(TimingError, match="keep it there"):
        bench_stateful(lambda: None, waits, device=torch.device("cuda"), rounds=8)
    assert fake.mode == 0  # put back


def test_r17_nothing_else_in_asv_bench_reads_a_clock(root: Path) -> None:
    clocks = {"perf_counter", "perf_counter_ns", "Event", "do_bench", "elapsed_time", "process_time", "timeit"}
    found = []
    for path in sorted((root / "asv_bench").glob("*.py")):
        if path.name not in ("microbench.py", "host.py", "demonstrations.py"):  # the last shows the mistakes on purpose
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [f"{path.name}: {n.attr}" for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in clocks]
    assert found == []


def test_r12_r13_metadata_names_what_reproduces_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPID_LLM_FORCE_BACKEND", "torch")
    data = microbench.metadata(CPU, dtype="float16", shapes={"batch": 8})
    assert data["device"]["name"].startswith("CPU ")
    assert data["dtype"] == "float16"
    assert data["shapes"] == {"batch": 8}
    assert data["torch"] == torch.__version__
    assert data["env_vars"]["RAPID_LLM_FORCE_BACKEND"] == "torch"
    assert {"driver", "cuda", "triton", "python", "commit", "boot_id", "state"} <= data.keys()


def test_the_ceiling_follows_the_mix_of_bytes() -> None:
    ceilings = Ceilings(read=4500.0, write=4600.0, copy=4200.0)
    assert ceilings.rate(Work(moved=1e9, written=0.0)) == pytest.approx(4500.0)
    assert ceilings.rate(Work(moved=1e9, written=1e9)) == pytest.approx(4600.0)
    assert ceilings.rate(Work(moved=1e9, written=5e8)) == pytest.approx(4200.0)
    # 2 bytes read and 1 written: 2/3 at the copy rate, 1/3 at the read rate
    assert ceilings.rate(Work(moved=3e9, written=1e9)) == pytest.approx(3 / (2 / 4200.0 + 1 / 4500.0))
    assert ceilings.rate(Work(moved=1e9)) is None
    assert ceilings.rate(Work(flops=1e9)) is None


def test_a_row_over_102_percent_of_a_measured_ceiling_says_that_the_ceiling_is_stale_and_is_no_violation() -> None:
    at = _row(us=2.684e8 / 4500.0 / 1e3)
    assert at.ceiling_fraction == pytest.approx(1.0)
    assert "STALE-CEILING" not in report([_row(us=at.us / 1.019)])
    over = _row(us=at.us / 1.021)
    assert "STALE-CEILING" in report([over])
    assert not over.violation
    assert "STALE-CEILING" not in report([_row(us=at.us / 1.5, peak_gb_per_s=None)])


def test_a_device_reading_under_that_of_an_empty_kernel_is_refused() -> None:
    with pytest.raises(TimingError, match="launches nothing"):
        Timing("bench_graph", "device", (0.1,) * 9, floor_us=0.68).check()
    Timing("bench_graph", "device", (0.66,) * 9, floor_us=0.68).check()
    Timing("bench_host", "wall-clock", (0.1,) * 9, floor_us=0.68).check()


class FakeReplays:
    """A device whose calls take 2 us each when they are replayed; counts flushes and passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, l2_bytes: int) -> None:
        self.flushes = 0
        self.captured: list[int] = []
        fake = self

        class Flush:
            def __init__(self, device: object) -> None: ...

            def __call__(self) -> None:
                fake.flushes += 1

        def capture(calls: Any, passes: int) -> Any:
            fake.captured.append(passes)
            us = 2.0 * len(calls) * passes
            return SimpleNamespace(replay=lambda: setattr(fake, "us", us), us=us)

        def pair() -> Any:
            return SimpleNamespace(record=lambda: None, elapsed_time=lambda end: fake.us / 1e3), SimpleNamespace(record=lambda: None)

        self.us = 0.0
        monkeypatch.setattr(microbench, "torch", SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None)))
        monkeypatch.setattr(microbench, "DeviceFlush", Flush)
        monkeypatch.setattr(microbench, "l2_bytes", lambda device: l2_bytes)
        monkeypatch.setattr(microbench, "_capture", capture)
        monkeypatch.setattr(microbench, "_graph_sample_us", self._sample)
        monkeypatch.setattr(microbench, "_graph_floor_us", lambda device, calls: 0.5)
        monkeypatch.setattr(microbench, "_event_pair", pair)
        monkeypatch.setattr(microbench, "_hold", lambda device, hold_us: None)
        monkeypatch.setattr(microbench.time, "sleep", lambda seconds: None)

    def _sample(self, graph: Any, replays: int) -> float:
        return float(graph.us)


def test_small_working_sets_are_flushed_and_passed_once_large_ones_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    l2 = 60 << 20
    small = FakeReplays(monkeypatch, l2)
    timing = bench_graph([lambda: None] * 64, device=device, set_bytes=8192.0)
    assert small.captured == [1]
    assert small.flushes > len(timing.samples_us)  # before every timed replay, and before the untimed one of each burst
    assert timing.median_us == pytest.approx(2.0)
    assert timing.floor_us == 0.5
    large = FakeReplays(monkeypatch, l2)
    bench_graph([lambda: None] * 16, device=device, set_bytes=2 * l2 / 16)
    assert large.captured[0] == 1
    assert large.captured[1] > 1
    assert large.flushes == 0


@pytest.mark.parametrize(("host_us", "median_us", "limited"), [(80.0, 83.0, True), (50.0, 83.0, False), (80.0, 300.0, False)])
def test_bench_marks_a_row_whose_enqueue_outlasts_the_flush(
    monkeypatch: pytest.MonkeyPatch, host_us: float, median_us: float, limited: bool
) -> None:
    monkeypatch.setattr(microbench, "_flush_us", lambda device: 64.0)
    monkeypatch.setattr(microbench, "_event_floor_us", lambda device: 3.0)
    monkeypatch.setattr(microbench, "_enqueue_us", lambda fn: host_us)
    monkeypatch.setattr(microbench, "_cold_samples", lambda fn, rep_ms: (median_us,) * 9)
    timing = bench(lambda: None, device=torch.device("cuda"))
    assert timing.host_limited is limited
    assert timing.host_us == host_us
    assert timing.floor_us == 3.0


def test_a_flush_smaller_than_twice_the_l2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    driver = SimpleNamespace(get_empty_cache_for_benchmark=lambda: torch.empty(1 << 10, dtype=torch.int32))
    monkeypatch.setattr(triton, "runtime", SimpleNamespace(driver=SimpleNamespace(active=driver)))
    monkeypatch.setattr(microbench, "l2_bytes", lambda device: 1 << 20)
    with pytest.raises(TimingError, match="use bench_graph"):
        microbench._flush_us.__wrapped__(torch.device("cuda"))
