"""int8 bytes with a scale a head, of every backend: each byte read, each border between two bytes written (R8, R53)."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from asv_bench.verify import check_decode, decode_reference
from rapid_llm.kernels.ops import int8_scales, kv_write, paged_decode_attention

FP16, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_every_int8_byte_decodes(backend: str, device: str, dtype: torch.dtype) -> None:
    """With a single token the output is V itself, so all 256 bytes come out as themselves, -128 too, at even and odd places."""
    every_byte = torch.arange(-128, 128, device=device).to(INT8)
    v_rows = torch.stack([every_byte, every_byte.roll(1)])[:, None]
    q = torch.ones(2, 1, 256, dtype=dtype, device=device)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    out = paged_decode_attention(q, torch.zeros_like(v_rows), v_rows, table, lens, k_scale=one, v_scale=one, backend=backend)
    assert torch.equal(out, v_rows.to(dtype))


def test_heads_and_k_and_v_each_have_their_own_scale(make_cache: Any, backend: str) -> None:
    """Scales that are exchanged, between heads or between K and V, are far from what comes out."""
    cache = make_cache([40, 3], 4, 2, 64, kv_dtype=INT8)
    cache.scales = {"k_scale": torch.tensor([0.004, 0.02]), "v_scale": torch.tensor([2.0, 0.1])}
    cache.scales = {name: scale.to(cache.q.device) for name, scale in cache.scales.items()}
    out = paged_decode_attention(*cache.tensors, **cache.scales, backend=backend)
    check_decode(out, decode_reference(*cache.tensors, **cache.scales), kv_dtype="int8")
    k_scale, v_scale = cache.scales.values()
    for wrong in ((k_scale.flip(0), v_scale), (k_scale, v_scale.flip(0)), (v_scale, k_scale)):
        other = decode_reference(*cache.tensors, k_scale=wrong[0], v_scale=wrong[1])
        assert (out.double() - other).abs().max() > 0.1


def test_scales_may_lie_anywhere(make_cache: Any, backend: str) -> None:
    """A layer's row of the scales of all layers: its address is a multiple of 4 bytes only."""
    cache = make_cache([20, 7], 6, 3, 32, kv_dtype=INT8)
    reference = paged_decode_attention(*cache.tensors, **cache.scales, backend=backend)
    layers = torch.full((4, 2, 3), torch.nan, device=cache.q.device)
    layers[1, 0], layers[1, 1] = cache.scales["k_scale"], cache.scales["v_scale"]
    moved = {"k_scale": layers[1, 0], "v_scale": layers[1, 1]}
    assert torch.equal(paged_decode_attention(*cache.tensors, **moved, backend=backend), reference)


def test_other_values_of_scales_are_seen_by_a_like_call(make_cache: Any, backend: str) -> None:
    """Also where the tensors are the same: their values are on the device."""
    cache = make_cache([20, 7], 4, 2, 32, kv_dtype=INT8)
    for _ in range(3):
        out = paged_decode_attention(*cache.tensors, **cache.scales, backend=backend)
        check_decode(out, decode_reference(*cache.tensors, **cache.scales), kv_dtype="int8")
        cache.scales["v_scale"] *= 3.0
        cache.scales = {"k_scale": cache.scales["k_scale"] / 2.0, "v_scale": cache.scales["v_scale"]}


def written(values: torch.Tensor, scales: torch.Tensor, backend: str) -> torch.Tensor:
    """What a write leaves of values [num_tokens, num_kv_heads, head_dim], as K; as V their negation has to be the negation of it."""
    rows = torch.full((2, *values.shape), 99, dtype=INT8, device=values.device)
    slots = torch.arange(values.shape[0], device=values.device)
    kv_write(values, -values, slots, rows[0], rows[1], k_scale=scales, v_scale=scales, backend=backend)
    assert torch.equal(rows[0], -rows[1])
    return rows[0]


def test_what_no_rounding_reaches_saturates_and_nan_is_0(backend: str, device: str) -> None:
    """-128 is never written."""
    steps = [127.4, 127.5, 128.0, 1e4, math.inf, -127.4, -127.5, -128.0, -1e4, -math.inf, math.nan, 0.0, -0.0, 126.5, 126.4, -0.5]
    values = torch.tensor(steps, device=device).to(FP16).view(1, 1, 16)
    expected = [127] * 5 + [-127] * 5 + [0, 0, 0, 126, 126, 0]
    assert written(values, torch.ones(1, device=device), backend).flatten().tolist() == expected
    nan = torch.tensor([0x7E00, -0x200, 0x7C01, -0x1], dtype=torch.int16, device=device).view(FP16).view(1, 1, 4)
    assert written(nan, torch.ones(1, device=device), backend).flatten().tolist() == [0] * 4


@pytest.mark.parametrize("scale", [2.0**-12, 0.25, 1.0, 8.0])
def test_ties_go_to_the_even_byte(backend: str, device: str, scale: float) -> None:
    halves = torch.arange(-253, 254, 2, device=device) * 0.5
    values = (halves * scale).to(FP16).view(1, 1, -1)
    assert torch.equal(values.double().flatten(), halves.double() * scale)  # these are exact
    assert torch.equal(written(values, torch.tensor([scale], device=device), backend).flatten(), halves.round().to(INT8))


def by_borders() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values of 11 bits and scales of 24 whose quotient is within some units in the last place of a half-integer up to 127.5: all such, but
    for powers of two of both. The quotient of two mantissas is by a border with a numerator B in one binade, so the scales follow."""
    numerators, values = np.meshgrid(np.arange(1, 256, 2), np.arange(1024, 2048), indexing="ij")
    found = []
    exponent = 23 - np.floor(np.log2(values / numerators)).astype(np.int64)
    for more in (-1, 0, 1):
        nearest = (values << (exponent + more)) // numerators
        for step in range(-3, 5):
            scales = nearest + step
            kept = (scales >= 1 << 23) & (scales < 1 << 24)
            found.append((np.ldexp(values.astype(np.float64), exponent + more - 1)[kept], scales[kept]))
    x, s = (np.concatenate(part) for part in zip(*found, strict=True))
    return x, s.astype(np.float64)


def test_a_byte_is_that_of_a_division_at_every_border(device: str) -> None:
    """The Triton write gives the byte of the fp32 quotient wherever that could turn on its last place, with one exception, which is stated.

    The exception: a power of two over a scale with all mantissa bits set, a quotient of 1/2 and half a place, gives 0 where the inverse
    before it is mended is rounded right, as it is in the interpreter. On a GPU it is the device's own, and an H200 gives 1.
    """
    x, s = by_borders()
    assert len(x) > 900_000
    # Values are brought to fp16's range: exact, and so are the scales.
    exponent = np.frexp(x)[1]
    values = torch.from_numpy(np.ldexp(x, -exponent)).to(device=device, dtype=FP16)
    scales = torch.from_numpy(np.ldexp(s, -exponent)).to(device=device, dtype=torch.float32)
    assert torch.equal(values.double().cpu(), torch.from_numpy(np.ldexp(x, -exponent)))
    assert torch.equal(scales.double().cpu(), torch.from_numpy(np.ldexp(s, -exponent)))
    heads = 1 << 17
    padding = -len(values) % heads
    shaped = [torch.nn.functional.pad(part, (0, padding), value=1.0).view(-1, heads, 1) for part in (values, scales)]
    exceptions = 0
    for token_values, token_scales in zip(*shaped, strict=True):
        expected = written(token_values[None], token_scales.flatten(), "torch")
        got = written(token_values[None], token_scales.flatten(), "triton")
        for value, scale in zip(token_values[expected[0] != got[0]].tolist(), token_scales[expected[0] != got[0]].tolist(), strict=True):
            assert (math.frexp(value)[0], math.frexp(scale)[0]) == (0.5, 1.0 - 2.0**-24)
            exceptions += 1
    assert exceptions == 1 if device == "cpu" else exceptions <= 1


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_backends_write_the_same_bytes(device: str, dtype: torch.dtype) -> None:
    """Of every finite 16-bit pattern over scales of many binades."""
    patterns = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype).view(16, 64, 64)
    scales = torch.exp2(torch.randn(64, device=device) * 6)
    assert torch.equal(written(patterns, scales, "torch"), written(patterns, scales, "triton"))


def test_scales_map_the_largest_magnitude_of_each_head_to_127(device: str) -> None:
    x = torch.randn(5, 3, 16, device=device).half()
    x[:, 2] = 0.0
    scales = int8_scales(x)
    assert scales.dtype == torch.float32
    assert scales.tolist() == [*(x[:, :2].float().abs().amax((0, 2)) / 127).tolist(), 1.0]
    assert int8_scales(x[0]).tolist() == int8_scales(x[:1]).tolist()
    stored = written(x, scales, "torch")
    assert stored[:, :2].abs().amax((0, 2)).tolist() == [127, 127]
    x[1, 0, 0] = torch.nan
    assert int8_scales(x).isnan().tolist() == [True, False, False]
