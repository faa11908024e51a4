"""A decode step's new tokens in one launch: norm and rotation of Q and K, and the write of K and V.

Run as a script, it prints the table: `python -m asv_bench.bench_rope_write`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asv_bench import bench_kv_write, kv_pool, suite, verify, verify_rope
from asv_bench.lazy import LazyModule
from asv_bench.microbench import Work
from asv_bench.suite import Case, Outcomes, Prepared

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

ops: Any = LazyModule("rapid_llm.kernels.ops")
dispatcher: Any = LazyModule("rapid_llm.kernels.ops.dispatch")

_IMPL = {"cuda": "triton_rope_norm_kv_write", "cpu": "torch_rope_norm_kv_write"}
_MAX_POSITION = 32768
_THETA = 10000.0
_NORM_EPS = 1e-6


def _decode(num_tokens: int, kv_dtype: str) -> Case:
    return Case(
        label=f"decode T={num_tokens} {kv_dtype} half-rotation norm combined fragmented",
        bottleneck="launch",
        devices=("cuda",),
        phase="decode",
        kv_dtype=kv_dtype,
        args={"num_tokens": num_tokens, "kv_dtype": kv_dtype, "dtype": "float16", "interleaved": False},
    )


def _cos_sin(rotary_dim: int, device: torch.device) -> torch.Tensor:
    """[max_position, rotary_dim] fp32: cosines and sines of position * theta ** (-2i / rotary_dim)."""
    rates = _THETA ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    angles = torch.arange(_MAX_POSITION, device=device)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _build(case: Case, device: torch.device) -> Prepared:
    """Rotating sets of a step's tokens, views of a fused QKV projection, at random positions, into scattered rows of a combined pool."""
    sets = bench_kv_write.write_sets(case, device)
    pool, keys = sets.pool, sets.keys
    num_tokens, num_kv_heads, head_dim = keys[0].shape
    queries = [projection[:, : projection.shape[1] - 2 * num_kv_heads] for projection in sets.qkv]
    outs = kv_pool.spread(len(queries), tuple(queries[0].shape), queries[0].dtype, device)
    positions = kv_pool.spread(len(queries), (num_tokens,), torch.int32, device)
    for i, position in enumerate(positions):
        drawn = kv_pool.random_values((num_tokens,), torch.float32, device, seed=101 + i)
        position.copy_((drawn.abs() * _MAX_POSITION / 4).clamp(max=_MAX_POSITION - 1))
    cos_sin = _cos_sin(head_dim, device)
    q_weight, k_weight = (1 + kv_pool.random_values((head_dim,), keys[0].dtype, device, seed=seed) / 8 for seed in (7, 8))
    known = {"norm_eps": _NORM_EPS, "interleaved": case.args["interleaved"]}
    guards = verify.guard_rows(pool.free_rows, pool.k_rows.shape[0])
    guards_before = torch.stack([pool.k_rows[guards], pool.v_rows[guards]])

    def tensors(i: int) -> tuple[torch.Tensor, ...]:
        return queries[i], keys[i], sets.values[i], positions[i], cos_sin, sets.slots[i], pool.k_rows, pool.v_rows

    def call(i: int) -> Callable[[], object]:
        given, out = tensors(i), outs[i]
        return lambda: ops.rope_norm_kv_write(*given, q_weight=q_weight, k_weight=k_weight, out=out, **known, **pool.scales)

    def poison() -> None:
        sets.poison()
        for out in outs:
            out.fill_(float("nan"))

    def check() -> float:
        what = f"norm, rotation and write, {case.label}"
        verify.check_guards(guards_before, torch.stack([pool.k_rows[guards], pool.v_rows[guards]]), what=what)
        worst = 0.0
        for i, out in enumerate(outs):
            q, k = (
                verify_rope.rotation_reference(x, positions[i], cos_sin, weight=weight, **known)
                for x, weight in ((queries[i], q_weight), (keys[i], k_weight))
            )
            rows = sets.slots[i].long()
            worst = max(
                worst,
                verify_rope.check_rotated(out, q, what=f"{what}, Q"),
                verify_rope.check_rotated(pool.k_rows[rows], k, scale=pool.factors["k_scale"], what=f"{what}, K"),
                verify_rope.check_copied(pool.v_rows[rows], sets.values[i], scale=pool.factors["v_scale"], what=f"{what}, V"),
            )
        return worst

    def vary() -> None:
        for projection, position in zip(sets.qkv, positions, strict=True):
            projection.neg_()
            position.copy_(_MAX_POSITION - 1 - position)

    read = sum(x.numel() * x.element_size() for x in (queries[0], keys[0], sets.values[0])) + 4 * num_tokens * (2 + head_dim)
    written = outs[0].numel() * outs[0].element_size() + 2 * keys[0].numel() * pool.k_rows.element_size()
    return Prepared(
        calls=[call(i) for i in range(len(outs))],
        work=Work(moved=float(read + written), written=float(written)),
        poison=poison,
        check=check,
        vary=vary,
        selection=dispatcher.dispatch(ops.rope_write_request(*tensors(0))),
        inputs=[sets.slots[0], positions[0]],
    )


class RopeWriteDecode(suite.Suite):
    """One token a sequence: bound by the launch, so calls are counted and no bandwidth is quoted."""

    op = "rope_norm_kv_write"
    impl = _IMPL
    cases = (_decode(64, "float16"), _decode(64, "e4m3"))

    def build(self, case: Case, device: torch.device) -> Prepared:
        return _build(case, device)

    @suite.throughput("calls/s")
    def track_calls(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


if __name__ == "__main__":
    sys.exit(suite.main(sys.modules[__name__]))
