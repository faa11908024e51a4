"""Faults of what is an int8 cache's own: its bytes, read and written, and the scales of its heads."""

from __future__ import annotations

from collections.abc import Mapping

from asv_bench.mutation.fault import DECODE_INT8, PREFILL, Edit, Fault

_INT8 = "rapid_llm/kernels/int8.py"
_SCALES = "rapid_llm/kernels/decode_int8.py"
_SPLIT = "rapid_llm/kernels/decode_split.py"
_WRITE = "rapid_llm/kernels/kv_write.py"

_READ: Mapping[str, tuple[str, ...]] = {DECODE_INT8: ("int8", "many")}
_WIDENED: Mapping[str, tuple[str, ...]] = {DECODE_INT8: ("int8", "int8 bf16")}
_WRITTEN: Mapping[str, tuple[str, ...]] = {PREFILL: ("int8",)}
_FILLED: Mapping[str, tuple[str, ...]] = {DECODE_INT8: (), PREFILL: ("int8",)}

_LOADED = "return tl.load(k_scale_ptr + kv_head), tl.load(v_scale_ptr + kv_head)"
_BEFORE_WIDENED = "    if dtype == tl.bfloat16:\n"
_BEFORE_STORE = "    if SPLIT:\n"
_NARROW = "narrow_to_int8(values, factor[None, :], rest[None, :])"
_SCALE = "scale = tl.load(scale_ptr + first // HEAD_DIM, "
_INSIDE = "inside = tl.minimum(tl.maximum(tl.where(wide == wide, wide, 0.0), -largest), largest)"
_ROUNDED = "(quotient + _MAGIC).to(tl.int32, bitcast=True).to(tl.int8)"


def _scales(name: str, what: str, new: str) -> Fault:
    return Fault(name, what, _READ, (Edit(_SCALES, _LOADED, f"return {new}"),), reason="elements are off")


def _widened(name: str, what: str, lines: str) -> Fault:
    return Fault(name, what, _WIDENED, (Edit(_INT8, _BEFORE_WIDENED, f"{lines}\n{_BEFORE_WIDENED}"),), reason="elements are off")


def _written(name: str, what: str, old: str, new: str, *, path: str = _INT8, rows: Mapping[str, tuple[str, ...]] = _FILLED) -> Fault:
    """A fault of the write; where normal values show it, the pool's own bytes do, which the write has left."""
    reason = "pool fixture, quantiser" if rows is _FILLED else "KV write, . half"
    return Fault(name, what, rows, (Edit(path, old, new),), reason=reason)


FAULTS = (
    _scales(
        "ignored-k-scale-of-heads",
        "The K scales of an int8 pool are left out.",
        "0.0 * tl.load(k_scale_ptr + kv_head) + 1.0, tl.load(v_scale_ptr + kv_head)",
    ),
    _scales(
        "ignored-v-scale-of-heads",
        "The V scales of an int8 pool are left out.",
        "tl.load(k_scale_ptr + kv_head), 0.0 * tl.load(v_scale_ptr + kv_head) + 1.0",
    ),
    _scales(
        "k-scales-for-v",
        "The scales of K and V of an int8 pool are exchanged.",
        "tl.load(v_scale_ptr + kv_head), tl.load(k_scale_ptr + kv_head)",
    ),
    _scales(
        "scale-of-the-first-head", "Every head of an int8 pool has the scales of the first.", "tl.load(k_scale_ptr), tl.load(v_scale_ptr)"
    ),
    _scales(
        "k-scales-of-other-heads",
        "The K scales of neighbouring heads are exchanged.",
        "tl.load(k_scale_ptr + (kv_head ^ 1)), tl.load(v_scale_ptr + kv_head)",
    ),
    _scales(
        "v-scales-of-other-heads",
        "The V scales of neighbouring heads are exchanged.",
        "tl.load(k_scale_ptr + kv_head), tl.load(v_scale_ptr + (kv_head ^ 1))",
    ),
    _widened(
        "wrong-zero-point",
        "int8 bytes are read as one more than they are.",
        "    even = (even + 1.0).to(tl.float16)\n    odd = (odd + 1.0).to(tl.float16)",
    ),
    _widened(
        "unsigned-bytes",
        "int8 bytes are read without a sign.",
        "    even = tl.where(even < 0, even + 256.0, even).to(tl.float16)\n    odd = tl.where(odd < 0, odd + 256.0, odd).to(tl.float16)",
    ),
    _widened("lost-sign-of-odd-int8", "The sign of odd int8 bytes is lost.", "    odd = tl.abs(odd)"),
    _widened("swapped-int8-bytes", "The even and the odd byte of an int8 pair are exchanged.", "    even, odd = odd, even"),
    Fault(
        "int8-only",
        "Only outputs over an int8 pool are off, by a twentieth.",
        {DECODE_INT8: ()},
        (Edit(_SPLIT, _BEFORE_STORE, f"    if INT8:\n        result = result * 1.05\n{_BEFORE_STORE}"),),
        reason="elements are off",
    ),
    _written(
        "ignored-write-scale-of-heads",
        "int8 values are stored unscaled.",
        _NARROW,
        "narrow_to_int8(values, 0.0 * factor[None, :] + 1.0, 0.0 * rest[None, :] + 1.0)",
        path=_WRITE,
    ),
    _written(
        "write-scales-of-other-heads",
        "int8 values are divided by the scale of the neighbouring head.",
        _SCALE,
        "scale = tl.load(scale_ptr + ((first // HEAD_DIM) ^ 1), ",
    ),
    _written(
        "v-scales-for-k",
        "K is quantised to int8 with the scales of V.",
        "k_rows_ptr, v_rows_ptr, k_inverse, k_scale,",
        "k_rows_ptr, v_rows_ptr, v_inverse, v_scale,",
        path=_WRITE,
    ),
    _written(
        "written-zero-point",
        "int8 bytes are written as one more than they are.",
        _ROUNDED,
        "(quotient + (_MAGIC + 1.0)).to(tl.int32, bitcast=True).to(tl.int8)",
    ),
    _written("int8-truncation", "int8 values are cut off instead of rounded.", _ROUNDED, "quotient.to(tl.int32).to(tl.int8)"),
    _written(
        "int8-wraps",
        "Values beyond 127 times the scale wrap instead of saturating.",
        _INSIDE,
        "inside = tl.where(wide == wide, wide, 0.0)",
        rows=_WRITTEN,
    ),
    _written(
        "int8-saturates-at-minus-128",
        "Values below -127 times the scale are written as -128.",
        "wide, 0.0), -largest), largest)",
        "wide, 0.0), -largest - scale), largest)",
        rows=_WRITTEN,
    ),
    _written(
        "int8-of-nan",
        "NaN is written as 127.",
        _INSIDE,
        "inside = tl.minimum(tl.maximum(tl.where(wide == wide, wide, 1.0e38), -largest), largest)",
        rows=_WRITTEN,
    ),
)
