# mypy: disable-error-code="import-not-found"
"""FlashInfer's XQA kernel behind the call of `ops.attention.paged_decode_attention`. FlashInfer compiles it at the first call of a kind.

Source:
    flashinfer-python, `flashinfer.decode.xqa_batch_decode_with_kv_cache`.
"""

from __future__ import annotations

import functools

import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache

__all__ = ["xqa_decode"]

_WORKSPACE_BYTES = 128 * 2**20


@functools.cache
def _workspace(device: torch.device, stream: int) -> torch.Tensor:
    """Zeros at first: the kernel counts arrivals there, and leaves zeros. Calls on one stream follow each other and share one."""
    del stream
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def xqa_decode(
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
    block_size: int,
) -> None:
    """Calls it; see `rapid_llm.kernels.ops.attention.paged_decode_attention`, which validates."""
    max_seq_len = row_table.shape[1] * block_size
    pages = tuple(rows.view(-1, block_size, *rows.shape[1:]) for rows in (k_rows, v_rows))
    # What lies past a length may be anything here, and has to be a page there; a length may be over max_seq_len, or 0.
    inside = torch.arange(row_table.shape[1], device=q.device) * block_size < seq_lens[:, None]
    attended = xqa_batch_decode_with_kv_cache(
        q.contiguous(),
        pages,
        _workspace(q.device, torch.cuda.current_stream(q.device).cuda_stream),
        torch.where(inside, row_table, 0),
        seq_lens.clamp(1, max_seq_len),
        max_seq_len,
        bmm1_scale=softmax_scale * k_scale,
        bmm2_scale=v_scale,
    )
    out.copy_(attended.masked_fill((seq_lens <= 0)[:, None, None], 0.0))
