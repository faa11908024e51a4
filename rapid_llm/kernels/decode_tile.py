# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton device functions of decode attention over a range of one sequence's tokens: where rows lie, and online softmax over tiles.

A cache of bytes is read as int16 pairs of them (`rapid_llm.kernels.e4m3`, `rapid_llm.kernels.int8`): QK^T and PV are each the sum of an
even and an odd half of head_dim, so nothing widened goes back to shared memory. The K scale is folded into the softmax scale, the V
scale into the epilogue.

Source:
    Kwon et al. 2023, arXiv:2309.06180; online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

import triton
import triton.language as tl

from rapid_llm.kernels.e4m3 import widen_e4m3_pair
from rapid_llm.kernels.int8 import widen_int8_pair

__all__ = ["attend", "load_query", "normalised", "row_offsets"]


@triton.jit
def row_offsets(rows, row_stride, NARROW: tl.constexpr):
    """Element offsets of cache rows: in 64 bits, since a row of 2,048 elements passes 2**31 at row 1,048,576.

    Where NARROW they stay in 32 bits; the caller has checked on the host that the cache is small enough
    (`rapid_llm.kernels.paged_decode.fits_32_bits`).
    """
    wide = rows if NARROW else rows.to(tl.int64)
    return wide * row_stride


@triton.jit
def _table_entries(table_row, token, inside, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Entries of a sequence's table for tokens.

    Args:
        table_row: int32 pointer to the sequence's entries: of each token, or of each block of BLOCK_SIZE tokens.
        token: int32 positions in the sequence, none negative where it is followed.
        inside: Where MASKED, which tokens are followed; the others give entry 0.
    """
    place = token if BLOCK_SIZE == 1 else token // BLOCK_SIZE
    return tl.load(table_row + place, mask=inside, other=0) if MASKED else tl.load(table_row + place)


@triton.jit
def _entry_rows(entry, token, BLOCK_SIZE: tl.constexpr):
    """Cache rows of tokens with these entries."""
    return entry if BLOCK_SIZE == 1 else entry * BLOCK_SIZE + token % BLOCK_SIZE


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
def load_query(q_base, head_inside, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, PAIRED: tl.constexpr):
    """The query heads of a program.

    Args:
        q_base: Pointers to the heads' first elements, [BLOCK_M, 1].
        head_inside: Which of them there are, [BLOCK_M, 1].

    Returns:
        [BLOCK_M, BLOCK_D] twice: where PAIRED the even and the odd columns, else the columns and again the columns.
    """
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = head_inside & (column < COLUMNS)
    if PAIRED:
        even = tl.load(q_base + 2 * column, mask=mask, other=0.0)
        odd = tl.load(q_base + 2 * column + 1, mask=mask, other=0.0)
    else:
        even = tl.load(q_base + column, mask=mask, other=0.0)
        odd = even
    return even, odd


@triton.jit
def _widened(pair, dtype: tl.constexpr, INT8: tl.constexpr, CONVERT: tl.constexpr):
    """The even and the odd bytes of pairs, as `dtype`."""
    if INT8:
        even, odd = widen_int8_pair(pair, dtype)
    else:
        even, odd = widen_e4m3_pair(pair, dtype, CONVERT)
    return even, odd


@triton.jit
def attend(
    q,
    q_odd,
    table_row,
    k_base,
    v_base,
    first,
    last,
    score_scale,
    k_row_stride,
    v_row_stride,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
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
    """Attends the tokens [first, last) of one sequence and one K/V head, tile by tile.

    Args:
        q, q_odd: As `load_query` gives them.
        table_row: int32 pointer to the sequence's entries.
        k_base, v_base: Pointers to row 0 of the K/V head; where PAIRED to int16 pairs, with strides in pairs.
        score_scale: Factor on QK^T that makes of it a base-2 exponent.
        V_OFF: Distance of a row's V from its K, where both are views of one buffer with equal strides: the two gathers then share
            their addresses. 0 means that V has addresses of its own.
        AHEAD: Tiles that the entries of the table are loaded ahead, 1 or 2.
        SWAP: Tokens ride in the dots' M and query heads in their N: 16 of them are then enough for wgmma, whose M is 64. Otherwise query
            heads ride in M.
        PAIRED: Whether the cache holds bytes: int8 ones where INT8, else e4m3 ones.

    Returns:
        (acc, acc_odd, running_max, running_sum): sums of weighted values, [BLOCK_M, BLOCK_D] or where SWAP the transpose, the odd one
        of use where PAIRED; maximum of the scores and sum of the weights, [BLOCK_M]. No token gives -inf and 0.
    """
    HEADS: tl.constexpr = 1 if SWAP else 0  # where the query heads are in a tile of scores
    TOKENS: tl.constexpr = 1 - HEADS
    PADDED: tl.constexpr = BLOCK_D != COLUMNS
    token = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)[None, :]
    column_inside = column < COLUMNS
    # Bytes that are widened become the operand of a dot in registers, so V is then loaded as its dot wants it; transposed after the load,
    # it would pass through registers on its way to shared memory.
    V_TRANSPOSED: tl.constexpr = SWAP and PAIRED
    v_column = tl.arange(0, BLOCK_D)[:, None] if V_TRANSPOSED else column

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    if SWAP:
        q = tl.trans(q)
        q_odd = tl.trans(q_odd)
        acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
        acc_odd = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Lanes past the end repeat the last token, so that garbage in the table is never followed. Entries of a tile are loaded one or two
    # tiles ahead: they are what the loads of K and V wait for, and come from memory as these do. The loop carries what it loaded, nothing
    # made of it, since a load that is used in its own iteration becomes a stage of the pipeline, and those of K and V are then not ahead;
    # what it carries over two iterations is looked at once on the way, since Triton pipelines no loop that hands a value on untouched.
    some = first < last
    entry = _table_entries(table_row, tl.minimum(first + token, last - 1), (token >= 0) & some, BLOCK_SIZE, True)
    next_entry = entry
    if AHEAD == 2:
        next_entry = _table_entries(table_row, tl.minimum(first + BLOCK_N + token, last - 1), (token >= 0) & some, BLOCK_SIZE, True)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        rows = _entry_rows(entry, tl.minimum(start + token, last - 1), BLOCK_SIZE)
        if AHEAD == 2:
            entry = tl.maximum(next_entry, 0)
            next_entry = _table_entries(table_row, tl.minimum(start + 2 * BLOCK_N + token, last - 1), token >= 0, BLOCK_SIZE, False)
        else:
            entry = _table_entries(table_row, tl.minimum(start + BLOCK_N + token, last - 1), token >= 0, BLOCK_SIZE, False)
        k_offsets = row_offsets(rows, k_row_stride, NARROW)
        v_offsets = k_offsets if V_OFF != 0 else row_offsets(rows, v_row_stride, NARROW)
        k_pointers = k_base + k_offsets[:, None] + column
        k = _load_columns(k_pointers, column_inside, PADDED)
        if V_TRANSPOSED:
            v = _load_columns(v_base + v_offsets[None, :] + v_column, v_column < COLUMNS, PADDED)
        else:
            v_pointers = k_pointers + V_OFF if V_OFF != 0 else v_base + v_offsets[:, None] + column
            v = _load_columns(v_pointers, column_inside, PADDED)
            v = tl.trans(v) if SWAP else v
        if not SWAP:
            k = tl.trans(k)
        if PAIRED:
            k, k_odd = _widened(k, q.dtype, INT8, CONVERT)
            v, v_odd = _widened(v, q.dtype, INT8, CONVERT)
        if SWAP:
            scores = _dot(k, q, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), DOT_FP32)
            if PAIRED:
                scores = _dot(k_odd, q_odd, scores, DOT_FP32)
        else:
            scores = _dot(q, k, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), DOT_FP32)
            if PAIRED:
                scores = _dot(q_odd, k_odd, scores, DOT_FP32)
        token_inside = tl.expand_dims(start + token < last, HEADS)
        scores = tl.where(token_inside, scores * score_scale, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, TOKENS))
        weights = tl.exp2(scores - tl.expand_dims(new_max, TOKENS))
        decay = tl.exp2(running_max - new_max)
        running_sum = running_sum * decay + tl.sum(weights, TOKENS)
        running_max = new_max
        weights = weights.to(q.dtype)
        rescaled = acc * tl.expand_dims(decay, TOKENS)
        acc = _dot(v, weights, rescaled, DOT_FP32) if SWAP else _dot(weights, v, rescaled, DOT_FP32)
        if PAIRED:
            rescaled_odd = acc_odd * tl.expand_dims(decay, TOKENS)
            acc_odd = _dot(v_odd, weights, rescaled_odd, DOT_FP32) if SWAP else _dot(weights, v_odd, rescaled_odd, DOT_FP32)
    return acc, acc_odd, running_max, running_sum


@triton.jit
def normalised(
    acc,
    acc_odd,
    running_max,
    running_sum,
    out_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRED: tl.constexpr,
    SWAP: tl.constexpr,
):
    """What `attend` gave, as an output and its weight.

    Returns:
        (result, lse): fp32 [BLOCK_M, BLOCK_D], where PAIRED [BLOCK_M, 2 * BLOCK_D]; base-2 logarithm of the sum of weights, [BLOCK_M].
        No token gives 0 and -inf, which has no weight in a merge.
    """
    inverse = (out_scale / tl.where(running_sum == 0.0, 1.0, running_sum))[:, None]
    if SWAP:
        acc = tl.trans(acc)
        acc_odd = tl.trans(acc_odd)
    result = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, 2 * BLOCK_D]) * inverse if PAIRED else acc * inverse
    return result, running_max + tl.log2(tl.where(running_sum == 0.0, 1.0, running_sum))
