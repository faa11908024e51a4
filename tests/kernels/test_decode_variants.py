"""Every variant of the Triton decode attention against float64 attention over the same bytes: splits, parts, merges, pages."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from asv_bench.verify import check_decode, decode_reference
from rapid_llm.kernels import workspace
from rapid_llm.kernels.configs import VARIANTS, DecodeConfig, choose_config, choose_num_programs, choose_num_splits
from rapid_llm.kernels.ops import paged_decode_attention
from rapid_llm.kernels.ops.checks import DTYPE_NAMES
from rapid_llm.kernels.ops.tuned import overridden

FP16, BF16, E4M3, INT8 = torch.float16, torch.bfloat16, torch.uint8, torch.int8
POOLS = [(FP16, FP16), (BF16, BF16), (FP16, E4M3), (BF16, E4M3), (FP16, INT8), (BF16, INT8)]


def small(variant: str, group: int, head_dim: int, *, one_byte: bool = False, **more: Any) -> DecodeConfig:
    """Tiles of 16 tokens, so that short sequences have several."""
    return replace(choose_config(group, head_dim, one_byte=one_byte, variant=variant), block_n=16, **more)


def attend(cache: Any, config: DecodeConfig, **arguments: Any) -> torch.Tensor:
    """The public call with that config."""
    batch, num_q_heads, head_dim = cache.q.shape
    sizes = {
        "batch": batch,
        "max_seq_len": cache.row_table.shape[1],
        "num_q_heads": num_q_heads,
        "num_kv_heads": cache.k_rows.shape[1],
        "head_dim": head_dim,
    }
    assert config.problem(sizes, DTYPE_NAMES[cache.k_rows.dtype]) is None
    with overridden("triton_paged_decode", config):
        return paged_decode_attention(*cache.tensors, **cache.scales, backend="triton", **arguments)


def checked(cache: Any, config: DecodeConfig) -> torch.Tensor:
    """Runs the call twice over poison, since the second finds the counters that the first has left, and checks both."""
    reference = decode_reference(*cache.tensors, **cache.scales)
    for _ in range(2):
        out = torch.full_like(cache.q, torch.nan)
        attend(cache, config, out=out)
        check_decode(out, reference, kv_dtype=str(cache.k_rows.dtype))
    assert all(not bool(piece.counters.any()) for piece in workspace.kept.pieces.values())
    return out


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), POOLS)
def test_every_variant_and_pool(make_cache: Any, variant: str, dtype: Any, kv_dtype: Any) -> None:
    """Ragged, with an empty sequence and one of one token, in several parts; head_dim is padded."""
    cache = make_cache([37, 0, 1, 65], 6, 2, 24, dtype=dtype, kv_dtype=kv_dtype)
    out = checked(cache, small(variant, 3, 24, one_byte=kv_dtype in (E4M3, INT8)))
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_dtype", [FP16, INT8])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(2, 2), (10, 2), (16, 1), (70, 1)])
def test_every_variant_and_group(make_cache: Any, variant: str, num_q_heads: int, num_kv_heads: int, kv_dtype: torch.dtype) -> None:
    """Groups of 1, 5, 16, and one beyond a program's query heads, whose last block is nearly empty."""
    config = small(variant, num_q_heads // num_kv_heads, 16, one_byte=kv_dtype == INT8)
    checked(make_cache([33, 18], num_q_heads, num_kv_heads, 16, kv_dtype=kv_dtype), config)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", ["stream", "stream-swap"])
def test_a_stream_over_any_lengths(make_cache: Any, variant: str, seed: int) -> None:
    """However the tiles fall on the programs: shared first, shared last, whole sequences between, one sequence for all."""
    generator = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 7, (), generator=generator))
    longest = (16, 48, 160)[seed % 3]
    lengths = torch.randint(0, longest + 1, (batch,), generator=generator).tolist()
    cache = make_cache(lengths, 2, 1, 16)
    for programs_per_sm in (1, 2):
        checked(cache, small(variant, 2, 16, programs_per_sm=programs_per_sm, block_s=(1, 2, 4)[seed % 3]))


@pytest.mark.parametrize("variant", ["split", "swap"])
def test_any_number_of_splits(make_cache: Any, variant: str) -> None:
    """More splits than a sequence has tiles leave empty ones, which weigh nothing; a merge takes them in groups of any size."""
    cache = make_cache([37, 5], 4, 2, 16)
    for num_splits, block_s in itertools.product((1, 2, 3, 7), (1, 4)):
        checked(cache, small(variant, 2, 16, num_splits=num_splits, block_s=block_s))


@pytest.mark.parametrize("variant", VARIANTS)
def test_v_with_addresses_of_its_own(make_cache: Any, variant: str) -> None:
    """Two buffers, V before K in one buffer, and K and V that differ in strides: V lies at no fixed distance after K."""
    cache = make_cache([37, 20], 4, 2, 16)
    reference = decode_reference(*cache.tensors)
    pool = torch.cat([cache.v_rows, cache.k_rows], dim=1)
    padded = torch.full((len(pool), 3, 20), torch.nan, dtype=FP16, device=pool.device)
    padded[:, :2, :16] = cache.v_rows
    for k_rows, v_rows in (
        (cache.k_rows.clone(), cache.v_rows.clone()),
        (pool[:, 2:], pool[:, :2]),
        (cache.k_rows, padded[:, :2, :16]),
    ):
        cache.k_rows, cache.v_rows = k_rows, v_rows
        check_decode(attend(cache, small(variant, 2, 16)), reference, kv_dtype="float16")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_nan_in_one_part_reaches_the_output(make_cache: Any, variant: str) -> None:
    """A NaN value of the last token is in the output of its sequence alone, whichever part it came in."""
    cache = make_cache([70, 33], 2, 1, 16)
    cache.v_rows[cache.row_table[0, 69].long(), 0, 3] = torch.nan
    out = attend(cache, small(variant, 2, 16))
    assert bool(out[0, :, 3].isnan().all())
    assert not bool(out[1].isnan().any())
    cache.k_rows[cache.row_table[1, 0].long(), 0, 5] = torch.nan
    assert bool(attend(cache, small(variant, 2, 16))[1].isnan().all())


def in_blocks(cache: Any, block_size: int) -> torch.Tensor:
    """Moves a cache's tokens to blocks in scattered order, with garbage in what no token has; gives the block table."""
    batch, width = cache.row_table.shape
    num_blocks = -(-width // block_size)
    order = torch.randperm(batch * num_blocks).view(batch, num_blocks).int()
    pool = torch.full((batch * num_blocks * block_size, *cache.k_rows.shape[1:]), 0x7F if cache.k_rows.dtype in (E4M3, INT8) else torch.nan)
    k_rows, v_rows = (pool.to(cache.k_rows.dtype).to(cache.q.device) for _ in range(2))
    for sequence, length in enumerate(cache.seq_lens.tolist()):
        for token in range(length):
            row = int(order[sequence, token // block_size]) * block_size + token % block_size
            k_rows[row] = cache.k_rows[cache.row_table[sequence, token].long()]
            v_rows[row] = cache.v_rows[cache.row_table[sequence, token].long()]
        order[sequence, -(-length // block_size) :] = -1
    cache.k_rows, cache.v_rows = k_rows, v_rows
    return order.to(cache.q.device)


@pytest.mark.parametrize("block_size", [3, 16, 64])
@pytest.mark.parametrize("variant", [*VARIANTS, "torch"])
def test_a_block_table_is_the_row_table_in_blocks(make_cache: Any, variant: str, block_size: int) -> None:
    """Blocks smaller and larger than a tile, one that is no power of two, and entries past a length that no pool has."""
    cache = make_cache([70, 0, 18, 64], 4, 2, 16, kv_dtype={3: FP16, 16: E4M3, 64: INT8}[block_size])
    reference = decode_reference(*cache.tensors, **cache.scales)
    cache.row_table = in_blocks(cache, block_size)
    if variant == "torch":
        out = paged_decode_attention(*cache.tensors, **cache.scales, backend="torch", block_size=block_size)
    else:
        out = attend(cache, small(variant, 2, 16, one_byte=bool(cache.scales)), block_size=block_size)
    check_decode(out, reference, kv_dtype=str(cache.k_rows.dtype))


def test_a_larger_call_takes_a_larger_workspace(make_cache: Any) -> None:
    workspace.kept.cache_clear()
    small_cache, large_cache = make_cache([40], 2, 1, 16), make_cache([40] * 1100, 2, 1, 16)
    config = small("split", 2, 16, num_splits=2)
    checked(small_cache, config)
    (before,) = workspace.kept.pieces.values()
    piece = workspace.workspace_for(small_cache.q.device, 8, 8)
    assert piece is before
    grown = workspace.workspace_for(small_cache.q.device, len(piece.floats) + 1, 2 * len(large_cache.seq_lens))
    assert grown is not piece
    assert len(grown.floats) > len(piece.floats)
    assert not bool(grown.counters.any())
    assert workspace.workspace_for(small_cache.q.device, 8, 8) is grown


def test_split_choice_depends_on_host_integers_only() -> None:
    assert choose_num_splits(8, 8192, 132, block_n=64) == 32
    assert choose_num_splits(8, 1024, 132, block_n=64) == 16
    assert choose_num_splits(8 * 256, 8192, 132, block_n=64) == 1
    assert choose_num_splits(1, 64, 132, block_n=64) == 1
    assert choose_num_splits(1, 0, 132, block_n=64) == 1
    assert choose_num_splits(1, 10**7, 132, block_n=64) == 128
    for programs, tiles in itertools.product(range(1, 300, 7), (1, 2, 10, 33, 500)):
        splits = choose_num_splits(programs, 64 * tiles, 132, block_n=64)
        assert splits <= tiles
        assert splits == 1 or splits * programs <= 2 * 132


def test_program_choice_depends_on_host_integers_only() -> None:
    assert choose_num_programs(8, 32 * 8192, 132, block_n=64, programs_per_sm=3) == 49
    assert choose_num_programs(8, 640, 132, block_n=64) == 10
    assert choose_num_programs(500, 640, 132, block_n=64) == 1
    assert choose_num_programs(8, 0, 132, block_n=64) == 1
