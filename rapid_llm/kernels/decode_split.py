# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton decode attention with a fixed number of splits a sequence: the host says how many, each of them is one program.

Source:
    Dao et al., Flash-Decoding, 2023.
"""

import triton
import triton.language as tl

from rapid_llm.kernels.decode_merge import is_last_to_arrive, merge_parts, store_part
from rapid_llm.kernels.decode_tile import attend, load_query, normalised

__all__ = ["paged_decode_kernel"]


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
    part_out_ptr,
    part_lse_ptr,
    counter_ptr,
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    V_OFF: tl.constexpr,
    NARROW: tl.constexpr,
    AHEAD: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    PAIRED: tl.constexpr,
    INT8: tl.constexpr,
    CONVERT: tl.constexpr,
    DOT_FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program = (K/V head and block of its query heads, split, sequence).

    Args:
        q_ptr: [batch, num_q_heads, HEAD_DIM].
        k_ptr, v_ptr: [num_rows, NUM_KV_HEADS, HEAD_DIM]; where PAIRED, int16 pairs with strides in pairs.
        table_ptr: int32 [batch, max_seq_len / BLOCK_SIZE].
        seq_lens_ptr: int32 [batch].
        out_ptr: [batch, num_q_heads, HEAD_DIM].
        part_out_ptr, part_lse_ptr, counter_ptr: Where SPLIT, see `rapid_llm.kernels.decode_merge`: num_splits parts and one counter for
            each sequence and block of query heads. The counters are 0 before and after.
        score_scale: Factor on QK^T that makes of it a base-2 exponent.
        out_scale: Factor on the output.
        GROUP: Query heads a K/V head.
        BLOCK_M: Query heads a program; BLOCK_N: tokens a tile; BLOCK_D: columns a load, for PAIRED of pairs.
        BLOCK_SIZE: Tokens an entry of the table.
        BLOCK_H, BLOCK_S: Query heads and parts that the merge takes at a time.
        V_OFF, NARROW, AHEAD, SWAP, PAIRED, INT8: As of `attend` and `row_offsets`.
        SPLIT: Whether num_splits is over 1.
    """
    GROUP_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    HEADS: tl.constexpr = BLOCK_M if GROUP > BLOCK_M else GROUP
    COLUMNS: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    WIDTH: tl.constexpr = 2 * BLOCK_D if PAIRED else BLOCK_D
    kv_head = tl.program_id(0) // GROUP_BLOCKS
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    seq_len = tl.minimum(tl.load(seq_lens_ptr + batch), max_seq_len)
    first, last = _split_bounds(tl.maximum(seq_len, 0), split, num_splits, BLOCK_N)

    first_member = (tl.program_id(0) % GROUP_BLOCKS) * BLOCK_M
    member = first_member + tl.arange(0, BLOCK_M)
    head = (kv_head * GROUP + member).to(tl.int64)
    head_inside = (member < GROUP)[:, None]
    table_row = table_ptr + batch * table_batch_stride
    k_base = k_ptr + kv_head.to(tl.int64) * k_head_stride
    v_base = v_ptr + kv_head.to(tl.int64) * v_head_stride
    out_row = out_ptr + batch * out_batch_stride

    q_base = q_ptr + batch * q_batch_stride + head[:, None] * q_head_stride
    q, q_odd = load_query(q_base, head_inside, COLUMNS, BLOCK_D, PAIRED)
    acc, acc_odd, running_max, running_sum = attend(
        q, q_odd, table_row, k_base, v_base, first, last, score_scale, k_row_stride, v_row_stride, COLUMNS, BLOCK_M, BLOCK_N, BLOCK_D,
        BLOCK_SIZE, V_OFF, NARROW, AHEAD, SWAP, PAIRED, INT8, CONVERT, DOT_FP32, STAGES,
    )  # fmt: skip
    result, lse = normalised(acc, acc_odd, running_max, running_sum, out_scale, BLOCK_M, BLOCK_D, PAIRED, SWAP)
    if SPLIT:
        cell = batch * tl.num_programs(0) + tl.program_id(0)
        first_part = cell * num_splits
        store_part(part_out_ptr, part_lse_ptr, first_part + split, result, lse, HEADS, HEAD_DIM, BLOCK_M, WIDTH)
        if is_last_to_arrive(counter_ptr + cell, num_splits):
            merge_parts(
                part_out_ptr, part_lse_ptr, out_row, first_part, first_part, 1, num_splits, out_head_stride,
                kv_head * GROUP + first_member, GROUP - first_member, HEADS, HEAD_DIM, BLOCK_H, BLOCK_S, WIDTH,
            )  # fmt: skip
    else:
        out_column = tl.arange(0, WIDTH)
        out_pointers = out_row + head[:, None] * out_head_stride + out_column[None, :]
        tl.store(out_pointers, result.to(out_ptr.dtype.element_ty), mask=head_inside & (out_column < HEAD_DIM)[None, :])
