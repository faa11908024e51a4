"""Allocators for the tests: `manager` makes the kind whose turn it is, which the fixture in conftest.py says."""

from __future__ import annotations

from typing import Any

import torch

from asv_bench.verify import check_allocation
from rapid_llm.device_state_cache import DeviceStateKVCacheManager
from rapid_llm.kv_cache import KVCacheManager

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


KINDS = (KVCacheManager, DeviceStateKVCacheManager)
made: dict[str, type[KVCacheManager]] = {"kind": KVCacheManager}


def manager(num_rows: int = 16, block_size: int = 4, **changes: Any) -> KVCacheManager:
    arguments = {
        "num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float16, "device": DEVICE,
        "block_size": block_size, "allocate_kv": False,
    }  # fmt: skip
    return made["kind"](num_rows, **{**arguments, **changes})


def alloc(cache: KVCacheManager, count: int) -> torch.Tensor:
    """Allocates rows that must come, and checks that they are distinct and were free (R66)."""
    free = cache.is_free(torch.arange(cache.num_rows, device=DEVICE))
    rows = cache.alloc_kvcache_index(count)
    free_after = cache.is_free(torch.arange(cache.num_rows, device=DEVICE))
    check_allocation(rows, free, free_after, count=count, state=str(cache.last_alloc_path))
    assert rows is not None
    return rows.clone()


def state(cache: KVCacheManager) -> tuple[Any, ...]:
    every = torch.arange(cache.num_rows, device=DEVICE)
    counts, free = cache.ref_counts().tolist(), cache.is_free(every).tolist()
    return counts, free, cache.num_free_rows, cache.num_cached_rows, cache.last_alloc_path


def rows_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
