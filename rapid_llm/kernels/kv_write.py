# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton kernel that scatters new K and V into cache rows, quantising on the way, and its launcher."""

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.configs import WriteConfig, choose_write_config
from rapid_llm.kernels.e4m3 import narrow_to_e4m3
from rapid_llm.kernels.launch import has_e4m3_convert

__all__ = ["kv_write"]


@triton.jit
def kv_write_kernel(
    k_ptr,
    v_ptr,
    slot_ptr,
    k_rows_ptr,
    v_rows_ptr,
    num_tokens,
    num_rows,
    k_scale,
    v_scale,
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
    E4M3: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """One program = (TOKENS tokens, BLOCK elements of a token's heads, K or V).

    NUM_ELEMENTS is num_kv_heads * HEAD_DIM: the elements of a token's K.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_ptr + token * slot_stride, mask=token < num_tokens, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < num_rows)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = element // HEAD_DIM
    column = element % HEAD_DIM
    mask = kept[:, None]
    if NUM_ELEMENTS % BLOCK != 0:
        mask = mask & (element < NUM_ELEMENTS)[None, :]
    if tl.program_id(2) == 0:
        _write_rows(
            k_ptr + token[:, None] * k_token_stride + (head.to(tl.int64) * k_head_stride + column)[None, :],
            k_rows_ptr + slot[:, None] * k_row_stride + (head.to(tl.int64) * k_row_head_stride + column)[None, :],
            mask,
            k_scale,
            E4M3,
            CONVERT,
        )
    else:
        _write_rows(
            v_ptr + token[:, None] * v_token_stride + (head.to(tl.int64) * v_head_stride + column)[None, :],
            v_rows_ptr + slot[:, None] * v_row_stride + (head.to(tl.int64) * v_row_head_stride + column)[None, :],
            mask,
            v_scale,
            E4M3,
            CONVERT,
        )


@triton.jit
def _write_rows(source, destination, mask, scale, E4M3: tl.constexpr, CONVERT: tl.constexpr):
    values = tl.load(source, mask=mask, other=0.0)
    if E4M3:
        values = narrow_to_e4m3(values, scale, CONVERT)
    tl.store(destination, values, mask=mask)


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    *,
    k_scale: float,
    v_scale: float,
    config: WriteConfig | None = None,
) -> None:
    """Launches `kv_write_kernel`; see `rapid_llm.kernels.ops.kv.kv_write`, which validates.

    Args:
        k, v, slot_mapping, k_rows, v_rows, k_scale, v_scale: As there, none None.
        config: Tuned tile sizes; None means `choose_write_config`.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    num_elements = num_kv_heads * head_dim
    config = config or choose_write_config(num_tokens, num_elements)
    grid = (triton.cdiv(num_tokens, config.tokens), triton.cdiv(num_elements, config.block), 2)
    kv_write_kernel[grid](
        k,
        v,
        slot_mapping,
        k_rows,
        v_rows,
        num_tokens,
        k_rows.shape[0],
        k_scale,
        v_scale,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        slot_mapping.stride(0),
        k_rows.stride(0),
        k_rows.stride(1),
        v_rows.stride(0),
        v_rows.stride(1),
        NUM_ELEMENTS=num_elements,
        HEAD_DIM=head_dim,
        TOKENS=config.tokens,
        BLOCK=config.block,
        E4M3=k_rows.dtype == torch.uint8,
        CONVERT=has_e4m3_convert(k.device),
        num_warps=config.num_warps,
    )
