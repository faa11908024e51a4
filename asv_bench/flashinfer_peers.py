"""FlashInfer's paged decode as peers: each with what it needs made beforehand, which is not timed. Its kernels are compiled at first use.

Source:
    flashinfer-python: `flashinfer.BatchDecodeWithPagedKVCacheWrapper`, `flashinfer.decode.xqa_batch_decode_with_kv_cache`.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import TYPE_CHECKING, Any

from asv_bench.decode_cells import Prepared
from asv_bench.lazy import LazyModule
from asv_bench.timing import Call

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

flashinfer: Any = LazyModule("flashinfer")
flashinfer_decode: Any = LazyModule("flashinfer.decode")

_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation takes."""


def missing() -> str | None:
    """Why there is none; None where FlashInfer is installed."""
    return "the package flashinfer is not installed" if importlib.util.find_spec("flashinfer") is None else None


def version() -> str | None:
    """Of the installed distribution; None without one."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None


def pages_of(table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block table in the form that FlashInfer's plan takes.

    Args:
        table: [batch, max_blocks], int32.
        seq_lens: [batch], int32, in tokens, each at least 1.
        block_size: Tokens of a block.
    Returns:
        Where each sequence's blocks begin [batch + 1], the blocks of all sequences, the tokens in the last block of each [batch]; int32.
    """
    counts = (seq_lens + block_size - 1) // block_size
    begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    inside = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return begins, table[inside], ((seq_lens - 1) % block_size + 1).int()


def planned(prepared: Prepared, block_size: int) -> list[Call]:
    """Batch decode on tensor cores, a plan a working set; they share a workspace for parts of sequences, since calls follow each other."""
    q, pool = prepared.q, prepared.pool
    pages, workspace = _pages(prepared, block_size), torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)

    def call(table: torch.Tensor, out: torch.Tensor) -> Call:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        heads = (q.shape[1], pages[0].shape[2], q.shape[2])
        wrapper.plan(*pages_of(table, pool.seq_lens, block_size), *heads, block_size, q_data_type=q.dtype, kv_data_type=pages[0].dtype)
        return lambda: wrapper.run(q, pages, out=out, **pool.scales)

    return [call(table, out) for table, out in zip(prepared.tables[block_size], prepared.outs, strict=True)]


def xqa(prepared: Prepared, block_size: int) -> list[Call]:
    """XQA, which reads table and lengths on the device."""
    q, pool = prepared.q, prepared.pool
    pages, workspace = _pages(prepared, block_size), torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    factors = {"bmm1_scale": q.shape[2] ** -0.5 * pool.factors["k_scale"], "bmm2_scale": pool.factors["v_scale"]}

    def call(table: torch.Tensor, out: torch.Tensor) -> Call:
        most = table.shape[1] * block_size
        return lambda: flashinfer_decode.xqa_batch_decode_with_kv_cache(q, pages, workspace, table, pool.seq_lens, most, out=out, **factors)

    return [call(table, out) for table, out in zip(prepared.tables[block_size], prepared.outs, strict=True)]


def _pages(prepared: Prepared, block_size: int) -> tuple[torch.Tensor, ...]:
    """K and V as [blocks, block_size, num_kv_heads, head_dim], views of the rows."""
    rows = prepared.rows(block_size)
    return tuple(_values(part).view(-1, block_size, *part.shape[1:]) for part in rows)


def _values(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.float8_e4m3fn) if rows.dtype == torch.uint8 else rows
