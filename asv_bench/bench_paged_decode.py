"""Paged decode attention: the read path, bound by bandwidth, with the e4m3 pool as a bottleneck of its own.

Geometry of a Llama-3 or Qwen3 layer: 32 query heads over 8 KV heads of 128. Run as a script, it prints the table:
`python -m asv_bench.bench_paged_decode`.
"""

from __future__ import annotations

import sys
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

_IMPL = {"cuda": "triton_paged_decode", "cpu": "torch_paged_decode"}
_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128
_RAGGED = tuple(256 * (1 + (7 * i) % 32) for i in range(32))
"""32 lengths from 256 to 8192 tokens in a fixed, mixed order."""


def _case(
    batch: int, context: int, kv_dtype: str, device: str, *, q_dtype: str = "float16", layout: str = "combined", order: str = "fragmented"
) -> Case:
    q_note = "" if q_dtype == "float16" or kv_dtype == q_dtype else f" q={q_dtype}"
    return Case(
        label=f"decode B={batch} S={context} {kv_dtype}{q_note} {layout} {order} cold",
        bottleneck="dequant" if kv_dtype == "e4m3" else "read-bandwidth",
        devices=(device,),
        phase="decode",
        kv_dtype=kv_dtype,
        args={"seq_lens": [context] * batch, "kv_dtype": kv_dtype, "q_dtype": q_dtype, "layout": layout, "order": order},
    )


def _ragged(kv_dtype: str) -> Case:
    return suite.case_with(
        _case(len(_RAGGED), 0, kv_dtype, "cuda"),
        label=f"decode B=32 S=256..8192 ragged {kv_dtype} combined fragmented cold",
        args={"seq_lens": list(_RAGGED), "kv_dtype": kv_dtype, "q_dtype": "float16", "layout": "combined", "order": "fragmented"},
    )


class PagedDecode(suite.Suite):
    """One query token a sequence over a token-level row table."""

    op = "paged_decode_attention"
    impl = _IMPL
    cases = (
        _case(1, 32768, "float16", "cuda"),
        _case(8, 8192, "float16", "cuda"),
        _case(64, 8192, "float16", "cuda"),
        _case(128, 1024, "float16", "cuda"),
        _ragged("float16"),
        _case(8, 8192, "bfloat16", "cuda", q_dtype="bfloat16"),
        _case(64, 8192, "float16", "cuda", order="contiguous"),
        _case(64, 8192, "float16", "cuda", layout="split"),
        _case(1, 32768, "e4m3", "cuda"),
        _case(8, 8192, "e4m3", "cuda"),
        _case(64, 8192, "e4m3", "cuda"),
        _ragged("e4m3"),
        _case(2, 256, "float16", "cpu"),
        _case(2, 256, "float16", "cpu", order="contiguous"),
        _case(2, 256, "e4m3", "cpu"),
    )

    def build(self, case: Case, device: torch.device) -> Prepared:
        seq_lens: list[int] = case.args["seq_lens"]
        tokens = sum(seq_lens)
        q_dtype = getattr(torch, case.args["q_dtype"])
        kv_bytes = 2 * tokens * _NUM_KV_HEADS * _HEAD_DIM * kv_pool.pool_dtype(case.args["kv_dtype"]).itemsize
        pool = kv_pool.paged_pool(
            seq_lens=seq_lens,
            num_kv_heads=_NUM_KV_HEADS,
            head_dim=_HEAD_DIM,
            kv_dtype=case.args["kv_dtype"],
            device=device,
            layout=case.args["layout"],
            order=case.args["order"],
            num_sets=kv_pool.num_sets_for(kv_bytes, device),
            occupied_rows=case.args.get("occupied_rows", 0),
        )
        q = kv_pool.random_values((len(seq_lens), _NUM_Q_HEADS, _HEAD_DIM), q_dtype, device, seed=7)
        outs = [torch.empty_like(q) for _ in pool.row_tables]
        references = [
            verify.decode_reference(
                q, pool.k_rows, pool.v_rows, table, pool.seq_lens, k_scale=pool.k_scale or 1.0, v_scale=pool.v_scale or 1.0
            )
            for table in pool.row_tables
        ]

        def call(table: torch.Tensor, out: torch.Tensor) -> Any:
            return lambda: ops.paged_decode_attention(q, pool.k_rows, pool.v_rows, table, pool.seq_lens, out=out, **pool.scales)

        def poison() -> None:
            for out in outs:
                out.fill_(float("nan"))

        def check() -> float:
            return max(verify.check_decode(out, ref, kv_dtype=case.args["kv_dtype"]) for out, ref in zip(outs, references, strict=True))

        def vary() -> None:
            """Negates V, and with it every reference: exact, and the addresses stay."""
            rows = pool.used_rows.long()
            pool.v_rows[rows] = pool.v_rows[rows] ^ 0x80 if pool.v_rows.dtype == torch.uint8 else -pool.v_rows[rows]
            for reference in references:
                reference.neg_()

        index_bytes = 4 * (tokens + len(seq_lens))
        return Prepared(
            calls=[call(table, out) for table, out in zip(pool.row_tables, outs, strict=True)],
            work=Work(
                flops=4.0 * tokens * _NUM_Q_HEADS * _HEAD_DIM,
                moved=float(kv_bytes + index_bytes + 2 * q.numel() * q.element_size()),
            ),
            poison=poison,
            check=check,
            vary=vary,
            selection=dispatcher.dispatch(ops.decode_request(q, pool.k_rows, pool.v_rows, pool.row_tables[0], pool.seq_lens)),
            inputs=[pool.row_tables[0], pool.seq_lens],
        )

    @suite.throughput("GB/s")
    def track_bandwidth(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


if __name__ == "__main__":
    sys.exit(suite.main(sys.modules[__name__]))
