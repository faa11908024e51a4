"""Faults of the decode kernels, and of what widens e4m3 bytes for them."""

from __future__ import annotations

from collections.abc import Mapping

from asv_bench.mutation.fault import DECODE, DECODE_E4M3, DECODE_WRITE, GPU_ONLY, PREFILL, Edit, Fault

_TILE = "rapid_llm/kernels/decode_tile.py"
_SPLIT = "rapid_llm/kernels/decode_split.py"
_STREAM = "rapid_llm/kernels/decode_stream.py"
_MERGE = "rapid_llm/kernels/decode_merge.py"
_LAUNCHER = "rapid_llm/kernels/paged_decode.py"
_DIRECT = "rapid_llm/kernels/direct_launch.py"
_E4M3 = "rapid_llm/kernels/e4m3.py"
_SUITE = "asv_bench/bench_paged_decode.py"
_OFF = "elements are off"

_BOTH: Mapping[str, tuple[str, ...]] = {DECODE: (), DECODE_E4M3: ()}
_SHORT: Mapping[str, tuple[str, ...]] = {DECODE: ("one split",), DECODE_E4M3: ("one split",)}
_STREAMED: Mapping[str, tuple[str, ...]] = {DECODE: ("many",), DECODE_E4M3: ("many",)}
_BYTES: Mapping[str, tuple[str, ...]] = {DECODE_E4M3: ()}
_WIDENED: Mapping[str, tuple[str, ...]] = {DECODE_E4M3: ("e4m3", "e4m3 bf16")}

_BEFORE_STORE = "    if SPLIT:\n"
_BEFORE_WIDENED = "    if dtype == tl.bfloat16:\n"


def _kernel(name: str, what: str, path: str, old: str, new: str, rows: Mapping[str, tuple[str, ...]] = _BOTH) -> Fault:
    return Fault(name, what, rows, (Edit(path, old, new),), reason=_OFF)


def _result(name: str, what: str, line: str, rows: Mapping[str, tuple[str, ...]] = _BOTH) -> Fault:
    """A fault in the lines that make the output of what was attended, or of each part of it."""
    return _kernel(name, what, _SPLIT, _BEFORE_STORE, f"{line}\n{_BEFORE_STORE}", rows=rows)


def _widened(name: str, what: str, lines: str) -> Fault:
    edit = Edit(_E4M3, _BEFORE_WIDENED, f"{lines}\n{_BEFORE_WIDENED}")
    return Fault(name, what, _WIDENED, (edit,), reason=_OFF)


FAULTS = (
    _kernel(
        "dropped-mask",
        "Lanes past a sequence's last token count as tokens.",
        _TILE,
        'scores = tl.where(token_inside, scores * score_scale, float("-inf"))',
        "scores = scores * score_scale",
    ),
    _kernel(
        "swapped-strides",
        "K's row and head strides are exchanged.",
        _LAUNCHER,
        "        k_row_stride,\n        k_head_stride,\n",
        "        k_head_stride,\n        k_row_stride,\n",
    ),
    _kernel(
        "off-by-one-split",
        "The last split ends a token early.",
        _SPLIT,
        "return first * BLOCK_N, tl.minimum((first + count) * BLOCK_N, seq_len)",
        "return first * BLOCK_N, tl.minimum((first + count) * BLOCK_N, seq_len - 1)",
    ),
    _kernel(
        "lost-split",
        "The combination leaves out the last split.",
        _MERGE,
        "return tl.load(part_lse_ptr + cell, mask=inside,",
        "return tl.load(part_lse_ptr + cell, mask=inside & (place < count - 1)[:, None],",
    ),
    _kernel(
        "unweighted-splits",
        "The combination adds up the splits' outputs without their weights.",
        _MERGE,
        "tl.fma(tile, weights, tl.zeros_like(tile))",
        "tile",
    ),
    _kernel(
        "counter-not-set-back",
        "The program that merges leaves the counter as it is, so that no program of a later call merges.",
        _MERGE,
        "tl.store(counter_ptr, 0)",
        "tl.store(counter_ptr, count)",
    ),
    _kernel(
        "wrong-part-of-a-stream",
        "The program in which a sequence begins is taken to begin with it.",
        _STREAM,
        "first_part = next_part + tl.where(_first_tile(opener, programs, tiles) == sequence_begin, 0, 1)",
        "first_part = next_part",
        rows=_STREAMED,
    ),
    _kernel(
        "lost-piece-of-a-stream",
        "The last program of a stream has no tiles.",
        _STREAM,
        "end = _first_tile(tl.minimum(program + 1, programs), programs, tiles)",
        "end = tl.where(program + 1 == programs, tile, _first_tile(tl.minimum(program + 1, programs), programs, tiles))",
        rows=_STREAMED,
    ),
    _kernel(
        "stale-lengths-of-a-stream",
        "Every sequence of a stream is taken to be as long as the row table is wide.",
        _STREAM,
        "seq_len = tl.maximum(tl.minimum(tl.load(seq_lens_ptr + sequence), max_seq_len), 0)",
        "seq_len = max_seq_len + 0 * tl.load(seq_lens_ptr + sequence)",
        rows=_STREAMED,
    ),
    _kernel(
        "skipped-tile",
        "A split with several tiles leaves out its last.",
        _TILE,
        "for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):",
        "for start in tl.range(first, tl.maximum(last - BLOCK_N, tl.minimum(first + 1, last)), BLOCK_N, num_stages=STAGES):",
    ),
    _kernel(
        "missing-rescale",
        "What was accumulated is not rescaled when the running maximum grows.",
        _TILE,
        "rescaled = acc * tl.expand_dims(decay, TOKENS)",
        "rescaled = acc",
    ),
    _kernel(
        "missing-rescale-of-the-sum",
        "The sum of weights is not rescaled when the running maximum grows.",
        _TILE,
        "running_sum = running_sum * decay + tl.sum(weights, TOKENS)",
        "running_sum = running_sum + tl.sum(weights, TOKENS)",
    ),
    _kernel(
        "head-to-group",
        "A query head goes to the K/V head of another group.",
        _SPLIT,
        "head = (kv_head * GROUP + member).to(tl.int64)",
        "head = (member * NUM_KV_HEADS + kv_head).to(tl.int64)",
    ),
    Fault(
        "second-half-unwritten",
        "Only the first half of head_dim is stored.",
        {DECODE: ("fp16", "one split"), DECODE_E4M3: ()},
        (
            Edit(_SPLIT, "(out_column < HEAD_DIM)[None, :])", "(out_column < HEAD_DIM // 2)[None, :])"),
            Edit(
                _MERGE,
                "mask=member_inside[:, None] & column_inside[None, :])",
                "mask=member_inside[:, None] & (column < HEAD_DIM // 2)[None, :])",
            ),
        ),
        reason=_OFF,
    ),
    _kernel(
        "wrong-softmax-scale",
        "The factor that turns e into base 2 is missing.",
        _LAUNCHER,
        "softmax_scale * _LOG2_E * k_scale",
        "softmax_scale * k_scale",
    ),
    _kernel(
        "wrong-exponential",
        "Weights are powers of e although the scores are scaled for base 2.",
        _TILE,
        "weights = tl.exp2(scores - tl.expand_dims(new_max, TOKENS))",
        "weights = tl.exp(scores - tl.expand_dims(new_max, TOKENS))",
    ),
    _kernel(
        "offset-in-31-bits",
        "Row offsets keep 31 bits, so that rows past 2**31 elements are read elsewhere.",
        _TILE,
        "return wide * row_stride",
        "return (wide * row_stride) & 0x7FFFFFFF",
        rows={DECODE: ("far",)},
    ),
    Fault(
        "offset-in-31-bits-of-pairs",
        "As offset-in-31-bits, counted in pairs of e4m3 bytes.",
        {DECODE_E4M3: ("far",)},
        (Edit(_TILE, "return wide * row_stride", "return (wide * row_stride) & 0x7FFFFFFF"),),
        reason=_OFF,
        devices=GPU_ONLY,
    ),
    _kernel(
        "v-from-k",
        "V is read from the K half of the row.",
        _TILE,
        "v_pointers = k_pointers + V_OFF if V_OFF != 0",
        "v_pointers = k_pointers if V_OFF != 0",
    ),
    _kernel(
        "swapped-sequences",
        "A sequence attends the row table of another of the batch.",
        _SPLIT,
        "table_row = table_ptr + batch * table_batch_stride",
        "table_row = table_ptr + (tl.num_programs(2) - 1 - batch) * table_batch_stride",
    ),
    _kernel(
        "stale-lengths",
        "Every sequence is taken to be as long as the row table is wide.",
        _SPLIT,
        "seq_len = tl.minimum(tl.load(seq_lens_ptr + batch), max_seq_len)",
        "seq_len = tl.maximum(tl.load(seq_lens_ptr + batch), max_seq_len)",
    ),
    _kernel(
        "ignored-row-table",
        "Rows are read one after the other from a sequence's first.",
        _LAUNCHER,
        "    plan: _Plan | None = None",
        "    row_table = row_table[:, :1] + torch.arange(row_table.shape[1], dtype=torch.int32, device=q.device)\n"
        "    row_table = row_table.clamp(max=k_rows.shape[0] - 1)\n"
        "    plan: _Plan | None = None",
    ),
    _result(
        "nan",
        "One element of the output is NaN.",
        '    result = tl.where((head[:, None] == 0) & (tl.arange(0, WIDTH)[None, :] == 0), float("nan"), result)',
    ),
    _result("small-constant", "A small constant is added to the output.", "    result = result + 0.002"),
    _result("zeros", "The output is zeros.", "    result = result * 0.0"),
    _result(
        "fp16-only",
        "Only outputs over a fp16 pool are off, by a hundredth.",
        "    if not PAIRED and out_ptr.dtype.element_ty == tl.float16:\n        result = result * 1.01",
        {DECODE: ("fp16",)},
    ),
    _result(
        "bf16-only",
        "Only bf16 outputs are off, by a twentieth.",
        "    if out_ptr.dtype.element_ty == tl.bfloat16:\n        result = result * 1.05",
        {DECODE: ("bf16",), DECODE_E4M3: ("e4m3 bf16",)},
    ),
    _result(
        "e4m3-only",
        "Only outputs over an e4m3 pool are off, by a twentieth.",
        "    if PAIRED and not INT8:\n        result = result * 1.05",
        _BYTES,
    ),
    _kernel("ignored-k-scale", "The K scale of an e4m3 pool is left out.", _LAUNCHER, "* _LOG2_E * k_scale", "* _LOG2_E", rows=_BYTES),
    _kernel(
        "ignored-v-scale", "The V scale of an e4m3 pool is left out.", _LAUNCHER, "        v_scale * plan", "        plan", rows=_BYTES
    ),
    _kernel(
        "swapped-scales",
        "The scales of K and V are exchanged.",
        _LAUNCHER,
        "* _LOG2_E * k_scale * plan.gain,\n            v_scale * plan.gain,\n",
        "* _LOG2_E * v_scale * plan.gain,\n            k_scale * plan.gain,\n",
        rows=_BYTES,
    ),
    _kernel(
        "missing-rescale-of-odd",
        "The odd half of an e4m3 accumulator is not rescaled.",
        _TILE,
        "rescaled_odd = acc_odd * tl.expand_dims(decay, TOKENS)",
        "rescaled_odd = acc_odd",
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
        "kept-addresses",
        "A like call is launched with the addresses of the first.",
        {**_SHORT, PREFILL: ("fp16",), DECODE_WRITE: ("fp16",)},
        (Edit(_DIRECT, "chosen.launch(*pointers, ", "chosen.launch(*vars(Launches.again).setdefault(id(self), pointers), "),),
        reason=f"{_OFF}|KV write, . half",
        devices=GPU_ONLY,
    ),
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
        (Edit(_SPLIT, _BEFORE_STORE, f"    result = result.to(out_ptr.dtype.element_ty).to(tl.float32)\n{_BEFORE_STORE}"),),
        harmless=True,
    ),
)
