"""KV scatter of every backend, read back through the destination index (R8, R58, R59, R60)."""

import inspect
from typing import Any

import pytest
import torch

from asv_bench.verify import VerificationError, check_guards, check_write
from rapid_llm.kernels.configs import WriteConfig, choose_write_config
from rapid_llm.kernels.ops import kv_write, tuned
from rapid_llm.kernels.ops.checks import DTYPE_NAMES

FP16, BF16, E4M3, INT8 = torch.float16, torch.bfloat16, torch.uint8, torch.int8
POOLS = [(FP16, FP16), (BF16, BF16), (FP16, E4M3), (BF16, E4M3), (FP16, INT8), (BF16, INT8)]
GUARD_ROWS = 2


class Pool:
    """A combined buffer inside guard rows, filled with a byte that a write of normal numbers never leaves everywhere."""

    def __init__(self, num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self.memory = torch.full((num_rows + 2 * GUARD_ROWS, 2 * num_kv_heads, head_dim), 77, dtype=dtype, device=device)
        self.before = self.memory.clone()
        inside = self.memory[GUARD_ROWS:-GUARD_ROWS]
        self.k_rows, self.v_rows = inside[:, :num_kv_heads], inside[:, num_kv_heads:]

    def check_untouched_except(self, rows: torch.Tensor) -> None:
        """Every row but these, guard rows included, is byte for byte what it was."""
        untouched = torch.ones(self.memory.shape[0], dtype=torch.bool, device=self.memory.device)
        untouched[rows.long() + GUARD_ROWS] = False
        check_guards(self.before[untouched], self.memory[untouched], what="KV write")


def _tokens(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as a fused projection leaves them: token stride of all heads."""
    qkv = (3 * torch.randn(num_tokens, 4 * heads, head_dim, device=device)).to(dtype)
    return qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]


def _scales(rows: torch.Tensor) -> dict[str, Any]:
    """Scales for a pool; of an int8 one those of each head, none of which is another's."""
    if rows.dtype == INT8:
        steps = 1.0 + torch.arange(rows.shape[1], device=rows.device)
        return {"k_scale": 0.03 * steps, "v_scale": 0.5 / steps}
    return {"k_scale": 0.5, "v_scale": 2.0} if rows.dtype == E4M3 else {}


@pytest.mark.parametrize(("dtype", "pool_dtype"), POOLS)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (3, 96), (1, 128), (5, 17)])
def test_scattered_rows(backend: str, device: str, dtype: Any, pool_dtype: Any, heads: int, head_dim: int) -> None:
    """R58, R59: on scattered rows a stride bug shows as K in the V half; R60: nothing else is touched.

    The scales 0.5 and 2.0 show where K's and V's were swapped.
    """
    pool = Pool(40, heads, head_dim, pool_dtype, device)
    k, v = _tokens(13, heads, head_dim, dtype, device)
    slots = torch.randperm(40)[:13].int().to(device)
    kv_write(k, v, slots, pool.k_rows, pool.v_rows, **_scales(pool.k_rows), backend=backend)
    check_write(k, v, slots, pool.k_rows, pool.v_rows, **_scales(pool.k_rows))
    pool.check_untouched_except(slots)


@pytest.mark.parametrize("pool_dtype", [FP16, E4M3, INT8])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", [[-1], [5, -1, 7], [10], [9], [-7, 2**31 - 1, 0, 9], []])
def test_skipped_slots(backend: str, device: str, pool_dtype: Any, slot_dtype: torch.dtype, slots: list[int]) -> None:
    """A negative slot and one beyond the ten rows are skipped; the rows beside the pool stay."""
    pool = Pool(10, 2, 64, pool_dtype, device)
    k, v = _tokens(len(slots), 2, 64, FP16, device)
    mapping = torch.tensor(slots, dtype=slot_dtype, device=device)
    kv_write(k, v, mapping, pool.k_rows, pool.v_rows, **_scales(pool.k_rows), backend=backend)
    check_write(k, v, mapping, pool.k_rows, pool.v_rows, **_scales(pool.k_rows))
    pool.check_untouched_except(mapping[(mapping >= 0) & (mapping < 10)])


def test_int64_slots_do_not_wrap(backend: str, device: str) -> None:
    """2**32 + 3 is beyond the pool; cut to 32 bits it would be row 3."""
    pool = Pool(10, 2, 64, FP16, device)
    k, v = _tokens(2, 2, 64, FP16, device)
    mapping = torch.tensor([2**32 + 3, -(2**32) + 4], device=device)
    kv_write(k, v, mapping, pool.k_rows, pool.v_rows, backend=backend)
    pool.check_untouched_except(mapping[:0])


@pytest.mark.parametrize("pool_dtype", [FP16, E4M3, INT8])
def test_many_tokens(backend: str, device: str, monkeypatch: pytest.MonkeyPatch, pool_dtype: Any) -> None:
    """The rule's config of few, of more and of many tokens writes the same rows."""
    monkeypatch.setattr("rapid_llm.kernels.configs._FEW_TOKENS", 8)
    monkeypatch.setattr("rapid_llm.kernels.configs._MANY_TOKENS", 16)
    for num_tokens in (8, 16, 27):
        pool = Pool(40, 8, 128, pool_dtype, device)
        k, v = _tokens(num_tokens, 8, 128, FP16, device)
        slots = torch.randperm(40)[:num_tokens].int().to(device)
        kv_write(k, v, slots, pool.k_rows, pool.v_rows, **_scales(pool.k_rows), backend=backend)
        check_write(k, v, slots, pool.k_rows, pool.v_rows, **_scales(pool.k_rows))
        pool.check_untouched_except(slots)


def test_the_rule_has_other_warps_where_others_were_faster() -> None:
    """As measured on an H200: eight heads of 128."""
    rules = {
        n: (choose_write_config(n, 1024, one_byte=False), choose_write_config(n, 1024, one_byte=True)) for n in (1, 256, 257, 8192, 8193)
    }
    assert {n: [config.num_warps for config in found] for n, found in rules.items()} == {
        1: [4, 4], 256: [4, 4], 257: [2, 4], 8192: [2, 4], 8193: [8, 4]
    }  # fmt: skip
    assert all((config.tokens, config.halves, config.block) == (1, 2, 1024) for found in rules.values() for config in found)


@pytest.mark.parametrize(("dtype", "pool_dtype"), POOLS)
@pytest.mark.parametrize("num_tokens", [1, 7, pytest.param(8, marks=pytest.mark.gpu)])
def test_every_candidate_writes_the_same(device: str, dtype: Any, pool_dtype: Any, num_tokens: int) -> None:
    """Whatever the tiles: heads that end within a block, a last program that is not full, K and V apart and together."""
    heads, head_dim = 3, 96
    slots = torch.tensor([4, -1, 9, 12, 0, 40, 11, 7], device=device)[:num_tokens]
    k, v = _tokens(num_tokens, heads, head_dim, dtype, device)
    sizes = {"num_tokens": num_tokens, "num_kv_heads": heads, "head_dim": head_dim}
    candidates = WriteConfig.candidates(sizes, DTYPE_NAMES[pool_dtype])
    kept = slots[(slots >= 0) & (slots < 20)]
    assert {config.halves for config in candidates} == {1, 2}
    pool = Pool(20, heads, head_dim, pool_dtype, device)
    first: torch.Tensor | None = None
    for config in candidates:
        pool.memory.copy_(pool.before)
        with tuned.overridden("triton_kv_write", config):
            kv_write(k, v, slots, pool.k_rows, pool.v_rows, **_scales(pool.k_rows), backend="triton")
        if first is None:
            check_write(k, v, slots, pool.k_rows, pool.v_rows, **_scales(pool.k_rows))
            pool.check_untouched_except(kept)
            first = pool.memory.clone()
        assert torch.equal(pool.memory, first), config


def test_the_rule_is_a_candidate_and_no_candidate_is_one_twice() -> None:
    for num_tokens in (1, 64, 4096, 32768):
        for heads, head_dim in ((8, 128), (1, 64), (8, 96), (32, 256)):
            sizes = {"num_tokens": num_tokens, "num_kv_heads": heads, "head_dim": head_dim}
            rule, *others = WriteConfig.candidates(sizes, "e4m3")
            assert rule == WriteConfig.default(sizes, "e4m3")
            assert rule.problem(sizes, "e4m3") is None
            assert rule not in others
            assert len(set(others)) == len(others) >= 8
    assert "more than" in str(WriteConfig(8, 4096).problem({}, "e4m3"))
    assert "halves is 3" in str(WriteConfig(1, 1024, halves=3).problem({}, "e4m3"))


@pytest.mark.parametrize("pool_dtype", [FP16, E4M3, INT8])
def test_layouts(backend: str, device: str, pool_dtype: torch.dtype) -> None:
    """R45: split rows, transposed heads, a layer of many, all written in place through their own strides."""
    heads, dim, num_rows = 2, 48, 20
    layouts = {
        "split": torch.zeros(2, num_rows, heads, dim, dtype=pool_dtype, device=device).unbind(0),
        "transposed heads": torch.zeros(2, heads, num_rows, dim, dtype=pool_dtype, device=device).transpose(1, 2).unbind(0),
        "layer of many": torch.zeros(num_rows, 3, 2, heads, dim, dtype=pool_dtype, device=device)[:, 1].unbind(1),
        "odd strides": torch.zeros(2, num_rows, heads, dim + 3, dtype=pool_dtype, device=device)[..., 1:-2].unbind(0),
    }
    layouts["k and v laid out differently"] = (layouts["odd strides"][0].clone(), layouts["transposed heads"][1].clone())
    k, v = _tokens(7, heads, dim, FP16, device)
    v = v.transpose(0, 1).contiguous().transpose(0, 1)
    slots = torch.randperm(num_rows)[:7].to(device)
    for k_rows, v_rows in layouts.values():
        kv_write(k, v, slots, k_rows, v_rows, **_scales(k_rows), backend=backend)
        check_write(k, v, slots, k_rows, v_rows, **_scales(k_rows))


def test_transposed_tokens_and_strided_slots(backend: str, device: str) -> None:
    pool = Pool(10, 3, 32, FP16, device)
    k, v = (torch.randn(3, 5, 32, device=device).half().transpose(0, 1) for _ in range(2))
    slots = torch.tensor([9, 100, 0, 100, 4, 100, 2, 100, 7, 100], device=device)[::2]
    kv_write(k, v, slots, pool.k_rows, pool.v_rows, backend=backend)
    check_write(k, v, slots, pool.k_rows, pool.v_rows)
    pool.check_untouched_except(slots)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_nan_and_infinity_pass_unchanged_into_a_16_bit_pool(backend: str, device: str, dtype: torch.dtype) -> None:
    pool = Pool(4, 1, 16, dtype, device)
    k = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0] * 4, device=device).to(dtype).view(1, 1, 16)
    kv_write(k, -k, torch.tensor([2], device=device), pool.k_rows, pool.v_rows, backend=backend)
    check_write(k, -k, torch.tensor([2], device=device), pool.k_rows, pool.v_rows)
    assert torch.equal(pool.k_rows[2, 0, 3::4].signbit(), torch.ones(4, dtype=torch.bool, device=device))


def test_the_check_sees_a_swapped_half(backend: str, device: str) -> None:
    """R58: the comparison itself refuses K in the V half."""
    pool = Pool(10, 2, 64, FP16, device)
    k, v = _tokens(3, 2, 64, FP16, device)
    slots = torch.tensor([8, 1, 5], device=device)
    kv_write(v, k, slots, pool.k_rows, pool.v_rows, backend=backend)
    with pytest.raises(VerificationError):
        check_write(k, v, slots, pool.k_rows, pool.v_rows)


def test_the_contract_of_skipped_slots_is_documented() -> None:
    documented = inspect.getdoc(kv_write)
    assert documented is not None
    assert "A negative slot is skipped" in documented
