# mypy: disable-error-code="import-untyped"
"""Launcher of the Triton decode attention kernels: one launch a call, whatever the config's variant is.

What follows from shapes, strides and the config is planned once for a call form and kept with it; a like call takes its workspace and
launches (`rapid_llm.kernels.direct_launch`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from rapid_llm.kernels.configs import DecodeConfig, choose_block_s, choose_num_programs, choose_num_splits
from rapid_llm.kernels.decode_int8 import paged_decode_int8_kernel, paged_decode_int8_stream_kernel
from rapid_llm.kernels.decode_split import paged_decode_kernel
from rapid_llm.kernels.decode_stream import paged_decode_stream_kernel
from rapid_llm.kernels.direct_launch import Launches
from rapid_llm.kernels.e4m3 import PORTABLE_GAIN
from rapid_llm.kernels.launch import has_e4m3_convert, interpreted, num_multiprocessors
from rapid_llm.kernels.workspace import workspace_for

__all__ = ["fits_32_bits", "paged_decode"]

_KERNELS = {
    (False, False): paged_decode_kernel,
    (True, False): paged_decode_stream_kernel,
    (False, True): paged_decode_int8_kernel,
    (True, True): paged_decode_int8_stream_kernel,
}
"""By whether the config streams, and whether the cache is int8."""
_KIND = {torch.uint8: "e4m3", torch.int8: "int8"}
"""Names of bytes, as of a request."""
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
    """A call but for its tensors and scales.

    Attributes:
        launches: Its kernel with all that is the same in every call.
        part_cells: Query heads of all parts; 0 where no program shares a sequence.
        num_floats: Elements of the parts and their weights.
        lse_offset: Where the weights begin among them, in bytes.
        num_counters: Sequences times blocks of query heads.
        gain: Factor that the widening of e4m3 bytes leaves to the scales.
    """

    launches: Launches
    part_cells: int
    num_floats: int
    lse_offset: int
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
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    softmax_scale: float,
    block_size: int = 1,
    num_splits: int | None = None,
    config: DecodeConfig | None = None,
    memory: dict[str, Any] | None = None,
) -> None:
    """Launches a kernel; see `rapid_llm.kernels.ops.attention.paged_decode_attention`, which validates.

    Args:
        q, k_rows, v_rows, row_table, seq_lens, out: As there; batch at least 1. The bytes of an e4m3 or int8 cache are
            16-bit aligned.
        k_scale, v_scale, softmax_scale: As there, none None; scales are tensors where the cache is int8, and floats elsewhere.
        block_size: As there.
        num_splits: Splits a sequence, of a variant that has them; None leaves it to the config, and that to `choose_num_splits`.
        config: Tuned tile sizes; None means `DecodeConfig.default`.
        memory: What like calls share (`rapid_llm.kernels.ops.spec.KernelSpec.remembers`), empty in the first; None where there are none.
    """
    plan: _Plan | None = None if memory is None else memory.get("plan")
    if plan is None:
        plan = _planned(q, k_rows, v_rows, row_table, out, block_size, num_splits, config)
        if memory is not None:
            memory["plan"] = plan
    scales: tuple[Any, ...] = ()
    factors: tuple[float, ...]
    if isinstance(k_scale, (float, int)) and isinstance(v_scale, (float, int)):  # asked first, since a tensor's class takes longer to ask
        factors = (
            softmax_scale * _LOG2_E * k_scale * plan.gain,
            v_scale * plan.gain,
        )
    else:
        scales, factors = (k_scale, v_scale), (softmax_scale * _LOG2_E,)
    part_out_ptr = out_ptr = out.data_ptr()
    part_lse_ptr = counters_ptr = out_ptr
    workspace = None
    if plan.part_cells:
        workspace = workspace_for(q.device, plan.num_floats, plan.num_counters)
        part_out_ptr, counters_ptr = workspace.floats_ptr, workspace.counters_ptr
        part_lse_ptr = part_out_ptr + plan.lse_offset
    pointers: tuple[int, ...] = (
        q.data_ptr(),
        k_rows.data_ptr(),
        v_rows.data_ptr(),
        row_table.data_ptr(),
        seq_lens.data_ptr(),
        out_ptr,
        part_out_ptr,
        part_lse_ptr,
        counters_ptr,
    )
    if scales:
        pointers = (*pointers, scales[0].data_ptr(), scales[1].data_ptr())
    if memory is not None and plan.launches.again(pointers, factors):
        return
    k_rows, v_rows = _in_pairs(k_rows), _in_pairs(v_rows)
    parts = (out, out, out)
    if workspace is not None:
        parts = workspace.floats, workspace.floats[plan.lse_offset // workspace.floats.element_size() :], workspace.counters
    plan.launches.first((q, k_rows, v_rows, row_table, seq_lens, out, *parts, *scales), factors, keep=memory is not None)


def _in_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Bytes of an e4m3 or int8 cache as int16; other caches as they are."""
    return rows.view(torch.int16) if rows.dtype.itemsize == 1 else rows


def _planned(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_table: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    num_splits: int | None,
    config: DecodeConfig | None,
) -> _Plan:
    """The plan of a call; arguments as of `paged_decode`."""
    device, cache_dtype = q.device, k_rows.dtype
    paired, int8 = cache_dtype.itemsize == 1, cache_dtype == torch.int8
    k_rows, v_rows = _in_pairs(k_rows), _in_pairs(v_rows)
    q_batch_stride, q_head_stride, _ = q.stride()
    k_row_stride, k_head_stride, _ = k_strides = k_rows.stride()
    v_row_stride, v_head_stride, _ = v_strides = v_rows.stride()
    out_batch_stride, out_head_stride, _ = out.stride()
    v_off = 0
    if k_strides == v_strides:
        distance, rest = divmod(v_rows.data_ptr() - k_rows.data_ptr(), k_rows.element_size())
        # Beyond a row the distance depends on the size of the cache, and each would be compiled anew.
        v_off = distance if rest == 0 and 0 < distance < k_row_stride else 0
    max_seq_len = row_table.shape[1] * block_size
    (batch, num_q_heads, head_dim), (num_rows, num_kv_heads, _) = q.shape, k_rows.shape
    group = num_q_heads // num_kv_heads
    if config is None:
        sizes = {"batch": batch, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        config = DecodeConfig.default({**sizes, "max_seq_len": max_seq_len}, _KIND.get(cache_dtype, "float16"))
    counts: tuple[int, ...]
    head_blocks = num_kv_heads * -(-group // config.block_m)
    part_heads = min(group, config.block_m)
    convert = has_e4m3_convert(device)
    num_sms = num_multiprocessors(device)
    columns = config.block_d * (2 if paired else 1)
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": config.block_d,
        "BLOCK_SIZE": block_size,
        "V_OFF": v_off,
        "NARROW": fits_32_bits(num_rows, max(k_row_stride, v_row_stride)),
        "AHEAD": config.tiles_ahead,
        "SWAP": config.swapped,
        "DOT_FP32": interpreted(),
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    if not int8:
        constants |= {"PAIRED": paired, "INT8": False, "CONVERT": convert}
    if config.max_registers is not None:
        constants["maxnreg"] = config.max_registers
    if config.streamed:
        programs = choose_num_programs(
            head_blocks, batch * max_seq_len, num_sms, block_n=config.block_n, programs_per_sm=config.programs_per_sm
        )
        grid, counts = (head_blocks, programs, 1), (batch, max_seq_len, programs)
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
        grid, counts = (head_blocks, splits, batch), (max_seq_len, splits)
        constants["SPLIT"] = splits > 1
        parts = head_blocks * batch * splits if splits > 1 else 0
        block_s = config.block_s or choose_block_s(splits)
    constants["BLOCK_S"] = block_s
    constants["BLOCK_H"] = max(1, min(1 << (part_heads - 1).bit_length(), config.num_warps * _MERGED_PER_WARP // (columns * block_s)))
    integers = (
        *counts,
        q_batch_stride,
        q_head_stride,
        k_row_stride,
        k_head_stride,
        v_row_stride,
        v_head_stride,
        row_table.stride(0),
        out_batch_stride,
        out_head_stride,
    )
    part_cells = parts * part_heads
    return _Plan(
        launches=Launches(_KERNELS[config.streamed, int8], grid, integers, constants, device),
        part_cells=part_cells,
        num_floats=part_cells * (head_dim + 1),
        lse_offset=part_cells * head_dim * torch.float32.itemsize,
        num_counters=head_blocks * batch,
        gain=PORTABLE_GAIN if cache_dtype == torch.uint8 and not convert else 1.0,
    )
