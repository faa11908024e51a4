"""Norm, rotation and write of a step's tokens in one call, of every backend, against a slow float64 reference."""

import math
from typing import Any

import pytest
import torch

from asv_bench.verify_rope import check_copied, check_rotated
from rapid_llm.errors import DTypeError, NoKernelError, ScaleError, ShapeError
from rapid_llm.kernels.launch import interpreted
from rapid_llm.kernels.ops import rope_norm_kv_write

FP16, BF16, FP32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.uint8
NUM_ROWS, MAX_POSITION = 24, 50
"""Largest relative error of a rounding to nearest; the interpreter cuts fp32 off to bf16."""

# The interpreter computes with numpy, which warns of NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def _table(rotary_dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    angles = torch.arange(MAX_POSITION)[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device, dtype)


class Step:
    """Inputs of a call, and what it has to leave."""

    def __init__(
        self, device: str, *, num_tokens: int = 5, heads: tuple[int, int] = (4, 2), head_dim: int = 64, rotary_dim: int = 64,
        dtype: torch.dtype = FP16, pool_dtype: torch.dtype = FP16, norm: bool = True, interleaved: bool = False,
        table_dtype: torch.dtype = FP32,
    ) -> None:  # fmt: skip
        num_q_heads, num_kv_heads = heads
        qkv = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
        self.q, self.k, self.v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        self.positions = torch.randint(0, MAX_POSITION, (num_tokens,), device=device)
        self.cos_sin = _table(rotary_dim, table_dtype, device)
        self.slots = torch.randperm(NUM_ROWS, device=device)[:num_tokens].int()
        pool = torch.full((NUM_ROWS, 2 * num_kv_heads, head_dim), 77, dtype=pool_dtype, device=device)
        self.k_rows, self.v_rows = pool.split(num_kv_heads, dim=1)
        self.options: dict[str, Any] = {"interleaved": interleaved, "norm_eps": 1e-5}
        if norm:
            self.options |= {f"{x}_weight": (torch.rand(head_dim, device=device) + 0.5).to(dtype) for x in "qk"}
        self.scales = {"k_scale": 0.03, "v_scale": 0.02} if pool_dtype == E4M3 else {}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k, self.v, self.positions, self.cos_sin, self.slots, self.k_rows, self.v_rows)

    def call(self, backend: str, **more: Any) -> torch.Tensor:
        return rope_norm_kv_write(*self.tensors, **self.options, **self.scales, backend=backend, **more)

    def expected(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """float64, element by element as the formulas say, on the host: a device would take each for a kernel."""
        result, table = x.double().cpu().numpy(), self.cos_sin.double().cpu().numpy()
        gains = None if weight is None else weight.double().cpu().numpy()
        half = table.shape[1] // 2
        for t, position in enumerate(self.positions.tolist()):
            for head in result[t]:
                if gains is not None:
                    head *= gains / math.sqrt((head * head).mean() + self.options["norm_eps"])
                for i in range(half):
                    cos, sin = table[position, i], table[position, half + i]
                    first, second = (2 * i, 2 * i + 1) if self.options["interleaved"] else (i, half + i)
                    head[first], head[second] = head[first] * cos - head[second] * sin, head[second] * cos + head[first] * sin
        return torch.from_numpy(result).to(x.device)

    def check(self, out: torch.Tensor) -> None:
        """Q, K and V against the reference; an untouched row is as it was."""
        q, k = (self.expected(x, self.options.get(f"{name}_weight")) for name, x in (("q", self.q), ("k", self.k)))
        _check_rotated(out, q, "q")
        kept = (self.slots >= 0) & (self.slots < NUM_ROWS)
        rows = self.slots[kept].long()
        scales = {name: self.scales.get(name, 1.0) for name in ("k_scale", "v_scale")}
        _check_rotated(self.k_rows[rows], k[kept], "k", scales["k_scale"])
        check_copied(self.v_rows[rows], self.v[kept], scale=scales["v_scale"], what="v")
        untouched = torch.ones(NUM_ROWS, dtype=torch.bool, device=rows.device)
        untouched[rows] = False
        for pool in (self.k_rows, self.v_rows):
            assert bool((pool[untouched] == 77).all())


def _check_rotated(written: torch.Tensor, reference: torch.Tensor, what: str, scale: float = 1.0) -> None:
    if written.dtype == BF16 and interpreted():
        # Triton's interpreter cuts bf16 off instead of rounding.
        torch.testing.assert_close(written.double(), reference, rtol=2**-7 * 1.01, atol=1e-6)
    else:
        check_rotated(written, reference, scale=scale, what=what)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (96, 32), (128, 64), (256, 256), (128, 2)])
def test_against_float64(backend: str, device: str, head_dim: int, rotary_dim: int, interleaved: bool, norm: bool) -> None:
    step = Step(device, num_tokens=3, head_dim=head_dim, rotary_dim=rotary_dim, interleaved=interleaved, norm=norm)
    step.check(step.call(backend))


@pytest.mark.parametrize(("dtype", "pool_dtype"), [(FP16, FP16), (BF16, BF16), (FP16, E4M3), (BF16, E4M3)])
@pytest.mark.parametrize("heads", [(8, 1), (6, 3), (40, 8), (2, 2)])
@pytest.mark.parametrize("table_dtype", [FP32, BF16])
def test_groups_and_dtypes(backend: str, device: str, dtype: Any, pool_dtype: Any, heads: Any, table_dtype: Any) -> None:
    step = Step(device, num_tokens=2, heads=heads, dtype=dtype, pool_dtype=pool_dtype, table_dtype=table_dtype)
    step.check(step.call(backend))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pool_dtype", [FP16, E4M3])
def test_without_a_norm_the_backends_agree_in_every_bit(device: str, interleaved: bool, pool_dtype: torch.dtype) -> None:
    """fp32 in the same order and one rounding; with a norm, the order of a sum is the backend's own."""
    step = Step(
        device, num_tokens=16, heads=(8, 4), head_dim=128, rotary_dim=128, interleaved=interleaved, norm=False, pool_dtype=pool_dtype
    )
    left = []
    for backend in ("torch", "triton"):
        out = step.call(backend)
        left.append([out.view(torch.uint8).clone(), step.k_rows.clone(), step.v_rows.clone()])
    for one, other in zip(*left, strict=True):
        assert torch.equal(one, other)


def test_with_a_norm_bytes_differ_at_most_where_a_rounding_turns(device: str) -> None:
    step = Step(device, num_tokens=16, heads=(8, 4), head_dim=128, rotary_dim=128, pool_dtype=E4M3)
    left = []
    for backend in ("torch", "triton"):
        step.call(backend)
        left.append(step.k_rows.clone())
    apart = (left[0].int() - left[1].int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) < 1e-3


@pytest.mark.parametrize("pool_dtype", [FP16, E4M3])
def test_skipped_slots(backend: str, device: str, pool_dtype: torch.dtype) -> None:
    """Padding and slots beyond the cache write nothing; Q is rotated all the same."""
    step = Step(device, num_tokens=6, pool_dtype=pool_dtype)
    step.slots = torch.tensor([3, -1, 2**32 + 3, NUM_ROWS, NUM_ROWS - 1, -(2**31)], device=device)
    step.check(step.call(backend))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("position", [-1, MAX_POSITION, 2**31, -(2**32) + 3])
def test_a_position_outside_the_table_gives_nan_where_it_rotates(backend: str, device: str, interleaved: bool, position: int) -> None:
    step = Step(device, num_tokens=2, head_dim=64, rotary_dim=32, interleaved=interleaved, norm=False)
    step.positions = torch.tensor([position, 3], device=device)
    out = step.call(backend)
    for written, given in ((out, step.q), (step.k_rows[step.slots.long()], step.k)):
        assert bool(written[0, :, :32].isnan().all())
        assert torch.equal(written[0, :, 32:], given[0, :, 32:])
        assert not bool(written[1].isnan().any())


def test_strided_outputs_and_inputs(backend: str, device: str) -> None:
    step = Step(device, num_tokens=4)
    step.positions = step.positions.repeat_interleave(2)[::2]
    step.slots = step.slots.repeat_interleave(3)[::3]
    step.cos_sin = torch.cat([step.cos_sin, step.cos_sin], dim=1)[:, :64]
    out = torch.zeros(4, 7, 70, dtype=FP16, device=device)[:, 1:5, 2:66]
    assert step.call(backend, out=out) is out
    step.check(out)


def test_no_token(backend: str, device: str) -> None:
    step = Step(device, num_tokens=0)
    assert step.call(backend).shape == (0, 4, 64)
    step.check(step.call(backend))


def test_what_is_refused(device: str) -> None:
    """Each mistake is one sentence of the call that says what came and what to do."""
    refused: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
        ({"q": lambda s: s.q.float()}, {}, DTypeError, "expected q of dtype float16"),
        ({"q": lambda s: s.q[:-1]}, {}, ShapeError, "agree in num_tokens and head_dim"),
        ({"q": lambda s: s.q[:, :3]}, {}, ShapeError, "multiple of num_kv_heads, got 3 and 2"),
        ({"positions": lambda s: s.positions[:-1]}, {}, ShapeError, "one position for each of the 5 tokens"),
        ({"positions": lambda s: s.positions.float()}, {}, DTypeError, "expected positions of dtype int32 or int64"),
        ({"cos_sin": lambda s: s.cos_sin[:, :31]}, {}, ShapeError, "even rotary_dim of at most head_dim 64"),
        ({"cos_sin": lambda s: s.cos_sin.repeat(1, 2)}, {}, ShapeError, "even rotary_dim of at most head_dim 64"),
        ({"cos_sin": lambda s: s.cos_sin[:0]}, {}, ShapeError, "even rotary_dim of at most head_dim 64"),
        ({"slots": lambda s: s.slots[:-1]}, {}, ShapeError, "one slot for each of the 5 tokens"),
        ({"k": lambda s: s.k[..., :32]}, {}, ShapeError, "v of the shape and dtype of k"),
        ({}, {"q_weight": torch.ones(32, device=device)}, ShapeError, "q_weight of head_dim 64 elements, got 32"),
        ({}, {"k_weight": torch.ones(64, device=device).int()}, DTypeError, "expected k_weight of dtype float32"),
        ({}, {"norm_eps": -1.0}, ShapeError, "norm_eps to be finite and not negative"),
        ({}, {"norm_eps": math.nan}, ShapeError, "norm_eps to be finite and not negative"),
        ({}, {"k_scale": 0.5}, ScaleError, "k_scale=None for a cache that is not e4m3"),
        (
            {"k_rows": lambda s: s.k_rows.to(torch.int8), "v_rows": lambda s: s.v_rows.to(torch.int8)},
            {},
            DTypeError,
            "expected a cache of 16-bit values or e4m3, got int8; rotate K first and write it with kv_write",
        ),
        ({}, {"out": torch.empty(5, 4, 32, dtype=FP16, device=device)}, ShapeError, "out of shape"),
        ({}, {"backend": "nothing"}, Exception, "nothing"),
    ]
    for changes, options, kind, message in refused:
        step = Step(device, norm=False)
        for name, change in changes.items():
            setattr(step, name, change(step))
        with pytest.raises(kind, match=message) as caught:
            rope_norm_kv_write(*step.tensors, **options)
        assert "nothing" in message or "rope_norm_kv_write expected" in str(caught.value)
    step = Step(device)
    with pytest.raises(ShapeError, match="another storage than q"):
        rope_norm_kv_write(*step.tensors, out=step.q)
    wide = Step(device, num_tokens=1, head_dim=320, norm=False)
    with pytest.raises(NoKernelError, match="head_dim 320 is above 256"):
        wide.call("triton")
