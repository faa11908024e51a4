# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton device functions that read and write e4m3 bytes.

e4m3 has a sign, four exponent bits of bias 7, three mantissa bits, no infinity; 0x7F and 0xFF are NaN. Every value of
it, also times 2**-8, is exact in fp16 and in bf16.

Source:
    Micikevicius et al. 2022, arXiv:2209.05433.
"""

import triton
import triton.language as tl

__all__ = ["PORTABLE_GAIN", "narrow_to_e4m3", "widen_e4m3_pair"]

PORTABLE_GAIN = 256.0
"""Factor that the portable widening leaves to its caller."""


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
def narrow_to_e4m3(values, scale, CONVERT: tl.constexpr):
    """values / scale as e4m3 bytes: rounded to nearest even, saturated to +-448; NaN keeps its sign.

    Args:
        values: fp16, bf16 or fp32 tensor.
        scale: fp32 scalar.
        CONVERT: Whether to use the hardware's conversion (compute capability 8.9 on); otherwise integer arithmetic, of
            the same result in every bit.

    Returns:
        uint8 tensor.
    """
    # A true division: the reciprocal's product differs from it in the last bit, and a rounding turns on that.
    # The operands are broadcast by hand because div_rn needs them of one shape.
    wide = values.to(tl.float32)
    quotient = tl.div_rn(wide, tl.zeros_like(wide) + scale)
    clamped = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
    # From the bits that came in: a conversion or a division may lose the sign of a NaN.
    if values.dtype.primitive_bitwidth == 16:
        sign = (values.to(tl.int16, bitcast=True).to(tl.int32) >> 8) & 0x80
    else:
        sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    if CONVERT:
        magnitude = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) & 0x7F
    else:
        positive = tl.abs(clamped)
        positive_bits = positive.to(tl.int32, bitcast=True)
        # Round the mantissa to three bits, carrying into the exponent; 960 is the difference of the biases, 120 << 3.
        normal = ((positive_bits + 0x7FFFF + ((positive_bits >> 20) & 1)) >> 20) - 960
        # Below 2**-6 the steps are 2**-9, the last place of an fp32 at 2**14: the addition rounds.
        subnormal = (positive + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        magnitude = tl.where(positive < 0.015625, subnormal, normal)
    magnitude = tl.where(quotient != quotient, 0x7F, magnitude)
    return (magnitude | sign).to(tl.uint8)
