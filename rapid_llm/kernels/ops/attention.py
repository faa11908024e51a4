"""Public attention calls: validate, dispatch, run."""

from __future__ import annotations

import torch

from rapid_llm.errors import ShapeError
from rapid_llm.kernels.ops import checks
from rapid_llm.kernels.ops.accepted import AcceptedCalls, cache_form
from rapid_llm.kernels.ops.dispatch import decision_state, dispatch
from rapid_llm.kernels.ops.layout import layout_tags
from rapid_llm.kernels.ops.spec import Request

__all__ = ["DECODE_OP", "decode_request", "paged_decode_attention"]

DECODE_OP = "paged_decode_attention"

_INT32 = torch.int32

_accepted = AcceptedCalls()


def paged_decode_attention(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    softmax_scale: float | None = None,
    block_size: int = 1,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Attends one query token a sequence to its paged K/V rows.

    Nothing is synchronised with the host and the lengths are read on the device, so the call can be captured in a CUDA
    graph and replayed with other contents of `row_table` and `seq_lens`.

    Args:
        q: [batch, num_q_heads, head_dim], fp16 or bf16, any batch and head stride, last stride 1. num_q_heads is a
            multiple of num_kv_heads; query head h reads K/V head h // (num_q_heads // num_kv_heads).
        k_rows: [num_rows, num_kv_heads, head_dim], any row and head stride, last stride 1; dtype of q, uint8
            holding e4m3, or int8.
        v_rows: As k_rows.
        row_table: [batch, max_seq_len / block_size], int32, any batch stride, last stride 1: the cache row of each token, or where
            block_size is over 1 each block of tokens: entry i stands for the rows i * block_size and those that follow. Entries
            past a sequence's length are ignored, whatever they hold; those within it must be rows or blocks of the cache.
        seq_lens: [batch], int32, in tokens; 0 gives a row of zeros. A length over max_seq_len counts as max_seq_len.
        k_scale, v_scale: Scale of an e4m3 cache (value = byte's value * scale), a Python float; None means 1. Of an int8 cache the
            scale of each head (value = byte * scale[head]): fp32 [num_kv_heads], contiguous, on the cache's device. Its values are read
            on the device by each call and never looked at by the host, which would wait: what is not finite and positive gives what it
            gives.
        softmax_scale: Factor on the scores; None means head_dim ** -0.5.
        block_size: Rows of an entry of row_table; num_rows is a multiple of it.
        out: Written and returned where given: [batch, num_q_heads, head_dim], dtype and device of q, last stride 1.
        backend: Name of the backend that has to serve the call; None leaves the choice to the dispatch.

    Returns:
        [batch, num_q_heads, head_dim], dtype of q; accumulated in fp32.

    Raises:
        ShapeError: A shape, stride, dtype or device disagrees with the above (`DTypeError` for a dtype).
        ScaleError: A scale is of another kind than the cache's: no finite positive float (e4m3), no such tensor (int8), not None.
        NoKernelError: No registered spec can serve the call; the message lists each spec and its reasons.

    Source:
        Kwon et al. 2023, arXiv:2309.06180; split-K: Dao et al., Flash-Decoding, 2023.
    """
    key = _call_key(q, k_rows, v_rows, row_table, seq_lens, out, block_size, backend)
    accepted = _accepted.find(key)
    if accepted is None:
        request = decode_request(q, k_rows, v_rows, row_table, seq_lens, block_size)
        if out is not None:
            checks.check_out(DECODE_OP, out, q.shape, q.dtype, q.device)
    # What a key cannot hold is looked at in every call: the values of the scales, and the form of those on the device.
    int8 = k_rows.dtype == torch.int8
    k_factor = 1.0 if k_scale is None and not int8 else checks.check_cache_scale(DECODE_OP, "k_scale", k_scale, k_rows)
    v_factor = 1.0 if v_scale is None and not int8 else checks.check_cache_scale(DECODE_OP, "v_scale", v_scale, k_rows)
    factor = q.shape[-1] ** -0.5 if softmax_scale is None else checks.check_softmax_scale(DECODE_OP, softmax_scale)
    if accepted is None:
        selection = dispatch(request, backend=backend)
        options = selection.options if block_size == 1 else {**selection.options, "block_size": block_size}
        accepted = _accepted.add(key, selection, options)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] > 0:
        factors = {"k_scale": k_factor, "v_scale": v_factor, "softmax_scale": factor}
        accepted.run(q, k_rows, v_rows, row_table, seq_lens, out, **factors, **accepted.options)
    return out


def _call_key(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor | None,
    block_size: int,
    backend: str | None,
) -> tuple[object, ...] | None:
    """All that validation, layout tags and dispatch look at but the values of scales; None where that is not known from these, or wrong."""
    try:
        device, cache = q.device, cache_form(k_rows, v_rows)
        if cache is None or type(block_size) is not int or row_table.dtype != _INT32 or seq_lens.dtype != _INT32:
            return None
        if k_rows.device != device or v_rows.device != device or row_table.device != device or seq_lens.device != device:
            return None
        return (
            device, q.dtype, q.shape, q.stride(),
            cache, row_table.shape, row_table.stride(), seq_lens.shape, seq_lens.stride(),
            None if out is None else (out.dtype, out.device, out.shape, out.stride()),
            block_size, backend, decision_state(),
        )  # fmt: skip
    except (AttributeError, TypeError, IndexError):  # no tensor, or one without dimensions: validation says what is wrong
        return None


def decode_request(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, row_table: torch.Tensor, seq_lens: torch.Tensor, block_size: int = 1
) -> Request:
    """The request that `paged_decode_attention` makes for these tensors, which it validates first.

    Its shape names batch, max_seq_len (the tokens that a row of row_table has room for), num_q_heads, num_kv_heads, head_dim, num_rows, and
    block_size where it is over 1.

    Args:
        q, k_rows, v_rows, row_table, seq_lens, block_size: As of `paged_decode_attention`.

    Raises:
        ShapeError: As `paged_decode_attention`.
    """
    checks.check_dims(DECODE_OP, "q", q, "[batch, num_q_heads, head_dim]")
    checks.check_dtype(DECODE_OP, "q", q, (torch.float16, torch.bfloat16))
    checks.check_innermost(DECODE_OP, "q", q)
    checks.check_cache(DECODE_OP, k_rows, v_rows, "q", q)
    checks.check_block_size(DECODE_OP, block_size, k_rows.shape[0])
    checks.check_dims(DECODE_OP, "row_table", row_table, "[batch, max_seq_len]" if block_size == 1 else "[batch, max_blocks]")
    checks.check_dtype(DECODE_OP, "row_table", row_table, (torch.int32,))
    checks.check_innermost(DECODE_OP, "row_table", row_table)
    checks.check_dims(DECODE_OP, "seq_lens", seq_lens, "[batch]")
    checks.check_dtype(DECODE_OP, "seq_lens", seq_lens, (torch.int32,))
    checks.check_innermost(DECODE_OP, "seq_lens", seq_lens)
    checks.check_devices(DECODE_OP, q=q, k_rows=k_rows, v_rows=v_rows, row_table=row_table, seq_lens=seq_lens)
    batch, num_q_heads, head_dim = q.shape
    num_rows, num_kv_heads, _ = k_rows.shape
    if num_kv_heads == 0 or num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise ShapeError(
            f"{DECODE_OP} expected num_q_heads to be a positive multiple of num_kv_heads, got {num_q_heads} and "
            f"{num_kv_heads}; every K/V head serves the same number of query heads."
        )
    if head_dim == 0:
        raise ShapeError(f"{DECODE_OP} expected a positive head_dim, got q {tuple(q.shape)}; pass whole heads.")
    if row_table.shape[0] != batch or seq_lens.shape[0] != batch:
        raise ShapeError(
            f"{DECODE_OP} expected row_table and seq_lens for the batch of q ({batch}), got {row_table.shape[0]} and "
            f"{seq_lens.shape[0]} sequences; pass one row of the table and one length a query."
        )
    return Request(
        op=DECODE_OP,
        device_type=q.device.type,
        capability=checks.device_capability(q.device),
        q_dtype=checks.DTYPE_NAMES[q.dtype],
        kv_dtype=checks.DTYPE_NAMES[k_rows.dtype],
        layout_tags=layout_tags(k_rows, v_rows, row_table, block_size),
        shape=Request.sorted_shape(
            {
                "batch": batch,
                "max_seq_len": row_table.shape[1] * block_size,
                "num_q_heads": num_q_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "num_rows": num_rows,
                **({} if block_size == 1 else {"block_size": block_size}),
            }
        ),
    )
