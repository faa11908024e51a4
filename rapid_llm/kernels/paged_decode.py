# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton split-KV decode attention over a token-level row table: decode kernel, combine kernel, launcher.

An e4m3 cache is read as int16 pairs of bytes (`rapid_llm.kernels.e4m3`): QK^T and PV are each the sum of an even and an
odd half of head_dim, so nothing widened goes back to shared memory. The K scale is folded into the softmax scale, the V
scale into the epilogue.

Source:
    Kwon et al. 2023, arXiv:2309.06180; split-K: Dao et al., Flash-Decoding, 2023; online softmax: Milakov and
    Gimelshein 2018, arXiv:1805.02867.
"""

import math

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.configs import DecodeConfig, choose_config, choose_num_splits
from rapid_llm.kernels.e4m3 import PORTABLE_GAIN, widen_e4m3_pair
from rapid_llm.kernels.launch import has_e4m3_convert, interpreted, num_multiprocessors

__all__ = ["DecodeConfig", "choose_config", "choose_num_splits", "paged_decode"]

_LOG2_E = math.log2(math.e)
_COMBINE_SPLITS = 8


@triton.jit
def row_offsets(rows, row_stride):
    """Element offsets of cache rows, in 64 bits: a row of 2,048 elements passes 2**31 at row 1,048,576."""
    return rows.to(tl.int64) * row_stride


@triton.jit
def _load_columns(pointers, inside, PADDED: tl.constexpr):
    """Loads a tile whose columns need a mask only where head_dim is padded to a power of two."""
    if PADDED:
        return tl.load(pointers, mask=inside, other=0)
    return tl.load(pointers)


@triton.jit
def _dot(a, b, acc, DOT_FP32: tl.constexpr):
    """acc + a @ b; DOT_FP32 is for the interpreter, which would multiply the bit patterns of bf16 operands."""
    if DOT_FP32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _split_bounds(seq_len, split, num_splits, BLOCK_N: tl.constexpr):
    """[first, last) tokens of a split; whole tiles, dealt so that no split has two more than another."""
    tiles = tl.cdiv(seq_len, BLOCK_N)
    share = tiles // num_splits
    longer = tiles - share * num_splits
    first = split * share + tl.minimum(split, longer)
    count = share + tl.where(split < longer, 1, 0)
    return first * BLOCK_N, tl.minimum((first + count) * BLOCK_N, seq_len)


@triton.jit(do_not_specialize=["max_seq_len", "num_splits"])
def paged_decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    score_scale,
    out_scale,
    max_seq_len,
    num_splits,
    q_batch_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    table_batch_stride,
    out_batch_stride,
    out_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    E4M3: tl.constexpr,
    CONVERT: tl.constexpr,
    DOT_FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program = (K/V head and block of its query heads, split, sequence); the query heads ride in the dot's M.

    Args:
        q_ptr: [batch, num_q_heads, HEAD_DIM].
        k_ptr, v_ptr: [num_rows, NUM_KV_HEADS, HEAD_DIM]; where E4M3, int16 pairs with strides in pairs.
        table_ptr: int32 [batch, max_seq_len].
        seq_lens_ptr: int32 [batch].
        out_ptr: [batch, num_q_heads, HEAD_DIM]; written where num_splits is 1.
        partial_out_ptr, partial_lse_ptr: fp32 [batch, num_q_heads, num_splits, HEAD_DIM] and without HEAD_DIM: a
            split's normalised output and the base-2 logarithm of its sum of weights; written otherwise.
        score_scale: Factor on QK^T that makes of it a base-2 exponent.
        out_scale: Factor on the output.
        GROUP: Query heads a K/V head.
        BLOCK_M: Query heads a program; BLOCK_N: tokens a tile; BLOCK_D: columns a load, for E4M3 of pairs.
    """
    GROUP_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    NUM_Q_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    COLUMNS: tl.constexpr = HEAD_DIM // 2 if E4M3 else HEAD_DIM
    PADDED: tl.constexpr = BLOCK_D != COLUMNS
    kv_head = tl.program_id(0) // GROUP_BLOCKS
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    seq_len = tl.minimum(tl.load(seq_lens_ptr + batch), max_seq_len)
    first, last = _split_bounds(tl.maximum(seq_len, 0), split, num_splits, BLOCK_N)

    member = (tl.program_id(0) % GROUP_BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (kv_head * GROUP + member).to(tl.int64)
    head_inside = (member < GROUP)[:, None]
    column = tl.arange(0, BLOCK_D)
    column_inside = column < COLUMNS
    token = tl.arange(0, BLOCK_N)
    table_row = table_ptr + batch * table_batch_stride
    k_base = k_ptr + kv_head.to(tl.int64) * k_head_stride + column[:, None]
    v_base = v_ptr + kv_head.to(tl.int64) * v_head_stride + column[None, :]

    q_base = q_ptr + batch * q_batch_stride + head[:, None] * q_head_stride
    q_mask = head_inside & column_inside[None, :]
    if E4M3:
        q = tl.load(q_base + 2 * column[None, :], mask=q_mask, other=0.0)
        q_odd = tl.load(q_base + 2 * column[None, :] + 1, mask=q_mask, other=0.0)
    else:
        q = tl.load(q_base + column[None, :], mask=q_mask, other=0.0)

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Lanes past the end repeat the last token, so that garbage in the table is never followed. The rows of the next
    # tile are loaded a tile ahead: they are what the loads of K and V wait for.
    next_rows = tl.load(table_row + tl.minimum(first + token, last - 1), mask=(token >= 0) & (first < last), other=0)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = next_rows
        next_rows = tl.load(table_row + tl.minimum(start + BLOCK_N + token, last - 1))
        k = _load_columns(k_base + row_offsets(rows, k_row_stride)[None, :], column_inside[:, None], PADDED)
        v = _load_columns(v_base + row_offsets(rows, v_row_stride)[:, None], column_inside[None, :], PADDED)
        if E4M3:
            k, k_odd = widen_e4m3_pair(k, q.dtype, CONVERT)
            v, v_odd = widen_e4m3_pair(v, q.dtype, CONVERT)
        scores = _dot(q, k, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), DOT_FP32)
        if E4M3:
            scores = _dot(q_odd, k_odd, scores, DOT_FP32)
        scores = tl.where((start + token)[None, :] < last, scores * score_scale, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(running_max - new_max)
        running_sum = running_sum * decay + tl.sum(weights, 1)
        running_max = new_max
        weights = weights.to(q.dtype)
        acc = _dot(weights, v, acc * decay[:, None], DOT_FP32)
        if E4M3:
            acc_odd = _dot(weights, v_odd, acc_odd * decay[:, None], DOT_FP32)

    # An empty split has sum 0: its output is 0 and its logarithm -inf, which gives it no weight in the combination.
    inverse = (out_scale / tl.where(running_sum == 0.0, 1.0, running_sum))[:, None]
    if E4M3:
        result = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, 2 * BLOCK_D]) * inverse
        out_column = tl.arange(0, 2 * BLOCK_D)
    else:
        result = acc * inverse
        out_column = column
    out_mask = head_inside & (out_column < HEAD_DIM)[None, :]
    if num_splits == 1:
        out_pointers = out_ptr + batch * out_batch_stride + head[:, None] * out_head_stride + out_column[None, :]
        tl.store(out_pointers, result.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        lse = running_max + tl.log2(tl.where(running_sum == 0.0, 1.0, running_sum))
        cell = (batch * NUM_Q_HEADS + head) * num_splits + split
        tl.store(partial_out_ptr + cell[:, None] * HEAD_DIM + out_column[None, :], result, mask=out_mask)
        tl.store(partial_lse_ptr + cell, lse, mask=member < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    num_splits,
    out_batch_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merges the splits of one query head of one sequence, each weighted by its sum; one program a head."""
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    cell = (batch * tl.num_programs(0) + head) * num_splits
    column = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_S)
    running_max = float("-inf")
    running_sum = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        split = start + lane
        inside = split < num_splits
        lse = tl.load(partial_lse_ptr + cell + split, mask=inside, other=float("-inf"))
        tile = tl.load(
            partial_out_ptr + (cell + split)[:, None] * HEAD_DIM + column[None, :],
            mask=inside[:, None] & (column < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(running_max, tl.max(lse, 0))
        # While no split has had a token, every exponent would be -inf - -inf.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - reference)
        decay = tl.exp2(running_max - reference)
        running_sum = running_sum * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * tile, 0)
        running_max = new_max
    result = acc / tl.where(running_sum == 0.0, 1.0, running_sum)
    out_pointers = out_ptr + batch * out_batch_stride + head.to(tl.int64) * out_head_stride + column
    tl.store(out_pointers, result.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def paged_decode(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    k_scale: float,
    v_scale: float,
    softmax_scale: float,
    num_splits: int | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Launches the kernels; see `rapid_llm.kernels.ops.attention.paged_decode_attention`, which validates.

    Args:
        q, k_rows, v_rows, row_table, seq_lens, out: As there; batch at least 1. The bytes of an e4m3 cache are 16-bit
            aligned.
        k_scale, v_scale, softmax_scale: As there, none None.
        num_splits: Splits a sequence; None leaves it to the config, and that to `choose_num_splits`.
        config: Tuned tile sizes; None means `choose_config`.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = k_rows.shape[1]
    group = num_q_heads // num_kv_heads
    e4m3 = k_rows.dtype == torch.uint8
    convert = has_e4m3_convert(q.device)
    gain = PORTABLE_GAIN if e4m3 and not convert else 1.0
    if e4m3:
        k_rows, v_rows = k_rows.view(torch.int16), v_rows.view(torch.int16)
    config = config or choose_config(group, head_dim, e4m3=e4m3)
    num_splits = num_splits or config.num_splits
    heads = num_kv_heads * triton.cdiv(group, config.block_m)
    if num_splits is None:
        num_splits = choose_num_splits(heads * batch, row_table.shape[1], num_multiprocessors(q.device), block_n=config.block_n)
    partial_cells = batch * num_q_heads * num_splits if num_splits > 1 else 0
    partial_out = torch.empty(partial_cells * head_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(partial_cells, dtype=torch.float32, device=q.device)
    paged_decode_kernel[(heads, num_splits, batch)](
        q,
        k_rows,
        v_rows,
        row_table,
        seq_lens,
        out,
        partial_out,
        partial_lse,
        softmax_scale * _LOG2_E * k_scale * gain,
        v_scale * gain,
        row_table.shape[1],
        num_splits,
        q.stride(0),
        q.stride(1),
        k_rows.stride(0),
        k_rows.stride(1),
        v_rows.stride(0),
        v_rows.stride(1),
        row_table.stride(0),
        out.stride(0),
        out.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=config.block_d,
        E4M3=e4m3,
        CONVERT=convert,
        DOT_FP32=interpreted(),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    if num_splits > 1:
        combine_kernel[(num_q_heads, batch)](
            partial_out,
            partial_lse,
            out,
            num_splits,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            BLOCK_S=_COMBINE_SPLITS,
            BLOCK_D=triton.next_power_of_2(head_dim),
        )
