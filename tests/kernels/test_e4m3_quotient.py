"""The two-instruction quotient of the e4m3 writes: proven for every scale and every 16-bit value, without the kernel's own arithmetic.

The byte of a quotient turns on which side of a border between two neighbouring e4m3 values it lies. The borders have five significant bits,
16-bit values have eleven (fp16; fp16's subnormals and bf16 have fewer), scales have 24, and within the admitted exponents a power of two
changes no mantissa. So 16 borders times 2**23 scales, each with the one value that comes close to their product, are all there is to look
at: elsewhere the quotient is further from a border than any rounding reaches.
"""

import fractions
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from rapid_llm.kernels.e4m3 import inverse_parts, scale_factors
from rapid_llm.kernels.ops import quantize_e4m3

_CHUNK = 1 << 20
_NEAR_BITS = 20
"""Values and borders further apart than 2**-20 of the border are told apart by arithmetic that is right to 2**-22."""


def _fp32(x: Any) -> Any:
    return x.astype(np.float32).astype(np.float64)


def _inverse_parts(scale: Any) -> tuple[Any, Any]:
    """`inverse_parts` of a float64 array that holds fp32 values."""
    upper = (1.0 / scale).astype(np.float32)
    upper = np.where(upper.astype(np.float64) * scale >= 1.0, np.nextafter(upper, np.float32(0)), upper).astype(np.float64)
    return upper, _fp32((1.0 - upper * scale) / scale)


def _fused(x: Any, factor: Any, addend: Any) -> Any:
    """fp32 x * factor + addend with one rounding, for positive operands; the product is exact in fp64.

    The sum is rounded to odd, with the error that the sum of two fp64 leaves: then the rounding to fp32 is as of the exact sum.
    """
    product = x * factor
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits % 2 == 0)
    return _fp32(np.where(inexact, (bits + np.where(error > 0, 1, -1)).view(np.float64), total))


def _close_cases(first: int) -> Any:
    """(border, scale, value) triples of a chunk of scales in [1, 2), where the value is close to border * scale."""
    scales = np.arange(first, first + _CHUNK, dtype=np.int64)
    for border in range(16, 32):
        products = scales * border
        drop = np.where(products >= 1 << 28, 18, 17)  # 28 or 29 bits, of which a value keeps eleven
        values = ((products + (1 << (drop - 1))) >> drop) << drop
        close = np.abs(values - products) << _NEAR_BITS <= products
        yield border / 16, scales[close] / 2.0**23, values[close] / 2.0**27


def test_every_scale_and_every_16_bit_value() -> None:
    """The quotient falls on the same side of every border as the fp32 division, on the border included; a rounded inverse does not."""
    cases = wrong = wrong_with_the_inverse = 0
    for first in range(1 << 23, 1 << 24, _CHUNK):
        for border, scale, x in _close_cases(first):
            upper, lower = _inverse_parts(scale)
            divided = _fp32(x.astype(np.float32) / scale.astype(np.float32))
            quotient = _fused(x, upper, _fp32(x * lower))
            cases += len(x)
            wrong += int((np.sign(quotient - border) != np.sign(divided - border)).sum())
            wrong_with_the_inverse += int((np.sign(_fp32(x * _fp32(1.0 / scale)) - border) != np.sign(divided - border)).sum())
    assert wrong == 0
    assert cases > 100_000
    assert wrong_with_the_inverse > 1000, "the cases do not tell a product from a division"


def test_parts_are_those_of_the_proof_at_every_exponent() -> None:
    """The launcher's parts are the proven ones times a power of two, lie below the inverse and miss less than 2**-46 of it."""
    draw = random.Random(1)
    for _ in range(2000):
        mantissa, exponent = draw.choice([1.0, 2 - 2**-23, 1 + draw.getrandbits(23) * 2.0**-23]), draw.randint(-60, 59)
        scale = math.ldexp(mantissa, exponent)
        upper, lower = inverse_parts(scale)
        proven = [float(part[0]) for part in _inverse_parts(np.array([mantissa]))]
        assert [math.ldexp(part, exponent) for part in (upper, lower)] == proven
        inverse = 1 / fractions.Fraction(scale)
        assert 0 < fractions.Fraction(upper) < inverse
        assert lower > 0
        assert abs(fractions.Fraction(upper) + fractions.Fraction(lower) - inverse) < inverse * fractions.Fraction(1, 2**46)
        assert _fp32(np.array([upper, lower])).tolist() == [upper, lower]


def test_what_is_divided_and_what_is_multiplied() -> None:
    assert scale_factors(torch.float16, 0.3, 2.0) == ((inverse_parts(float(np.float32(0.3))), inverse_parts(2.0)), False)
    assert scale_factors(torch.float32, 0.5) == (((0.5, 0.0),), True)
    for extreme in (2.0**-61, 2.0**61, 2.0**-126, 3e38):
        (first, second), divide = scale_factors(torch.bfloat16, 1.0, extreme)
        assert (first, second[1], divide) == ((1.0, 0.0), 0.0, True)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-61, 2.0**-60, 1e-7, 0.3, 0.1 + 2**-20, 1.0, 7.0, 1e9, 2.0**60, 2.0**61, 3e38])
def test_all_16_bit_values_at_scales_of_every_size(backend: str, device: str, dtype: torch.dtype, scale: float) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    written = quantize_e4m3(every, scale, backend=backend)
    quotient = every.float() / torch.tensor(scale, dtype=torch.float32, device=device)
    expected = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    negative = (every.view(torch.int16) < 0).to(torch.uint8) * 0x80
    assert torch.equal(written, torch.where(every.isnan(), negative + 0x7F, expected))


def test_cases_of_the_proof_on_the_kernel(backend: str, device: str) -> None:
    """fp16 values that a product with the rounded inverse gets wrong, each at the scale at which it does."""
    found = 0
    for border, scale, x in _close_cases(1 << 23):
        divided = _fp32(x.astype(np.float32) / scale.astype(np.float32))
        product = _fp32(x * _fp32(1.0 / scale))
        hard = np.flatnonzero(np.sign(product - border) != np.sign(divided - border))[:2]
        for place in hard:
            values = torch.tensor([x[place], -x[place], x[place] * 2**-7], device=device).half()
            assert torch.equal(values[:1].double().cpu(), torch.tensor([x[place]]))
            quotient = values.float() / torch.tensor(scale[place], dtype=torch.float32, device=device)
            written = quantize_e4m3(values, float(scale[place]), backend=backend)
            assert torch.equal(written, quotient.to(torch.float8_e4m3fn).view(torch.uint8))
            found += 1
    assert found >= 8
