# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton device functions that read and write e4m3 bytes.

e4m3 has a sign, four exponent bits of bias 7, three mantissa bits, no infinity; 0x7F and 0xFF are NaN. Every value of
it, also times 2**-8, is exact in fp16 and in bf16.

Source:
    Micikevicius et al. 2022, arXiv:2209.05433.
"""

import functools
import math
import struct

import torch
import triton
import triton.language as tl

from rapid_llm.kernels.launch import interpreted

__all__ = ["PORTABLE_GAIN", "inverse_parts", "multiply_add", "narrow_to_e4m3", "scale_factors", "widen_e4m3_pair"]

PORTABLE_GAIN = 256.0
"""Factor that the portable widening leaves to its caller."""

_SMALLEST_INVERTED, _LARGEST_INVERTED = 2.0**-60, 2.0**60
_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())


@triton.jit
def widen_e4m3_pair(pair, dtype: tl.constexpr, CONVERT: tl.constexpr):
    """Widens two neighbouring e4m3 bytes, loaded as one int16.

    16-bit elements keep `ldmatrix` legal for a following dot, and one byte permutation and two packed conversions widen
    four bytes in registers, in the layout of the dot's operand.

    Args:
        pair: int16 tensor; the low byte is the even element.
        dtype: fp16 or bf16.
        CONVERT: Whether to use `cvt.rn.f16x2.e4m3x2` (compute capability 8.9 on); otherwise bit arithmetic.

    Returns:
        (even, odd) of `dtype`: the values, or where not CONVERT the values times 2**-8 (`PORTABLE_GAIN`).
    """
    if CONVERT:
        even, odd = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 split;
            .reg .b16 evens, odds;
            prmt.b32 split, $2, 0, 0x3120;
            mov.b32 {evens, odds}, split;
            cvt.rn.f16x2.e4m3x2 $0, evens;
            cvt.rn.f16x2.e4m3x2 $1, odds;
            }
            """,
            constraints="=r,=r,r",
            args=[pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = pair.to(tl.int32)
        even = _e4m3_to_fp16_bits(bits & 0xFF).to(tl.float16, bitcast=True)
        odd = _e4m3_to_fp16_bits((bits >> 8) & 0xFF).to(tl.float16, bitcast=True)
    if dtype == tl.bfloat16:
        # By way of fp32, which the hardware converts to bf16; both steps are exact here.
        even = even.to(tl.float32).to(tl.bfloat16)
        odd = odd.to(tl.float32).to(tl.bfloat16)
    return even, odd


@triton.jit
def _e4m3_to_fp16_bits(byte):
    """int32 byte -> int16 bits of an fp16 that is 2**-8 of the value: exponent bias 7 read as bias 15."""
    magnitude = byte & 0x7F
    # The bits alone would make 480 * 2**-8 of the NaN byte.
    widened = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7)
    return (((byte & 0x80) << 8) | widened).to(tl.int16)


@triton.jit
def narrow_to_e4m3(values, factor, rest, CONVERT: tl.constexpr, DIVIDE: tl.constexpr):
    """values / scale as e4m3 bytes: rounded to fp32, then to nearest even, saturated to +-448; NaN keeps its sign.

    Args:
        values: fp16, bf16 or fp32 tensor.
        factor, rest: fp32 scalars of `scale_factors`.
        CONVERT: Whether to use the hardware's conversion (compute capability 8.9 on); otherwise integer arithmetic, of
            the same result in every bit.
        DIVIDE: Of `scale_factors`.

    Returns:
        uint8 tensor.
    """
    wide = values.to(tl.float32)
    quotient = _quotient(wide, factor, rest, DIVIDE)
    # From the bits that came in: a conversion or a division may lose the sign of a NaN.
    if values.dtype.primitive_bitwidth == 16:
        signs = values.to(tl.int16, bitcast=True)
    else:
        signs = (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    if CONVERT:
        return _convert_to_e4m3(quotient, signs)
    positive = tl.minimum(tl.abs(quotient), 448.0)
    positive_bits = positive.to(tl.int32, bitcast=True)
    # Round the mantissa to three bits, carrying into the exponent; 960 is the difference of the biases, 120 << 3.
    normal = ((positive_bits + 0x7FFFF + ((positive_bits >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the steps are 2**-9, the last place of an fp32 at 2**14: the addition rounds.
    subnormal = (positive + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    magnitude = tl.where(positive < 0.015625, subnormal, normal)
    magnitude = tl.where(quotient != quotient, 0x7F, magnitude)
    return (magnitude | ((signs.to(tl.int32) >> 8) & 0x80)).to(tl.uint8)


@triton.jit
def _quotient(wide, factor, rest, DIVIDE: tl.constexpr):
    if DIVIDE:
        # The operands are broadcast by hand because div_rn needs them of one shape.
        return tl.div_rn(wide, tl.zeros_like(wide) + factor)
    return multiply_add(wide, factor, wide * rest)


@triton.jit
def multiply_add(x, factor, addend):
    """fp32 x * factor + addend, rounded once."""
    if _INTERPRETED:
        # The interpreter rounds a product before it adds. In fp64 the product is exact.
        return (x.to(tl.float64) * factor + addend).to(tl.float32)
    return tl.fma(x, tl.zeros_like(x) + factor, addend)


@triton.jit
def _convert_to_e4m3(quotient, signs):
    """fp32 tensor and int16 tensor of its signs -> uint8 tensor, in four instructions for four elements."""
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b16 first, second;
        .reg .b32 magnitudes, signs;
        cvt.rn.satfinite.e4m3x2.f32 first, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 second, $4, $3;
        mov.b32 magnitudes, {first, second};
        prmt.b32 signs, $5, $6, 0x7531;
        lop3.b32 $0, magnitudes, signs, 0x7f7f7f7f, 0xe4;
        }
        """,
        constraints="=r,f,f,f,f,r,r",
        args=[quotient, signs],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@functools.lru_cache(maxsize=1024)
def scale_factors(dtype: torch.dtype, *scales: float) -> tuple[tuple[tuple[float, float], ...], bool]:
    """What `narrow_to_e4m3` divides by scales with.

    A division takes a thread some forty instructions. For 16-bit values two suffice, with the inverse of the scale in two
    parts: x * factor + x * rest, rounded once, is within 2**-45 of the quotient before that rounding. It falls on the same
    side of every border between two e4m3 values as the fp32 quotient does: tests/kernels/test_e4m3_quotient.py shows it for
    all 2**23 mantissas of a scale and all 16-bit values. A product with the rounded inverse alone does not. The upper part is
    less than the inverse, so that the rest is positive and an infinity stays one.

    Args:
        dtype: Of the values: fp16, bf16 or fp32.
        scales: Finite and positive, normal in fp32.

    Returns:
        (factor, rest) of each scale and DIVIDE: False where these are the parts of its inverse; True for fp32 values and where the exponent
        of a scale leaves no room for exact steps, and then they are the fp32 scale and 0.
    """
    rounded = [_to_fp32(scale) for scale in scales]
    divide = dtype == torch.float32 or not all(_SMALLEST_INVERTED <= scale <= _LARGEST_INVERTED for scale in rounded)
    return tuple((scale, 0.0) if divide else inverse_parts(scale) for scale in rounded), divide


@functools.lru_cache(maxsize=1024)
def inverse_parts(scale: float) -> tuple[float, float]:
    """fp32 (upper, lower) of 1 / scale: the next fp32 below it, and what is missing.

    Args:
        scale: An fp32 value between 2**-60 and 2**60.
    """
    upper = _to_fp32(1.0 / scale)
    if upper * scale >= 1.0:  # exact in fp64, as both have 24 bits
        mantissa, exponent = math.frexp(upper)
        upper = math.ldexp(mantissa - (2**-24 if mantissa > 0.5 else 2**-25), exponent)
    return upper, _to_fp32((1.0 - upper * scale) / scale)


def _to_fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
