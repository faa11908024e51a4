"""The torch backend's kernels: plain tensor operations, no host synchronisation, fp32 arithmetic.

Their callers are the public calls of `rapid_llm.kernels.ops`, which have validated every argument.
"""

from __future__ import annotations

import torch

__all__ = ["kv_write", "paged_decode", "quantize_e4m3", "rope_norm_kv_write"]

_E4M3_MAX = 448.0
_E4M3_NAN = 0x7F
_INT8_MAX = 127.0
_GATHER_BYTES = 256 * 2**20


def paged_decode(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    softmax_scale: float,
    block_size: int = 1,
) -> None:
    """Decode attention by gathering each sequence's rows; see `ops.attention.paged_decode_attention`."""
    num_rows, num_kv_heads, head_dim = k_rows.shape
    if block_size > 1:
        inside = torch.arange(block_size, dtype=row_table.dtype, device=q.device)
        row_table = (row_table[:, :, None] * block_size + inside).flatten(1)
    batch, max_seq_len = row_table.shape
    if num_rows == 0 or max_seq_len == 0:
        out.zero_()
        return
    group = q.shape[1] // num_kv_heads
    k_factor, v_factor = (_of_heads(scale, group) for scale in (k_scale, v_scale))
    # The gathered fp32 copy is as wide as the row table, whatever the lengths are: bound it by slices of the batch.
    sequence_bytes = 2 * 4 * max_seq_len * num_kv_heads * head_dim
    step = max(1, _GATHER_BYTES // sequence_bytes)
    for first in range(0, batch, step):
        part = slice(first, first + step)
        scaled = q[part].float() * (softmax_scale * k_factor)
        out[part] = _decode_slice(scaled, k_rows, v_rows, row_table[part], seq_lens[part]).mul_(v_factor)


def _decode_slice(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, row_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_rows.shape[1]
    valid = torch.arange(row_table.shape[1], device=q.device) < seq_lens[:, None]
    rows = torch.where(valid, row_table, 0).long()
    # Row 0 stands in for the entries past a length and may hold NaN: mask the values, not the weights alone.
    k = _widened(k_rows[rows]).masked_fill(~valid[:, :, None, None], 0.0)
    v = _widened(v_rows[rows]).masked_fill(~valid[:, :, None, None], 0.0)
    grouped = q.view(batch, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bhgd,bnhd->bhgn", grouped, k)
    weights = scores.masked_fill(~valid[:, None, None, :], -torch.inf).softmax(-1)
    weights = weights.masked_fill((seq_lens <= 0)[:, None, None, None], 0.0)
    return torch.einsum("bhgn,bnhd->bhgd", weights, v).reshape(batch, num_q_heads, head_dim)


def _of_heads(scale: float | torch.Tensor, heads: int) -> float | torch.Tensor:
    """A factor on [..., num_kv_heads * heads, head_dim] of the scales of K/V heads; a float as it is."""
    return scale[:, None].expand(-1, heads).reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale


def _widened(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.float8_e4m3fn) if values.dtype == torch.uint8 else values).float()


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    *,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    """Scatters new K and V to their cache rows; see `ops.kv.kv_write`."""
    num_tokens, num_rows = k.shape[0], k_rows.shape[0]
    if num_tokens == 0 or num_rows == 0:
        return
    kept = (slot_mapping >= 0) & (slot_mapping < num_rows)
    # Selecting the kept tokens would have to ask the device how many they are. Instead, a skipped token repeats the
    # write of one kept token; where none is kept, row 0 is written with what it holds.
    stand_in = kept.int().argmax(keepdim=True)
    source = torch.where(kept, torch.arange(num_tokens, device=k.device), stand_in)
    slots = torch.where(kept, slot_mapping, slot_mapping.index_select(0, stand_in)).long().clamp(0, num_rows - 1)
    any_kept = kept.any()
    for values, rows, scale in ((k, k_rows, k_scale), (v, v_rows, v_scale)):
        rows[slots] = torch.where(any_kept, _stored(values, scale, rows.dtype)[source], rows[slots])


def _stored(values: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of `dtype` holds of values [num_tokens, num_kv_heads, head_dim]."""
    if isinstance(scale, torch.Tensor):
        return _int8_bytes(values, scale)
    return _e4m3_bytes(values, scale) if dtype == torch.uint8 else values


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
    """Norms and rotates Q and K, and writes K and V to their cache rows; see `ops.rope.rope_norm_kv_write`."""
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    angles = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)].float().masked_fill(~known[:, None], torch.nan)
    out.copy_(_rotated(_normed(q.float(), q_weight, norm_eps), angles, interleaved))
    new_k = _rotated(_normed(k.float(), k_weight, norm_eps), angles, interleaved)
    if k_rows.dtype != torch.uint8:
        new_k = new_k.to(k_rows.dtype)
    kv_write(new_k, v, slot_mapping, k_rows, v_rows, k_scale=k_scale, v_scale=v_scale)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, norm_eps: float) -> torch.Tensor:
    """fp32 [num_tokens, heads, head_dim], each head divided by its root mean square."""
    return x if weight is None else x * (1.0 / torch.sqrt(x.square().mean(-1, keepdim=True) + norm_eps)) * weight.float()


def _rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """fp32 [num_tokens, heads, head_dim], its first columns rotated by the cosines and sines [num_tokens, rotary_dim]."""
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    firsts = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    seconds = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    first, second = x[..., firsts], x[..., seconds]
    rotated = x.clone()
    rotated[..., firsts] = first * cos - second * sin
    rotated[..., seconds] = second * cos + first * sin
    return rotated


def quantize_e4m3(x: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
    """Quantises to e4m3 bytes; see `ops.kv.quantize_e4m3`."""
    out.copy_(_e4m3_bytes(x, scale))


def _e4m3_bytes(x: torch.Tensor, scale: float) -> torch.Tensor:
    # A tensor, because torch multiplies by the reciprocal of a Python divisor on CUDA, which rounds differently.
    divisor = torch.full((), scale, dtype=torch.float32, device=x.device)
    quotient = x.float() / divisor
    # Clamped first, because what the cast makes of an overflow depends on the version of torch.
    stored = quotient.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    # Not torch.signbit: on CUDA it converts fp16 to fp32 first, which loses the sign of a NaN.
    negative = x.view(torch.int16 if x.element_size() == 2 else torch.int32) < 0
    return torch.where(x.isnan(), negative.to(torch.uint8) * 0x80 + _E4M3_NAN, stored)


def _int8_bytes(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int8 of x [num_tokens, num_kv_heads, head_dim] over the scales of its heads; NaN gives 0."""
    return (x.float() / scales[:, None]).round().clamp(-_INT8_MAX, _INT8_MAX).nan_to_num(0.0).to(torch.int8)
