"""The pool fixture (R42–R49, R74, R75)."""

from __future__ import annotations

import pytest
import torch

from asv_bench import kv_pool, verify
from asv_bench.kv_pool import paged_pool
from rapid_llm.kernels import ops
from rapid_llm.kv_cache import KVCacheManager

CPU = torch.device("cpu")


def _pool(**changes: object) -> kv_pool.PagedPool:
    known: dict[str, object] = {
        "seq_lens": [300, 0, 211],
        "num_kv_heads": 2,
        "head_dim": 64,
        "kv_dtype": "float16",
        "device": CPU,
        "num_sets": 3,
    }
    return paged_pool(**{**known, **changes})  # type: ignore[arg-type]


def test_r45_views_have_the_strides_that_the_manager_hands_to_the_module() -> None:
    pool = _pool()
    manager = KVCacheManager(pool.k_rows.shape[0], num_layers=1, num_kv_heads=2, head_dim=64, dtype=torch.float16, device=CPU)
    k_rows, v_rows = manager.layer_views(0)
    assert pool.k_rows.stride() == k_rows.stride()
    assert pool.v_rows.stride() == v_rows.stride()
    assert pool.v_rows.storage_offset() - pool.k_rows.storage_offset() == v_rows.storage_offset() - k_rows.storage_offset() == 2 * 64


@pytest.mark.parametrize(("layout", "tag"), [("combined", "kv:combined"), ("split", "kv:split")])
def test_r75_layout_tags_come_from_the_tensors(layout: str, tag: str) -> None:
    pool = _pool(layout=layout)
    assert tag in ops.layout_tags(pool.k_rows, pool.v_rows)


def test_tables_are_disjoint_distinct_rows_of_the_pool() -> None:
    pool = _pool(spare_rows=50)
    used = torch.cat([table[b, :length] for table in pool.row_tables for b, length in enumerate(pool.seq_lens.tolist())])
    everything = torch.cat([used, pool.free_rows])
    assert everything.numel() == 3 * 511 + 50
    assert everything.unique().numel() == everything.numel()
    assert int(everything.min()) >= 0
    assert int(everything.max()) < pool.k_rows.shape[0]


def test_r44_fragmented_rows_are_scattered_and_contiguous_ones_are_not() -> None:
    for order, low, high in (("fragmented", 0.0, 0.01), ("contiguous", 0.99, 1.0)):
        table = _pool(seq_lens=[4000], num_sets=1, order=order).row_tables[0][0]
        adjacent = float(((table[1:] - table[:-1]) == 1).float().mean())
        assert low <= adjacent <= high, order


def test_r49_e4m3_bytes_come_from_the_real_quantiser_with_its_scale() -> None:
    pool = _pool(kv_dtype="e4m3")
    assert pool.k_rows.dtype == torch.uint8
    assert pool.k_scale is not None
    values = kv_pool.random_values(tuple(pool.k_rows.shape), torch.float16, CPU, 1)
    assert pool.k_scale == pytest.approx(float(values.abs().max()) / 448)
    verify.check_e4m3(pool.k_rows, values, pool.k_scale, what="pool")
    assert int((pool.k_rows & 0x7F).max()) == 0x7E  # the largest value fills the range: a plain cast would not
    assert pool.scales == {"k_scale": pool.k_scale, "v_scale": pool.v_scale}
    assert _pool().scales == {}


def test_int8_bytes_come_from_the_real_write_with_the_scales_of_their_heads() -> None:
    pool = _pool(kv_dtype="int8")
    assert pool.k_rows.dtype == torch.int8
    assert isinstance(pool.k_scale, torch.Tensor)
    assert isinstance(pool.v_scale, torch.Tensor)
    assert pool.k_scale.shape == (pool.k_rows.shape[1],)
    k_values = kv_pool.random_values(tuple(pool.k_rows.shape), torch.float16, CPU, 1)
    k_values[:, 1::2] *= 0.5
    assert torch.equal(pool.k_scale, k_values.float().abs().amax((0, 2)) / 127)
    verify.check_int8(pool.k_rows, k_values, pool.k_scale, what="pool")
    for rows in (pool.k_rows, pool.v_rows):
        assert rows.abs().amax((0, 2)).tolist() == [127] * rows.shape[1]  # each head fills its own range
    scales = torch.cat([pool.k_scale, pool.v_scale]).tolist()
    assert all(max(one, other) > 1.5 * min(one, other) for i, one in enumerate(scales) for other in scales[:i])
    assert pool.scales == pool.factors == {"k_scale": pool.k_scale, "v_scale": pool.v_scale}
    assert _pool().factors == {"k_scale": 1.0, "v_scale": 1.0}


def test_a_commit_without_int8_has_no_such_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "ops", object())
    with pytest.raises(NotImplementedError, match="no int8 cache"):
        _pool(kv_dtype="int8")


def test_one_seed_gives_one_pool() -> None:
    first, again, other = _pool(), _pool(), _pool(seed=1)
    assert torch.equal(first.k_rows, again.k_rows)
    assert torch.equal(first.row_tables[2], again.row_tables[2])
    assert not torch.equal(first.row_tables[0], other.row_tables[0])


def test_unknown_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="not blocked/fragmented"):
        _pool(layout="blocked")


def test_rotation_exceeds_the_l2_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "l2_bytes", lambda device: 60 << 20)
    assert kv_pool.num_sets_for(1 << 30, torch.device("cuda")) == 1
    assert kv_pool.num_sets_for(32 << 20, torch.device("cuda")) == 8
    assert kv_pool.num_sets_for(4096, torch.device("cuda")) == 256
