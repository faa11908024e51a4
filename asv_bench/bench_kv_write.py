"""KV write: the scatter at prefill (bandwidth) and at decode (launches), and the allocator's three states (host).

Prefill and decode are different operations on one kernel, not two points of a curve, and have suites of their own. Run as a script, it
prints the tables: `python -m asv_bench.bench_kv_write`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asv_bench import kv_pool, suite, verify
from asv_bench.lazy import LazyModule
from asv_bench.microbench import Work
from asv_bench.suite import Case, Outcomes, Prepared

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

ops: Any = LazyModule("rapid_llm.kernels.ops")
dispatcher: Any = LazyModule("rapid_llm.kernels.ops.dispatch")
kv_cache: Any = LazyModule("rapid_llm.kv_cache")
device_state_cache: Any = LazyModule("rapid_llm.device_state_cache")

_IMPL = {"cuda": "triton_kv_write", "cpu": "torch_kv_write"}
_ALLOCATOR_IMPL = {"cuda": "KVCacheManager.alloc_kvcache_index", "cpu": "KVCacheManager.alloc_kvcache_index"}
_DEVICE_ALLOCATOR_IMPL = dict.fromkeys(("cuda", "cpu"), "DeviceStateKVCacheManager.alloc_kvcache_index")
_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128
_MOST_SETS = 512
_POISON = {"e4m3": 0x7F, "int8": -128}
"""Bytes that no write leaves: the NaN of e4m3 where values are none, and what int8 saturates before."""
ALLOCATOR_ROWS = 1 << 17
ALLOCATOR_TOKENS = 64
ALLOCATOR_FREE = {"bump": ALLOCATOR_ROWS // 2, "run_search": 4 * ALLOCATOR_TOKENS, "fragmented": ALLOCATOR_ROWS // 2}
"""Free rows of each state."""


def _prefill(num_tokens: int, kv_dtype: str, device: str, *, dtype: str = "float16") -> Case:
    return Case(
        label=f"prefill T={num_tokens} {kv_dtype} combined fragmented cold",
        bottleneck="write-bandwidth",
        devices=(device,),
        phase="prefill",
        kv_dtype=kv_dtype,
        args={"num_tokens": num_tokens, "kv_dtype": kv_dtype, "dtype": dtype},
    )


def _decode(num_tokens: int, kv_dtype: str) -> Case:
    return Case(
        label=f"decode T={num_tokens} {kv_dtype} combined fragmented",
        bottleneck="launch",
        devices=("cuda", "cpu"),
        phase="decode",
        kv_dtype=kv_dtype,
        args={"num_tokens": num_tokens, "kv_dtype": kv_dtype, "dtype": "float16"},
    )


@dataclass
class WriteSets:
    """Working sets of scatters of fresh K and V, views of a fused QKV projection, into scattered rows of a combined pool.

    Attributes:
        pool: Whose rows are written.
        slots: [num_tokens] int32 of each set, which share no row.
        qkv: [num_tokens, heads, head_dim] of each set.
        keys, values: Views of `qkv`, [num_tokens, num_kv_heads, head_dim].
        work: Of a call.
    """

    pool: kv_pool.PagedPool
    slots: list[torch.Tensor]
    qkv: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    work: Work

    def call(self, i: int) -> Callable[[], object]:
        """The public call on set `i`."""
        k, v, slot_mapping, pool = self.keys[i], self.values[i], self.slots[i], self.pool
        return lambda: ops.kv_write(k, v, slot_mapping, pool.k_rows, pool.v_rows, **pool.scales)

    def poison(self) -> None:
        """Makes all rows of the slots wrong."""
        written = torch.cat(self.slots).long()
        for rows in (self.pool.k_rows, self.pool.v_rows):
            rows[written] = _POISON.get(verify.dtype_name(rows.dtype), float("nan"))

    def check(self) -> float:
        """Reads all rows of the slots back; returns the largest absolute difference, raises `VerificationError`."""
        pool = self.pool
        k, v, slots = (torch.cat(tensors) for tensors in (self.keys, self.values, self.slots))
        return verify.check_write(k, v, slots, pool.k_rows, pool.v_rows, **pool.factors)


def write_sets(case: Case, device: torch.device) -> WriteSets:
    """As many sets as keep each cold until its turn comes again.

    Args:
        case: Of `KVWritePrefill` or `KVWriteDecode`, or one like them with other arguments.
        device: Where.
    """
    num_tokens: int = case.args["num_tokens"]
    kv_dtype: str = case.args["kv_dtype"]
    dtype = getattr(torch, case.args["dtype"])
    heads = _NUM_Q_HEADS + 2 * _NUM_KV_HEADS
    elements = 2 * num_tokens * _NUM_KV_HEADS * _HEAD_DIM
    moved = elements * (dtype.itemsize + kv_pool.pool_dtype(kv_dtype).itemsize) + 4 * num_tokens
    num_sets = kv_pool.num_sets_for(moved, device, most=_MOST_SETS)
    pool = kv_pool.paged_pool(
        seq_lens=[],
        num_kv_heads=_NUM_KV_HEADS,
        head_dim=_HEAD_DIM,
        kv_dtype=kv_dtype,
        device=device,
        spare_rows=num_sets * num_tokens,
        occupied_rows=case.args.get("occupied_rows", 0),
    )
    slots = kv_pool.spread(num_sets, (num_tokens,), torch.int32, device)
    for i, slot_mapping in enumerate(slots):
        slot_mapping.copy_(pool.free_rows[i * num_tokens : (i + 1) * num_tokens])
    qkv = kv_pool.spread(num_sets, (num_tokens, heads, _HEAD_DIM), dtype, device)
    for i, projection in enumerate(qkv):
        projection.copy_(kv_pool.random_values(tuple(projection.shape), dtype, device, seed=11 + i))
    keys = [projection[:, _NUM_Q_HEADS : _NUM_Q_HEADS + _NUM_KV_HEADS] for projection in qkv]
    values = [projection[:, _NUM_Q_HEADS + _NUM_KV_HEADS :] for projection in qkv]
    work = Work(moved=float(moved), written=float(elements * kv_pool.pool_dtype(kv_dtype).itemsize))
    return WriteSets(pool, slots, qkv, keys, values, work)


def request_of(sets: WriteSets) -> Any:
    """The request of a call."""
    return ops.write_request(sets.keys[0], sets.values[0], sets.slots[0], sets.pool.k_rows, sets.pool.v_rows)


def prepared_write(case: Case, sets: WriteSets) -> Prepared:
    """The row of `sets`, with the checks that a row has."""
    pool, device = sets.pool, sets.slots[0].device
    guards = verify.guard_rows(pool.free_rows, pool.k_rows.shape[0])
    edges = [verify.edge_values(scale, sets.keys[0].dtype, device) for scale in pool.factors.values()]
    guards_before = torch.stack([pool.k_rows[guards], pool.v_rows[guards]])

    def check() -> float:
        verify.check_guards(guards_before, torch.stack([pool.k_rows[guards], pool.v_rows[guards]]), what=f"KV write, {case.label}")
        return sets.check()

    def vary() -> None:
        """Other values, and among them those at which a store goes wrong first; only after the timing, for these are slow to convert."""
        for projection in sets.qkv:
            projection.neg_()
        for inputs, edge in zip((sets.keys, sets.values), edges, strict=True):
            for x in inputs:
                x[..., : edge.shape[-1]] = edge

    return Prepared(
        calls=[sets.call(i) for i in range(len(sets.slots))],
        work=sets.work,
        poison=sets.poison,
        check=check,
        vary=vary,
        selection=dispatcher.dispatch(request_of(sets)),
        inputs=[sets.slots[0]],
    )


class KVWritePrefill(suite.Suite):
    """Thousands of rows a call: bound by bandwidth."""

    op = "kv_write"
    impl = _IMPL
    cases = (
        _prefill(4096, "float16", "cuda"),
        _prefill(16384, "float16", "cuda"),
        _prefill(32768, "float16", "cuda"),
        _prefill(16384, "bfloat16", "cuda", dtype="bfloat16"),
        _prefill(4096, "e4m3", "cuda"),
        _prefill(16384, "e4m3", "cuda"),
        _prefill(32768, "e4m3", "cuda"),
        _prefill(16384, "int8", "cuda"),
        _prefill(512, "float16", "cpu"),
        _prefill(512, "e4m3", "cpu"),
    )

    def build(self, case: Case, device: torch.device) -> Prepared:
        return prepared_write(case, write_sets(case, device))

    @suite.throughput("GB/s")
    def track_bandwidth(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


class KVWriteDecode(suite.Suite):
    """One row a sequence: bound by the launch, so calls are counted and no bandwidth is quoted."""

    op = "kv_write"
    impl = _IMPL
    cases = (_decode(1, "float16"), _decode(8, "float16"), _decode(64, "float16"), _decode(64, "e4m3"))

    def build(self, case: Case, device: torch.device) -> Prepared:
        return prepared_write(case, write_sets(case, device))

    @suite.throughput("calls/s")
    def track_calls(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


def _state(state: str, *devices: str, note: str = "") -> Case:
    return Case(
        label=f"alloc n={ALLOCATOR_TOKENS} of {ALLOCATOR_ROWS} rows{note}, state={state}",
        bottleneck="host",
        devices=devices,
        phase="decode",
        args={"state": state},
    )


def build_allocation(case: Case, device: torch.device, kind: Any, *, before: Callable[[Any], object] = lambda manager: None) -> Prepared:
    """One allocation by a manager of class `kind`, in the state that the case names.

    Args:
        case: Of `Allocator`, or one like them.
        device: Where the manager hands rows out.
        kind: Its class.
        before: Is given the manager at the end of each reset, untimed, and leaves the state as it is.
    """
    state: str = case.args["state"]
    manager = kind(ALLOCATOR_ROWS, num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float16, device=device, allocate_kv=False)
    all_rows = torch.arange(ALLOCATOR_ROWS, dtype=torch.int32, device=device)
    taken: list[torch.Tensor] = []

    def reach() -> None:
        """Brings the manager into the state through its public calls, from wherever it is."""
        taken.clear()
        manager.free_all()
        if state == "bump":
            manager.alloc_kvcache_index(ALLOCATOR_ROWS - ALLOCATOR_FREE[state])
            return
        everything = manager.alloc_kvcache_index(ALLOCATOR_ROWS)
        if state == "run_search":
            manager.release(everything[ALLOCATOR_ROWS // 2 :][: ALLOCATOR_FREE[state]])
        else:
            manager.release(everything[::2])

    def reset() -> None:
        """Gives back what the last call took, which leaves the state as it was; a bump cursor needs `free_all` instead."""
        if state == "bump" or not taken:
            reach()
        else:
            manager.release(taken.pop())
        before(manager)

    def call() -> None:
        taken.append(manager.alloc_kvcache_index(ALLOCATOR_TOKENS))

    def check() -> float:
        reset()
        free = manager.is_free(all_rows)
        verify.check_state(free, state=state, num_free=ALLOCATOR_FREE[state], count=ALLOCATOR_TOKENS)
        call()
        verify.check_allocation(taken[-1], free, manager.is_free(all_rows), count=ALLOCATOR_TOKENS, state=state)
        if manager.last_alloc_path != state:
            raise verify.VerificationError(f"allocator: the row says {state} and the call took the {manager.last_alloc_path} path")
        return 0.0

    return Prepared(
        calls=[call],
        work=Work(),
        poison=reach,
        check=check,
        reset=reset,
        called=kind.alloc_kvcache_index.__qualname__,
    )


class Allocator(suite.Suite):
    """`KVCacheManager.alloc_kvcache_index` in the three states that a server meets: host time, by `bench_host`."""

    op = "alloc_kvcache_index"
    impl = _ALLOCATOR_IMPL
    cases = tuple(_state(state, "cuda", "cpu") for state in ALLOCATOR_FREE)

    def build(self, case: Case, device: torch.device) -> Prepared:
        return build_allocation(case, device, kv_cache.KVCacheManager)

    @suite.throughput("calls/s")
    def track_calls(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


class DeviceStateAllocator(suite.Suite):
    """The same calls on the manager whose state is on the device: it waits to search, and what the wait costs is the difference.

    Measured where there is a device to wait for.
    """

    op = "alloc_kvcache_index"
    impl = _DEVICE_ALLOCATOR_IMPL
    cases = tuple(_state(state, "cuda", note=", state on the device") for state in ALLOCATOR_FREE)

    def build(self, case: Case, device: torch.device) -> Prepared:
        try:
            kind = device_state_cache.DeviceStateKVCacheManager
        except ModuleNotFoundError as error:
            raise NotImplementedError("this commit has one allocator only") from error
        return build_allocation(case, device, kind)

    @suite.throughput("calls/s")
    def track_calls(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


if __name__ == "__main__":
    sys.exit(suite.main(sys.modules[__name__]))
