# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernel that quantises a tensor to e4m3 bytes, and its launcher."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.e4m3 import narrow_to_e4m3, scale_factors
from rapid_llm.kernels.launch import has_e4m3_convert

__all__ = ["quantize_e4m3"]

_BLOCK = 2048


@triton.jit
def quantize_e4m3_kernel(
    x_ptr,
    out_ptr,
    numel,
    factor,
    rest,
    size_1,
    size_2,
    stride_0,
    stride_1,
    stride_2,
    CONTIGUOUS: tl.constexpr,
    BLOCK: tl.constexpr,
    CONVERT: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    """out[i] = e4m3(x[i] / scale) over the row-major index i of three dimensions; one program a BLOCK of them."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    if CONTIGUOUS:
        source = index
    else:
        line = index // size_2
        source = (line // size_1) * stride_0 + (line % size_1) * stride_1 + (index % size_2) * stride_2
    values = tl.load(x_ptr + source, mask=inside, other=0.0)
    tl.store(out_ptr + index, narrow_to_e4m3(values, factor, rest, CONVERT, DIVIDE), mask=inside)


def quantize_e4m3(x: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
    """Launches `quantize_e4m3_kernel`; see `rapid_llm.kernels.ops.kv.quantize_e4m3`, which validates.

    Args:
        x: [size_0, size_1, size_2], fp16, bf16 or fp32, any strides; not empty.
        out: uint8, contiguous, shape of x.
        scale: Finite and positive.
    """
    numel = x.numel()
    ((factor, rest),), divide = scale_factors(x.dtype, scale)
    quantize_e4m3_kernel[(triton.cdiv(numel, _BLOCK),)](
        x,
        out,
        numel,
        factor,
        rest,
        x.shape[1],
        x.shape[2],
        *x.stride(),
        CONTIGUOUS=x.is_contiguous(),
        BLOCK=_BLOCK,
        CONVERT=has_e4m3_convert(x.device),
        DIVIDE=divide,
    )
