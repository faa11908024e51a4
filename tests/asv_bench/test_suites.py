"""The suites as asv and the gate see them (R2, R8, R11, R27–R29, R40, R42, R54, R62, R63, R65, R75, R77, R78, R93, R106)."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asv_bench import bench_allocator, bench_controls, bench_kv_write, bench_paged_decode, suite, worker
from asv_bench.suite import Case, Prepared, RowError, Suite, SuiteRow, all_rows, rows_of, suites_in
from asv_bench.verify import VerificationError
from asv_bench.worker import Bench
from rapid_llm.kernels.ops import registry
from rapid_llm.kernels.ops.spec import KernelSpec, load_target

CPU = torch.device("cpu")
MODULES = (bench_allocator, bench_controls, bench_kv_write, bench_paged_decode)


@pytest.fixture(autouse=True)
def _kernels_are_looked_up_again() -> Iterator[None]:
    """Specs keep what they have loaded; a test that replaces a kernel wants it looked up, and the next test the right one."""
    load_target.cache_clear()
    yield
    load_target.cache_clear()


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(CPU)


def _rows_for(device: str) -> list[SuiteRow]:
    return [row for row in all_rows() if device in row.case.devices]


def test_r93_every_track_method_has_a_throughput_unit_and_a_direction() -> None:
    for row in all_rows():
        (method,) = (value for name, value in vars(row.suite).items() if name.startswith("track_"))
        assert method.unit == row.suite.unit
        assert method.unit.endswith("/s")
        assert method.higher_is_better is True


def test_rows_of_a_section_exist_on_each_device() -> None:
    for device in ("cuda", "cpu"):
        kinds = {(row.suite.op, row.case.phase, row.case.kv_dtype, row.case.bottleneck) for row in _rows_for(device)}
        assert {
            ("paged_decode_attention", "decode", "float16", "read-bandwidth"),
            ("paged_decode_attention", "decode", "e4m3", "dequant"),
            ("kv_write", "prefill", "float16", "write-bandwidth"),
            ("kv_write", "prefill", "e4m3", "write-bandwidth"),
            ("kv_write", "decode", "float16", "launch"),
            ("alloc_kvcache_index", "decode", None, "host"),
        } <= kinds
        controls = {row.case.bottleneck for row in _rows_for(device) if row.suite.control}
        assert controls == {"write-bandwidth", "read-bandwidth", "compute", "launch", "host"}


def test_r54_r65_labels_say_phase_dtype_layout_and_state() -> None:
    for row in all_rows():
        label = row.case.label
        if row.suite.op in ("paged_decode_attention", "kv_write"):
            assert label.startswith(f"{row.case.phase} ")
            assert row.case.kv_dtype is not None
            assert f" {row.case.kv_dtype} " in label
            assert re.search(r"\b(combined|split)\b.*\b(fragmented|contiguous)\b", label)
        if row.suite.op == "alloc_kvcache_index":
            assert re.search(r"state=(bump|run_search|fragmented)$", label)


def test_r2_every_row_that_is_no_control_names_a_registered_spec_or_a_public_class() -> None:
    known = {spec.name for op in ("paged_decode_attention", "kv_write") for spec in registry.specs_for(op)}
    for row in all_rows():
        for impl in row.suite.impl.values():
            assert row.suite.control == impl.startswith("vendor:")
            if row.suite.op in ("paged_decode_attention", "kv_write"):
                assert impl in known


@pytest.mark.parametrize("module", [bench_paged_decode, bench_kv_write])
def test_r27_a_spec_name_stands_once_in_its_suite(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for name in module._IMPL.values():
        assert texts.count(name) == 1


@pytest.mark.parametrize("module", [bench_paged_decode, bench_kv_write])
def test_r42_r63_suites_take_inputs_from_the_pool_and_use_public_names_only(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "paged_pool" in used
    assert not used & {"randn", "rand", "randint", "normal_"}
    assert not {name for name in used if name.startswith("_") and not name.startswith("__")}


def _write_row() -> SuiteRow:
    return next(row for row in rows_of([bench_kv_write.KVWriteDecode]) if "T=8 float16" in row.case.label)


def _decode_row(kv_dtype: str) -> SuiteRow:
    return next(row for row in _rows_for("cpu") if row.suite.op == "paged_decode_attention" and row.case.kv_dtype == kv_dtype)


def test_r28_r106_a_suite_refuses_when_dispatch_runs_another_kernel(bench: Bench) -> None:
    row = _write_row()
    twin = registry.get("torch_kv_write")
    with registry.isolated():
        registry.register(KernelSpec(**{**{f: getattr(twin, f) for f in twin.__dataclass_fields__}, "name": "torch_twin", "priority": 99}))
        record = bench.measure(row)
    assert record["status"] == "failed"
    assert record["value"] is None
    assert "named after torch_kv_write and dispatch() runs torch_twin" in record["reason"]
    assert bench.measure(row)["status"] == "ok"


@pytest.mark.parametrize("fault", ["nothing", "zeros", "half"])
def test_r4_a_wrong_kernel_gives_no_number(bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from rapid_llm.kernels.backends import torch_impl

    right = torch_impl.paged_decode

    def wrong(q: Any, k_rows: Any, v_rows: Any, row_table: Any, seq_lens: Any, out: Any, **scales: Any) -> None:
        if fault == "zeros":
            out.zero_()
        elif fault == "half":
            right(q[:1], k_rows, v_rows, row_table[:1], seq_lens[:1], out[:1], **scales)

    monkeypatch.setattr(torch_impl, "paged_decode", wrong)
    for kv_dtype in ("float16", "e4m3"):
        record = bench.measure(_decode_row(kv_dtype))
        assert record["status"] == "unverified", record
        assert record["value"] is record["latency_us"] is None


def test_case_4_a_kernel_that_goes_wrong_while_it_is_timed_gives_no_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from rapid_llm.kernels.backends import torch_impl

    right, calls = torch_impl.paged_decode, 0

    def later_wrong(q: Any, k_rows: Any, v_rows: Any, row_table: Any, seq_lens: Any, out: Any, **scales: Any) -> None:
        nonlocal calls
        calls += 1
        right(q, k_rows, v_rows, row_table, seq_lens, out, **scales)
        if calls > 5:
            out[0, 0, 0] += 1.0

    monkeypatch.setattr(torch_impl, "paged_decode", later_wrong)
    record = bench.measure(_decode_row("float16"))
    assert calls > 5
    assert record["status"] == "unverified"


def test_case_4_a_kernel_that_writes_only_at_first_gives_no_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arrival counter that is never reset: the first call's result stays in the buffer and every later call is fast."""
    from rapid_llm.kernels.backends import torch_impl

    right, seen = torch_impl.paged_decode, set()

    def once(q: Any, k_rows: Any, v_rows: Any, row_table: Any, seq_lens: Any, out: Any, **scales: Any) -> None:
        if out.data_ptr() not in seen:
            seen.add(out.data_ptr())
            right(q, k_rows, v_rows, row_table, seq_lens, out, **scales)

    monkeypatch.setattr(torch_impl, "paged_decode", once)
    assert bench.measure(_decode_row("float16"))["status"] == "unverified"


class _Fake:
    """A prepared case that notes what is done with it; its output is right, poisoned, or remembered from before the inputs changed."""

    def __init__(self, *, poisonable: bool = True, remembers: bool = False, wrong_while_timed: bool = False) -> None:
        self.events: list[str] = []
        self.inputs, self.kept, self.output = 1, None, 0
        self.poisonable, self.remembers, self.wrong_while_timed = poisonable, remembers, wrong_while_timed

    def call(self) -> None:
        self.events.append("call")
        if self.kept is None or not self.remembers:
            self.kept = self.inputs
        self.output = self.kept

    def poison(self) -> None:
        self.events.append("poison")
        if self.poisonable:
            self.output = 0

    def check(self) -> float:
        self.events.append("check")
        if self.output != self.inputs:
            raise VerificationError(f"expected {self.inputs}, got {self.output}")
        return 0.0

    def vary(self) -> None:
        self.events.append("vary")
        self.inputs += 1

    def time(self, *arguments: Any, poison: Any, **more: Any) -> Any:
        poison()
        self.call()
        self.output -= self.wrong_while_timed
        self.events.append("time")
        return _timing()

    def prepared(self) -> Prepared:
        work = bench_kv_write.Work(moved=1e6)
        return Prepared(calls=[self.call], work=work, poison=self.poison, check=self.check, vary=self.vary)


def _measure_fake(bench: Bench, monkeypatch: pytest.MonkeyPatch, fake: _Fake) -> dict[str, Any]:
    monkeypatch.setattr(bench_kv_write.KVWritePrefill, "build", lambda self, case, device: fake.prepared())
    monkeypatch.setattr(worker, "bench", fake.time)
    return bench.measure(next(r for r in rows_of([bench_kv_write.KVWritePrefill]) if "cpu" in r.case.devices))


def test_what_a_row_left_is_freed_before_the_next(bench: Bench) -> None:
    """The bench looks only through what was made after it: a cycle of a row's own is that."""

    class Cycle:
        pass

    left = Cycle()
    left.itself = left  # type: ignore[attr-defined]
    gone = weakref.ref(left)
    del left
    assert gone() is not None
    bench.release()
    assert gone() is None


def test_r4_verification_comes_before_timing_and_after(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Fake()
    assert _measure_fake(bench, monkeypatch, fake)["status"] == "ok"
    anew = ["poison", "call", "check"]
    seen = ["poison", "check"]
    timed = ["poison", "call", "time", "check"]
    assert fake.events == [*anew * worker.CHECKED_CALLS, *seen, *timed, *anew, "vary", *anew]


def test_case_4_a_check_that_takes_poison_gives_no_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _measure_fake(bench, monkeypatch, _Fake(poisonable=False))
    assert (record["status"], record["value"]) == ("unverified", None)
    assert "takes outputs that its poison made wrong" in record["reason"]


def test_case_4_a_kernel_that_is_wrong_only_while_it_is_timed_gives_no_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before and right again after: only what the timed calls left in the output tells."""
    record = _measure_fake(bench, monkeypatch, _Fake(wrong_while_timed=True))
    assert (record["status"], record["value"]) == ("unverified", None)


def test_case_4_a_result_that_was_kept_gives_no_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _measure_fake(bench, monkeypatch, _Fake(remembers=True))
    assert (record["status"], record["reason"]) == ("unverified", "expected 2, got 1")


def _timing() -> Any:
    from asv_bench.microbench import Timing

    return Timing("bench", "wall-clock", (5.0,) * 6)


def test_r11_work_of_a_decode_is_counted_by_hand(bench: Bench) -> None:
    row = _decode_row("float16")
    prepared = row.suite().build(row.case, CPU)
    tokens, q_bytes = 2 * 256, 2 * 32 * 128 * 2
    assert prepared.work.moved == 2 * tokens * 8 * 128 * 2 + 4 * tokens + 4 * 2 + 2 * q_bytes
    assert prepared.work.flops == 4 * tokens * 32 * 128


def test_work_of_a_write_is_counted_by_hand() -> None:
    row = next(r for r in _rows_for("cpu") if r.suite is bench_kv_write.KVWritePrefill and r.case.kv_dtype == "e4m3")
    prepared = row.suite().build(row.case, CPU)
    elements = 2 * 512 * 8 * 128
    assert prepared.work.moved == elements * (2 + 1) + 4 * 512


@pytest.mark.parametrize("state", ["bump", "run_search", "fragmented"])
def test_r65_r105_an_allocator_row_is_refused_when_its_state_is_not_the_one_it_names(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    from rapid_llm.kv_cache import KVCacheManager

    row = next(r for r in rows_of([bench_kv_write.Allocator]) if r.case.args["state"] == state)
    assert bench.measure(row)["status"] == "ok"
    original = KVCacheManager.alloc_kvcache_index
    monkeypatch.setattr(KVCacheManager, "release", lambda self, rows, **k: self.free_all())
    reset_only_frees_all = bench.measure(row)
    assert (reset_only_frees_all["status"] == "ok") == (state == "bump")
    monkeypatch.undo()

    @functools.wraps(original)
    def duplicate(self: Any, num_tokens: int) -> Any:
        rows = original(self, num_tokens)
        if rows is not None and num_tokens == 64:
            rows = rows.clone()
            rows[1] = rows[0]
        return rows

    monkeypatch.setattr(KVCacheManager, "alloc_kvcache_index", duplicate)
    wrong = bench.measure(row)
    assert wrong["status"] == "unverified"
    assert "handed out twice" in wrong["reason"]


def test_a_row_of_another_device_is_skipped_with_the_reason(bench: Bench) -> None:
    row = next(r for r in all_rows() if r.case.devices == ("cuda",))
    record = bench.measure(row)
    assert record["status"] == "skipped"
    assert record["reason"] == "needs a cuda device"


def test_asv_gets_the_value_the_skip_or_an_error() -> None:
    row = _write_row()
    made = row.suite()
    made.setup({row.id: {"status": "ok", "value": 5.0}}, row.case.label)
    assert made.value({row.id: {"status": "ok", "value": 5.0}}, row.case.label) == 5.0
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        made.setup({row.id: {"status": "skipped", "reason": "needs a GPU"}}, row.case.label)
    with pytest.raises(NotImplementedError, match="not selected"):
        made.setup({}, row.case.label)
    for status in ("failed", "unverified", "violation", "invalid"):
        with pytest.raises(RowError, match=f"{status}: why"):
            made.value({row.id: {"status": status, "reason": "why", "value": 5.0}}, row.case.label)


def test_two_cases_with_one_label_are_refused() -> None:
    case = Case("x", "launch", ("cpu",))
    with pytest.raises(ValueError, match="two cases with one label"):
        type("Twice", (Suite,), {"cases": (case, case)})
    with pytest.raises(TypeError, match="one track_ method"):
        type("None_", (Suite,), {"cases": (case,)})
    for unit in ("us", "GB", "GiB/s"):
        with pytest.raises(ValueError, match="is told in GB/s, TFLOP/s, calls/s, and not in"):
            suite.throughput(unit)
    with pytest.raises(TypeError, match="is not marked by"):
        type("Unmarked", (Suite,), {"cases": (case,), "track_calls": lambda self, outcomes, case: 1.0})
    unknown = Case("y", "read_bandwidth", ("cpu",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bottleneck of 'y' is 'read_bandwidth', which is none of read-bandwidth, dequant"):
        type("Unknown", (Suite,), {"cases": (unknown,), "track_calls": suite.throughput("calls/s")(lambda self, outcomes, case: 1.0)})


def test_a_reason_is_a_line_with_the_list_that_it_announces() -> None:
    assert worker._reason("No kernel serves it. Change what the reasons name:\n  a: no dtype\n  b: no device\n") == (
        "No kernel serves it. Change what the reasons name: a: no dtype b: no device"
    )
    assert (
        worker._reason("CUDA error: an illegal memory access\nFor debugging consider passing X\n") == "CUDA error: an illegal memory access"
    )
    assert worker._reason("") == "no message"
    assert len(worker._reason("x" * 9_000)) == 500


def test_importing_the_suites_imports_neither_torch_nor_the_library(root: Path) -> None:
    import subprocess
    import sys

    heavy = "[m for m in ('torch', 'triton', 'rapid_llm') if m in sys.modules]"
    code = f"import sys; from asv_bench.suite import all_rows; all_rows(); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["bench_paged_decode", "bench_kv_write", "bench_controls"])
def test_r77_r78_r29_a_suite_is_a_script_that_prints_the_table_and_the_decision(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(worker.DEVICE_VARIABLE, "cpu")
    module = importlib.import_module(f"asv_bench.{name}")
    assert suite.main(module) == 0
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if line.startswith("case "))
    assert header.split() == ["case", "kernel", "throughput", "latency", "of", "peak", "of", "ceiling", "max", "|diff|", "flags"]
    assert "wall clock on a CPU" in printed
    for row in rows_of(suites_in(module)):
        assert (row.case.label in printed) == ("cpu" in row.case.devices)
    if name != "bench_controls":
        assert "rejected:" in printed
        assert "triton_" in printed
    if name == "bench_kv_write":
        assert "floor: bench_host(lambda: None) reads" in printed  # R40, R62, R100


def test_the_page_of_the_h200_has_every_row_of_a_gpu(root: Path) -> None:
    page = (root / "docs" / "h200.md").read_text(encoding="utf-8")
    labels = {row.case.label for row in all_rows() if "cuda" in row.case.devices}
    assert {label for label in labels if f"| {label} |" not in page} == set()
