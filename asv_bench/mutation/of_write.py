"""Faults of the KV write kernel, and of the quantiser that fills e4m3 pools."""

from __future__ import annotations

from collections.abc import Mapping

from asv_bench.mutation.fault import DECODE_E4M3, DECODE_WRITE, PREFILL, Edit, Fault

_KERNEL = "rapid_llm/kernels/kv_write.py"
_QUANT = "rapid_llm/kernels/kv_quant.py"
_E4M3 = "rapid_llm/kernels/e4m3.py"
_SUITE = "asv_bench/bench_kv_write.py"

_BOTH: Mapping[str, tuple[str, ...]] = {PREFILL: (), DECODE_WRITE: ()}
_BYTES: Mapping[str, tuple[str, ...]] = {PREFILL: ("e4m3",), DECODE_WRITE: ("e4m3",)}

_DIFFER = "KV write, . half"
_NARROW = "        values = narrow_to_e4m3(values, factor, rest, CONVERT, DIVIDE)\n"
_STORE = "    if E4M3:\n        values"
_K_STORES = (
    ("k_rows_ptr, slot, head, column, k_row_stride, k_row_head_stride, k, kept, k_factor, k_rest, E4M3, CONVERT, DIVIDE)\n        _store("),
    ("k_rows_ptr, slot, head, column, k_row_stride, k_row_head_stride, k, kept, k_factor, k_rest, E4M3, CONVERT, DIVIDE)\n    else:"),
)
"""The stores of K, in programs that write both and in those that write one, each with what follows it."""
_V_STORES = (
    "v_rows_ptr, slot, head, column, v_row_stride, v_row_head_stride, v, kept, v_factor, v_rest, E4M3, CONVERT, DIVIDE)\n    elif",
    "v_rows_ptr, slot, head, column, v_row_stride, v_row_head_stride, v, kept, v_factor, v_rest, E4M3, CONVERT, DIVIDE)\n\n\n",
)
"""The stores of V, likewise."""
_V_LOADS = (
    "        v = _load(v_ptr, token, head, column, v_token_stride, v_head_stride, within)\n        _store(k_rows_ptr",
    "    else:\n        v = _load(v_ptr, token, head, column, v_token_stride, v_head_stride, within)\n",
)
"""The loads of V, likewise."""
_HEAD = "    tensors = (k, v, slot_mapping, k_rows, v_rows)\n"


def _kernel(name: str, what: str, old: str, new: str, *, rows: Mapping[str, tuple[str, ...]] = _BOTH, reason: str = _DIFFER) -> Fault:
    return Fault(name, what, rows, (Edit(_KERNEL, old, new),), reason=reason)


def _twice(name: str, what: str, lines: tuple[str, str], old: str, new: str, *, rows: Mapping[str, tuple[str, ...]] = _BOTH) -> Fault:
    """A fault of a line of both kinds of programs."""
    return Fault(name, what, rows, tuple(Edit(_KERNEL, line, line.replace(old, new)) for line in lines), reason=_DIFFER)


def _narrowed(name: str, what: str, lines: str) -> Fault:
    return _kernel(name, what, _NARROW, lines, rows=_BYTES)


def _value(name: str, what: str, lines: str, rows: Mapping[str, tuple[str, ...]]) -> Fault:
    return _kernel(name, what, _STORE, f"{lines}\n{_STORE}", rows=rows)


def _after(name: str, what: str, line: str) -> Fault:
    """A fault that the launcher makes after the right write."""
    text = (
        "_right = kv_write\n\n\ndef kv_write(k, v, slots, k_rows, v_rows, **scales):\n    _right(k, v, slots, k_rows, v_rows, **scales)\n"
    )
    return Fault(name, what, _BOTH, (Edit(_KERNEL, "", f"{text}    {line}\n"),), reason="rows that were not in the index have changed|half")


def _quantiser(name: str, what: str, new: str) -> Fault:
    return Fault(
        name,
        what,
        {DECODE_E4M3: (), **_BYTES},
        (Edit(_QUANT, "narrow_to_e4m3(values, factor, rest, CONVERT, DIVIDE), mask=inside", f"{new}, mask=inside"),),
        reason="pool fixture, quantiser",
    )


FAULTS = (
    _twice("k-in-v-half", "K lands in the V half of its row.", _K_STORES, "k_rows_ptr, slot", "v_rows_ptr, slot"),
    _twice("v-unwritten", "Only K is written.", _V_STORES, "v, kept", "v, kept & (slot < 0)[:, None]"),
    _twice("v-is-k", "K is written to both halves.", _V_LOADS, "v_ptr, token", "k_ptr, token"),
    _kernel(
        "swapped-row-and-head-strides",
        "The row and head strides of the pool's K are exchanged.",
        "        k_rows.stride(0),\n        k_rows.stride(1),\n",
        "        k_rows.stride(1),\n        k_rows.stride(0),\n",
        reason="half|have changed",
    ),
    _kernel(
        "assumed-contiguous",
        "New K is read as if it were contiguous, and not a view of a fused projection.",
        "        k.stride(0),\n",
        "        num_elements,\n",
    ),
    _kernel(
        "off-by-one-slot",
        "Each token goes to the row after its slot.",
        "    element = tl.program_id(1)",
        "    slot = tl.where(slot + 1 < num_rows, slot + 1, 0)\n    element = tl.program_id(1)",
        reason="half|have changed",
    ),
    _kernel(
        "ignored-slot-mapping",
        "Tokens go to neighbouring rows from the first slot on.",
        _HEAD,
        f"    slot_mapping = (slot_mapping[:1] + torch.arange(k.shape[0], device=k.device)) % k_rows.shape[0]\n{_HEAD}",
        rows={PREFILL: (), DECODE_WRITE: ()},
        reason="half|have changed",
    ),
    _kernel(
        "last-token-unwritten",
        "The last token of a call is masked out.",
        "kept = ((place < num_tokens)",
        "kept = ((place < num_tokens - 1)",
        rows={PREFILL: (), DECODE_WRITE: ("fp16", "one token")},
    ),
    _kernel(
        "second-half-of-a-row-unwritten",
        "The second half of a token's heads is masked out.",
        "    if TOGETHER:\n",
        "    kept = kept & (element < NUM_ELEMENTS // 2)[None, :]\n    if TOGETHER:\n",
    ),
    _kernel(
        "swapped-tokens",
        "K and V of the tokens are written in reverse order.",
        "    slot = tl.load(slot_ptr + token * slot_stride",
        "    slot = tl.load(slot_ptr + tl.maximum(num_tokens - 1 - token, 0) * slot_stride",
    ),
    _kernel(
        "write-offset-in-31-bits",
        "Row offsets keep 31 bits, so that rows past 2**31 elements are written elsewhere.",
        "    tl.store(pointer + row[:, None] * row_stride + (",
        "    tl.store(pointer + ((row[:, None] * row_stride) & 0x7FFFFFFF) + (",
        rows={PREFILL: ("far",)},
    ),
    _after("row-0-touched", "Row 0 is overwritten, whatever the slots are.", "k_rows[:1] = 0"),
    _after("neighbour-touched", "The row after the last slot is overwritten.", "v_rows[(slots[-1:].long() + 1) % v_rows.shape[0]] = 0"),
    _after("last-row-touched", "The last row of the pool is overwritten.", "v_rows[-1:] = 0"),
    _value("written-zeros", "Zeros are written.", "    values = values * 0", _BOTH),
    _value(
        "fp16-copy-only",
        "Only the copy of fp16 values changes them, by a last place.",
        "    if not E4M3 and values.dtype == tl.float16:\n        values = (values.to(tl.float32) * 1.001).to(tl.float16)",
        {PREFILL: ("fp16",), DECODE_WRITE: ("fp16",)},
    ),
    _value(
        "bf16-copy-only",
        "Only the copy of bf16 values changes them, by a last place.",
        "    if not E4M3 and values.dtype == tl.bfloat16:\n        values = (values.to(tl.float32) * 1.01).to(tl.bfloat16)",
        {PREFILL: ("bf16",)},
    ),
    _value(
        "lost-sign-of-zero",
        "Negative zero is written as zero.",
        "    values = tl.where(values == 0, 0.0, values).to(values.dtype)",
        {PREFILL: ("fp16",), DECODE_WRITE: ("fp16",)},
    ),
    _narrowed("wrong-scale", "e4m3 values are divided by a scale a tenth too large.", _NARROW.replace("factor", "factor / 1.1")),
    _narrowed("ignored-scale", "e4m3 values are stored unscaled.", _NARROW.replace("factor, rest", "1.0, 0.0")),
    _narrowed("scaled-the-wrong-way", "e4m3 values are multiplied by the scale.", _NARROW.replace("factor, rest", "1.0 / factor, 0.0")),
    _twice("swapped-write-scales", "K is quantised with the scale of V.", _K_STORES, "k_factor, k_rest", "v_factor, v_rest", rows=_BYTES),
    _narrowed(
        "missing-saturation",
        "Values beyond 448 times the scale become NaN instead of saturating.",
        "        wide = tl.abs(values.to(tl.float32))\n"
        f"{_NARROW}"
        "        values = tl.where(wide * factor > 464.0, 0x7F, values.to(tl.int32)).to(tl.uint8)\n",
    ),
    _narrowed(
        "flushed-written-subnormals",
        "Values below the smallest normal e4m3 number are written as zeros.",
        f"{_NARROW}        values = tl.where((values.to(tl.int32) & 0x78) == 0, 0, values.to(tl.int32)).to(tl.uint8)\n",
    ),
    _narrowed(
        "truncation",
        "e4m3 values are cut off instead of rounded.",
        "        exact = tl.abs(values.to(tl.float32)) * factor\n"
        f"{_NARROW}"
        "        bits = values.to(tl.int32)\n"
        "        step = ((bits & 0x7F) > 0) & ((bits & 0x7F) < 0x7E) & (exact < 448.0) & (exact > 1.0) & ((exact * 8.0) % 1.0 > 0.5)\n"
        "        values = tl.where(step, bits - 1, bits).to(tl.uint8)\n",
    ),
    _narrowed(
        "lost-nan",
        "NaN is written as the largest value.",
        f"{_NARROW}        values = tl.where((values.to(tl.int32) & 0x7F) == 0x7F, 0x7E, values.to(tl.int32)).to(tl.uint8)\n",
    ),
    _quantiser(
        "quantised-with-wrong-scale",
        "The quantiser divides by a scale a tenth too large.",
        "narrow_to_e4m3(values, factor / 1.1, rest, CONVERT, DIVIDE)",
    ),
    _quantiser("quantised-to-half", "The quantiser loses the sign bit.", "narrow_to_e4m3(values, factor, rest, CONVERT, DIVIDE) & 0x7F"),
    _quantiser(
        "quantised-subnormals-flushed",
        "The quantiser writes zeros for subnormal values.",
        "tl.where((narrow_to_e4m3(values, factor, rest, CONVERT, DIVIDE).to(tl.int32) & 0x78) == 0, 0, "
        "narrow_to_e4m3(values, factor, rest, CONVERT, DIVIDE).to(tl.int32)).to(tl.uint8)",
    ),
    Fault(
        "wrong-write-impl",
        "The suite is named after another kernel than the one that dispatch() runs.",
        _BOTH,
        (Edit(_SUITE, '_IMPL = {"cuda": "triton_kv_write"', '_IMPL = {"cuda": "torch_kv_write"'),),
        status=("failed",),
        reason="WrongKernelError.*named after torch_kv_write and dispatch\\(\\) runs triton_kv_write",
    ),
    Fault(
        "no-write-poison",
        "The suite's poison leaves the rows as they are: what an earlier call wrote would be checked.",
        _BOTH,
        (Edit(_SUITE, "            rows[written] = ", "            rows[:0] = "),),
        reason="takes outputs that its poison made wrong|KV write",
    ),
    Fault(
        "reciprocal",
        "e4m3 values are multiplied by the scale's reciprocal: another right way.",
        {PREFILL: ("e4m3",)},
        (Edit(_E4M3, "return multiply_add(wide, factor, wide * rest)", "return wide * (factor + rest)"),),
        harmless=True,
    ),
)
