"""Public calls that fill a KV cache: validate, dispatch, run."""

from __future__ import annotations

import math

import torch

from rapid_llm.errors import ScaleError, ShapeError
from rapid_llm.kernels.ops import checks
from rapid_llm.kernels.ops.accepted import AcceptedCalls, cache_form
from rapid_llm.kernels.ops.dispatch import decision_state, dispatch
from rapid_llm.kernels.ops.layout import layout_tags
from rapid_llm.kernels.ops.spec import Request

__all__ = [
    "E4M3_MAX",
    "INT8_MAX",
    "QUANTIZE_OP",
    "WRITE_OP",
    "e4m3_scale",
    "int8_scales",
    "kv_write",
    "quantize_e4m3",
    "quantize_request",
    "write_request",
]

WRITE_OP = "kv_write"
QUANTIZE_OP = "quantize_e4m3"
E4M3_MAX = 448.0
"""Largest finite e4m3 value."""
INT8_MAX = 127
"""Largest magnitude that a write gives an int8 byte."""

_INDICES = (torch.int32, torch.int64)
_QUANTIZABLE = (torch.float16, torch.bfloat16, torch.float32)

_accepted = AcceptedCalls()


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Writes each token's new K and V heads into its cache row, quantised on the way where the cache is e4m3 or int8.

    A negative slot is skipped (padding), and so is one of num_rows or above; the slots kept must be distinct. No other
    row is touched. Nothing is synchronised with the host: the call can be captured in a CUDA graph.

    Args:
        k: [num_tokens, num_kv_heads, head_dim], fp16 or bf16, any token and head stride, last stride 1.
        v: As k.
        slot_mapping: [num_tokens], int32 or int64, any stride: the cache row of each token.
        k_rows: [num_rows, num_kv_heads, head_dim], any row and head stride, last stride 1; dtype of k, or uint8 for
            e4m3: value / scale, rounded to nearest even, saturated to ±448; NaN stays NaN. Or int8: value / scale[head] in fp32,
            rounded to nearest even, saturated to ±127; -128 is never written, and NaN becomes 0. (A kernel may give 0 for a quotient
            within a place of 1/2.)
        v_rows: As k_rows.
        k_scale, v_scale: Scale of an e4m3 cache, a Python float; None means 1. Of an int8 cache the scale of each head: fp32
            [num_kv_heads], contiguous, on the cache's device, between 2**-60 and 2**60. Its values are read on the device by each call
            and never looked at by the host, which would wait: others give what they give.
        backend: Name of the backend that has to serve the call; None leaves the choice to the dispatch.

    Raises:
        ShapeError: A shape, stride, dtype or device disagrees with the above (`DTypeError` for a dtype).
        ScaleError: A scale is of another kind than the cache's: no finite positive float (e4m3), no such tensor (int8), not None.
        NoKernelError: No registered spec can serve the call; the message lists each spec and its reasons.

    Source:
        e4m3: Micikevicius et al. 2022, arXiv:2209.05433.
    """
    key = _call_key(k, v, slot_mapping, k_rows, v_rows, backend)
    accepted = _accepted.find(key)
    if accepted is None:
        request = write_request(k, v, slot_mapping, k_rows, v_rows)
    # What a key cannot hold is looked at in every call: the values of the scales, and the form of those on the device.
    int8 = k_rows.dtype == torch.int8
    k_factor = 1.0 if k_scale is None and not int8 else checks.check_cache_scale(WRITE_OP, "k_scale", k_scale, k_rows)
    v_factor = 1.0 if v_scale is None and not int8 else checks.check_cache_scale(WRITE_OP, "v_scale", v_scale, k_rows)
    if accepted is None:
        selection = dispatch(request, backend=backend)
        accepted = _accepted.add(key, selection, selection.options)
    if k.numel() > 0:
        accepted.run(k, v, slot_mapping, k_rows, v_rows, k_scale=k_factor, v_scale=v_factor, **accepted.options)


def _call_key(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, backend: str | None
) -> tuple[object, ...] | None:
    """All that validation, layout tags and dispatch look at but the values of scales; None where that is not known from these, or wrong."""
    try:
        device, dtype, cache = k.device, k.dtype, cache_form(k_rows, v_rows)
        if cache is None or v.dtype != dtype or slot_mapping.dtype not in _INDICES:
            return None
        if v.device != device or slot_mapping.device != device or k_rows.device != device or v_rows.device != device:
            return None
        return (
            device, dtype, k.shape, k.stride(), v.shape, v.stride(),
            slot_mapping.dtype, slot_mapping.shape, slot_mapping.stride(), cache, backend, decision_state(),
        )  # fmt: skip
    except (AttributeError, TypeError, IndexError):  # no tensor, or one without dimensions: validation says what is wrong
        return None


def write_request(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, *, call: str = WRITE_OP
) -> Request:
    """The request that `kv_write` makes for these tensors, which it validates first.

    Its shape names num_tokens, num_kv_heads, head_dim and num_rows.

    Args:
        k, v, slot_mapping, k_rows, v_rows: As of `kv_write`.
        call: Name of the operation, for the request and the messages.

    Raises:
        ShapeError: As `kv_write`.
    """
    for name, values in (("k", k), ("v", v)):
        checks.check_dims(call, name, values, "[num_tokens, num_kv_heads, head_dim]")
        checks.check_dtype(call, name, values, (torch.float16, torch.bfloat16))
        checks.check_innermost(call, name, values)
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ShapeError(
            f"{call} expected v of the shape and dtype of k, {tuple(k.shape)} {k.dtype}, got {tuple(v.shape)} "
            f"{v.dtype}; pass the K and V of the same tokens."
        )
    checks.check_cache(call, k_rows, v_rows, "k", k)
    if k.shape[1] != k_rows.shape[1]:
        raise ShapeError(
            f"{call} expected k and k_rows to agree in num_kv_heads, got {k.shape[1]} and {k_rows.shape[1]}; pass the cache of this layer."
        )
    checks.check_dims(call, "slot_mapping", slot_mapping, "[num_tokens]")
    checks.check_dtype(call, "slot_mapping", slot_mapping, (torch.int32, torch.int64))
    if slot_mapping.shape[0] != k.shape[0]:
        raise ShapeError(
            f"{call} expected one slot for each of the {k.shape[0]} tokens of k, got {slot_mapping.shape[0]}; "
            "give -1 to a token that is not to be written."
        )
    checks.check_devices(call, k=k, v=v, slot_mapping=slot_mapping, k_rows=k_rows, v_rows=v_rows)
    return Request(
        op=call,
        device_type=k.device.type,
        capability=checks.device_capability(k.device),
        q_dtype=checks.DTYPE_NAMES[k.dtype],
        kv_dtype=checks.DTYPE_NAMES[k_rows.dtype],
        layout_tags=layout_tags(k_rows, v_rows),
        shape=Request.sorted_shape(
            {
                "num_tokens": k.shape[0],
                "num_kv_heads": k.shape[1],
                "head_dim": k.shape[2],
                "num_rows": k_rows.shape[0],
            }
        ),
    )


def quantize_e4m3(x: torch.Tensor, scale: float, *, out: torch.Tensor | None = None, backend: str | None = None) -> torch.Tensor:
    """Quantises to e4m3 bytes: x / scale, rounded to nearest even, saturated to ±448; NaN stays NaN.

    Args:
        x: Any shape, fp16, bf16 or fp32, last stride 1; its dimensions may be strided as long as they collapse into
            at most three.
        scale: Python float, finite and positive.
        out: Written and returned where given: uint8, shape and device of x, contiguous.
        backend: Name of the backend that has to serve the call; None leaves the choice to the dispatch.

    Returns:
        uint8 of the shape of x, contiguous; `view(torch.float8_e4m3fn)` reads it.

    Raises:
        ShapeError: A shape, stride, dtype or device disagrees with the above (`DTypeError` for a dtype).
        ScaleError: The scale is not finite and positive.
        NoKernelError: No registered spec can serve the call; the message lists each spec and its reasons.

    Source:
        Micikevicius et al. 2022, arXiv:2209.05433.
    """
    request = quantize_request(x)
    if scale is None:
        raise ScaleError(f"{QUANTIZE_OP} expected a scale, got None; compute it with e4m3_scale or pass 1.0.")
    divisor = checks.check_scale(QUANTIZE_OP, "scale", scale)
    if out is None:
        out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    else:
        checks.check_out(QUANTIZE_OP, out, x.shape, torch.uint8, x.device)
        if not out.is_contiguous():
            strides = tuple(out.stride())
            raise ShapeError(f"{QUANTIZE_OP} expected a contiguous out, got strides {strides}; leave it out or copy.")
    run = dispatch(request, backend=backend).spec.load()
    if x.numel() > 0:
        values = _collapsed(x)
        run(values, out.view(values.shape), scale=divisor)
    return out


def quantize_request(x: torch.Tensor) -> Request:
    """The request that `quantize_e4m3` makes for `x`, which it validates first; its shape names numel.

    Args:
        x: As of `quantize_e4m3`.

    Raises:
        ShapeError: As `quantize_e4m3`.
    """
    if not isinstance(x, torch.Tensor):
        raise ShapeError(f"{QUANTIZE_OP} expected x to be a tensor, got {type(x).__name__}; pass a tensor.")
    checks.check_dtype(QUANTIZE_OP, "x", x, _QUANTIZABLE)
    if x.dim() > 0:
        checks.check_innermost(QUANTIZE_OP, "x", x)
    return Request(
        op=QUANTIZE_OP,
        device_type=x.device.type,
        capability=checks.device_capability(x.device),
        q_dtype=checks.DTYPE_NAMES[x.dtype],
        kv_dtype="e4m3",
        layout_tags=frozenset(),
        shape=(("numel", x.numel()),),
    )


def e4m3_scale(x: torch.Tensor) -> float:
    """The scale that maps the largest magnitude of `x` to e4m3's largest value: max|x| / 448.

    It reads the maximum back to the host, which waits for the device: compute it while calibrating, not in a step.

    Args:
        x: Any shape and stride, fp16, bf16 or fp32.

    Returns:
        Positive and finite; 1.0 where `x` is empty or all zero, so that zeros quantise to zeros.

    Raises:
        DTypeError: Another dtype.
        ScaleError: `x` holds NaN or infinity.
    """
    checks.check_dtype("e4m3_scale", "x", x, _QUANTIZABLE)
    amax = float(x.abs().max()) if x.numel() > 0 else 0.0
    if not math.isfinite(amax):
        raise ScaleError(f"e4m3_scale expected finite values, got max|x| = {amax}; mask NaN and infinity.")
    return max(amax / E4M3_MAX, torch.finfo(torch.float32).tiny) if amax > 0.0 else 1.0


def int8_scales(x: torch.Tensor) -> torch.Tensor:
    """The scales that map the largest magnitude of each head of `x` to 127: max|x| / 127. Nothing waits for the device.

    Args:
        x: [..., num_kv_heads, head_dim], fp16, bf16 or fp32, any stride; with an element in each head.

    Returns:
        fp32 [num_kv_heads]; 1 where a head is all zero, NaN or infinity where it holds one.

    Raises:
        ShapeError: Fewer than two dimensions, or no element in a head.
        DTypeError: Another dtype.
    """
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.numel() == 0:
        got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ShapeError(f"int8_scales expected x [..., num_kv_heads, head_dim] with elements, got {got}; pass the values of some tokens.")
    checks.check_dtype("int8_scales", "x", x, _QUANTIZABLE)
    # To fp32 after the maximum is found, which rounds nothing.
    largest = x.abs().amax(dim=-1).flatten(0, -2).amax(dim=0).float() if x.dim() > 2 else x.abs().amax(dim=-1).float()
    return torch.where(largest == 0.0, 1.0, largest / INT8_MAX)


def _collapsed(x: torch.Tensor) -> torch.Tensor:
    """`x` as a view of exactly three dimensions, neighbours merged where their strides allow it."""
    sizes, strides = [1], [1]
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size == 1:
            continue
        if sizes[-1] == 1:
            sizes[-1], strides[-1] = size, stride
        elif stride == sizes[-1] * strides[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 3:
        raise ShapeError(
            f"{QUANTIZE_OP} expected x whose strides collapse into three dimensions, got shape {tuple(x.shape)} with "
            f"strides {tuple(x.stride())}; copy it with contiguous()."
        )
    padding = 3 - len(sizes)
    return x.as_strided([1] * padding + sizes[::-1], [0] * padding + strides[::-1])
