"""References and tolerances of normed, rotated heads; see `asv_bench.verify`. A pair is turned as a complex number here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asv_bench.lazy import LazyModule
from asv_bench.verify import VerificationError, check_e4m3, dtype_name

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of a rounding to nearest."""

_COMPUTED = 2.0**-20
"""Error of the fp32 arithmetic, in units of the head vector's largest element: eight units in the last place."""

_E4M3_MAX = 448.0


def rotation_reference(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, weight: torch.Tensor | None, norm_eps: float, interleaved: bool
) -> torch.Tensor:
    """Heads of tokens, normed and rotated in float64.

    Args:
        x: [num_tokens, heads, head_dim].
        positions: [num_tokens], all within cos_sin.
        cos_sin: [max_position, rotary_dim].
        weight: [head_dim]; None leaves the norm out.
        norm_eps, interleaved: As of the call.
    """
    half = cos_sin.shape[1] // 2
    heads = x.double()
    if weight is not None:
        heads = heads / (heads.square().mean(-1, keepdim=True) + norm_eps).sqrt() * weight.double()
    angles = cos_sin[positions.long()].double()
    turn = torch.complex(angles[:, :half].contiguous(), angles[:, half:].contiguous())[:, None]
    turned, kept = heads[..., : 2 * half], heads[..., 2 * half :]
    grouped = turned.reshape(*turned.shape[:-1], *((half, 2) if interleaved else (2, half)))
    pairs = grouped if interleaved else grouped.transpose(-1, -2)
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    result = result if interleaved else result.transpose(-1, -2)
    return torch.cat([result.flatten(-2), kept], dim=-1)


def check_rotated(written: torch.Tensor, reference: torch.Tensor, *, scale: float = 1.0, what: str) -> float:
    """Compares what was written with the reference: it has to be the rounding of a value that fp32 arithmetic can reach.

    Args:
        written: [..., head_dim], fp16, bf16, or uint8 holding e4m3.
        reference: As `written`, float64, finite.
        scale: Of an e4m3 pool.
        what: Named in the message.
    Returns:
        The largest absolute difference, saturated values not counted.
    Raises:
        VerificationError: An element is not.
    """
    reached = _COMPUTED * reference.abs().amax(-1, keepdim=True)
    if written.dtype == torch.uint8:
        # Between the roundings of both ends; the order of bytes is that of magnitudes, and a sign turns at zero only.
        low, high = (
            ((reference + end) / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).double() for end in (-reached, reached)
        )
        values = written.view(torch.float8_e4m3fn).double()
        right = (low <= values) & (values <= high)
        inside = reference.abs() <= _E4M3_MAX * scale
        difference = torch.where(inside, (values * scale - reference).abs(), 0.0)
    else:
        info = torch.finfo(written.dtype)
        difference = (written.double() - reference).abs()
        right = difference <= _ROUNDING[dtype_name(written.dtype)] * reference.abs() + 2 * reached + info.smallest_normal * info.eps
    if bool((~right).any()):
        raise VerificationError(f"{what}: {int((~right).sum())} of {right.numel()} elements are not the rounding of their reference")
    return float(difference.max()) if difference.numel() else 0.0


def check_copied(written: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0, what: str) -> float:
    """Compares rows that are stored as they are, or quantised.

    Args:
        written: fp16, bf16, or uint8 holding e4m3.
        values: As `written`, what was stored.
        scale, what: As of `check_rotated`.
    Returns:
        The largest absolute difference.
    Raises:
        VerificationError: An element differs.
    """
    if written.dtype == torch.uint8:
        return check_e4m3(written, values, scale, what=what)
    if not torch.equal(written.view(torch.int16), values.contiguous().view(torch.int16)):
        raise VerificationError(f"{what}: elements differ from what was written")
    return 0.0
