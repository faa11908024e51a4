# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernel of a step's new tokens: norm and rotation of Q and K, and the write of K and V into cache rows; its launcher."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.e4m3 import narrow_to_e4m3, scale_factors
from rapid_llm.kernels.launch import has_e4m3_convert

__all__ = ["rope_norm_kv_write"]

_ELEMENTS_PER_PROGRAM = 1024
_ELEMENTS_PER_WARP = 256


@triton.jit
def rope_norm_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    position_ptr,
    cos_sin_ptr,
    slot_ptr,
    k_rows_ptr,
    v_rows_ptr,
    out_ptr,
    q_weight_ptr,
    k_weight_ptr,
    num_rows,
    max_position,
    norm_eps,
    k_factor,
    v_factor,
    v_rest,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    position_stride,
    cos_sin_stride,
    slot_stride,
    k_row_stride,
    k_row_head_stride,
    v_row_stride,
    v_row_head_stride,
    out_token_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    E4M3: tl.constexpr,
    CONVERT: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    """One program = (token, BLOCK_H heads of Q, of K or of V, in this order along the second axis)."""
    Q_BLOCKS: tl.constexpr = (NUM_Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(position_ptr + token * position_stride).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_stride).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    angles = cos_sin_ptr + position * cos_sin_stride
    known = (position >= 0) & (position < max_position)
    kept = (slot >= 0) & (slot < num_rows)
    # Names of its own for each branch: one name has one type in all of them.
    if part < Q_BLOCKS:
        q_head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        q_mask = (q_head < NUM_Q_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
        q_source = q_ptr + token * q_token_stride + (q_head.to(tl.int64) * q_head_stride)[:, None]
        q = _rotated(q_source, column, q_mask, angles, known, q_weight_ptr, norm_eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, Q_NORM)
        out = out_ptr + token * out_token_stride + (q_head.to(tl.int64) * out_head_stride)[:, None] + column[None, :]
        tl.store(out, q.to(out_ptr.dtype.element_ty), mask=q_mask)
    elif part < Q_BLOCKS + KV_BLOCKS:
        k_head = (part - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        k_mask = (k_head < NUM_KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
        k_source = k_ptr + token * k_token_stride + (k_head.to(tl.int64) * k_head_stride)[:, None]
        k = _rotated(k_source, column, k_mask, angles, known, k_weight_ptr, norm_eps, HEAD_DIM, ROTARY_DIM, INTERLEAVED, K_NORM)
        # More than 16 bits come in here, for which two parts of an inverse are not enough.
        k_stored = narrow_to_e4m3(k, k_factor, 0.0, CONVERT, True) if E4M3 else k.to(k_rows_ptr.dtype.element_ty)
        k_rows = k_rows_ptr + slot * k_row_stride + (k_head.to(tl.int64) * k_row_head_stride)[:, None] + column[None, :]
        tl.store(k_rows, k_stored, mask=k_mask & kept)
    else:
        v_head = (part - Q_BLOCKS - KV_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        v_mask = (v_head < NUM_KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
        v_source = v_ptr + token * v_token_stride + (v_head.to(tl.int64) * v_head_stride)[:, None] + column[None, :]
        v = tl.load(v_source, mask=v_mask, other=0.0)
        v_stored = narrow_to_e4m3(v, v_factor, v_rest, CONVERT, DIVIDE) if E4M3 else v
        v_rows = v_rows_ptr + slot * v_row_stride + (v_head.to(tl.int64) * v_row_head_stride)[:, None] + column[None, :]
        tl.store(v_rows, v_stored, mask=v_mask & kept)


@triton.jit
def _rotated(
    source,
    column,
    mask,
    angles,
    known,
    weight_ptr,
    norm_eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads [BLOCK_H, BLOCK_D] at `source`, normed and rotated, in fp32. The other of a pair is read a second time, from the L1."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    turned = column < ROTARY_DIM
    if INTERLEAVED:
        other = tl.where(turned, column ^ 1, column)
        angle = column // 2
        is_second = column % 2 == 1
    else:
        other = tl.where(turned, (column + HALF) % ROTARY_DIM, column)
        angle = column % HALF
        is_second = column >= HALF
    x = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
    # A position outside the table gives NaN where columns are rotated, and no read outside of it.
    cos = tl.where(turned, tl.load(angles + angle, mask=turned & known, other=float("nan")).to(tl.float32), 1.0)
    sin = tl.where(turned, tl.load(angles + HALF + angle, mask=turned & known, other=float("nan")).to(tl.float32), 0.0)
    if NORM:
        mean = tl.sum(x * x, axis=1) / HEAD_DIM
        root = tl.sqrt_rn(mean + norm_eps)
        inverse = tl.div_rn(tl.zeros_like(root) + 1.0, root)[:, None]
        inside = column < HEAD_DIM
        x = x * inverse * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = y * inverse * tl.load(weight_ptr + other, mask=inside, other=0.0).to(tl.float32)[None, :]
    # x of the first of a pair is cos * x - sin * y, of the second cos * x + sin * y; what is not rotated stays as it is, NaN included.
    across = tl.where(is_second[None, :], y, -y) * sin[None, :]
    return tl.where(turned[None, :], x * cos[None, :] + across, x)


def rope_norm_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    out: torch.Tensor,
    *,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    norm_eps: float,
    interleaved: bool,
    k_scale: float,
    v_scale: float,
) -> None:
    """Launches `rope_norm_kv_write_kernel`; see `rapid_llm.kernels.ops.rope.rope_norm_kv_write`, which validates."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    block_d = triton.next_power_of_2(head_dim)
    heads = triton.next_power_of_2(max(num_q_heads, num_kv_heads))
    block_h = max(1, min(heads, _ELEMENTS_PER_PROGRAM // block_d))
    ((v_factor, v_rest),), divide = scale_factors(v.dtype, v_scale)
    ((k_factor, _),), _ = scale_factors(torch.float32, k_scale)
    grid = (num_tokens, triton.cdiv(num_q_heads, block_h) + 2 * triton.cdiv(num_kv_heads, block_h))
    rope_norm_kv_write_kernel[grid](
        q,
        k,
        v,
        positions,
        cos_sin,
        slot_mapping,
        k_rows,
        v_rows,
        out,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        k_rows.shape[0],
        cos_sin.shape[0],
        norm_eps,
        k_factor,
        v_factor,
        v_rest,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        positions.stride(0),
        cos_sin.stride(0),
        slot_mapping.stride(0),
        k_rows.stride(0),
        k_rows.stride(1),
        v_rows.stride(0),
        v_rows.stride(1),
        out.stride(0),
        out.stride(1),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=cos_sin.shape[1],
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        INTERLEAVED=interleaved,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        E4M3=k_rows.dtype == torch.uint8,
        CONVERT=has_e4m3_convert(q.device),
        DIVIDE=divide,
        num_warps=max(1, min(4, block_h * block_d // _ELEMENTS_PER_WARP)),
        # A fused product and sum would round otherwise than the reference, and an e4m3 byte turns on that.
        enable_fp_fusion=False,
    )
