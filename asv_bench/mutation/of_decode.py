"""Faults of the decode kernels, and of what widens e4m3 bytes for them."""

from __future__ import annotations

from collections.abc import Mapping

from asv_bench.mutation.fault import DECODE, DECODE_E4M3, GPU_ONLY, Edit, Fault

_KERNEL = "rapid_llm/kernels/paged_decode.py"
_E4M3 = "rapid_llm/kernels/e4m3.py"
_SUITE = "asv_bench/bench_paged_decode.py"
_OFF = "elements are off"

_BOTH: Mapping[str, tuple[str, ...]] = {DECODE: (), DECODE_E4M3: ()}
_SHORT: Mapping[str, tuple[str, ...]] = {DECODE: ("one split",), DECODE_E4M3: ("one split",)}
_BYTES: Mapping[str, tuple[str, ...]] = {DECODE_E4M3: ()}
_WIDENED: Mapping[str, tuple[str, ...]] = {DECODE_E4M3: ("e4m3", "e4m3 bf16")}

_BEFORE_STORE = "    out_mask = head_inside & (out_column < HEAD_DIM)[None, :]\n"
_BEFORE_WIDENED = "    if dtype == tl.bfloat16:\n"


def _kernel(name: str, what: str, old: str, new: str, *more: tuple[str, str], rows: Mapping[str, tuple[str, ...]] = _BOTH) -> Fault:
    edits = tuple(Edit(_KERNEL, a, b) for a, b in ((old, new), *more))
    return Fault(name, what, rows, edits, reason=_OFF)


def _result(name: str, what: str, line: str, rows: Mapping[str, tuple[str, ...]] = _BOTH) -> Fault:
    """A fault in the lines before the store: of the output, or of each split's part of it."""
    return _kernel(name, what, _BEFORE_STORE, f"{line}\n{_BEFORE_STORE}", rows=rows)


def _widened(name: str, what: str, lines: str) -> Fault:
    edit = Edit(_E4M3, _BEFORE_WIDENED, f"{lines}\n{_BEFORE_WIDENED}")
    return Fault(name, what, _WIDENED, (edit,), reason=_OFF)


FAULTS = (
    _kernel(
        "dropped-mask",
        "Lanes past a sequence's last token count as tokens.",
        'scores = tl.where((start + token)[None, :] < last, scores * score_scale, float("-inf"))',
        "scores = scores * score_scale",
    ),
    _kernel(
        "swapped-strides",
        "K's row and head strides are exchanged.",
        "        k_rows.stride(0),\n        k_rows.stride(1),\n",
        "        k_rows.stride(1),\n        k_rows.stride(0),\n",
    ),
    _kernel(
        "off-by-one-split",
        "The last split ends a token early.",
        "return first * BLOCK_N, tl.minimum((first + count) * BLOCK_N, seq_len)",
        "return first * BLOCK_N, tl.minimum((first + count) * BLOCK_N, seq_len - 1)",
    ),
    _kernel(
        "lost-split",
        "The combination leaves out the last split.",
        "        inside = split < num_splits\n",
        "        inside = split < num_splits - 1\n",
    ),
    _kernel(
        "unweighted-splits",
        "The combination adds up the splits' outputs without their weights.",
        "acc = acc * decay + tl.sum(weights[:, None] * tile, 0)",
        "acc = acc * decay + tl.sum(tile, 0)",
    ),
    _kernel(
        "skipped-tile",
        "A split with several tiles leaves out its last.",
        "for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):",
        "for start in tl.range(first, tl.maximum(last - BLOCK_N, tl.minimum(first + 1, last)), BLOCK_N, num_stages=STAGES):",
    ),
    _kernel(
        "missing-rescale",
        "What was accumulated is not rescaled when the running maximum grows.",
        "acc = _dot(weights, v, acc * decay[:, None], DOT_FP32)",
        "acc = _dot(weights, v, acc, DOT_FP32)",
    ),
    _kernel(
        "missing-rescale-of-the-sum",
        "The sum of weights is not rescaled when the running maximum grows.",
        "running_sum = running_sum * decay + tl.sum(weights, 1)",
        "running_sum = running_sum + tl.sum(weights, 1)",
    ),
    _kernel(
        "head-to-group",
        "A query head goes to the K/V head of another group.",
        "head = (kv_head * GROUP + member).to(tl.int64)",
        "head = (member * NUM_KV_HEADS + kv_head).to(tl.int64)",
    ),
    _kernel(
        "second-half-unwritten",
        "Only the first half of head_dim is stored.",
        "tl.store(out_pointers, result.to(out_ptr.dtype.element_ty), mask=out_mask)",
        "tl.store(out_pointers, result.to(out_ptr.dtype.element_ty), mask=out_mask & (out_column < HEAD_DIM // 2)[None, :])",
        (
            "tl.store(out_pointers, result.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)",
            "tl.store(out_pointers, result.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM // 2)",
        ),
        rows={DECODE: ("fp16", "one split"), DECODE_E4M3: ()},
    ),
    _kernel(
        "wrong-softmax-scale",
        "The factor that turns e into base 2 is missing.",
        "softmax_scale * _LOG2_E * k_scale * gain",
        "softmax_scale * k_scale * gain",
    ),
    _kernel(
        "wrong-exponential",
        "Weights are powers of e although the scores are scaled for base 2.",
        "weights = tl.exp2(scores - new_max[:, None])",
        "weights = tl.exp(scores - new_max[:, None])",
    ),
    _kernel(
        "offset-in-31-bits",
        "Row offsets keep 31 bits, so that rows past 2**31 elements are read elsewhere.",
        "return rows.to(tl.int64) * row_stride",
        "return (rows.to(tl.int64) * row_stride) & 0x7FFFFFFF",
        rows={DECODE: ("far",)},
    ),
    Fault(
        "offset-in-31-bits-of-pairs",
        "As offset-in-31-bits, counted in pairs of e4m3 bytes.",
        {DECODE_E4M3: ("far",)},
        (Edit(_KERNEL, "return rows.to(tl.int64) * row_stride", "return (rows.to(tl.int64) * row_stride) & 0x7FFFFFFF"),),
        reason=_OFF,
        devices=GPU_ONLY,
    ),
    _kernel(
        "v-from-k",
        "V is read from the K half of the row.",
        "v_base = v_ptr + kv_head",
        "v_base = k_ptr + kv_head",
    ),
    _kernel(
        "swapped-sequences",
        "A sequence attends the row table of another of the batch.",
        "table_row = table_ptr + batch * table_batch_stride",
        "table_row = table_ptr + (tl.num_programs(2) - 1 - batch) * table_batch_stride",
    ),
    _kernel(
        "stale-lengths",
        "Every sequence is taken to be as long as the row table is wide.",
        "seq_len = tl.minimum(tl.load(seq_lens_ptr + batch), max_seq_len)",
        "seq_len = tl.maximum(tl.load(seq_lens_ptr + batch), max_seq_len)",
    ),
    _kernel(
        "ignored-row-table",
        "Rows are read one after the other from a sequence's first.",
        "    num_kv_heads = k_rows.shape[1]\n    group =",
        "    num_kv_heads = k_rows.shape[1]\n"
        "    row_table = row_table[:, :1] + torch.arange(row_table.shape[1], dtype=torch.int32, device=q.device)\n"
        "    row_table = row_table.clamp(max=k_rows.shape[0] - 1)\n"
        "    group =",
    ),
    _result(
        "nan",
        "One element of the output is NaN.",
        '    result = tl.where((head[:, None] == 0) & (out_column[None, :] == 0), float("nan"), result)',
    ),
    _result("small-constant", "A small constant is added to the output.", "    result = result + 0.002"),
    _result("zeros", "The output is zeros.", "    result = result * 0.0"),
    _result(
        "fp16-only",
        "Only outputs over a fp16 pool are off, by a hundredth.",
        "    if not E4M3 and out_ptr.dtype.element_ty == tl.float16:\n        result = result * 1.01",
        {DECODE: ("fp16",)},
    ),
    _result(
        "bf16-only",
        "Only bf16 outputs are off, by a twentieth.",
        "    if out_ptr.dtype.element_ty == tl.bfloat16:\n        result = result * 1.05",
        {DECODE: ("bf16",), DECODE_E4M3: ("e4m3 bf16",)},
    ),
    _result("e4m3-only", "Only outputs over an e4m3 pool are off, by a twentieth.", "    if E4M3:\n        result = result * 1.05", _BYTES),
    _kernel("ignored-k-scale", "The K scale of an e4m3 pool is left out.", "* _LOG2_E * k_scale * gain", "* _LOG2_E * gain", rows=_BYTES),
    _kernel("ignored-v-scale", "The V scale of an e4m3 pool is left out.", "        v_scale * gain,\n", "        gain,\n", rows=_BYTES),
    _kernel(
        "swapped-scales",
        "The scales of K and V are exchanged.",
        "* _LOG2_E * k_scale * gain,\n        v_scale * gain,\n",
        "* _LOG2_E * v_scale * gain,\n        k_scale * gain,\n",
        rows=_BYTES,
    ),
    _kernel(
        "missing-rescale-of-odd",
        "The odd half of an e4m3 accumulator is not rescaled.",
        "acc_odd = _dot(weights, v_odd, acc_odd * decay[:, None], DOT_FP32)",
        "acc_odd = _dot(weights, v_odd, acc_odd, DOT_FP32)",
        rows=_BYTES,
    ),
    _widened("wrong-bias", "e4m3 bytes are decoded with an exponent bias of 6.", "    even = even * 2.0\n    odd = odd * 2.0"),
    _widened(
        "flushed-subnormals",
        "Subnormal e4m3 bytes are decoded as zeros.",
        "    even = tl.where((pair.to(tl.int32) & 0x78) == 0, 0.0, even).to(tl.float16)\n"
        "    odd = tl.where(((pair.to(tl.int32) >> 8) & 0x78) == 0, 0.0, odd).to(tl.float16)",
    ),
    _widened("lost-sign", "The sign of odd e4m3 bytes is lost.", "    odd = tl.abs(odd)"),
    _widened("swapped-bytes", "The even and the odd byte of a pair are exchanged.", "    even, odd = odd, even"),
    Fault(
        "wrong-impl",
        "The suite is named after another kernel than the one that dispatch() runs.",
        _BOTH,
        (Edit(_SUITE, '_IMPL = {"cuda": "triton_paged_decode"', '_IMPL = {"cuda": "torch_paged_decode"'),),
        status=("failed",),
        reason="WrongKernelError.*named after torch_paged_decode and dispatch\\(\\) runs triton_paged_decode",
    ),
    Fault(
        "no-poison",
        "The suite's poison leaves the outputs as they are.",
        _SHORT,
        (Edit(_SUITE, 'outs.fill_(float("nan"))', "outs.sum()"),),
        reason="takes outputs that its poison made wrong|^decode over",
    ),
    Fault(
        "no-check",
        "The suite's check compares nothing.",
        _SHORT,
        (
            Edit(
                _SUITE,
                "return verify.check_decode(outs",
                "return 0.0 * len(outs) if len(outs) else verify.check_decode(outs",
            ),
        ),
        reason="takes outputs that its poison made wrong",
    ),
    Fault(
        "rounded-parts",
        "Each split's part is rounded to the output's dtype: another right way.",
        {DECODE_E4M3: ()},
        (Edit(_KERNEL, _BEFORE_STORE, f"    result = result.to(out_ptr.dtype.element_ty).to(tl.float32)\n{_BEFORE_STORE}"),),
        harmless=True,
    ),
)
