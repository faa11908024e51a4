"""Layout tags: what the tensors of a KV cache really look like, read off their strides and storage."""

from __future__ import annotations

import torch

__all__ = ["ALIGNED", "BLOCK_TABLE", "COMBINED", "CONTIGUOUS", "PAGED", "ROW_TABLE", "SPLIT", "layout_tags"]

PAGED = "kv:paged"
ROW_TABLE = "kv:row-table"
BLOCK_TABLE = "kv:block-table"
COMBINED = "kv:combined"
SPLIT = "kv:split"
CONTIGUOUS = "kv:contiguous"
ALIGNED = "kv:16bit-aligned"


def layout_tags(k_rows: torch.Tensor, v_rows: torch.Tensor, row_table: torch.Tensor | None = None, block_size: int = 1) -> frozenset[str]:
    """Derives the tags that a cache satisfies.

    | tag | holds where |
    |---|---|
    | kv:paged | rows and heads of K and of V lie apart (no broadcast or overlapping view), head_dim innermost |
    | kv:row-table | a row_table is given and has int32 entries, one for each token or block of tokens of a sequence |
    | kv:block-table | as kv:row-table, and an entry is a block of more than one row; who takes row tables only forbids it |
    | kv:combined | K and V are disjoint views of one buffer with equal strides, a row's V less than a row from its K |
    | kv:split | otherwise |
    | kv:contiguous | both K and V are contiguous |
    | kv:16bit-aligned | every even element starts at an even byte: always for 16-bit pools, by strides for bytes |

    Args:
        k_rows, v_rows: [num_rows, num_kv_heads, head_dim].
        row_table: [batch, max_seq_len / block_size], int32, where the call has one.
        block_size: Rows an entry of row_table stands for.
    """
    tags = {COMBINED if _is_combined(k_rows, v_rows) else SPLIT}
    if _rows_lie_apart(k_rows) and _rows_lie_apart(v_rows):
        tags.add(PAGED)
    if row_table is not None and row_table.dim() == 2 and row_table.dtype == torch.int32:
        tags.add(ROW_TABLE)
        if block_size > 1:
            tags.add(BLOCK_TABLE)
    if k_rows.is_contiguous() and v_rows.is_contiguous():
        tags.add(CONTIGUOUS)
    if _is_aligned(k_rows) and _is_aligned(v_rows):
        tags.add(ALIGNED)
    return frozenset(tags)


def _is_combined(k_rows: torch.Tensor, v_rows: torch.Tensor) -> bool:
    if k_rows.dtype != v_rows.dtype or k_rows.shape != v_rows.shape or k_rows.stride() != v_rows.stride():
        return False
    if k_rows.untyped_storage().data_ptr() != v_rows.untyped_storage().data_ptr():
        return False
    _, num_kv_heads, head_dim = k_rows.shape
    row_stride, head_stride, _ = k_rows.stride()
    extent = (num_kv_heads - 1) * head_stride + head_dim
    distance = abs(int(v_rows.storage_offset()) - int(k_rows.storage_offset()))
    if distance + extent > row_stride:
        return False
    between_heads = distance % head_stride if head_stride else 0
    interleaved = head_dim <= between_heads <= head_stride - head_dim
    return distance >= extent or interleaved


def _rows_lie_apart(rows: torch.Tensor) -> bool:
    """Whether the row and head strides address distinct, non-overlapping head vectors."""
    num_rows, num_kv_heads, head_dim = rows.shape
    row_stride, head_stride, dim_stride = rows.stride()
    if head_dim > 1 and dim_stride != 1:
        return False
    spans = sorted((stride, size) for stride, size in ((row_stride, num_rows), (head_stride, num_kv_heads)) if size > 1)
    extent = head_dim
    for stride, size in spans:
        if stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def _is_aligned(rows: torch.Tensor) -> bool:
    if rows.element_size() % 2 == 0:
        return True
    row_stride, head_stride, _ = rows.stride()
    offset = rows.storage_offset()
    return offset % 2 == 0 and rows.data_ptr() % 2 == 0 and row_stride % 2 == 0 and head_stride % 2 == 0
