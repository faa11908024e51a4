# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""The decode attention kernels over an int8 cache, whose scales are on the device, one for each K/V head.

Each loads its head's two scales and goes on as the kernel that it is named after, so that one text attends all caches. They are kernels
of their own since two more pointers would change the launch of every other cache.
"""

import triton
import triton.language as tl

from rapid_llm.kernels.decode_split import paged_decode_kernel
from rapid_llm.kernels.decode_stream import paged_decode_stream_kernel

__all__ = ["paged_decode_int8_kernel", "paged_decode_int8_stream_kernel"]


@triton.jit
def _head_scales(k_scale_ptr, v_scale_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The scales of K and V of this program's K/V head."""
    kv_head = tl.program_id(0) // ((GROUP + BLOCK_M - 1) // BLOCK_M)
    return tl.load(k_scale_ptr + kv_head), tl.load(v_scale_ptr + kv_head)


@triton.jit(do_not_specialize=["max_seq_len", "num_splits"])
def paged_decode_int8_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_lens_ptr,
    out_ptr,
    part_out_ptr,
    part_lse_ptr,
    counter_ptr,
    k_scale_ptr,
    v_scale_ptr,
    score_scale,
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
    DOT_FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program as of `rapid_llm.kernels.decode_split.paged_decode_kernel`.

    Args:
        k_scale_ptr, v_scale_ptr: fp32 [NUM_KV_HEADS].
        score_scale: As there, without the scale of K.

    The others are as there.
    """
    k_scale, v_scale = _head_scales(k_scale_ptr, v_scale_ptr, GROUP, BLOCK_M)
    paged_decode_kernel(
        q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, counter_ptr, score_scale * k_scale, v_scale,
        max_seq_len, num_splits, q_batch_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
        table_batch_stride, out_batch_stride, out_head_stride, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_SIZE,
        BLOCK_H, BLOCK_S, V_OFF, NARROW, AHEAD, SPLIT, SWAP, True, True, False, DOT_FP32, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "max_seq_len", "num_programs"])
def paged_decode_int8_stream_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    seq_lens_ptr,
    out_ptr,
    part_out_ptr,
    part_lse_ptr,
    counter_ptr,
    k_scale_ptr,
    v_scale_ptr,
    score_scale,
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
    DOT_FP32: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program as of `rapid_llm.kernels.decode_stream.paged_decode_stream_kernel`; scales as of `paged_decode_int8_kernel`."""
    k_scale, v_scale = _head_scales(k_scale_ptr, v_scale_ptr, GROUP, BLOCK_M)
    paged_decode_stream_kernel(
        q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, counter_ptr, score_scale * k_scale, v_scale,
        batch, max_seq_len, num_programs, q_batch_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
        table_batch_stride, out_batch_stride, out_head_stride, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_B,
        BLOCK_SIZE, BLOCK_H, BLOCK_S, V_OFF, NARROW, AHEAD, SWAP, True, True, False, DOT_FP32, STAGES,
    )  # fmt: skip
