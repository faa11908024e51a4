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

_PARTS_WEIGHED = tl.constexpr(64)
"""Parts whose weights are looked at at a time."""

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
    column_inside = column < HEAD_DIM
    lane = tl.arange(0, BLOCK_S)
    many = tl.arange(0, _PARTS_WEIGHED)
    for chunk in tl.static_range(0, HEADS, BLOCK_H):
        member = chunk + tl.arange(0, BLOCK_H)
        member_inside = (member < HEADS) & (member < heads_left)
        # The weights' maximum and sum first, so that the turns over the outputs have nothing to wait for but their own loads.
        highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        for start in range(0, count, _PARTS_WEIGHED):
            lse = _load_lse(part_lse_ptr, first_part, next_part, step, start + many, count, member, member_inside, HEADS)
            new_highest = tl.maximum(highest, tl.max(lse, 0))
            # While no part has had a token, every exponent would be -inf - -inf.
            reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            total = total * tl.exp2(highest - reference) + tl.sum(tl.exp2(lse - reference[None, :]), 0)
            highest = new_highest
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        for start in range(0, count, BLOCK_S):
            place = start + lane
            lse = _load_lse(part_lse_ptr, first_part, next_part, step, place, count, member, member_inside, HEADS)
            cell = _part(first_part, next_part, step, place)[:, None] * HEADS + member[None, :]
            inside = (place < count)[:, None] & member_inside[None, :]
            # Past the first level of cache, which other multiprocessors do not write to.
            tile = tl.load(
                part_out_ptr + cell[:, :, None] * HEAD_DIM + column[None, None, :],
                mask=inside[:, :, None] & column_inside[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            weights = tl.broadcast_to((tl.exp2(lse - reference[None, :]) * inverse[None, :])[:, :, None], [BLOCK_S, BLOCK_H, BLOCK_C])
            # Rounded before it is added. Fused with the sum, a thread's own product would be exact and the other's rounded, so that threads
            # which sum the same parts held sums that differ in the last place, and which of them is stored was a race.
            acc += tl.sum(tl.fma(tile, weights, tl.zeros_like(tile)), 0)
        head = (first_head + member).to(tl.int64)
        out_pointers = out_row + head[:, None] * out_head_stride + column[None, :]
        tl.store(out_pointers, acc.to(out_row.dtype.element_ty), mask=member_inside[:, None] & column_inside[None, :])


@triton.jit
def _part(first_part, next_part, step, place):
    """The part at a place, int64."""
    return tl.where(place == 0, first_part, next_part + place * step)


@triton.jit
def _load_lse(part_lse_ptr, first_part, next_part, step, place, count, member, member_inside, HEADS: tl.constexpr):
    """What `store_part` kept of the parts at these places, [places, heads]; -inf, which has no weight, where there is none."""
    cell = _part(first_part, next_part, step, place)[:, None] * HEADS + member[None, :]
    inside = (place < count)[:, None] & member_inside[None, :]
    return tl.load(part_lse_ptr + cell, mask=inside, other=float("-inf"), cache_modifier=".cg")
