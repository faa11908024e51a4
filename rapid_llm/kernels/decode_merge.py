# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton device functions that keep what a program found for part of a sequence, and merge the parts in the last program to arrive.

A part is the normalised output of some tokens and the base-2 logarithm of their sum of weights. Each program that has a part
stores it and adds one to the sequence's counter; the program that completes the count merges all parts and sets the counter back to
0, so that one launch is enough and the next finds the counters as this one did.

Source:
    Dao et al., Flash-Decoding, 2023.
"""

import triton
import triton.language as tl

__all__ = ["is_last_to_arrive", "merge_parts", "store_part"]


@triton.jit
def store_part(
    part_out_ptr, part_lse_ptr, part, result, lse, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr
):
    """Stores one part.

    Args:
        part_out_ptr, part_lse_ptr: fp32 [parts, HEADS, HEAD_DIM] and [parts, HEADS].
        part: Which, int64.
        result, lse: As `rapid_llm.kernels.decode_tile.normalised` gives them, [BLOCK_M, WIDTH] and [BLOCK_M].
        HEADS: Query heads of a part.
    """
    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, WIDTH)
    cell = part * HEADS + member
    mask = (member < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(part_out_ptr + cell[:, None] * HEAD_DIM + column[None, :], result, mask=mask)
    tl.store(part_lse_ptr + cell, lse, mask=member < HEADS)


@triton.jit
def is_last_to_arrive(counter_ptr, count):
    """Counts this program in, and says whether it completes `count`; it then also sets the counter back.

    The barrier orders what the other threads of the program stored before the atomic of one of them, whose release makes it visible to
    the device; its acquire does the same for the loads that follow.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == count - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def merge_parts(
    part_out_ptr,
    part_lse_ptr,
    out_row,
    first_part,
    next_part,
    step,
    count,
    out_head_stride,
    first_head,
    heads_left,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Merges the parts of one sequence, each weighted by its sum, and writes the output.

    Args:
        part_out_ptr, part_lse_ptr: As of `store_part`.
        out_row: Pointer to the sequence's output.
        first_part, next_part, step: Part 0 lies at first_part, part c of the others at next_part + c * step; int64.
        count: Parts.
        first_head: First query head of the parts.
        heads_left: Query heads that there are from it on.
        BLOCK_H, BLOCK_S, BLOCK_C: Query heads and parts at a time, and columns: powers of two.
    """
    column = tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_S)
    column_inside = column < HEAD_DIM
    for chunk in tl.static_range(0, HEADS, BLOCK_H):
        member = chunk + tl.arange(0, BLOCK_H)
        member_inside = (member < HEADS) & (member < heads_left)
        running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        for start in range(0, count, BLOCK_S):
            place = start + lane
            part = tl.where(place == 0, first_part, next_part + place * step)
            cell = part[:, None] * HEADS + member[None, :]
            inside = (place < count)[:, None] & member_inside[None, :]
            # Past the first level of cache, which other multiprocessors do not write to.
            lse = tl.load(part_lse_ptr + cell, mask=inside, other=float("-inf"), cache_modifier=".cg")
            tile = tl.load(
                part_out_ptr + cell[:, :, None] * HEAD_DIM + column[None, None, :],
                mask=inside[:, :, None] & column_inside[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_max = tl.maximum(running_max, tl.max(lse, 0))
            # While no part has had a token, every exponent would be -inf - -inf.
            reference = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(lse - reference[None, :])
            decay = tl.exp2(running_max - reference)
            running_sum = running_sum * decay + tl.sum(weights, 0)
            acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * tile, 0)
            running_max = new_max
        result = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
        head = (first_head + member).to(tl.int64)
        out_pointers = out_row + head[:, None] * out_head_stride + column[None, :]
        tl.store(out_pointers, result.to(out_row.dtype.element_ty), mask=member_inside[:, None] & column_inside[None, :])
