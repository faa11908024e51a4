# mypy: disable-error-code="import-untyped"
"""What a launcher has to know of the machine: interpreter or compiler, multiprocessors, e4m3 instructions."""

from __future__ import annotations

import functools

import torch
import triton

__all__ = ["has_e4m3_convert", "interpreted", "num_multiprocessors"]

_E4M3_CONVERT_CAPABILITY = (8, 9)
_INTERPRETED_MULTIPROCESSORS = 4


@triton.jit
def _decorated():  # type: ignore[no-untyped-def]
    pass


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter: it decides that while they are decorated, and for good."""
    return not isinstance(_decorated, triton.JITFunction)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device; a small constant for the interpreter, so that it splits too."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def has_e4m3_convert(device: torch.device) -> bool:
    """Whether kernels launched for `device` can use the e4m3 conversion instructions (compute capability 8.9 on).

    The interpreter cannot: it knows no inline assembly, and it rounds to e4m3 wrongly.
    """
    if interpreted() or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _E4M3_CONVERT_CAPABILITY
