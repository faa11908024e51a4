# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernel that scatters new K and V into cache rows, quantising on the way, and its launcher."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.configs import WriteConfig, choose_write_config
from rapid_llm.kernels.direct_launch import Launches
from rapid_llm.kernels.e4m3 import narrow_to_e4m3, scale_factors
from rapid_llm.kernels.int8 import narrow_to_int8, scales_of_elements
from rapid_llm.kernels.launch import has_e4m3_convert

__all__ = ["kv_write"]

_LONGEST_RUN = 8
"""Elements of a head that share an inverse: those of a thread's 16-byte load."""


@triton.jit
def kv_write_kernel(
    k_ptr,
    v_ptr,
    slot_ptr,
    k_rows_ptr,
    v_rows_ptr,
    k_factor,
    k_rest,
    v_factor,
    v_rest,
    num_tokens,
    num_rows,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    slot_stride,
    k_row_stride,
    k_row_head_stride,
    v_row_stride,
    v_row_head_stride,
    NUM_ELEMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    E4M3: tl.constexpr,
    CONVERT: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    """One program = (TOKENS tokens, BLOCK elements of a token's heads, K or V; both where TOGETHER).

    NUM_ELEMENTS is num_kv_heads * HEAD_DIM: the elements of a token's K. Values are loaded without waiting for the slots: those of a
    skipped token are read in vain.
    """
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # What lies past the last token reads the last token, so that no load needs a mask.
    token = tl.minimum(place, num_tokens - 1).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_stride).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = element // HEAD_DIM
    column = element % HEAD_DIM
    within = None
    kept = ((place < num_tokens) & (slot >= 0) & (slot < num_rows))[:, None]
    if NUM_ELEMENTS % BLOCK != 0:
        within = (element < NUM_ELEMENTS)[None, :]
        kept = kept & within
    if TOGETHER:
        k = _load(k_ptr, token, head, column, k_token_stride, k_head_stride, within)
        v = _load(v_ptr, token, head, column, v_token_stride, v_head_stride, within)
        _store(k_rows_ptr, slot, head, column, k_row_stride, k_row_head_stride, k, kept, k_factor, k_rest, E4M3, CONVERT, DIVIDE)
        _store(v_rows_ptr, slot, head, column, v_row_stride, v_row_head_stride, v, kept, v_factor, v_rest, E4M3, CONVERT, DIVIDE)
    elif tl.program_id(2) == 0:
        k = _load(k_ptr, token, head, column, k_token_stride, k_head_stride, within)
        _store(k_rows_ptr, slot, head, column, k_row_stride, k_row_head_stride, k, kept, k_factor, k_rest, E4M3, CONVERT, DIVIDE)
    else:
        v = _load(v_ptr, token, head, column, v_token_stride, v_head_stride, within)
        _store(v_rows_ptr, slot, head, column, v_row_stride, v_row_head_stride, v, kept, v_factor, v_rest, E4M3, CONVERT, DIVIDE)


@triton.jit
def _load(pointer, row, head, column, row_stride, head_stride, mask):
    return tl.load(pointer + row[:, None] * row_stride + (head.to(tl.int64) * head_stride + column)[None, :], mask=mask)


@triton.jit
def _store(
    pointer,
    row,
    head,
    column,
    row_stride,
    head_stride,
    values,
    mask,
    factor,
    rest,
    E4M3: tl.constexpr,
    CONVERT: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    if E4M3:
        values = narrow_to_e4m3(values, factor, rest, CONVERT, DIVIDE)
    elif pointer.dtype.element_ty == tl.int8:
        values = narrow_to_int8(values, factor[None, :], rest[None, :])
    tl.store(pointer + row[:, None] * row_stride + (head.to(tl.int64) * head_stride + column)[None, :], values, mask=mask)


@triton.jit
def kv_write_int8_kernel(
    k_ptr,
    v_ptr,
    slot_ptr,
    k_rows_ptr,
    v_rows_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    num_rows,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    slot_stride,
    k_row_stride,
    k_row_head_stride,
    v_row_stride,
    v_row_head_stride,
    NUM_ELEMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    RUN: tl.constexpr,
):
    """One program as of `kv_write_kernel`, with the heads' scales (fp32 [num_kv_heads]) on the device; RUN as of `scales_of_elements`.

    A kernel of its own since two more pointers would change the launch of every other cache.
    """
    k_inverse, k_scale = scales_of_elements(k_scale_ptr, NUM_ELEMENTS, HEAD_DIM, BLOCK, RUN)
    v_inverse, v_scale = scales_of_elements(v_scale_ptr, NUM_ELEMENTS, HEAD_DIM, BLOCK, RUN)
    kv_write_kernel(
        k_ptr, v_ptr, slot_ptr, k_rows_ptr, v_rows_ptr, k_inverse, k_scale, v_inverse, v_scale, num_tokens, num_rows, k_token_stride,
        k_head_stride, v_token_stride, v_head_stride, slot_stride, k_row_stride, k_row_head_stride, v_row_stride, v_row_head_stride,
        NUM_ELEMENTS, HEAD_DIM, TOKENS, BLOCK, TOGETHER, False, False, False,
    )  # fmt: skip


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    *,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    config: WriteConfig | None = None,
    memory: dict[bool, Launches] | None = None,
) -> None:
    """Launches `kv_write_kernel` or, for an int8 cache, `kv_write_int8_kernel`; see `rapid_llm.kernels.ops.kv.kv_write`, which validates.

    Args:
        k, v, slot_mapping, k_rows, v_rows: As there.
        k_scale, v_scale: As there, none None; tensors where the cache is int8, and floats elsewhere.
        config: Tuned tile sizes; None means `choose_write_config`.
        memory: What like calls share (`rapid_llm.kernels.ops.spec.KernelSpec.remembers`), empty in the first; None where there are none.
    """
    tensors = (k, v, slot_mapping, k_rows, v_rows)
    scales: tuple[Any, ...] = ()
    factors: tuple[float, ...] = ()
    divide = False
    if isinstance(k_scale, (float, int)) and isinstance(v_scale, (float, int)):  # asked first, since a tensor's class takes longer to ask
        ((k_factor, k_rest), (v_factor, v_rest)), divide = scale_factors(k.dtype, k_scale, v_scale)
        factors = (k_factor, k_rest, v_factor, v_rest)
    else:
        scales = (k_scale, v_scale)
    # Like calls may differ in scales, and these decide whether the kernel divides.
    launches = None if memory is None else memory.get(divide)
    if launches is None:
        launches = _planned(*tensors, divide, config)
        if memory is not None:
            memory[divide] = launches
    pointers: tuple[int, ...] = (k.data_ptr(), v.data_ptr(), slot_mapping.data_ptr(), k_rows.data_ptr(), v_rows.data_ptr())
    if scales:
        pointers = (*pointers, scales[0].data_ptr(), scales[1].data_ptr())
    if memory is not None and launches.again(pointers, factors):
        return
    launches.first((*tensors, *scales), factors, keep=memory is not None)


def _planned(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    divide: bool,
    config: WriteConfig | None,
) -> Launches:
    """A call but for its tensors and scales; arguments as of `kv_write`, `divide` as of `scale_factors`."""
    num_tokens, num_kv_heads, head_dim = k.shape
    num_elements = num_kv_heads * head_dim
    e4m3, int8 = k_rows.dtype == torch.uint8, k_rows.dtype == torch.int8
    config = config or choose_write_config(num_tokens, num_elements, one_byte=e4m3 or int8)
    grid = (triton.cdiv(num_tokens, config.tokens), triton.cdiv(num_elements, config.block), 2 // config.halves)
    integers = (
        num_tokens,
        k_rows.shape[0],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        slot_mapping.stride(0),
        k_rows.stride(0),
        k_rows.stride(1),
        v_rows.stride(0),
        v_rows.stride(1),
    )
    constants = {
        "NUM_ELEMENTS": num_elements,
        "HEAD_DIM": head_dim,
        "TOKENS": config.tokens,
        "BLOCK": config.block,
        "TOGETHER": config.halves == 2,
        "num_warps": config.num_warps,
    }
    if int8:
        constants["RUN"] = math.gcd(head_dim, config.block, _LONGEST_RUN)
    else:
        constants |= {"E4M3": e4m3, "CONVERT": has_e4m3_convert(k.device), "DIVIDE": divide}
    return Launches(kv_write_int8_kernel if int8 else kv_write_kernel, grid, integers, constants, k.device)
