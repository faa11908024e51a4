# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton decode attention that deals the tiles of all sequences evenly to its programs, whatever the lengths are.

The tiles of a head block stand in one row, sequence after sequence, and each program takes an equal piece of it. Each program finds its
piece from a cumulative sum of the lengths: no plan on the host, so a captured graph serves other lengths. A program has at most two
sequences that it shares with other programs, its first and its last.

Source:
    Osama et al., Stream-K, 2023, arXiv:2301.03598.
"""

import triton
import triton.language as tl

from rapid_llm.kernels.decode_merge import is_last_to_arrive, merge_parts, store_part
from rapid_llm.kernels.decode_tile import attend, load_query, normalised

__all__ = ["paged_decode_stream_kernel"]


@triton.jit
def _first_tile(program, programs, tiles):
    """First tile of a program when `tiles` are dealt evenly to `programs`; the product needs 64 bits."""
    return (program.to(tl.int64) * tiles // programs).to(tl.int32)


@triton.jit
def _owner(tile, programs, tiles):
    """The program whose piece has the tile."""
    return (((tile.to(tl.int64) + 1) * programs - 1) // tiles).to(tl.int32)


@triton.jit(do_not_specialize=["batch", "max_seq_len", "num_programs"])
def paged_decode_stream_kernel(
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
    batch,
    max_seq_len,
    num_programs,
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
    BLOCK_B: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    V_OFF: tl.constexpr,
    NARROW: tl.constexpr,
    AHEAD: tl.constexpr,
    SWAP: tl.constexpr,
    PAIRED: tl.constexpr,
    INT8: tl.constexpr,
    CONVERT: tl.constexpr,
    DOT_FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program = (K/V head and block of its query heads, piece of the row of tiles).

    Args:
        batch: Sequences, at most BLOCK_B, a power of two; the tiles of all are fewer than 2**31.
        num_programs: Programs a head block.
        part_out_ptr, part_lse_ptr, counter_ptr: See `rapid_llm.kernels.decode_merge`: two parts for each program, and one counter for each
            sequence and block of query heads. The counters are 0 before and after.

    The others are as of `rapid_llm.kernels.decode_split.paged_decode_kernel`.
    """
    GROUP_BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    HEADS: tl.constexpr = BLOCK_M if GROUP > BLOCK_M else GROUP
    COLUMNS: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM
    WIDTH: tl.constexpr = 2 * BLOCK_D if PAIRED else BLOCK_D
    kv_head = tl.program_id(0) // GROUP_BLOCKS
    first_member = (tl.program_id(0) % GROUP_BLOCKS) * BLOCK_M
    member = first_member + tl.arange(0, BLOCK_M)
    head = (kv_head * GROUP + member).to(tl.int64)
    head_inside = (member < GROUP)[:, None]
    k_base = k_ptr + kv_head.to(tl.int64) * k_head_stride
    v_base = v_ptr + kv_head.to(tl.int64) * v_head_stride

    place = tl.arange(0, BLOCK_B)
    place_inside = place < batch
    lengths = tl.minimum(tl.load(seq_lens_ptr + place, mask=place_inside, other=0), max_seq_len)
    # An empty sequence has a tile too: some program has to write its zeros.
    tiles_of = tl.where(place_inside, tl.maximum(tl.cdiv(lengths, BLOCK_N), 1), 0)
    tiles = tl.sum(tiles_of, 0)
    programs = tl.minimum(num_programs, tiles)  # never an empty program between two that share a sequence
    program = tl.program_id(1)
    tile = _first_tile(tl.minimum(program, programs), programs, tiles)
    begin = tile
    end = _first_tile(tl.minimum(program + 1, programs), programs, tiles)
    sequence = tl.sum(tl.where((tl.cumsum(tiles_of, 0) <= tile) & place_inside, 1, 0), 0)
    sequence_begin = tl.sum(tl.where(place < sequence, tiles_of, 0), 0)
    while tile < end:
        seq_len = tl.maximum(tl.minimum(tl.load(seq_lens_ptr + sequence), max_seq_len), 0)
        sequence_tiles = tl.maximum(tl.cdiv(seq_len, BLOCK_N), 1)
        own_tiles = tl.minimum(sequence_tiles - (tile - sequence_begin), end - tile)
        first = (tile - sequence_begin) * BLOCK_N
        last = tl.minimum(first + own_tiles * BLOCK_N, seq_len)
        batch_index = sequence.to(tl.int64)
        out_row = out_ptr + batch_index * out_batch_stride
        q_base = q_ptr + batch_index * q_batch_stride + head[:, None] * q_head_stride
        q, q_odd = load_query(q_base, head_inside, COLUMNS, BLOCK_D, PAIRED)
        acc, acc_odd, running_max, running_sum = attend(
            q, q_odd, table_ptr + batch_index * table_batch_stride, k_base, v_base, first, last, score_scale, k_row_stride, v_row_stride,
            COLUMNS, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_SIZE, V_OFF, NARROW, AHEAD, SWAP, PAIRED, INT8, CONVERT, DOT_FP32, STAGES,
        )  # fmt: skip
        result, lse = normalised(acc, acc_odd, running_max, running_sum, out_scale, BLOCK_M, BLOCK_D, PAIRED, SWAP)
        if own_tiles == sequence_tiles:
            out_column = tl.arange(0, WIDTH)
            out_pointers = out_row + head[:, None] * out_head_stride + out_column[None, :]
            tl.store(out_pointers, result.to(out_ptr.dtype.element_ty), mask=head_inside & (out_column < HEAD_DIM)[None, :])
        else:
            # Part 0 of a program is of the sequence that it begins with, part 1 of the one that it ends in.
            row = tl.program_id(0).to(tl.int64) * num_programs
            part = 2 * (row + program) + tl.where(tile == begin, 0, 1)
            store_part(part_out_ptr, part_lse_ptr, part, result, lse, HEADS, HEAD_DIM, BLOCK_M, WIDTH)
            opener = _owner(sequence_begin, programs, tiles)
            count = _owner(sequence_begin + sequence_tiles - 1, programs, tiles) - opener + 1
            if is_last_to_arrive(counter_ptr + batch_index * tl.num_programs(0) + tl.program_id(0), count):
                next_part = 2 * (row + opener)
                first_part = next_part + tl.where(_first_tile(opener, programs, tiles) == sequence_begin, 0, 1)
                merge_parts(
                    part_out_ptr, part_lse_ptr, out_row, first_part, next_part, 2, count, out_head_stride,
                    kv_head * GROUP + first_member, GROUP - first_member, HEADS, HEAD_DIM, BLOCK_H, BLOCK_S, WIDTH,
                )  # fmt: skip
        tile += own_tiles
        sequence_begin += sequence_tiles
        sequence += 1
