"""A wrong argument gives one sentence that says what was expected, what came, and what to do; nothing is launched."""

import math
from typing import Any

import pytest
import torch

from rapid_llm.errors import DTypeError, NoKernelError, RapidLLMError, ScaleError, ShapeError
from rapid_llm.kernels.ops import (
    decode_request,
    e4m3_scale,
    int8_scales,
    kv_write,
    paged_decode_attention,
    quantize_e4m3,
    write_request,
)


def decode_arguments(num_q_heads: int = 4, num_kv_heads: int = 2, **changes: Any) -> dict[str, Any]:
    arguments = {
        "q": torch.zeros(3, num_q_heads, 64, dtype=torch.float16),
        "k_rows": torch.zeros(10, num_kv_heads, 64, dtype=torch.float16),
        "v_rows": torch.zeros(10, num_kv_heads, 64, dtype=torch.float16),
        "row_table": torch.zeros(3, 5, dtype=torch.int32),
        "seq_lens": torch.ones(3, dtype=torch.int32),
    }
    return {**arguments, **changes}


def write_arguments(**changes: Any) -> dict[str, Any]:
    arguments = {
        "k": torch.zeros(3, 2, 64, dtype=torch.float16),
        "v": torch.zeros(3, 2, 64, dtype=torch.float16),
        "slot_mapping": torch.arange(3),
        "k_rows": torch.zeros(10, 2, 64, dtype=torch.float16),
        "v_rows": torch.zeros(10, 2, 64, dtype=torch.float16),
    }
    return {**arguments, **changes}


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": half(3, 4)}, ShapeError, r"q \[batch, num_q_heads, head_dim\], got shape \(3, 4\)"),
        ({"q": [1.0]}, ShapeError, "expected q to be a tensor"),
        ({"q": half(3, 4, 64).float()}, DTypeError, "q of dtype float16 or bfloat16, got float32"),
        ({"q": half(3, 64, 4).transpose(1, 2)}, ShapeError, "q with last stride 1, got strides"),
        ({"k_rows": half(10, 64, 2).transpose(1, 2)}, ShapeError, "k_rows with last stride 1, got strides"),
        ({"v_rows": half(10, 2, 128)[..., ::2]}, ShapeError, r"v_rows with last stride 1, got strides \(256, 128, 2\)"),
        ({"k_rows": half(11, 2, 64)}, ShapeError, r"v_rows of the shape of k_rows \(11, 2, 64\), got \(10, 2, 64\)"),
        ({"v_rows": half(10, 2, 64).bfloat16()}, DTypeError, "v_rows of the dtype of k_rows"),
        (
            {"k_rows": half(10, 2, 64).bfloat16(), "v_rows": half(10, 2, 64).bfloat16()},
            DTypeError,
            r"the dtype of q \(torch.float16\) or uint8 holding e4m3 or int8, got torch.bfloat16",
        ),
        ({"k_rows": half(10, 2, 64).float()}, DTypeError, "k_rows of dtype float16 or bfloat16 or uint8 or int8, got float32"),
        ({"k_rows": half(10, 2, 32), "v_rows": half(10, 2, 32)}, ShapeError, "agree in head_dim, got 64 and 32"),
        ({"row_table": torch.zeros(3, 5)}, DTypeError, "row_table of dtype int32, got float32"),
        ({"row_table": torch.zeros(3, 5, dtype=torch.int64)}, DTypeError, "row_table of dtype int32, got int64"),
        ({"row_table": torch.zeros(5, 3, dtype=torch.int32).t()}, ShapeError, "row_table with last stride 1"),
        ({"row_table": torch.zeros(2, 5, dtype=torch.int32)}, ShapeError, r"the batch of q \(3\), got 2 and 3"),
        ({"seq_lens": torch.ones(4, dtype=torch.int32)}, ShapeError, r"the batch of q \(3\), got 3 and 4"),
        ({"seq_lens": torch.ones(3)}, DTypeError, "seq_lens of dtype int32, got float32"),
        ({"seq_lens": torch.ones(3, 1, dtype=torch.int32)}, ShapeError, r"seq_lens \[batch\], got shape \(3, 1\)"),
        (
            {"seq_lens": torch.ones(3, dtype=torch.int32, device="meta")},
            ShapeError,
            "seq_lens on cpu as q is, got meta",
        ),
        ({"out": half(3, 4, 32)}, ShapeError, r"out of shape \(3, 4, 64\), got \(3, 4, 32\)"),
        ({"out": half(3, 4, 64).bfloat16()}, DTypeError, "out of dtype float16, got bfloat16"),
        ({"out": half(3, 4, 64).to("meta")}, ShapeError, "out on cpu, got meta"),
        ({"out": half(3, 64, 4).transpose(1, 2)}, ShapeError, "out with last stride 1"),
        ({"k_scale": 0.5}, ScaleError, "k_scale=None for a cache that is not e4m3 or int8, got 0.5"),
        ({"v_scale": 1.0}, ScaleError, "v_scale=None for a cache that is not e4m3 or int8, got 1.0"),
        ({"v_scale": torch.ones(2)}, ScaleError, "v_scale=None for a cache that is not e4m3 or int8, got Tensor"),
        ({"softmax_scale": math.nan}, ScaleError, "finite softmax_scale, got nan"),
        ({"softmax_scale": torch.ones(())}, ScaleError, "softmax_scale to be a Python float, got Tensor"),
    ],
)
def test_decode(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        paged_decode_attention(**decode_arguments(**changes))
    one_sentence(caught.value, "paged_decode_attention")


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(3, 2), (33, 2), (2, 4), (0, 1), (4, 0)])
def test_head_counts_that_do_not_divide(num_q_heads: int, num_kv_heads: int) -> None:
    with pytest.raises(ShapeError, match=f"multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}") as caught:
        paged_decode_attention(**decode_arguments(num_q_heads, num_kv_heads))
    one_sentence(caught.value, "paged_decode_attention")


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-50, 1e39, True, "1", torch.ones(())])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_of_an_e4m3_cache(bad: Any, name: str) -> None:
    rows = torch.zeros(10, 2, 64, dtype=torch.uint8)
    with pytest.raises(ScaleError, match=f"expected {name} to be") as caught:
        paged_decode_attention(**decode_arguments(k_rows=rows, v_rows=rows, **{name: bad}))
    one_sentence(caught.value, "paged_decode_attention")
    with pytest.raises(ScaleError, match=f"expected {name} to be"):
        kv_write(**write_arguments(k_rows=rows, v_rows=rows, **{name: bad}))
    with pytest.raises(ScaleError, match="expected scale to be"):
        quantize_e4m3(torch.zeros(3), bad)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, r"to be an fp32 tensor \[num_kv_heads\] for an int8 cache, got NoneType; pass the scale of each head"),
        (0.5, "for an int8 cache, got float; pass the scale of each head, such as int8_scales gives"),
        ([0.5, 0.5], "got list"),
        (torch.ones(3), r"float32 \[2\], contiguous, on cpu for an int8 cache, got float32 \[3\] with strides \(1,\) on cpu"),
        (torch.ones(()), r"got float32 \[\]"),
        (torch.ones(1), r"got float32 \[1\]"),
        (torch.ones(2, 1), r"got float32 \[2, 1\]"),
        (torch.ones(2).half(), r"got float16 \[2\]"),
        (torch.ones(2).double(), r"got float64 \[2\]"),
        (torch.ones(4)[::2], r"with strides \(2,\)"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
)
def test_scales_of_an_int8_cache(bad: Any, message: str, name: str) -> None:
    rows = torch.zeros(10, 2, 64, dtype=torch.int8)
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(2), name: bad}
    for call, made in ((paged_decode_attention, decode_arguments), (kv_write, write_arguments)):
        with pytest.raises(ScaleError, match=f"expected {name} .*{message}") as caught:
            call(**made(k_rows=rows, v_rows=rows, **scales))  # type: ignore[operator]
        one_sentence(caught.value, call.__name__)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_values_of_scales_of_heads_are_not_looked_at(bad: float) -> None:
    """The host would wait for them."""
    rows = torch.zeros(10, 2, 64, dtype=torch.int8)
    scales = {"k_scale": torch.full((2,), bad), "v_scale": torch.full((2,), bad)}
    paged_decode_attention(**decode_arguments(k_rows=rows, v_rows=rows, **scales))
    kv_write(**write_arguments(k_rows=rows, v_rows=rows, **scales))


def test_int8_scales_take_heads_with_elements() -> None:
    for wrong in (torch.zeros(3), torch.zeros(0, 2, 4), 1.0):
        with pytest.raises(ShapeError, match=r"int8_scales expected x \[..., num_kv_heads, head_dim\]"):
            int8_scales(wrong)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="int8_scales expected x of dtype"):
        int8_scales(torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": half(3, 2)}, ShapeError, r"k \[num_tokens, num_kv_heads, head_dim\], got shape \(3, 2\)"),
        ({"k": half(3, 2, 64).float()}, DTypeError, "k of dtype float16 or bfloat16, got float32"),
        ({"v": half(3, 64, 2).transpose(1, 2)}, ShapeError, "v with last stride 1"),
        ({"v": half(4, 2, 64)}, ShapeError, "v of the shape and dtype of k"),
        ({"v": half(3, 2, 64).bfloat16()}, ShapeError, "v of the shape and dtype of k"),
        ({"k": half(3, 4, 64), "v": half(3, 4, 64)}, ShapeError, "agree in num_kv_heads, got 4 and 2"),
        ({"k": half(3, 2, 32), "v": half(3, 2, 32)}, ShapeError, "agree in head_dim, got 32 and 64"),
        ({"slot_mapping": torch.arange(2)}, ShapeError, "one slot for each of the 3 tokens of k, got 2"),
        ({"slot_mapping": torch.arange(4)}, ShapeError, "one slot for each of the 3 tokens of k, got 4"),
        ({"slot_mapping": torch.arange(3).float()}, DTypeError, "slot_mapping of dtype int32 or int64, got float32"),
        ({"slot_mapping": torch.arange(3)[:, None]}, ShapeError, r"slot_mapping \[num_tokens\], got shape \(3, 1\)"),
        ({"slot_mapping": torch.arange(3, device="meta")}, ShapeError, "slot_mapping on cpu as k is, got meta"),
        ({"k_scale": 1.0}, ScaleError, "k_scale=None for a cache that is not e4m3 or int8"),
        ({"v_rows": half(10, 2, 64).bfloat16()}, DTypeError, "v_rows of the dtype of k_rows"),
    ],
)
def test_write(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        kv_write(**write_arguments(**changes))
    one_sentence(caught.value, "kv_write")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(3, dtype=torch.int32), 1.0), DTypeError, "x of dtype float16 or bfloat16 or float32, got int32"),
        (([1.0], 1.0), ShapeError, "x to be a tensor, got list"),
        ((torch.zeros(3, 4).t(), 1.0), ShapeError, "x with last stride 1"),
        ((torch.zeros(3), None), ScaleError, "expected a scale, got None"),
        ((torch.zeros(4, 4, 4, 4)[::2, ::2, ::2, :2], 1.0), ShapeError, "collapse into three dimensions"),
    ],
)
def test_quantize(arguments: tuple[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        quantize_e4m3(*arguments)
    one_sentence(caught.value, "quantize_e4m3")


def test_quantize_out() -> None:
    with pytest.raises(ShapeError, match="contiguous out"):
        quantize_e4m3(torch.zeros(3, 4), 1.0, out=torch.zeros(3, 8, dtype=torch.uint8)[:, :4])
    with pytest.raises(DTypeError, match="out of dtype uint8, got int8"):
        quantize_e4m3(torch.zeros(3), 1.0, out=torch.zeros(3, dtype=torch.int8))
    with pytest.raises(DTypeError, match="e4m3_scale expected x of dtype"):
        e4m3_scale(torch.zeros(3, dtype=torch.float64))


def test_a_broadcast_cache_has_no_kernel() -> None:
    """R76: rows that overlap in memory are no pages; the missing tag is the reason."""
    one = half(1, 2, 64).expand(10, 2, 64)
    with pytest.raises(NoKernelError, match="torch_paged_decode: layout tag kv:paged is missing"):
        paged_decode_attention(**decode_arguments(k_rows=one, v_rows=one))
    with pytest.raises(NoKernelError, match="torch_kv_write: layout tag kv:paged is missing"):
        kv_write(**write_arguments(k_rows=one, v_rows=one))


def test_requests_describe_the_tensors() -> None:
    """R75: what dispatch sees is derived from the tensors."""
    pool = torch.zeros(10, 4, 64, dtype=torch.uint8)
    request = decode_request(**decode_arguments(k_rows=pool[:, :2], v_rows=pool[:, 2:]))
    assert (request.op, request.device_type, request.capability) == ("paged_decode_attention", "cpu", None)
    assert (request.q_dtype, request.kv_dtype) == ("float16", "e4m3")
    assert request.layout_tags == {"kv:paged", "kv:row-table", "kv:combined", "kv:16bit-aligned"}
    sizes = {"batch": 3, "max_seq_len": 5, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_rows": 10}
    assert dict(request.shape) == sizes
    assert list(request.shape) == sorted(sizes.items())
    written = write_request(**write_arguments())
    assert dict(written.shape) == {"num_tokens": 3, "num_kv_heads": 2, "head_dim": 64, "num_rows": 10}
    assert written.layout_tags == {"kv:paged", "kv:split", "kv:contiguous", "kv:16bit-aligned"}


def one_sentence(error: BaseException, call: str) -> None:
    """Names the call, expects one line, and says what to do after the semicolon."""
    message = str(error)
    assert message.startswith(f"{call} expected ")
    assert "\n" not in message
    assert message.endswith(".")
    assert "; " in message
    assert isinstance(error, RapidLLMError)
