"""Public call of a step's new tokens: norm and rotary embedding of Q and K, and the write of K and V: validate, dispatch, run."""

from __future__ import annotations

import math

import torch

from rapid_llm.errors import DTypeError, ShapeError
from rapid_llm.kernels.ops import checks
from rapid_llm.kernels.ops.dispatch import dispatch
from rapid_llm.kernels.ops.kv import write_request
from rapid_llm.kernels.ops.spec import Request

__all__ = ["ROPE_WRITE_OP", "rope_norm_kv_write", "rope_write_request"]

ROPE_WRITE_OP = "rope_norm_kv_write"

_TABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rope_norm_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: float | None = None,
    v_scale: float | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotates each token's Q and K by its position, normed head by head where weights are given, and writes K and V to the cache.

    What is between the inputs and the outputs is fp32 and rounded once. A negative slot is skipped (padding), and so is one of num_rows or
    above; the Q of such a token is rotated all the same. The slots kept must be distinct; no other row is touched. A position outside of
    `cos_sin` gives NaN in the rotated columns. Nothing is synchronised with the host: with `out` given, the call can be captured in a
    CUDA graph and allocates nothing on a GPU with Triton.

    Args:
        q: [num_tokens, num_q_heads, head_dim], fp16 or bf16, any token and head stride, last stride 1.
        k: [num_tokens, num_kv_heads, head_dim], dtype of q, strides likewise; num_q_heads is a multiple of num_kv_heads.
        v: As k; neither normed nor rotated.
        positions: [num_tokens], int32 or int64, any stride.
        cos_sin: [max_position, rotary_dim], fp32, fp16 or bf16, last stride 1: of each position the cosines of rotary_dim / 2 angles, then
            their sines. rotary_dim is even and at most head_dim; the columns after it are not rotated.
        slot_mapping: [num_tokens], int32 or int64, any stride: the cache row of each token.
        k_rows: [num_rows, num_kv_heads, head_dim], any row and head stride, last stride 1; dtype of k, or uint8 for e4m3.
        v_rows: As k_rows.
        q_weight, k_weight: [head_dim], contiguous, fp32, fp16 or bf16: of the norm of each head of Q and of K; None leaves the norm out.
        norm_eps: Is added to the mean square of a head; finite and not negative.
        interleaved: Whether columns 2i and 2i + 1 turn by angle i (GPT-J's style); else columns i and i + rotary_dim / 2 (GPT-NeoX's).
        k_scale, v_scale: Scale of an e4m3 cache, a Python float; None means 1.
        out: Written and returned where given: shape, dtype and device of q, last stride 1, of other memory than q.
        backend: Name of the backend that has to serve the call; None leaves the choice to the dispatch.

    Returns:
        [num_tokens, num_q_heads, head_dim], dtype of q: the normed, rotated Q.

    Raises:
        ShapeError: A shape, stride, dtype, device or norm_eps disagrees with the above (`DTypeError` for a dtype).
        ScaleError: A scale is not finite and positive, or is given for a cache that is not e4m3.
        NoKernelError: No registered spec can serve the call; the message lists each spec and its reasons.

    Source:
        Su et al. 2021, arXiv:2104.09864 (rotary embedding); Zhang and Sennrich 2019, arXiv:1910.07467 (RMS norm).
    """
    request = rope_write_request(q, k, v, positions, cos_sin, slot_mapping, k_rows, v_rows)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            _check_weight(name, weight, q)
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, (int, float)) or not (math.isfinite(norm_eps) and norm_eps >= 0):
        raise ShapeError(f"{ROPE_WRITE_OP} expected norm_eps to be finite and not negative, got {norm_eps!r}; pass the model's.")
    quantised = k_rows.dtype == torch.uint8
    k_factor = checks.check_scale(ROPE_WRITE_OP, "k_scale", k_scale, quantised=quantised)
    v_factor = checks.check_scale(ROPE_WRITE_OP, "v_scale", v_scale, quantised=quantised)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        checks.check_out(ROPE_WRITE_OP, out, q.shape, q.dtype, q.device)
        if out.untyped_storage().data_ptr() == q.untyped_storage().data_ptr():
            raise ShapeError(f"{ROPE_WRITE_OP} expected out in another storage than q, got the same; leave it out, or allocate it apart.")
    run = dispatch(request, backend=backend).spec.load()
    if q.shape[0] > 0:
        run(
            q, k, v, positions, cos_sin, slot_mapping, k_rows, v_rows, out,
            q_weight=q_weight, k_weight=k_weight, norm_eps=float(norm_eps), interleaved=bool(interleaved),
            k_scale=k_factor, v_scale=v_factor,
        )  # fmt: skip
    return out


def rope_write_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
) -> Request:
    """The request that `rope_norm_kv_write` makes for these tensors, which it validates first.

    Its shape names num_tokens, num_q_heads, num_kv_heads, head_dim, rotary_dim and num_rows.

    Args:
        q, k, v, positions, cos_sin, slot_mapping, k_rows, v_rows: As of `rope_norm_kv_write`.

    Raises:
        ShapeError: As `rope_norm_kv_write`.
    """
    call = ROPE_WRITE_OP
    written = write_request(k, v, slot_mapping, k_rows, v_rows, call=call)
    if k_rows.dtype == torch.int8:
        raise DTypeError(f"{call} expected a cache of 16-bit values or e4m3, got int8; rotate K first and write it with kv_write.")
    checks.check_dims(call, "q", q, "[num_tokens, num_q_heads, head_dim]")
    checks.check_dtype(call, "q", q, (k.dtype,))
    checks.check_innermost(call, "q", q)
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"{call} expected q and k to agree in num_tokens and head_dim, got {tuple(q.shape)} and {tuple(k.shape)}; "
            "pass the Q and K of the same tokens."
        )
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"{call} expected num_q_heads to be a multiple of num_kv_heads, got {q.shape[1]} and {k.shape[1]}; pass whole groups."
        )
    checks.check_dims(call, "positions", positions, "[num_tokens]")
    checks.check_dtype(call, "positions", positions, (torch.int32, torch.int64))
    if positions.shape[0] != q.shape[0]:
        raise ShapeError(
            f"{call} expected one position for each of the {q.shape[0]} tokens of q, got {positions.shape[0]}; "
            "give any to a token of padding."
        )
    checks.check_dims(call, "cos_sin", cos_sin, "[max_position, rotary_dim]")
    checks.check_dtype(call, "cos_sin", cos_sin, _TABLE_DTYPES)
    checks.check_innermost(call, "cos_sin", cos_sin)
    max_position, rotary_dim = cos_sin.shape
    if max_position == 0 or rotary_dim == 0 or rotary_dim % 2 or rotary_dim > q.shape[2]:
        raise ShapeError(
            f"{call} expected cos_sin [max_position, rotary_dim] with a position and an even rotary_dim of at most head_dim {q.shape[2]}, "
            f"got {tuple(cos_sin.shape)}; lay the cosines of rotary_dim / 2 angles and then their sines in each row."
        )
    checks.check_devices(call, k=k, q=q, positions=positions, cos_sin=cos_sin)
    sizes = {**dict(written.shape), "num_q_heads": q.shape[1], "rotary_dim": rotary_dim}
    return Request(
        op=call,
        device_type=written.device_type,
        capability=written.capability,
        q_dtype=written.q_dtype,
        kv_dtype=written.kv_dtype,
        layout_tags=written.layout_tags,
        shape=Request.sorted_shape(sizes),
    )


def _check_weight(name: str, weight: torch.Tensor, q: torch.Tensor) -> None:
    checks.check_dims(ROPE_WRITE_OP, name, weight, "[head_dim]")
    checks.check_dtype(ROPE_WRITE_OP, name, weight, _TABLE_DTYPES)
    checks.check_innermost(ROPE_WRITE_OP, name, weight)
    if weight.shape[0] != q.shape[2]:
        raise ShapeError(
            f"{ROPE_WRITE_OP} expected {name} of head_dim {q.shape[2]} elements, got {weight.shape[0]}; pass the weight of one head's norm."
        )
    checks.check_devices(ROPE_WRITE_OP, q=q, **{name: weight})
