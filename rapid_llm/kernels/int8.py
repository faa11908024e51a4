# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton device functions that read and write int8 bytes with a scale a head.

A byte stands for itself times its head's scale; -128 is read and never written, so that the range is symmetric. Every byte is exact in
fp16 and in bf16.
"""

import triton
import triton.language as tl

from rapid_llm.kernels.e4m3 import multiply_add
from rapid_llm.kernels.launch import interpreted

__all__ = ["narrow_to_int8", "scales_of_elements", "widen_int8_pair"]

_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
_MAGIC: tl.constexpr = tl.constexpr(1.5 * 2**23)
"""An fp32 at 2**23 has steps of 1: the addition rounds to nearest even, and the low byte of the sum is the integer."""


@triton.jit
def widen_int8_pair(pair, dtype: tl.constexpr):
    """Widens two neighbouring int8 bytes, loaded as one int16, as `rapid_llm.kernels.e4m3.widen_e4m3_pair` does e4m3 ones.

    An fp16 between 1024 and 2048 has steps of 1, so that a byte with its sign turned is the mantissa of 1152 + byte: no conversion.

    Args:
        pair: int16 tensor; the low byte is the even element.
        dtype: fp16 or bf16.

    Returns:
        (even, odd) of `dtype`.
    """
    if _INTERPRETED:
        bits = pair.to(tl.int32)
        even = ((bits & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
        odd = (((bits >> 8) & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0
        even = even.to(tl.float16)
        odd = odd.to(tl.float16)
    else:
        # Four bytes in five instructions: 0x6a is (a & b) ^ c, and 0x6480 is the fp16 1152.
        even, odd = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 evens, odds, shifted;
            shr.u32 shifted, $2, 8;
            lop3.b32 evens, $2, 0x00ff00ff, 0x64806480, 0x6a;
            lop3.b32 odds, shifted, 0x00ff00ff, 0x64806480, 0x6a;
            mov.b32 shifted, 0x64806480;
            sub.rn.f16x2 $0, evens, shifted;
            sub.rn.f16x2 $1, odds, shifted;
            }
            """,
            constraints="=r,=r,r",
            args=[pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    if dtype == tl.bfloat16:
        # By way of fp32, which the hardware converts to bf16; both steps are exact here.
        even = even.to(tl.float32).to(tl.bfloat16)
        odd = odd.to(tl.float32).to(tl.bfloat16)
    return even, odd


@triton.jit
def scales_of_elements(scale_ptr, NUM_ELEMENTS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """The scale of each element of a block of a token's heads, and its inverse, which is found once for RUN elements of a head.

    Args:
        scale_ptr: fp32 [num_kv_heads].
        NUM_ELEMENTS: num_kv_heads * HEAD_DIM.
        BLOCK: Elements of the block; the second program id is which.
        RUN: Divides BLOCK and HEAD_DIM.

    Returns:
        (inverse, scale): fp32 [BLOCK].
    """
    first = tl.program_id(1) * BLOCK + RUN * tl.arange(0, BLOCK // RUN)
    scale = tl.load(scale_ptr + first // HEAD_DIM, mask=first < NUM_ELEMENTS, other=1.0)
    inverse = 1.0 / scale
    # Mended, since the device's own is off by some of the last place; without the branches of a division that is rounded right, so that
    # the values are asked for before the scale is here.
    inverse = multiply_add(inverse, multiply_add(-inverse, scale, 1.0), inverse)
    return _repeated(inverse, BLOCK, RUN), _repeated(scale, BLOCK, RUN)


@triton.jit
def _repeated(values, BLOCK: tl.constexpr, RUN: tl.constexpr):
    return tl.reshape(tl.broadcast_to(values[:, None], [BLOCK // RUN, RUN]), [BLOCK])


@triton.jit
def narrow_to_int8(values, inverse, scale):
    """values / scale as int8 bytes: rounded to fp32, then to nearest even, saturated to +-127; NaN gives 0.

    A product with the inverse, mended by what is exactly missing times the inverse, is the quotient of a division where the inverse is
    rounded right. Where it is a place off, the byte is still that of the division: tests/kernels/test_int8.py holds it for every 16-bit
    value and scale whose quotient lies by a border between two bytes, with one exception: a power of two over a scale whose mantissa bits
    are all set, where the quotient is half a place above 1/2, may give 0 and not 1 (it does in Triton's interpreter, not on an H200).

    Args:
        values: fp16 or bf16 tensor.
        inverse, scale: fp32 tensors that broadcast with it; 1 / scale within a unit in the last place, and scale, between 2**-60 and 2**60.

    Returns:
        int8 tensor.

    Source:
        Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor", IBM J. Res. Dev. 34(1).
    """
    wide = values.to(tl.float32)
    # Saturated before it is divided: an infinity would miss itself.
    largest = 127.0 * scale
    inside = tl.minimum(tl.maximum(tl.where(wide == wide, wide, 0.0), -largest), largest)
    near = inside * inverse
    quotient = multiply_add(multiply_add(near, -scale, inside), inverse, near)
    return (quotient + _MAGIC).to(tl.int32, bitcast=True).to(tl.int8)
