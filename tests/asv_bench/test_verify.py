"""References and tolerances refuse what is wrong and take what is right (R4, R5, R6, R53, R58–R60, R66)."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from asv_bench import kv_pool, verify
from asv_bench.verify import VerificationError


def _decode_inputs(context: int = 400, kv_dtype: torch.dtype = torch.float16, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * context
    k, v = (torch.randn(rows, 2, 64, generator=generator) for _ in range(2))
    if kv_dtype == torch.int8:
        k, v = ((40 * x).round().clamp(-127, 127).to(torch.int8) for x in (k, v))
    elif kv_dtype == torch.uint8:
        k, v = (x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) for x in (k, v))
    else:
        k, v = k.to(kv_dtype), v.to(kv_dtype)
    table = torch.randperm(rows, generator=generator)[: 2 * context].view(2, context).to(torch.int32)
    q = torch.randn(2, 8, 64, generator=generator).half()
    return {"q": q, "k_rows": k, "v_rows": v, "row_table": table, "seq_lens": torch.tensor([context, context - 7], dtype=torch.int32)}


def test_decode_reference_is_softmax_attention_by_hand() -> None:
    q = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]).half()
    k = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]], [[9.0, 9.0]]]).half()
    v = torch.tensor([[[1.0, 10.0]], [[3.0, 30.0]], [[9.0, 9.0]]]).half()
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    out = verify.decode_reference(q, k, v, table, torch.tensor([2], dtype=torch.int32), softmax_scale=0.5)
    weight = torch.tensor(1.0).exp() / (torch.tensor(1.0).exp() + torch.tensor(-1.0).exp())
    assert out[0, 0].tolist() == pytest.approx([float(weight + 3 * (1 - weight)), float(10 * weight + 30 * (1 - weight))], rel=1e-6)
    assert out[0, 1].tolist() == pytest.approx([2.0, 20.0])


def test_decode_reference_gives_zeros_for_length_zero() -> None:
    inputs = _decode_inputs()
    inputs["seq_lens"] = torch.tensor([0, 3], dtype=torch.int32)
    out = verify.decode_reference(**inputs)
    assert not out[0].any()
    assert out[1].any()


@pytest.mark.parametrize("context", [1, 64, 4000])
def test_zeros_are_refused_however_long_the_context(context: int) -> None:
    """A long context makes outputs of about 1/sqrt(S): a fixed tolerance would take zeros."""
    inputs = _decode_inputs(max(context, 8))
    inputs["seq_lens"] = torch.tensor([context, context], dtype=torch.int32)
    reference = verify.decode_reference(**inputs)
    assert verify.check_decode(reference.half(), reference, kv_dtype="float16") < 2e-3
    with pytest.raises(VerificationError):
        verify.check_decode(torch.zeros_like(reference).half(), reference, kv_dtype="float16")


def _drop_last_token(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "seq_lens": inputs["seq_lens"] - 1}


def _swap_heads(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "k_rows": inputs["k_rows"].flip(1)}


def _swap_k_and_v(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "k_rows": inputs["v_rows"], "v_rows": inputs["k_rows"]}


def _wrong_row(inputs: dict[str, Any]) -> dict[str, Any]:
    table = inputs["row_table"].clone()
    table[:, 0] = table[:, 1]
    return {**inputs, "row_table": table}


def _wrong_scale(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "softmax_scale": 1.1 * 64**-0.5}


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.uint8])
@pytest.mark.parametrize("fault", [_drop_last_token, _swap_heads, _swap_k_and_v, _wrong_row, _wrong_scale])
def test_faults_of_a_decode_are_refused(fault: Any, kv_dtype: torch.dtype) -> None:
    inputs = _decode_inputs(kv_dtype=kv_dtype)
    reference = verify.decode_reference(**inputs)
    wrong = verify.decode_reference(**fault(inputs)).half()
    with pytest.raises(VerificationError, match="elements are off"):
        verify.check_decode(wrong, reference, kv_dtype="float16")


def test_one_unwritten_element_is_refused_and_named() -> None:
    inputs = _decode_inputs()
    reference = verify.decode_reference(**inputs)
    out = reference.half()
    out[1, 5, 17] = float("nan")
    with pytest.raises(VerificationError, match=r"1 of 1024 elements are off, the worst at \[1, 5, 17\] is nan"):
        verify.check_decode(out, reference, kv_dtype="float16")


def test_r53_e4m3_bytes_are_widened_by_torch_with_their_scale() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)
    widened = verify.widen(every_byte, 0.5)
    expected = every_byte.view(torch.float8_e4m3fn).float().double() * 0.5
    assert torch.equal(widened.nan_to_num(), expected.nan_to_num())
    assert int(widened.isnan().sum()) == 2


def test_int8_bytes_are_widened_with_the_scales_of_their_heads() -> None:
    rows = torch.tensor([[[-128, 127], [-127, 1]], [[0, 5], [6, 7]]], dtype=torch.int8)
    widened = verify.widen(rows, torch.tensor([0.5, 2.0]))
    assert widened.dtype == torch.float64
    assert widened.tolist() == [[[-64.0, 63.5], [-254.0, 2.0]], [[0.0, 2.5], [12.0, 14.0]]]


def test_scales_of_heads_that_are_exchanged_are_seen_in_a_decode() -> None:
    inputs, scales = _decode_inputs(kv_dtype=torch.int8), [torch.tensor([0.02, 0.03]), torch.tensor([0.03, 0.02])]
    right = verify.decode_reference(**inputs, k_scale=scales[0], v_scale=scales[0])
    verify.check_decode(right.half(), right, kv_dtype="int8")
    for k, v in ((0, 1), (1, 0)):
        wrong = verify.decode_reference(**inputs, k_scale=scales[k], v_scale=scales[v])
        with pytest.raises(VerificationError, match="int8 pool"):
            verify.check_decode(wrong.half(), right, kv_dtype="int8")


def test_int8_bytes_beside_the_rounding_are_refused() -> None:
    """By one, by the scales of another head, -128 for -127, NaN that is not 0."""
    scale = torch.tensor([0.5, 0.25])
    x = torch.tensor([[[1.0, -0.25, 0.75, 63.6, -70.0, float("nan"), float("inf")]] * 2]).half()
    right = torch.tensor([[[2, 0, 2, 127, -127, 0, 127], [4, -1, 3, 127, -127, 0, 127]]], dtype=torch.int8)
    assert verify.check_int8(right, x, scale, what="w") == 0.25
    for place, byte in (((0, 0, 0), 1), ((0, 0, 1), -1), ((0, 1, 2), 2), ((0, 0, 4), -128), ((0, 0, 5), 127), ((0, 0, 6), -1)):
        wrong = right.clone()
        wrong[place] = byte
        with pytest.raises(VerificationError, match="w: 1 of 14 int8 bytes are not the rounding"):
            verify.check_int8(wrong, x, scale, what="w")
    with pytest.raises(VerificationError):
        verify.check_int8(right, x, scale.flip(0), what="w")


def _write_case(kv_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(6, 2, 16, generator=generator).half() for _ in range(2))
    pool = torch.zeros(20, 4, 16, dtype=kv_dtype)
    slots = torch.tensor([7, 3, -1, 19, 40, 0], dtype=torch.int32)
    return k, v, slots, pool


def _store(pool: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: tuple[Any, Any]) -> None:
    for half, values, scale in ((pool[:, :2], k, scales[0]), (pool[:, 2:], v, scales[1])):
        quantise = {torch.uint8: verify.e4m3_bytes, torch.int8: verify.int8_bytes}.get(pool.dtype)
        half[rows] = values if quantise is None else quantise(values, scale)[0]


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.uint8, torch.int8])
def test_r58_a_write_is_read_back_through_its_index(kv_dtype: torch.dtype) -> None:
    k, v, slots, pool = _write_case(kv_dtype)
    scales: tuple[Any, Any] = (0.5, 2.0) if kv_dtype == torch.uint8 else (1.0, 1.0)
    if kv_dtype == torch.int8:
        scales = (torch.tensor([0.02, 0.03]), torch.tensor([0.05, 0.01]))
    keep = torch.tensor([0, 1, 3, 5])
    rows = slots[keep].long()
    _store(pool, rows, k[keep], v[keep], scales)
    error = verify.check_write(k, v, slots, pool[:, :2], pool[:, 2:], k_scale=scales[0], v_scale=scales[1])
    assert (error == 0) == (kv_dtype == torch.float16)
    swapped = torch.cat([pool[:, 2:], pool[:, :2]], dim=1)
    with pytest.raises(VerificationError, match="K half"):
        verify.check_write(k, v, slots, swapped[:, :2], swapped[:, 2:], k_scale=scales[0], v_scale=scales[1])
    shifted = pool.roll(1, dims=0)
    with pytest.raises(VerificationError):
        verify.check_write(k, v, slots, shifted[:, :2], shifted[:, 2:], k_scale=scales[0], v_scale=scales[1])
    pool[int(rows[-1]), 2] += 1
    with pytest.raises(VerificationError, match="V half"):
        verify.check_write(k, v, slots, pool[:, :2], pool[:, 2:], k_scale=scales[0], v_scale=scales[1])


@pytest.mark.parametrize("kv_dtype", [torch.uint8, torch.int8])
def test_swapped_k_and_v_scales_are_refused(kv_dtype: torch.dtype) -> None:
    k, v, slots, pool = _write_case(kv_dtype)
    keep = torch.tensor([0, 1, 3, 5])
    scales: tuple[Any, Any] = (0.5, 2.0) if kv_dtype == torch.uint8 else (torch.tensor([0.5, 0.1]), torch.tensor([0.1, 0.5]))
    _store(pool, slots[keep].long(), k[keep], v[keep], (scales[1], scales[0]))
    with pytest.raises(VerificationError, match="not the rounding"):
        verify.check_write(k, v, slots, pool[:, :2], pool[:, 2:], k_scale=scales[0], v_scale=scales[1])


def test_guard_rows_that_changed_are_refused() -> None:
    before = torch.arange(8, dtype=torch.float16).view(4, 2)
    verify.check_guards(before, before.clone(), what="w")
    after = before.clone()
    after[2, 1] = -0.0
    before[2, 1] = 0.0
    with pytest.raises(VerificationError, match="have changed"):
        verify.check_guards(before, after, what="w")


@pytest.mark.parametrize("written", [[0], [7], [3, 4, 9], [0, 1, 2, 19], list(range(20))])
def test_r60_guard_rows_are_the_neighbours_and_the_check_touches_four_times_what_was_written(written: list[int]) -> None:
    guards = verify.guard_rows(torch.tensor(written, dtype=torch.int32), 20).tolist()
    assert not set(guards) & set(written)
    neighbours = {row + step for row in written for step in (-1, 1)} & set(range(20)) - set(written)
    assert neighbours <= set(guards)
    assert len(guards) + len(written) <= 4 * len(written)


def test_r60_a_scatter_over_the_fixture_compares_few_rows() -> None:
    pool = kv_pool.paged_pool(seq_lens=[], num_kv_heads=2, head_dim=16, kv_dtype="float16", device=torch.device("cpu"), spare_rows=100)
    guards = verify.guard_rows(pool.free_rows, pool.k_rows.shape[0])
    assert 20 < guards.numel() <= 300


def test_edge_values_hold_what_a_store_gets_wrong() -> None:
    scale = 0.03
    edges = verify.edge_values(scale, torch.float16, torch.device("cpu"))
    stored = verify.e4m3_bytes(edges.nan_to_num(0.0), scale)[0]
    assert edges.isnan().any()
    assert edges.isinf().sum() == 2
    assert (edges.abs() > 448 * scale).sum() >= 4
    assert ((stored & 0x78 == 0) & (stored & 0x07 != 0)).sum() >= 2
    assert (edges.view(torch.int16) == -(2**15)).any()


def test_edge_values_of_heads_are_in_units_of_their_scales() -> None:
    scale = torch.tensor([0.03, 0.5])
    edges = verify.edge_values(scale, torch.float16, torch.device("cpu"))
    assert edges.shape[0] == 2
    assert edges.isnan().any(-1).all()
    assert (edges.isinf().sum(-1) == 2).all()
    finite = edges.float()[:, edges[0].isfinite()]
    assert ((finite.abs() > 127.4 * scale[:, None]).sum(-1) >= 4).all()
    assert (finite[1] / 0.5 % 1.0 == 0.5).sum() >= 4  # ties, exact where the scale is a power of two
    torch.testing.assert_close(finite[0] / 0.03, finite[1] / 0.5, rtol=1e-3, atol=1e-3)


def test_a_small_head_is_held_to_its_own_magnitude() -> None:
    """A tolerance from the whole output would take anything for a head that is 2**-13 of the others."""
    inputs = _decode_inputs()
    inputs["v_rows"] = torch.stack([inputs["v_rows"][:, 0], inputs["v_rows"][:, 1] * 2.0**-13], dim=1)
    reference = verify.decode_reference(**inputs)
    verify.check_decode(reference.half(), reference, kv_dtype="float16")
    wrong = reference.half()
    wrong[:, 4:] *= 1.05
    with pytest.raises(VerificationError, match="elements are off"):
        verify.check_decode(wrong, reference, kv_dtype="float16")


def test_r8_each_dtype_has_a_tolerance_of_its_own() -> None:
    """What bf16 may be off by is refused of fp16."""
    inputs = _decode_inputs()
    reference = verify.decode_reference(**inputs)
    off = reference * 1.008
    verify.check_decode(off.bfloat16(), reference, kv_dtype="bfloat16")
    with pytest.raises(VerificationError):
        verify.check_decode(off.half(), reference, kv_dtype="float16")


def test_negative_zero_and_the_bits_of_nan_are_compared() -> None:
    k, v, slots, pool = _write_case(torch.float16)
    k[0, 0, 0], k[1, 0, 0] = -0.0, float("nan")
    keep = torch.tensor([0, 1, 3, 5])
    rows = slots[keep].long()
    _store(pool, rows, k[keep], v[keep], (1.0, 1.0))
    assert verify.check_write(k, v, slots, pool[:, :2], pool[:, 2:]) == 0
    pool[int(rows[0]), 0, 0] = 0.0
    with pytest.raises(VerificationError, match="K half: 1 of"):
        verify.check_write(k, v, slots, pool[:, :2], pool[:, 2:])


def test_a_stride_fault_passes_on_rows_in_order_and_fails_on_scattered_ones_r59() -> None:
    """Rows counted from the first slot instead of read from the mapping."""
    k, v, _, pool = _write_case(torch.float16)
    for slots, fits in ((torch.arange(4, 10), True), (torch.tensor([4, 9, 2, 17, 0, 6]), False)):
        _store(pool, slots[0] + torch.arange(6), k, v, (1.0, 1.0))
        if fits:
            verify.check_write(k, v, slots, pool[:, :2], pool[:, 2:])
        else:
            with pytest.raises(VerificationError):
                verify.check_write(k, v, slots, pool[:, :2], pool[:, 2:])


_FREE = [True, True, True, False, True]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (None, "got none"),
        ([0, 1], "got 2"),
        ([0, 1, 1], "handed out twice"),
        ([0, 1, 9], "outside the pool"),
        ([0, -1, 2], "outside the pool"),
        ([0, 1, 3], "in use already"),
    ],
)
def test_r66_allocations_that_break_the_invariant_are_refused(rows: list[int] | None, why: str) -> None:
    free, after = torch.tensor(_FREE), torch.tensor([False, True, False, False, False])
    verify.check_allocation(torch.tensor([0, 2, 4], dtype=torch.int32), free, after, count=3, state="bump")
    got = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    with pytest.raises(VerificationError, match=why):
        verify.check_allocation(got, free, after, count=3, state="bump")


@pytest.mark.parametrize("after", [_FREE, [False, True, False, False, True], [False, False, False, False, False]])
def test_r66_rows_that_stay_free_or_are_taken_along_are_refused(after: list[bool]) -> None:
    rows = torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(VerificationError, match="that should not be"):
        verify.check_allocation(rows, torch.tensor(_FREE), torch.tensor(after), count=3, state="bump")


def test_r66_rows_of_another_dtype_are_refused() -> None:
    free, after = torch.tensor(_FREE), torch.tensor([False, True, False, False, False])
    with pytest.raises(VerificationError, match="expected int32 rows on cpu, got int64"):
        verify.check_allocation(torch.tensor([0, 2, 4]), free, after, count=3, state="bump")


STATES = {"bump": "00001111", "run_search": "01111000", "fragmented": "01010101"}


@pytest.mark.parametrize("state", STATES)
def test_r64_a_state_is_told_from_every_other(state: str) -> None:
    for name, text in STATES.items():
        free = torch.tensor([c == "1" for c in text])
        if name == state or (state == "run_search" and name == "bump"):  # a run at the end is a run
            verify.check_state(free, state=state, num_free=4, count=2)
        else:
            with pytest.raises(VerificationError, match="the reset leaves"):
                verify.check_state(free, state=state, num_free=4, count=2)
    with pytest.raises(VerificationError, match="the reset leaves 8 free rows where the state has 4"):
        verify.check_state(torch.ones(8, dtype=torch.bool), state=state, num_free=4, count=2)


def test_r5_the_references_import_nothing_of_the_library_under_test(root: Path) -> None:
    tree = ast.parse((root / "asv_bench" / "verify.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {
        str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.startswith("rapid_llm")
    }
    assert not {name for name in names if name.startswith("rapid_llm")}


def test_r6_tolerances_are_named_and_no_suite_has_one_of_its_own(root: Path) -> None:
    assert set(verify._RTOL) == set(verify._ATOL) == {"float16", "bfloat16"}
    for path in (root / "asv_bench").glob("bench_*.py"):
        text = path.read_text(encoding="utf-8")
        assert "rtol" not in text.lower(), path
        assert "allclose" not in text, path


def test_r7_the_kernel_tests_take_their_tolerances_from_here(root: Path) -> None:
    """One literal in them compares two outputs of a kernel with each other, not one with a reference; one allows for Triton's interpreter,
    which cuts bf16 off."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (root / "tests" / "kernels").glob("test_*.py")}
    assert {name: text.count("rtol") for name, text in texts.items() if "rtol" in text} == {
        "test_paged_decode.py": 1,
        "test_rope_write.py": 1,
    }
    assert [name for name, text in texts.items() if "allclose" in text] == []
    for name, check in (("test_paged_decode.py", "check_decode"), ("test_kv_write.py", "check_write"), ("test_offsets.py", "check_write")):
        assert f"{check}(" in texts[name]
        assert "from asv_bench.verify import" in texts[name]
