"""Slow, obvious references and the tolerances that go with them; nothing here calls the library under test.

A result is verified before it is timed, and again after. The kernel tests import the same functions, so that a tolerance has one
definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asv_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

_RTOL = {"float16": 2e-3, "bfloat16": 1.6e-2}
"""Relative tolerance of an attention output by its dtype: two units in the last place of the stored result, and as much again."""

_ATOL = {"float16": 4e-3, "bfloat16": 3e-2}
"""Absolute tolerance in units of the root mean square of the reference's head vector: outputs over long contexts are about 1/sqrt(S), and
heads differ in magnitude, so that a fixed number would accept zeros."""

_E4M3_MAX = 448.0
_INT8_MAX = 127
_GUARDS_A_ROW = 3


class VerificationError(AssertionError):
    """A result differs from its reference; there is no number for it."""


def dtype_name(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16; the uint8 container of a KV pool is called "e4m3"."""
    return "e4m3" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")


def widen(rows: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """float64 values of pool rows [..., num_kv_heads, head_dim]; uint8 rows are e4m3 bytes, widened by torch and multiplied by `scale`,
    int8 rows are multiplied by the scales of their heads, [num_kv_heads]."""
    if rows.dtype == torch.uint8:
        rows = rows.view(torch.float8_e4m3fn).to(torch.float32)
    return rows.to(torch.float64) * (scale.to(torch.float64)[:, None] if isinstance(scale, torch.Tensor) else scale)


def decode_reference(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    row_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Attention of one query token a sequence over its rows, sequence by sequence in float64.

    Args:
        q: [batch, num_q_heads, head_dim].
        k_rows, v_rows: [num_rows, num_kv_heads, head_dim]; uint8 holds e4m3 bytes.
        row_table: [batch, max_seq_len], int32.
        seq_lens: [batch], int32, in tokens.
        k_scale, v_scale: Scales of an e4m3 or int8 pool, as of `widen`.
        softmax_scale: None means head_dim ** -0.5.
    Returns:
        [batch, num_q_heads, head_dim], float64; zeros for a sequence of length 0.
    """
    batch, num_q_heads, head_dim = q.shape
    group = num_q_heads // k_rows.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(batch, num_q_heads, head_dim, dtype=torch.float64, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        rows = row_table[b, :length].long()
        keys = widen(k_rows[rows], k_scale).repeat_interleave(group, dim=1)
        values = widen(v_rows[rows], v_scale).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,shd->hs", q[b].double(), keys) * scale
        out[b] = torch.einsum("hs,shd->hd", scores.softmax(dim=-1), values)
    return out


def check_decode(out: torch.Tensor, reference: torch.Tensor, *, kv_dtype: str) -> float:
    """Compares an attention output with its reference.

    Args:
        out: [..., num_q_heads, head_dim], fp16 or bf16.
        reference: As `out`, float64, from the same pool bytes.
        kv_dtype: Named in the message.
    Returns:
        The largest absolute difference.
    Raises:
        VerificationError: An element is missing (NaN) or beyond the tolerance: `_RTOL` of itself, `_ATOL` of its head vector's root mean
            square, and the smallest step of the dtype.
    """
    name = dtype_name(out.dtype)
    difference = (out.double() - reference).abs()
    rms = reference.square().mean(-1, keepdim=True).sqrt()
    info = torch.finfo(out.dtype)
    allowed = _RTOL[name] * reference.abs() + _ATOL[name] * rms + info.smallest_normal * info.eps
    wrong = ~(difference <= allowed)
    if bool(wrong.any()):
        worst = torch.where(difference.isnan(), torch.inf, difference / allowed.clamp_min(1e-300)).argmax()
        raise VerificationError(
            f"decode over a {kv_dtype} pool: {int(wrong.sum())} of {wrong.numel()} elements are off, the worst at"
            f" {_place(int(worst), out.shape)} is"
            f" {float(out.flatten()[worst]):.6g} where the reference has {float(reference.flatten()[worst]):.6g}"
        )
    return float(difference.max()) if difference.numel() else 0.0


def _place(flat: int, shape: Sequence[int]) -> list[int]:
    """The indices of an element, by its number; `torch.unravel_index` imports a computer algebra for it."""
    place: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        place.insert(0, index)
    return place


def e4m3_bytes(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 bytes of x / scale, saturating, by both ways to divide: x / scale, and x times the fp32 reciprocal."""
    x32 = x.to(torch.float32)
    quotient = x32 / torch.tensor(scale, dtype=torch.float32, device=x.device)
    product = x32 * (1.0 / torch.tensor(scale, dtype=torch.float32, device=x.device))
    by_quotient, by_product = (v.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8) for v in (quotient, product))
    return by_quotient, by_product


def check_e4m3(written: torch.Tensor, x: torch.Tensor, scale: float, *, what: str) -> float:
    """Checks quantised bytes: each has to be the rounding of x / scale, by either way to divide; NaN stays NaN.

    Args:
        written: uint8, any shape.
        x: Values that were quantised, same shape.
        scale: Scale of the pool.
        what: Named in the message.
    Returns:
        The largest absolute difference between x and what the bytes stand for (rounding included, saturated values not).
    Raises:
        VerificationError: A byte is neither.
    """
    by_quotient, by_product = e4m3_bytes(x, scale)
    nan = x.isnan()
    right = torch.where(nan, (written & 0x7F) == 0x7F, (written == by_quotient) | (written == by_product))
    if bool((~right).any()):
        raise VerificationError(f"{what}: {int((~right).sum())} of {right.numel()} e4m3 bytes are not the rounding of value / scale")
    inside = x.double().abs() <= _E4M3_MAX * scale
    error = torch.where(inside, (widen(written, scale) - x.double()).abs(), 0.0)
    return float(error.max()) if error.numel() else 0.0


def int8_bytes(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 bytes of x [..., num_kv_heads, head_dim] over the scales of its heads, saturating, by both ways to divide; NaN gives 0."""
    x32, divisor = x.to(torch.float32), scale[:, None]
    ways = (x32 / divisor, x32 * (1.0 / divisor))
    by_quotient, by_product = (v.round().clamp(-_INT8_MAX, _INT8_MAX).nan_to_num(0.0).to(torch.int8) for v in ways)
    return by_quotient, by_product


def check_int8(written: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *, what: str) -> float:
    """Checks quantised bytes as `check_e4m3` does: the rounding of x / scale of the head, within +-127; NaN becomes 0.

    Args:
        written: int8, [..., num_kv_heads, head_dim].
        x: Values that were quantised, same shape.
        scale: fp32 [num_kv_heads].
        what: Named in the message.
    Returns:
        The largest absolute difference between x and what the bytes stand for (rounding included, saturated values not).
    Raises:
        VerificationError: A byte is neither.
    """
    by_quotient, by_product = int8_bytes(x, scale)
    right = (written == by_quotient) | (written == by_product)
    if bool((~right).any()):
        raise VerificationError(f"{what}: {int((~right).sum())} of {right.numel()} int8 bytes are not the rounding of value / scale")
    inside = x.double().abs() <= _INT8_MAX * scale.double()[:, None]
    error = torch.where(inside, (widen(written, scale) - x.double()).abs(), 0.0)
    return float(error.max()) if error.numel() else 0.0


_E4M3_EDGES = (500.0, -500.0, 448.0, -448.0, 464.0, 1.0625, 1.1875, -1.0625, 2.0**-6, 2.0**-9, 3 * 2.0**-9, -5 * 2.0**-10, 2.0**-11)
_INT8_EDGES = (127.0, -127.0, 127.5, -127.5, 128.0, -128.0, 300.0, -300.0, 0.5, -0.5, 1.5, 2.5, -126.5, 0.49, -0.51)
"""Saturation, ties and subnormals, in units of the scale."""


def edge_values(scale: float | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values at which a store goes wrong first, for a pool of `scale`: zeros, NaN, infinities, saturation, ties, subnormals of e4m3.

    A write whose inputs hold them is checked on them; normal values alone would meet none in a small case.

    Args:
        scale: Of the pool; of an int8 one [num_kv_heads].
        dtype, device: Of the values.

    Returns:
        [n], or [num_kv_heads, n].
    """
    of_heads = isinstance(scale, torch.Tensor)
    in_steps = torch.tensor([0.0, -0.0, *(_INT8_EDGES if of_heads else _E4M3_EDGES)], dtype=torch.float32, device=device)
    finite = scale[:, None] * in_steps if isinstance(scale, torch.Tensor) else scale * in_steps
    beyond = torch.tensor([float("nan"), float("inf"), float("-inf")], device=device).expand(*finite.shape[:-1], 3)
    return torch.cat([finite, beyond], dim=-1).to(dtype)


def write_reference(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a KV write has to leave: (rows, keys, values) of the tokens that are kept (slot in [0, num_rows))."""
    keep = (slot_mapping >= 0) & (slot_mapping < num_rows)
    return slot_mapping[keep].long(), k[keep], v[keep]


def check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
) -> float:
    """Reads written rows back through the destination index and compares them, K with K and V with V.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], what was written.
        slot_mapping: [num_tokens]; negative and too large slots were skipped.
        k_rows, v_rows: [num_rows, num_kv_heads, head_dim], the pool after the write.
        k_scale, v_scale: Scales of an e4m3 pool; of an int8 one [num_kv_heads].
    Returns:
        The largest absolute difference: 0 for a copy, the rounding for an e4m3 or int8 pool.
    Raises:
        VerificationError: A row does not hold what was written to it.
    """
    rows, keys, values = write_reference(k, v, slot_mapping, num_rows=k_rows.shape[0])
    worst = 0.0
    for name, pool, expected, scale in (("K", k_rows, keys, k_scale), ("V", v_rows, values, v_scale)):
        written = pool[rows]
        if isinstance(scale, torch.Tensor):
            worst = max(worst, check_int8(written, expected, scale, what=f"KV write, {name} half"))
        elif written.dtype == torch.uint8:
            worst = max(worst, check_e4m3(written, expected, scale, what=f"KV write, {name} half"))
        elif bool((wrong := written.view(torch.int16) != expected.view(torch.int16)).any()):
            raise VerificationError(f"KV write, {name} half: {int(wrong.sum())} of {wrong.numel()} elements differ from what was written")
    return worst


def check_guards(before: torch.Tensor, after: torch.Tensor, *, what: str) -> None:
    """Checks that rows which nobody wrote are byte for byte what they were.

    Raises:
        VerificationError: A guard row changed.
    """
    if not torch.equal(before.view(torch.uint8), after.view(torch.uint8)):
        raise VerificationError(f"{what}: rows that were not in the index have changed")


def guard_rows(written: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows to hold against stray writes: the unwritten neighbours of the written rows, and the ends of the pool.

    Comparing the whole pool would touch far more memory than the write; the rows read back and their guards are at most four times the
    rows written.

    Args:
        written: Rows that a write may change, any shape.
        num_rows: Rows of the pool.
    Returns:
        [n], int64, ascending, n at most three times the rows written.
    """
    rows = written.reshape(-1).long()
    ends = torch.tensor([0, num_rows - 1], device=rows.device)
    near = torch.zeros(num_rows, dtype=torch.bool, device=rows.device)
    near[torch.cat([rows - 1, rows + 1, ends]).clamp(0, num_rows - 1)] = True
    near[rows] = False
    return near.nonzero().view(-1)[: _GUARDS_A_ROW * rows.numel()]


def check_allocation(rows: torch.Tensor | None, free_before: torch.Tensor, free_after: torch.Tensor, *, count: int, state: str) -> None:
    """Checks what an allocator returned: `count` distinct rows that were free, are free no longer, and are all that was taken.

    Args:
        rows: [count], int32, the rows returned.
        free_before, free_after: [num_rows], bool, which rows were free before and after the call, on the device of the rows.
        count: How many were asked for.
        state: Named in the message.
    Raises:
        VerificationError: Too few, duplicate, foreign or occupied rows; rows of another dtype or device; rows that stay free, or more
            rows taken than returned.
    """
    if rows is None or rows.numel() != count:
        raise VerificationError(f"allocator, {state}: asked for {count} rows, got {'none' if rows is None else rows.numel()}")
    if rows.dtype != torch.int32 or rows.device != free_before.device:
        expected = f"int32 rows on {free_before.device}"
        raise VerificationError(f"allocator, {state}: expected {expected}, got {dtype_name(rows.dtype)} on {rows.device}")
    distinct = len(set(rows.tolist()))
    if distinct != count:
        raise VerificationError(f"allocator, {state}: {count - distinct} rows were handed out twice in one call")
    if bool(((rows < 0) | (rows >= free_before.numel())).any()):
        raise VerificationError(f"allocator, {state}: a row lies outside the pool of {free_before.numel()} rows")
    if not bool(free_before[rows.long()].all()):
        raise VerificationError(f"allocator, {state}: {int((~free_before[rows.long()]).sum())} rows were in use already")
    remaining = free_before.clone()
    remaining[rows.long()] = False
    if not torch.equal(remaining, free_after):
        raise VerificationError(f"allocator, {state}: {int((remaining != free_after).sum())} rows are free, or taken, that should not be")


def check_state(free: torch.Tensor, *, state: str, num_free: int, count: int) -> None:
    """Checks that an allocator is in the state that a row names, before each checked call: a reset that leaves another is refused.

    Args:
        free: [num_rows], bool.
        state: "bump" (one free run, at the end), "run_search" (a run of `count` is free), "fragmented" (none is).
        num_free: Free rows that the state has.
        count: Rows that the call asks for.
    Raises:
        VerificationError: Another number of free rows, or other runs.
    """
    if int(free.sum()) != num_free:
        raise VerificationError(f"allocator, {state}: the reset leaves {int(free.sum())} free rows where the state has {num_free}")
    steps = torch.nn.functional.pad(free.to(torch.int8), (1, 1)).diff()
    ends = (steps == -1).nonzero().view(-1)
    longest = int((ends - (steps == 1).nonzero().view(-1)).max())
    fits = {"bump": ends.numel() == 1 and int(ends[0]) == free.numel(), "run_search": longest >= count, "fragmented": longest < count}
    if not fits[state]:
        raise VerificationError(f"allocator, {state}: the reset leaves {ends.numel()} free runs, the longest of {longest} rows")
