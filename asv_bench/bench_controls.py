"""Controls: vendor operations that a change of this library cannot touch.

When one of them moves, the machine moved. Each serves the bottleneck classes whose rows it is like. Run as a script, it prints the
table: `python -m asv_bench.bench_controls`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asv_bench import kv_pool, suite, verify
from asv_bench.lazy import LazyModule
from asv_bench.microbench import Work
from asv_bench.suite import Bottleneck, Case, Outcomes, Prepared

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


_LAUNCH_SETS = 256
_SUM_OF_SQUARES = 199 * 200 * 399 // 6


def _num_sets(size: int, device: torch.device) -> int:
    """Buffers to rotate over: where in memory a pair lies is worth up to 1 % of a copy's time on an H200."""
    return max(1, min(8, (4 << 30) // size)) if device.type == "cuda" else 1


def _vendor(name: str) -> dict[str, str]:
    return {"cuda": f"vendor:{name}", "cpu": f"vendor:{name}"}


def _case(what: str, size: int, device: str, bottleneck: Bottleneck, *, unit: str = "MiB", **more: Any) -> Case:
    return Case(label=f"{what} {size} {unit} cold", bottleneck=bottleneck, devices=(device,), args={"size": size, **more})


def _equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> float:
    if not torch.equal(actual, expected):
        raise verify.VerificationError(f"control {what}: the vendor's result is not what it has to be")
    return 0.0


class Copy(suite.Suite):
    """A copy by an elementwise kernel: serves the rows that are bound by writing.

    Not `copy_`: in a graph that becomes a memcpy node, which took 1 GiB at 2.8 instead of 4.2 TB/s on an H200.
    """

    op = "copy"
    control = True
    impl = _vendor("abs")
    cases = (
        _case("copy", 1024, "cuda", "write-bandwidth"),
        _case("copy", 256, "cuda", "write-bandwidth"),
        _case("copy", 32, "cpu", "write-bandwidth"),
    )

    def build(self, case: Case, device: torch.device) -> Prepared:
        size = case.args["size"] << 20
        sources = [torch.arange(size // 4, dtype=torch.int32, device=device) for _ in range(_num_sets(size, device))]
        targets = [torch.empty_like(source) for source in sources]
        return Prepared(
            calls=[functools.partial(torch.abs, source, out=target) for source, target in zip(sources, targets, strict=True)],
            work=Work(moved=2.0 * size, written=float(size)),
            poison=lambda: [target.fill_(-1) for target in targets],
            check=lambda: max(_equal(target, source, case.label) for source, target in zip(sources, targets, strict=True)),
        )

    @suite.throughput("GB/s")
    def track_bandwidth(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


class Read(suite.Suite):
    """Reduction over a large tensor: serves the rows that are bound by reading, e4m3 included."""

    op = "read"
    control = True
    impl = _vendor("amax")
    cases = (
        _case("read", 1024, "cuda", "read-bandwidth"),
        _case("read", 256, "cuda", "read-bandwidth"),
        _case("read", 32, "cpu", "read-bandwidth"),
    )

    def build(self, case: Case, device: torch.device) -> Prepared:
        size = case.args["size"] << 20
        sources = [torch.arange(size // 4, dtype=torch.int32, device=device).view(-1, 1024) for _ in range(_num_sets(size, device))]
        results = [torch.empty(source.shape[0], dtype=torch.int32, device=device) for source in sources]
        pairs = list(zip(sources, results, strict=True))
        written = 4.0 * results[0].numel()
        return Prepared(
            calls=[functools.partial(torch.amax, source, dim=1, out=result) for source, result in pairs],
            work=Work(moved=size + written, written=written),
            poison=lambda: [result.fill_(-1) for result in results],
            check=lambda: max(_equal(result, source[:, -1], case.label) for source, result in pairs),
        )

    @suite.throughput("GB/s")
    def track_bandwidth(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


class Matmul(suite.Suite):
    """Vendor matrix product: serves the rows that are bound by arithmetic, and shows the clocks."""

    op = "matmul"
    control = True
    impl = _vendor("matmul")
    cases = (
        _case("matmul bfloat16", 8192, "cuda", "compute", unit="cubed", dtype="bfloat16"),
        _case("matmul float32", 512, "cpu", "compute", unit="cubed", dtype="float32"),
    )

    def build(self, case: Case, device: torch.device) -> Prepared:
        size = case.args["size"]
        dtype = getattr(torch, case.args["dtype"])
        a, b = (kv_pool.random_values((size, size), dtype, device, seed=s) for s in (1, 2))
        out = torch.empty_like(a)
        rows = torch.arange(0, size, size // 8, device=device)
        expected = a[rows].double() @ b.double()
        tolerance = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-16

        def check() -> float:
            error = (out[rows].double() - expected).norm() / expected.norm()
            if not float(error) < tolerance:
                raise verify.VerificationError(f"control {case.label}: relative error {float(error):.2e} over {tolerance:.2e}")
            return float((out[rows].double() - expected).abs().max())

        return Prepared(
            calls=[lambda: torch.matmul(a, b, out=out)],
            work=Work(flops=2.0 * size**3, moved=3.0 * size * size * a.element_size()),
            poison=lambda: out.fill_(float("nan")),
            check=check,
        )

    @suite.throughput("TFLOP/s")
    def track_compute(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


class Small(suite.Suite):
    """A vendor call too small for bandwidth to matter: serves launch rows."""

    op = "small"
    control = True
    impl = _vendor("add_")
    cases = (Case(label="add_ of 4096 int32", bottleneck="launch", devices=("cuda", "cpu")),)

    def build(self, case: Case, device: torch.device) -> Prepared:
        buffers = kv_pool.spread(_LAUNCH_SETS if device.type == "cuda" else 1, (4096,), torch.int32, device)
        for buffer in buffers:
            torch.arange(4096, out=buffer)

        def step(buffer: torch.Tensor) -> Callable[[], object]:
            return lambda: buffer.add_(1)

        def check() -> float:
            for buffer in buffers:
                _equal(buffer - buffer[0], torch.arange(4096, dtype=torch.int32, device=device), case.label)
            return 0.0

        return Prepared(calls=[step(b) for b in buffers], work=Work(moved=2.0 * 4 * 4096), poison=lambda: None, check=check)

    @suite.throughput("calls/s")
    def track_calls(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


class Host(suite.Suite):
    """A host that waits for the device, and one that only computes: serve host rows, and show how fast the host runs today."""

    op = "host"
    control = True
    impl = _vendor("python")
    cases = (
        Case(label="nonzero and item of 4096 int32", bottleneck="host", devices=("cuda", "cpu"), args={"wait": True}),
        Case(label="200 products in Python", bottleneck="host", devices=("cuda", "cpu"), args={"wait": False}),
    )

    def build(self, case: Case, device: torch.device) -> Prepared:
        found: list[int] = []
        if not case.args["wait"]:
            expected = _SUM_OF_SQUARES

            def call() -> None:
                found[:] = [sum(i * i for i in range(200))]
        else:
            expected = 4095
            buffer = torch.arange(4096, dtype=torch.int32, device=device)

            def call() -> None:
                found[:] = [int(buffer.nonzero()[-1].item())]

        def check() -> float:
            return _equal(torch.tensor(found), torch.tensor([expected]), case.label)

        return Prepared(calls=[call], work=Work(), poison=found.clear, check=check)

    @suite.throughput("calls/s")
    def track_calls(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


if __name__ == "__main__":
    sys.exit(suite.main(sys.modules[__name__]))
