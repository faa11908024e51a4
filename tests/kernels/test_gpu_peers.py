"""What only a GPU can show of the rows of other libraries: each computes what its operation says, or has a reason why not."""

import importlib.util

import pytest
import torch

from asv_bench.verify import check_decode, decode_reference
from rapid_llm.kernels.ops import contiguous_decode_attention, paged_decode_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["sdpa-math", "sdpa-flash", "sdpa-cudnn"])
def test_each_backend_of_sdpa(backend: str, dtype: torch.dtype) -> None:
    batch, heads, kv_heads, seq_len, head_dim = 3, 32, 8, 1000, 128
    k, v = torch.randn(2, batch, kv_heads, seq_len, head_dim, device="cuda").to(dtype)
    q = torch.randn(batch, heads, head_dim, device="cuda").to(dtype)
    out = contiguous_decode_attention(q, k, v, backend=backend)
    rows = [part.transpose(1, 2).reshape(-1, kv_heads, head_dim) for part in (k, v)]
    table = torch.arange(batch * seq_len, dtype=torch.int32, device="cuda").view(batch, -1)
    lens = torch.full((batch,), seq_len, dtype=torch.int32, device="cuda")
    check_decode(out, decode_reference(q, *rows, table, lens), kv_dtype=str(dtype))


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block_size", [16, 64])
def test_flashinfers_row(block_size: int) -> None:
    """Ragged lengths, one of them 0; what lies past them is no page."""
    num_rows, lengths = 1 << 13, [1000, 1, 0, 777]
    k_rows, v_rows = torch.randn(2, num_rows, 8, 128, device="cuda").half()
    q = torch.randn(len(lengths), 32, 128, device="cuda").half()
    table = torch.randint(0, num_rows // block_size, (len(lengths), 1024 // block_size), device="cuda").int()
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    inside = torch.arange(block_size, dtype=torch.int32, device="cuda")
    expected = decode_reference(q, k_rows, v_rows, (table[:, :, None] * block_size + inside).flatten(1), lens)
    table[torch.arange(table.shape[1], device="cuda") * block_size >= lens[:, None]] = 2**31 - 1
    out = paged_decode_attention(q, k_rows, v_rows, table, lens, block_size=block_size, backend="flashinfer")
    check_decode(out, expected, kv_dtype="float16")
