"""The public call over contiguous K and V: what vendors' kernels serve, and what the cost of paging is told from."""

from __future__ import annotations

import torch

from rapid_llm.errors import DTypeError, ShapeError
from rapid_llm.kernels.ops import checks
from rapid_llm.kernels.ops.dispatch import dispatch
from rapid_llm.kernels.ops.layout import CONTIGUOUS
from rapid_llm.kernels.ops.spec import Request

__all__ = ["CONTIGUOUS_DECODE_OP", "contiguous_decode_attention", "contiguous_decode_request"]

CONTIGUOUS_DECODE_OP = "contiguous_decode_attention"
_DTYPES = (torch.float16, torch.bfloat16)


def contiguous_decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None = None, backend: str | None = None
) -> torch.Tensor:
    """Attends one query token a sequence to K and V that lie contiguous, sequences of one length.

    Nothing is copied: a cache of pages has to be gathered first, which is no part of this call.

    Args:
        q: [batch, num_q_heads, head_dim], fp16 or bf16. num_q_heads is a multiple of num_kv_heads; query head h reads K/V head
            h // (num_q_heads // num_kv_heads).
        k: [batch, num_kv_heads, seq_len, head_dim], dtype of q.
        v: As k.
        softmax_scale: Factor on the scores; None means head_dim ** -0.5.
        backend: Name of the backend that has to serve the call ("sdpa-flash", "sdpa-cudnn", "sdpa-math"); None leaves the choice to the
            dispatch.

    Returns:
        [batch, num_q_heads, head_dim], dtype of q, of strides that the kernel chose.

    Raises:
        ShapeError: A shape, stride, dtype or device disagrees with the above (`DTypeError` for a dtype).
        ScaleError: softmax_scale is no finite number.
        NoKernelError: No registered spec can serve the call; the message lists each spec and its reasons.

    Source:
        torch.nn.functional.scaled_dot_product_attention; Dao et al. 2022, arXiv:2205.14135.
    """
    request = contiguous_decode_request(q, k, v)
    factor = q.shape[-1] ** -0.5 if softmax_scale is None else checks.check_softmax_scale(CONTIGUOUS_DECODE_OP, softmax_scale)
    run = dispatch(request, backend=backend).spec.load()
    return run(q, k, v, softmax_scale=factor)  # type: ignore[no-any-return]


def contiguous_decode_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Request:
    """The request that `contiguous_decode_attention` makes for these tensors, which it validates first.

    Its shape names batch, seq_len, num_q_heads, num_kv_heads and head_dim; its only layout tag is kv:contiguous, where it holds.

    Args:
        q, k, v: As of `contiguous_decode_attention`.

    Raises:
        ShapeError: As `contiguous_decode_attention`.
    """
    call = CONTIGUOUS_DECODE_OP
    checks.check_dims(call, "q", q, "[batch, num_q_heads, head_dim]")
    checks.check_dtype(call, "q", q, _DTYPES)
    for name, values in (("k", k), ("v", v)):
        checks.check_dims(call, name, values, "[batch, num_kv_heads, seq_len, head_dim]")
        if values.dtype != q.dtype:
            raise DTypeError(f"{call} expected {name} of the dtype of q ({q.dtype}), got {values.dtype}; convert one of them.")
    if k.shape != v.shape:
        raise ShapeError(f"{call} expected v of the shape of k {tuple(k.shape)}, got {tuple(v.shape)}; pass K and V of one cache.")
    (batch, num_q_heads, head_dim), (_, num_kv_heads, seq_len, _) = q.shape, k.shape
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ShapeError(
            f"{call} expected k of the batch and head_dim of q {tuple(q.shape)}, got {tuple(k.shape)}; pass the cache of these sequences."
        )
    if num_kv_heads == 0 or num_q_heads == 0 or num_q_heads % num_kv_heads or head_dim == 0:
        raise ShapeError(
            f"{call} expected num_q_heads to be a positive multiple of num_kv_heads, and whole heads, got q {tuple(q.shape)} and "
            f"k {tuple(k.shape)}; every K/V head serves the same number of query heads."
        )
    checks.check_devices(call, q=q, k=k, v=v)
    return Request(
        op=call,
        device_type=q.device.type,
        capability=checks.device_capability(q.device),
        q_dtype=checks.DTYPE_NAMES[q.dtype],
        kv_dtype=checks.DTYPE_NAMES[k.dtype],
        layout_tags=frozenset({CONTIGUOUS}) if k.is_contiguous() and v.is_contiguous() else frozenset(),
        shape=Request.sorted_shape(
            {"batch": batch, "seq_len": seq_len, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        ),
    )
