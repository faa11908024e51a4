"""What the device could do at best: peaks from properties and a table, ceilings measured in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asv_bench.lazy import LazyModule
from asv_bench.microbench import bench
from asv_bench.table import Ceilings

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

probes: Any = LazyModule("asv_bench.probes")

_TENSOR_TFLOP_PER_S = {
    # Dense rates without sparsity, from the vendors' data sheets; add a device here rather than guess.
    ("NVIDIA H200", "bfloat16"): 989.5,
    ("NVIDIA H200", "float16"): 989.5,
    ("NVIDIA H100 80GB HBM3", "bfloat16"): 989.5,
    ("NVIDIA H100 80GB HBM3", "float16"): 989.5,
    ("NVIDIA A100-SXM4-80GB", "bfloat16"): 312.0,
    ("NVIDIA A100-SXM4-80GB", "float16"): 312.0,
    ("NVIDIA A10", "bfloat16"): 125.0,
    ("NVIDIA A10", "float16"): 125.0,
}
_CEILING_BYTES = 4 << 30
_CEILING_MEMORY_SHARE = 8
_CPU_CEILING_BYTES = 32 << 20
_CEILING_REP_MS = 24.0


def memory_peak_gb_per_s(device: torch.device) -> float | None:
    """Peak of the device memory from its clock and bus width (two transfers a clock), or None where they are not reported.

    Source: CUDA device properties `memoryClockRate` (kHz) and `memoryBusWidth` (bits).
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    if not clock_khz or not bus_bits:
        return None
    return float(2 * clock_khz * 1e3 * bus_bits / 8 / 1e9)


def tensor_peak_tflop_per_s(device_name: str, dtype: str) -> float | None:
    """Dense tensor-core peak of a known device, or None: an absent device gets no percentage rather than a guess."""
    return _TENSOR_TFLOP_PER_S.get((device_name, dtype))


def measured_ceilings(device: torch.device) -> Ceilings:
    """Rates of a large read, fill and copy on this device now: what a kernel without arithmetic reaches.

    On CUDA the read is a Triton kernel of our own (torch's reductions are slower), the others are torch's `fill_` and `copy_`. On a
    CPU all three are torch's.
    """
    size = _CPU_CEILING_BYTES
    if device.type == "cuda":
        size = min(_CEILING_BYTES, torch.cuda.get_device_properties(device).total_memory // _CEILING_MEMORY_SHARE >> 20 << 20)
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def rate(call: Callable[[], object], moved: float) -> float:
        timing = bench(call, device=device, rep_ms=_CEILING_REP_MS)
        return moved / timing.reading_us / 1e3

    return Ceilings(
        read=rate(_reader(source), size), write=rate(lambda: target.fill_(7), size), copy=rate(lambda: target.copy_(source), 2 * size)
    )


def _reader(source: torch.Tensor) -> Callable[[], object]:
    if source.device.type != "cuda":
        return source.max
    out = torch.empty(source.numel() // (probes.READ_BLOCK * probes.READ_UNROLL), dtype=torch.int32, device=source.device)
    return lambda: probes.read(source, out)
