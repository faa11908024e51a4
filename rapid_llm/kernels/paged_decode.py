# mypy: disable-error-code="import-untyped"
"""Launcher of the Triton decode attention kernels: one launch a call, whatever the config's variant is.

What follows from shapes, strides and the config is planned once and kept; a call looks the plan up, takes its workspace and launches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch

from rapid_llm.kernels.configs import DecodeConfig, choose_block_s, choose_num_programs, choose_num_splits
from rapid_llm.kernels.decode_split import paged_decode_kernel
from rapid_llm.kernels.decode_stream import paged_decode_stream_kernel
from rapid_llm.kernels.e4m3 import PORTABLE_GAIN
from rapid_llm.kernels.launch import has_e4m3_convert, interpreted, num_multiprocessors
from rapid_llm.kernels.workspace import workspace_for

__all__ = ["fits_32_bits", "paged_decode"]

_LOG2_E = math.log2(math.e)
_LEAST_BLOCK_B = 32
_MERGED_PER_WARP = 2048
"""Elements of parts that a warp takes at a time in a merge: 64 registers a thread."""
_STREAM_PARTS = 4
"""Parts of a sequence that a stream's merge is made for."""


def fits_32_bits(num_rows: int, row_stride: int) -> bool:
    """Whether the offset of every row of a cache, in elements, is an int32 (and that of the row after the last)."""
    return num_rows * row_stride < 2**31


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A launch but for its tensors and scales.

    Attributes:
        launch: The kernel with its grid.
        counts: Scalars that the kernel takes after its scales.
        constants: Its constexprs and launch options.
        part_cells: Query heads of all parts; 0 where no program shares a sequence.
        num_counters: Sequences times blocks of query heads.
        gain: Factor that the widening of e4m3 bytes leaves to the scales.
    """

    launch: Any
    counts: tuple[int, ...]
    constants: dict[str, Any]
    part_cells: int
    num_counters: int
    gain: float


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
    block_size: int = 1,
    num_splits: int | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Launches a kernel; see `rapid_llm.kernels.ops.attention.paged_decode_attention`, which validates.

    Args:
        q, k_rows, v_rows, row_table, seq_lens, out: As there; batch at least 1. The bytes of an e4m3 cache are 16-bit
            aligned.
        k_scale, v_scale, softmax_scale: As there, none None.
        block_size: As there.
        num_splits: Splits a sequence, of a variant that has them; None leaves it to the config, and that to `choose_num_splits`.
        config: Tuned tile sizes; None means `DecodeConfig.default`.
    """
    if k_rows.dtype == torch.uint8:
        k_rows, v_rows = k_rows.view(torch.int16), v_rows.view(torch.int16)
        e4m3 = True
    else:
        e4m3 = False
    q_batch_stride, q_head_stride, _ = q.stride()
    k_row_stride, k_head_stride, _ = k_strides = k_rows.stride()
    v_row_stride, v_head_stride, _ = v_strides = v_rows.stride()
    out_batch_stride, out_head_stride, _ = out.stride()
    v_off = 0
    if k_strides == v_strides:
        distance, rest = divmod(v_rows.data_ptr() - k_rows.data_ptr(), k_rows.element_size())
        # Beyond a row the distance depends on the size of the cache, and each would be compiled anew.
        v_off = distance if rest == 0 and 0 < distance < k_row_stride else 0
    plan = _planned(
        q.device,
        q.shape,
        k_rows.shape[:2],
        row_table.shape[1] * block_size,
        max(k_row_stride, v_row_stride),
        v_off,
        e4m3,
        block_size,
        num_splits,
        config,
    )
    part_out = part_lse = counters = out
    if plan.part_cells:
        head_dim = q.shape[2]
        workspace = workspace_for(q.device, plan.part_cells * (head_dim + 1), plan.num_counters)
        part_out, part_lse, counters = workspace.floats, workspace.floats[plan.part_cells * head_dim :], workspace.counters
    plan.launch(
        q,
        k_rows,
        v_rows,
        row_table,
        seq_lens,
        out,
        part_out,
        part_lse,
        counters,
        softmax_scale * _LOG2_E * k_scale * plan.gain,
        v_scale * plan.gain,
        *plan.counts,
        q_batch_stride,
        q_head_stride,
        k_row_stride,
        k_head_stride,
        v_row_stride,
        v_head_stride,
        row_table.stride(0),
        out_batch_stride,
        out_head_stride,
        **plan.constants,
    )


@functools.lru_cache(maxsize=4096)
def _planned(
    device: torch.device,
    q_shape: tuple[int, int, int],
    kv_shape: tuple[int, int],
    max_seq_len: int,
    row_stride: int,
    v_off: int,
    e4m3: bool,
    block_size: int,
    num_splits: int | None,
    config: DecodeConfig | None,
) -> _Plan:
    """The plan of a call; kv_shape is (num_rows, num_kv_heads), row_stride the larger one of K and V, in elements or pairs."""
    batch, num_q_heads, head_dim = q_shape
    num_rows, num_kv_heads = kv_shape
    group = num_q_heads // num_kv_heads
    if config is None:
        sizes = {"batch": batch, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        config = DecodeConfig.default({**sizes, "max_seq_len": max_seq_len}, "e4m3" if e4m3 else "float16")
    counts: tuple[int, ...]
    head_blocks = num_kv_heads * -(-group // config.block_m)
    part_heads = min(group, config.block_m)
    convert = has_e4m3_convert(device)
    num_sms = num_multiprocessors(device)
    columns = config.block_d * (2 if e4m3 else 1)
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": config.block_d,
        "BLOCK_SIZE": block_size,
        "V_OFF": v_off,
        "NARROW": fits_32_bits(num_rows, row_stride),
        "AHEAD": config.tiles_ahead,
        "SWAP": config.swapped,
        "E4M3": e4m3,
        "CONVERT": convert,
        "DOT_FP32": interpreted(),
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    if config.max_registers is not None:
        constants["maxnreg"] = config.max_registers
    if config.streamed:
        programs = choose_num_programs(
            head_blocks, batch * max_seq_len, num_sms, block_n=config.block_n, programs_per_sm=config.programs_per_sm
        )
        launch, counts = paged_decode_stream_kernel[head_blocks, programs], (batch, max_seq_len, programs)
        # Batches up to the least size share one compiled kernel.
        constants["BLOCK_B"] = max(_LEAST_BLOCK_B, 1 << (batch - 1).bit_length())
        parts = 2 * head_blocks * programs
        block_s = config.block_s or _STREAM_PARTS
    else:
        splits = num_splits or config.num_splits
        if splits is None:
            splits = choose_num_splits(
                head_blocks * batch, max_seq_len, num_sms, block_n=config.block_n, programs_per_sm=config.programs_per_sm
            )
        launch, counts = paged_decode_kernel[head_blocks, splits, batch], (max_seq_len, splits)
        constants["SPLIT"] = splits > 1
        parts = head_blocks * batch * splits if splits > 1 else 0
        block_s = config.block_s or choose_block_s(splits)
    constants["BLOCK_S"] = block_s
    constants["BLOCK_H"] = max(1, min(1 << (part_heads - 1).bit_length(), config.num_warps * _MERGED_PER_WARP // (columns * block_s)))
    gain = PORTABLE_GAIN if e4m3 and not convert else 1.0
    return _Plan(launch, counts, constants, parts * part_heads, head_blocks * batch, gain)
