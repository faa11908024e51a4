"""The e4m3 codec, bit for bit against torch's cast of the clamped value (R8, R49)."""

import math
from typing import Any

import pytest
import torch

from asv_bench.verify import check_e4m3
from rapid_llm.errors import ScaleError
from rapid_llm.kernels.ops import e4m3_scale, quantize_e4m3

SPECIAL = [0.0, -0.0, 2**-9, 2**-10, 447.0, 448.0, 449.0, 464.0, 465.0, 1e4, math.inf, -math.inf, math.nan]
SPECIAL_BYTES = [0x00, 0x80, 0x01, 0x00, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F]

# Values that are NaN or overflow on purpose make numpy, which the interpreter computes with, warn.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning:triton.runtime.interpreter")


def _expected(x: torch.Tensor, scale: float) -> torch.Tensor:
    quotient = x.float() / torch.tensor(scale, dtype=torch.float32, device=x.device)
    stored = quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    # By the bits, because torch.signbit of an fp16 NaN is wrong on CUDA.
    negative = x.view(torch.int16 if x.element_size() == 2 else torch.int32) < 0
    return torch.where(x.isnan(), 0x7F | (negative * 0x80).to(torch.uint8), stored)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.013])
def test_all_values_of_a_16_bit_dtype(backend: str, device: str, dtype: torch.dtype, scale: float) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    written = quantize_e4m3(every, scale, backend=backend)
    assert torch.equal(written, _expected(every, scale))
    check_e4m3(written, every, scale, what="quantize")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_special_values(backend: str, device: str, dtype: torch.dtype) -> None:
    """Finite input never gives a NaN byte; anything beyond 448 saturates; NaN stays NaN; half a step rounds to even."""
    x = torch.tensor(SPECIAL, dtype=dtype, device=device)
    assert quantize_e4m3(x, 1.0, backend=backend).tolist() == SPECIAL_BYTES


def test_fp32_extremes(backend: str, device: str) -> None:
    x = torch.tensor([3e38, -3e38, 1e-45, -1e-45, 1.5 * 2**-9, 2.5 * 2**-9, 2**-6 - 2**-11], device=device)
    assert quantize_e4m3(x, 1.0, backend=backend).tolist() == [0x7E, 0xFE, 0x00, 0x80, 0x02, 0x02, 0x08]
    assert quantize_e4m3(x[:2], 1e-30, backend=backend).tolist() == [0x7E, 0xFE]


def test_true_division_not_the_reciprocal(backend: str, device: str) -> None:
    """Among these a product with the fp32 reciprocal rounds to another byte; the contract is value / scale."""
    scale = 0.3
    near_ties = (torch.arange(8.5, 16, 1) * scale).repeat(4)
    x = (near_ties.view(torch.int32) + torch.arange(-2, 2).repeat_interleave(8).int()).view(torch.float32).to(device)
    fp32_scale = torch.tensor(scale, device=device)
    by_product = (x * (1 / fp32_scale)).to(torch.float8_e4m3fn).view(torch.uint8)
    assert not torch.equal(by_product, _expected(x, scale))
    assert torch.equal(quantize_e4m3(x, scale, backend=backend), _expected(x, scale))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:3],
        lambda x: x[::2],
        lambda x: x[:, :, 4:],
        lambda x: x.transpose(0, 1),
        lambda x: x[0, 0, :3],
        lambda x: x[2, 1, 5].reshape(()),
        lambda x: x[:0],
        lambda x: x[:, None, :, None],
        lambda x: x.view(2, 3, 2, 2, 8)[:, 1:, :, ::2],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shapes_and_strides(backend: str, device: str, view: Any, dtype: torch.dtype) -> None:
    """Case 30, in every dtype: 16 bits are quantised by another way than 32, and once took a row's number for a part of the scale."""
    x = view(torch.randn(6, 4, 8, device=device).to(dtype))
    written = quantize_e4m3(x, 0.1, backend=backend)
    assert written.shape == x.shape
    assert written.is_contiguous()
    assert torch.equal(written, _expected(x, 0.1))


def test_several_programs_and_a_ragged_end(backend: str, device: str) -> None:
    x = torch.randn(3, 2049, device=device).half()
    out = torch.empty(3, 2049, dtype=torch.uint8, device=device)
    assert quantize_e4m3(x, 0.02, out=out, backend=backend) is out
    assert torch.equal(out, _expected(x, 0.02))


def test_scale_maps_the_largest_magnitude_to_448(backend: str, device: str) -> None:
    x = torch.randn(100, device=device).half() * 30
    scale = e4m3_scale(x)
    assert scale == pytest.approx(float(x.abs().max()) / 448)
    written = quantize_e4m3(x, scale, backend=backend)
    assert int((written & 0x7F).max()) == 0x7E
    assert check_e4m3(written, x, scale, what="round trip") <= float(x.abs().max()) / 16


@pytest.mark.parametrize("shape", [(4, 8), (0,)])
def test_zeros_have_scale_one_and_quantise_to_zeros(backend: str, device: str, shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape, device=device)
    assert e4m3_scale(zeros) == 1.0
    assert not quantize_e4m3(zeros, e4m3_scale(zeros), backend=backend).any()


def test_scale_of_tiny_values_is_a_scale_that_is_accepted(backend: str, device: str) -> None:
    tiny = torch.full((4,), 1e-44, device=device)
    assert not quantize_e4m3(tiny, e4m3_scale(tiny), backend=backend).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scale_of_what_is_not_finite(device: str, bad: float) -> None:
    with pytest.raises(ScaleError, match="e4m3_scale expected finite values"):
        e4m3_scale(torch.tensor([1.0, bad], device=device))
