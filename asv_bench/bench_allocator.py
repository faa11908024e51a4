"""The allocator where nothing was made ready, and what making ready costs: what `bench_kv_write.Allocator` does not see.

`KVCacheManager.release` prepares an allocation of the size that was asked for last, so that the rows of `Allocator` time the handing
out. The search itself and the release are these rows. Run as a script, it prints the table: `python -m asv_bench.bench_allocator`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from asv_bench import suite, verify
from asv_bench.bench_kv_write import ALLOCATOR_ROWS, ALLOCATOR_TOKENS, build_allocation
from asv_bench.lazy import LazyModule
from asv_bench.microbench import Work
from asv_bench.suite import Case, Outcomes, Prepared

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

kv_cache: Any = LazyModule("rapid_llm.kv_cache")

_IMPL = dict.fromkeys(("cuda", "cpu"), "KVCacheManager.alloc_kvcache_index")
_RELEASE_IMPL = dict.fromkeys(("cuda", "cpu"), "KVCacheManager.release")
_OTHER_TOKENS = ALLOCATOR_TOKENS - 1


def _case(what: str, state: str) -> Case:
    return Case(
        label=f"{what} of {ALLOCATOR_ROWS} rows, state={state}",
        bottleneck="host",
        devices=("cuda", "cpu"),
        phase="decode",
        args={"state": state},
    )


class AllocatorOtherSize(suite.Suite):
    """An allocation of another size than the one before it, after a release: the rows are searched when they are asked for."""

    op = "alloc_kvcache_index"
    impl = _IMPL
    cases = tuple(_case(f"alloc n={ALLOCATOR_TOKENS} after n={_OTHER_TOKENS}", state) for state in ("run_search", "fragmented"))

    def build(self, case: Case, device: torch.device) -> Prepared:
        def ask_for_another_size(manager: Any) -> None:
            manager.release(manager.alloc_kvcache_index(_OTHER_TOKENS))

        return build_allocation(case, device, kv_cache.KVCacheManager, before=ask_for_another_size)

    @suite.throughput("calls/s")
    def track_calls(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


class Release(suite.Suite):
    """A release of some rows where the free rows are scattered: it waits for the device and prepares the next allocation."""

    op = "release"
    impl = _RELEASE_IMPL
    cases = (_case(f"release n={ALLOCATOR_TOKENS}", "fragmented"),)

    def build(self, case: Case, device: torch.device) -> Prepared:
        manager = kv_cache.KVCacheManager(
            ALLOCATOR_ROWS, num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float16, device=device, allocate_kv=False
        )
        all_rows = torch.arange(ALLOCATOR_ROWS, dtype=torch.int32, device=device)
        taken: list[torch.Tensor] = []

        def reach() -> None:
            """Every other row is free, and nothing is taken."""
            taken.clear()
            manager.free_all()
            manager.release(manager.alloc_kvcache_index(ALLOCATOR_ROWS)[::2])

        def reset() -> None:
            """Takes rows for the call to release."""
            if not taken:
                taken.append(manager.alloc_kvcache_index(ALLOCATOR_TOKENS))

        def call() -> None:
            manager.release(taken.pop())

        def check() -> float:
            reset()
            rows, expected = taken[-1], manager.is_free(all_rows)
            verify.check_allocation(rows, _with(expected, rows, True), expected, count=ALLOCATOR_TOKENS, state=case.args["state"])
            call()
            if not torch.equal(manager.is_free(all_rows), _with(expected, rows, True)):
                raise verify.VerificationError(f"release, {case.label}: other rows are free than were, and those that were released")
            return 0.0

        reach()
        return Prepared(
            calls=[call], work=Work(), poison=reach, check=check, reset=reset, called=kv_cache.KVCacheManager.release.__qualname__
        )

    @suite.throughput("calls/s")
    def track_calls(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


def _with(free: torch.Tensor, rows: torch.Tensor, value: bool) -> torch.Tensor:
    """A copy with these rows set."""
    changed = free.clone()
    changed[rows.long()] = value
    return changed


if __name__ == "__main__":
    sys.exit(suite.main(sys.modules[__name__]))
