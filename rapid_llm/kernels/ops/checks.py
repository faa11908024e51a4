"""Checks of the public calls' arguments; each raises one sentence: what was expected, what came, what to do."""

from __future__ import annotations

import functools
import math

import torch

from rapid_llm.errors import DTypeError, ScaleError, ShapeError

__all__ = [
    "DTYPE_NAMES",
    "check_block_size",
    "check_cache",
    "check_cache_scale",
    "check_devices",
    "check_dims",
    "check_dtype",
    "check_head_scales",
    "check_innermost",
    "check_out",
    "check_scale",
    "check_softmax_scale",
    "device_capability",
]

DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.uint8: "e4m3",
    torch.int8: "int8",
}
"""Name of a dtype in specs and requests; uint8 is the container of e4m3 bytes."""

_BYTE_DTYPES = (torch.uint8, torch.int8)
_CACHE_DTYPES = (torch.float16, torch.bfloat16, *_BYTE_DTYPES)
_FP32_MIN_NORMAL = torch.finfo(torch.float32).tiny
_FP32_MAX = torch.finfo(torch.float32).max


@functools.cache
def device_capability(device: torch.device) -> tuple[int, int] | None:
    """(major, minor) compute capability of a CUDA device, None of any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def check_dims(call: str, name: str, tensor: torch.Tensor, form: str) -> None:
    """`tensor` is a tensor of as many dimensions as `form`, such as "[batch, num_q_heads, head_dim]", names."""
    if not isinstance(tensor, torch.Tensor):
        raise ShapeError(f"{call} expected {name} to be a tensor {form}, got {type(tensor).__name__}; pass a tensor.")
    if tensor.dim() != form.count(",") + 1:
        raise ShapeError(f"{call} expected {name} {form}, got shape {tuple(tensor.shape)}; reshape it to that form.")


def check_dtype(call: str, name: str, tensor: torch.Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    """`tensor` has one of the dtypes `accepted`."""
    if tensor.dtype not in accepted:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        got = str(tensor.dtype).removeprefix("torch.")
        raise DTypeError(f"{call} expected {name} of dtype {wanted}, got {got}; convert it before the call.")


def check_innermost(call: str, name: str, tensor: torch.Tensor) -> None:
    """The last dimension of `tensor` is innermost in memory."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ShapeError(
            f"{call} expected {name} with last stride 1, got strides {tuple(tensor.stride())}; the call copies nothing "
            "silently, so lay the last dimension out innermost."
        )


def check_block_size(call: str, block_size: int, num_rows: int) -> None:
    """`block_size` is a number of rows that a cache of `num_rows` is made of blocks of."""
    if type(block_size) is not int or block_size < 1:
        raise ShapeError(f"{call} expected block_size to be a positive int, got {block_size!r}; 1 is a table of rows.")
    if num_rows % block_size:
        raise ShapeError(f"{call} expected whole blocks of {block_size} rows, got a cache of {num_rows} rows; pass whole blocks.")


def check_devices(call: str, **tensors: torch.Tensor) -> None:
    """All tensors are on the device of the first."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        if tensor.device != first.device:
            raise ShapeError(f"{call} expected {name} on {first.device} as {first_name} is, got {tensor.device}; move one of them.")


def check_cache(call: str, k_rows: torch.Tensor, v_rows: torch.Tensor, values_name: str, values: torch.Tensor) -> None:
    """K and V rows are one cache that holds heads of the size and dtype of `values`, or e4m3 or int8 bytes."""
    form = "[num_rows, num_kv_heads, head_dim]"
    for name, rows in (("k_rows", k_rows), ("v_rows", v_rows)):
        check_dims(call, name, rows, form)
        check_dtype(call, name, rows, _CACHE_DTYPES)
        check_innermost(call, name, rows)
    if k_rows.shape != v_rows.shape:
        raise ShapeError(
            f"{call} expected v_rows of the shape of k_rows {tuple(k_rows.shape)}, got {tuple(v_rows.shape)}; "
            "pass the two views of one cache."
        )
    if k_rows.dtype != v_rows.dtype:
        raise DTypeError(
            f"{call} expected v_rows of the dtype of k_rows {k_rows.dtype}, got {v_rows.dtype}; pass the two views of one cache."
        )
    if k_rows.dtype not in (*_BYTE_DTYPES, values.dtype):
        raise DTypeError(
            f"{call} expected k_rows and v_rows of the dtype of {values_name} ({values.dtype}) or uint8 holding e4m3 or int8, "
            f"got {k_rows.dtype}; convert {values_name} or use a cache of its dtype."
        )
    if k_rows.shape[-1] != values.shape[-1]:
        raise ShapeError(
            f"{call} expected {values_name} and k_rows to agree in head_dim, got {values.shape[-1]} and "
            f"{k_rows.shape[-1]}; pass the cache of this layer."
        )


def check_out(call: str, out: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    """`out` can take the result."""
    if not isinstance(out, torch.Tensor) or out.shape != shape:
        got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ShapeError(f"{call} expected out of shape {tuple(shape)}, got {got}; allocate it so, or leave it out.")
    check_dtype(call, "out", out, (dtype,))
    if out.device != device:
        raise ShapeError(f"{call} expected out on {device}, got {out.device}; allocate it there, or leave it out.")
    check_innermost(call, "out", out)


def check_scale(call: str, name: str, scale: object, *, quantised: bool = True) -> float:
    """`scale` is a positive finite number of fp32's normal range, or None for 1.

    Args:
        call: Name of the call, for the message.
        name: Name of the argument, for the message.
        scale: What the caller gave.
        quantised: Whether the cache holds e4m3 bytes; elsewhere only None is accepted.
    """
    if scale is None:
        return 1.0
    if not quantised:
        raise ScaleError(f"{call} expected {name}=None for a cache that is not e4m3 or int8, got {_told(scale)}; leave it out.")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        kind = type(scale).__name__
        raise ScaleError(f"{call} expected {name} to be a Python float, got {kind}; pass float({name}), read once.")
    if not (math.isfinite(scale) and _FP32_MIN_NORMAL <= scale <= _FP32_MAX):
        raise ScaleError(
            f"{call} expected {name} to be finite and positive (a normal fp32 number), got {scale!r}; "
            "compute it with e4m3_scale, which gives 1.0 for zeros."
        )
    return float(scale)


def check_cache_scale(call: str, name: str, scale: float | torch.Tensor | None, rows: torch.Tensor) -> float | torch.Tensor:
    """The scale of a cache as its kernels take it: those of its heads where it is int8, else a float.

    Args:
        call: Name of the call, for the message.
        name: Name of the argument, for the message.
        scale: What the caller gave.
        rows: [num_rows, num_kv_heads, head_dim], of the cache.
    """
    dtype = rows.dtype
    if dtype == torch.int8:
        return check_head_scales(call, name, scale, rows)
    return check_scale(call, name, scale, quantised=dtype == torch.uint8)


def check_head_scales(call: str, name: str, scale: object, rows: torch.Tensor) -> torch.Tensor:
    """`scale` can be the scales of an int8 cache, one a head: by its form only, since its values are on the device.

    Args:
        call: Name of the call, for the message.
        name: Name of the argument, for the message.
        scale: What the caller gave.
        rows: [num_rows, num_kv_heads, head_dim], of the cache.
    """
    num_kv_heads = rows.shape[1]
    if not isinstance(scale, torch.Tensor):
        raise ScaleError(
            f"{call} expected {name} to be an fp32 tensor [num_kv_heads] for an int8 cache, got {type(scale).__name__}; "
            "pass the scale of each head, such as int8_scales gives."
        )
    if scale.dtype != torch.float32 or scale.shape != (num_kv_heads,) or not scale.is_contiguous() or scale.device != rows.device:
        raise ScaleError(
            f"{call} expected {name} float32 [{num_kv_heads}], contiguous, on {rows.device} for an int8 cache, got "
            f"{str(scale.dtype).removeprefix('torch.')} {list(scale.shape)} with strides {tuple(scale.stride())} on {scale.device}; "
            "pass the scale of each head of this cache, beside it."
        )
    return scale


def _told(value: object) -> str:
    """A value for a message; a tensor's would wait for the device, and take lines."""
    return type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)


def check_softmax_scale(call: str, softmax_scale: object) -> float:
    """`softmax_scale` is a finite number."""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        kind = type(softmax_scale).__name__
        raise ScaleError(f"{call} expected softmax_scale to be a Python float, got {kind}; convert it.")
    if not math.isfinite(softmax_scale):
        raise ScaleError(f"{call} expected a finite softmax_scale, got {softmax_scale!r}; None is the usual one.")
    return float(softmax_scale)
