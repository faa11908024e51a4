"""Paged decode attention of every backend against float64 attention over the same bytes (R5, R7, R8, R53)."""

from typing import Any

import pytest
import torch

from asv_bench.verify import check_decode, decode_reference
from rapid_llm.kernels.ops import layout_tags, paged_decode_attention

FP16, BF16, E4M3, INT8 = torch.float16, torch.bfloat16, torch.uint8, torch.int8
POOLS = [(FP16, FP16), (BF16, BF16), (FP16, E4M3), (BF16, E4M3), (FP16, INT8), (BF16, INT8)]
LENGTHS = [70, 0, 1, 129, 64]


def _checked(cache: Any, backend: str, **arguments: Any) -> torch.Tensor:
    """Runs the call, checks it against the reference, and gives its output."""
    out = paged_decode_attention(*cache.tensors, **cache.scales, backend=backend, **arguments)
    arguments.pop("out", None)
    reference = decode_reference(*cache.tensors, **cache.scales, **arguments)
    check_decode(out, reference, kv_dtype=str(cache.k_rows.dtype))
    return out


@pytest.mark.parametrize(("dtype", "kv_dtype"), POOLS)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_every_pool_dtype_and_head_dim(make_cache: Any, backend: str, dtype: Any, kv_dtype: Any, head_dim: int) -> None:
    """R8, R53: odd batch, odd lengths, lengths 0 and 1, scattered rows, garbage past the length, NaN in a foreign row."""
    cache = make_cache(LENGTHS, 4, 2, head_dim, dtype=dtype, kv_dtype=kv_dtype)
    out = _checked(cache, backend)
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(256, FP16), (256, E4M3), (80, E4M3), (16, E4M3), (17, FP16), (256, INT8), (80, INT8), (16, INT8)]
)
def test_unusual_head_dims(make_cache: Any, backend: str, head_dim: int, kv_dtype: torch.dtype) -> None:
    _checked(make_cache([33, 5], 2, 1, head_dim, kv_dtype=kv_dtype), backend)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
@pytest.mark.parametrize(("dtype", "kv_dtype"), POOLS)
def test_any_number_of_splits(make_cache: Any, device: str, dtype: Any, kv_dtype: Any, num_splits: int) -> None:
    """More splits than a short sequence has tiles leave empty ones, which must weigh nothing."""
    from rapid_llm.kernels.paged_decode import paged_decode

    cache = make_cache(LENGTHS, 6, 2, 64, dtype=dtype, kv_dtype=kv_dtype)
    scales = {"k_scale": 1.0, "v_scale": 1.0, **cache.scales}
    out = torch.empty_like(cache.q).fill_(torch.nan)
    paged_decode(*cache.tensors, out, softmax_scale=64**-0.5, num_splits=num_splits, **scales)
    reference = decode_reference(*cache.tensors, **cache.scales)
    check_decode(out, reference, kv_dtype=str(kv_dtype))


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"),
    [(24, 8), (28, 4), (14, 2), (48, 2), (40, 2), (80, 4), (64, 1), (5, 5), (16, 4), (8, 1), (130, 1)],
)
def test_each_query_head_reads_its_own_kv_head(make_cache: Any, backend: str, num_q_heads: int, num_kv_heads: int) -> None:
    """K/V head h holds h everywhere, so a wrong mapping is a wrong integer."""
    cache = make_cache([9, 2], num_q_heads, num_kv_heads, 64)
    heads = torch.arange(num_kv_heads, device=cache.q.device, dtype=torch.float16)
    cache.v_rows[:] = heads[:, None]
    out = paged_decode_attention(*cache.tensors, backend=backend)
    expected = heads.repeat_interleave(num_q_heads // num_kv_heads)[:, None].expand(num_q_heads, 64)
    assert torch.equal(out.round(), expected.expand_as(out))
    torch.testing.assert_close(out, expected.expand_as(out), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kv_dtype", [FP16, E4M3, INT8])
def test_layouts_give_the_same_bits(make_cache: Any, backend: str, kv_dtype: torch.dtype) -> None:
    """R45, R50: every stride is the tensor's own, so the same values in seven layouts give the same output."""
    cache = make_cache([70, 3, 0], 6, 2, 64, kv_dtype=kv_dtype)
    k, v = cache.k_rows, cache.v_rows
    num_rows, heads, dim = k.shape
    fill = 0x7F if kv_dtype in (E4M3, INT8) else torch.nan
    layers = torch.full((num_rows, 3, 2 * heads, dim), fill, dtype=k.dtype, device=k.device)
    layers[:, 1, :heads], layers[:, 1, heads:] = k, v
    padded = torch.full((num_rows + 5, 2 * heads + 1, dim + 4), fill, dtype=k.dtype, device=k.device)
    padded[5:, :heads, 2:-2], padded[5:, heads:-1, 2:-2] = k, v
    interleaved = torch.stack([k, v], dim=2)
    layouts = {
        "combined": (k, v),
        "split": (k.contiguous(), v.contiguous()),
        "transposed heads": tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)),
        "layer of many": (layers[:, 1, :heads], layers[:, 1, heads:]),
        "offset and padded": (padded[5:, :heads, 2:-2], padded[5:, heads:-1, 2:-2]),
        "interleaved": (interleaved[:, :, 0], interleaved[:, :, 1]),
        "k and v laid out differently": (k.transpose(0, 1).contiguous().transpose(0, 1), padded[5:, heads:-1, 2:-2]),
    }
    tags = {name: layout_tags(*rows, cache.row_table) for name, rows in layouts.items()}
    assert {name for name in tags if "kv:combined" in tags[name]} == {
        "combined",
        "layer of many",
        "offset and padded",
        "interleaved",
    }
    outputs = {
        name: paged_decode_attention(cache.q, *rows, cache.row_table, cache.seq_lens, **cache.scales, backend=backend)
        for name, rows in layouts.items()
    }
    check_decode(outputs["combined"], decode_reference(*cache.tensors, **cache.scales), kv_dtype=str(kv_dtype))
    assert [name for name, out in outputs.items() if not torch.equal(out, outputs["combined"])] == []


def test_strided_query_table_and_output(make_cache: Any, backend: str) -> None:
    """q out of a fused projection, a table and an output out of wider ones; what lies beside the output stays."""
    cache = make_cache([20, 7], 4, 2, 64)
    qkv = torch.randn(2, 8, 64, device=cache.q.device).half()
    cache.q = qkv[:, 2:6]
    wide = torch.full((4, cache.row_table.shape[1] + 2), -1, dtype=torch.int32, device=cache.q.device)
    wide[::2, : cache.row_table.shape[1]] = cache.row_table
    cache.row_table = wide[::2]
    beside = torch.full((2, 6, 70), 7.0, dtype=FP16, device=cache.q.device)
    out = beside[:, 1:5, :64]
    assert _checked(cache, backend, out=out) is out
    beside[:, 1:5, :64] = 7.0
    assert bool((beside == 7.0).all())


def test_scales_are_not_swapped(make_cache: Any, backend: str) -> None:
    cache = make_cache([40, 3], 4, 2, 64, kv_dtype=E4M3)
    bytes_of = torch.randn(cache.k_rows.shape[0], 4, 64).to(torch.float8_e4m3fn).view(torch.uint8)
    pool = bytes_of.to(cache.q.device)
    cache.k_rows, cache.v_rows, cache.scales = pool[:, :2], pool[:, 2:], {"k_scale": 0.5, "v_scale": 2.0}
    right = _checked(cache, backend)
    swapped = decode_reference(*cache.tensors, k_scale=2.0, v_scale=0.5)
    assert (right.double() - swapped).abs().max() > 0.1


def test_softmax_scale(make_cache: Any, backend: str) -> None:
    _checked(make_cache([40, 3], 4, 2, 64), backend, softmax_scale=0.5)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_every_e4m3_byte_decodes(backend: str, device: str, dtype: torch.dtype) -> None:
    """With a single token the output is V itself, so all 256 bytes come out as torch widens them, at even and odd places.

    The NaN bytes 0x7F and 0xFF give NaN.
    """
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    v_rows = torch.stack([every_byte, every_byte.roll(1)])[:, None]
    q = torch.ones(2, 1, 256, dtype=dtype, device=device)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    out = paged_decode_attention(q, torch.zeros_like(v_rows), v_rows, table, lens, backend=backend)
    widened = v_rows.view(torch.float8_e4m3fn).to(dtype)
    assert int(widened.isnan().sum()) == 4
    assert torch.equal(out.isnan(), widened.isnan())
    assert torch.equal(out.nan_to_num(), widened.nan_to_num())


@pytest.mark.parametrize("half", [0, 1])
def test_a_nan_key_byte_makes_nan(backend: str, device: str, half: int) -> None:
    rows = torch.full((3, 1, 32), 0x38, dtype=torch.uint8, device=device)
    k_rows, v_rows = rows.clone(), rows
    k_rows[1, 0, half] = 0xFF
    q = torch.ones(2, 1, 32, dtype=FP16, device=device)
    table = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32, device=device)
    lens = torch.tensor([2, 2], dtype=torch.int32, device=device)
    out = paged_decode_attention(q, k_rows, v_rows, table, lens, backend=backend)
    assert bool(out[0].isnan().all())
    assert torch.equal(out[1], torch.ones_like(out[1]))


def test_lengths_beyond_the_table_count_as_its_width(make_cache: Any, backend: str) -> None:
    cache = make_cache([12, 5], 2, 1, 64)
    cache.row_table = cache.row_table[:, :5].contiguous()
    out = paged_decode_attention(*cache.tensors, backend=backend)
    cache.seq_lens = torch.full_like(cache.seq_lens, 5)
    assert torch.equal(out, paged_decode_attention(*cache.tensors, backend=backend))


def test_empty_batch_and_empty_table(make_cache: Any, backend: str) -> None:
    cache = make_cache([4, 4], 2, 1, 64)
    none = paged_decode_attention(cache.q[:0], cache.k_rows, cache.v_rows, cache.row_table[:0], cache.seq_lens[:0], backend=backend)
    assert none.shape == (0, 2, 64)
    cache.row_table, cache.seq_lens = cache.row_table[:, :0], torch.zeros_like(cache.seq_lens)
    out = paged_decode_attention(*cache.tensors, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))


def test_large_scores_do_not_overflow(make_cache: Any, backend: str) -> None:
    """Scores of some hundreds: without the running maximum exp would be inf."""
    cache = make_cache([130], 2, 1, 64)
    cache.q *= 60
    _checked(cache, backend)
