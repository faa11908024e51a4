"""What the device could do at best: peaks from properties and a table, ceilings measured in the same run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asv_bench.lazy import LazyModule
from asv_bench.microbench import bench

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

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
_CEILING_BYTES = 1 << 30
_CPU_CEILING_BYTES = 32 << 20


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


def copy_ceiling_gb_per_s(device: torch.device) -> float:
    """Rate of a large vendor copy on this device now, bytes read plus bytes written."""
    size = _CEILING_BYTES if device.type == "cuda" else _CPU_CEILING_BYTES
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    timing = bench(lambda: target.copy_(source), device=device, rep_ms=30)
    return 2 * size / timing.median_us / 1e3
