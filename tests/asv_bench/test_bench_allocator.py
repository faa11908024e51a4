"""The rows of an allocation that is searched for and of a release refuse an allocator that does something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asv_bench import bench_allocator
from asv_bench.bench_kv_write import ALLOCATOR_TOKENS
from asv_bench.suite import SuiteRow, rows_of
from asv_bench.worker import Bench
from rapid_llm.kv_cache import KVCacheManager
from rapid_llm.row_search import RowSearch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(CPU)


def _rows() -> Iterator[SuiteRow]:
    return rows_of([bench_allocator.AllocatorOtherSize, bench_allocator.Release])


@pytest.mark.parametrize("row", list(_rows()), ids=lambda row: row.case.label)
def test_the_code_as_it_is_is_measured(bench: Bench, row: SuiteRow) -> None:
    assert bench.measure(row)["status"] == "ok"


def test_an_allocation_of_another_size_is_not_served_from_what_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the row would time the same as the row of the same size."""
    searched: list[int] = []
    original = RowSearch.take

    def take(self: RowSearch, count: int, num_free: int) -> Any:
        if self._ready is None or self._ready.num_rows != count:
            searched.append(count)
        return original(self, count, num_free)

    monkeypatch.setattr(RowSearch, "take", take)
    for case in bench_allocator.AllocatorOtherSize.cases:
        prepared = bench_allocator.AllocatorOtherSize().build(case, CPU)
        assert prepared.reset is not None
        prepared.reset()
        searched.clear()
        prepared.calls[0]()
        assert searched == [ALLOCATOR_TOKENS]


def _nothing(release: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rows, **more: None if len(rows) == ALLOCATOR_TOKENS else release(self, rows, **more)


def _half(release: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rows, **more: release(self, rows[: len(rows) // 2] if len(rows) == ALLOCATOR_TOKENS else rows, **more)


def _another_row(release: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: KVCacheManager, rows: torch.Tensor, **more: Any) -> None:
        release(self, rows, **more)
        if len(rows) == ALLOCATOR_TOKENS:
            self.alloc_kvcache_index(1)

    return wrong


def _everything(release: Callable[..., None]) -> Callable[..., None]:
    return lambda self, rows, **more: self.free_all() if len(rows) == ALLOCATOR_TOKENS else release(self, rows, **more)


@pytest.mark.parametrize("fault", [_nothing, _half, _another_row, _everything])
def test_a_release_that_frees_other_rows_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    monkeypatch.setattr(KVCacheManager, "release", fault(KVCacheManager.release))
    monkeypatch.setattr(KVCacheManager.release, "__qualname__", "KVCacheManager.release")
    (row,) = rows_of([bench_allocator.Release])
    record = bench.measure(row)
    assert (record["status"], record["value"]) == ("unverified", None)
    assert "release, " in record["reason"]
