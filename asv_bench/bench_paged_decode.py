"""Paged decode attention: the read path, bound by bandwidth, with the e4m3 and int8 pools as a bottleneck of their own.

Geometry of a Llama-3 or Qwen3 layer: 32 query heads over 8 KV heads of 128. Run as a script, it prints the table:
`python -m asv_bench.bench_paged_decode`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
_COPY_IMPL = {"cuda": "vendor:index_select", "cpu": "vendor:index_select"}
_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128
_RAGGED_ORDERS = 64
_MOST_PLACES = 8
_PLACES_BYTES = 1 << 30
_CHECK_STEP = 97
_RAGGED = tuple(256 * (1 + (7 * i) % 32) for i in range(32))
"""32 lengths from 256 to 8192 tokens in a fixed, mixed order."""


def _case(
    seq_lens: Sequence[int],
    context: str,
    kv_dtype: str,
    device: str,
    *,
    q_dtype: str = "float16",
    layout: str = "combined",
    order: str = "fragmented",
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    **more: Any,
) -> Case:
    q_note = "" if q_dtype == "float16" or kv_dtype == q_dtype else f" q={q_dtype}"
    heads, width = num_kv_heads or _NUM_KV_HEADS, head_dim or _HEAD_DIM
    geometry = "" if num_kv_heads is None and head_dim is None else f" {heads}x{width}"
    extra = "".join(f" {name}={value}" for name, value in more.items())
    return Case(
        label=f"decode B={len(seq_lens)} S={context} {kv_dtype}{q_note}{geometry} {layout} {order}{extra} cold",
        bottleneck="dequant" if kv_dtype in ("e4m3", "int8") else "read-bandwidth",
        devices=(device,),
        phase="decode",
        kv_dtype=kv_dtype,
        args={
            "seq_lens": list(seq_lens),
            "kv_dtype": kv_dtype,
            "q_dtype": q_dtype,
            "num_kv_heads": heads,
            "head_dim": width,
            "pool": {"layout": layout, "order": order, **more},
        },
    )


def uniform(batch: int, context: int, kv_dtype: str, device: str, **more: Any) -> Case:
    """A batch of sequences of one length; `more` are arguments of `paged_pool` and the geometry, and stand in the label."""
    return _case([context] * batch, str(context), kv_dtype, device, **more)


def _ragged(kv_dtype: str) -> Case:
    return _case(_RAGGED, "256..8192 ragged", kv_dtype, "cuda")


def build(case: Case, device: torch.device) -> Prepared:
    """The decode calls of a case, one a working set.

    The calls of a ragged batch also take its sequences in an order of their own each: which sequences share a multiprocessor decides
    how long the last of them takes, and one order's luck is not the kernel's speed.
    """
    seq_lens: list[int] = case.args["seq_lens"]
    kv_dtype: str = case.args["kv_dtype"]
    num_kv_heads: int = case.args["num_kv_heads"]
    head_dim: int = case.args["head_dim"]
    tokens = sum(seq_lens)
    kv_bytes = 2 * tokens * num_kv_heads * head_dim * kv_pool.pool_dtype(kv_dtype).itemsize
    pool = kv_pool.paged_pool(
        seq_lens=seq_lens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=kv_dtype,
        device=device,
        num_sets=_num_sets(case, kv_bytes, device),
        **case.args["pool"],
    )
    q = kv_pool.random_values((len(seq_lens), _NUM_Q_HEADS, head_dim), getattr(torch, case.args["q_dtype"]), device, seed=7)
    references = [verify.decode_reference(q, pool.k_rows, pool.v_rows, table, pool.seq_lens, **pool.factors) for table in pool.row_tables]
    orders = _orders(seq_lens, device)
    expected = torch.stack([reference[order] for reference in references for order in orders])
    outs = torch.empty(expected.shape, dtype=q.dtype, device=device)
    steps = [(q[order], table[order], pool.seq_lens[order]) for table in pool.row_tables for order in orders]

    def call(q: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> Any:
        return lambda: ops.paged_decode_attention(q, pool.k_rows, pool.v_rows, table, lens, out=out, **pool.scales)

    def poison() -> None:
        outs.fill_(float("nan"))

    def check() -> float:
        return verify.check_decode(outs, expected, kv_dtype=kv_dtype)

    def vary() -> None:
        """Negates V, and with it every reference: exact, and the addresses stay."""
        rows = pool.used_rows.long()
        pool.v_rows[rows] = pool.v_rows[rows] ^ 0x80 if pool.v_rows.dtype == torch.uint8 else -pool.v_rows[rows]
        expected.neg_()

    out_bytes = q.numel() * q.element_size()
    return Prepared(
        calls=[call(*step, out) for step, out in zip(steps, outs, strict=True)],
        work=Work(
            flops=4.0 * tokens * _NUM_Q_HEADS * head_dim,
            moved=float(kv_bytes + 4 * (tokens + len(seq_lens)) + 2 * out_bytes),
            written=float(out_bytes),
        ),
        poison=poison,
        check=check,
        vary=vary,
        selection=dispatcher.dispatch(ops.decode_request(q, pool.k_rows, pool.v_rows, pool.row_tables[0], pool.seq_lens)),
        inputs=[pool.row_tables[0], pool.seq_lens],
    )


def _num_sets(case: Case, kv_bytes: int, device: torch.device) -> int:
    """Sets to rotate over: one where the pool's size is the question, else so many that no one place in memory decides."""
    if "l2_factor" in case.args["pool"]:
        return 1
    return kv_pool.num_sets_for(kv_bytes, device, least=max(1, min(_MOST_PLACES, _PLACES_BYTES // kv_bytes)))


def _orders(seq_lens: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Orders in which the sequences are taken: as they come, and for a ragged batch on a device many more."""
    orders = [torch.arange(len(seq_lens), device=device)]
    if len(set(seq_lens)) > 1 and device.type == "cuda":
        generator = torch.Generator().manual_seed(3)
        orders += [torch.randperm(len(seq_lens), generator=generator).to(device) for _ in range(_RAGGED_ORDERS - 1)]
    return orders


class PagedDecode(suite.Suite):
    """One query token a sequence over a token-level row table."""

    op = "paged_decode_attention"
    impl = _IMPL
    cases = (
        uniform(1, 32768, "float16", "cuda"),
        uniform(8, 8192, "float16", "cuda"),
        uniform(64, 8192, "float16", "cuda"),
        uniform(128, 1024, "float16", "cuda"),
        _ragged("float16"),
        uniform(8, 8192, "bfloat16", "cuda", q_dtype="bfloat16"),
        uniform(64, 8192, "float16", "cuda", order="contiguous"),
        uniform(64, 8192, "float16", "cuda", layout="split"),
        uniform(64, 8192, "float16", "cuda", num_kv_heads=1),
        uniform(64, 8192, "float16", "cuda", num_kv_heads=1, layout="split"),
        uniform(64, 8192, "float16", "cuda", head_dim=64),
        uniform(64, 8192, "float16", "cuda", head_dim=64, layout="split"),
        uniform(1, 32768, "e4m3", "cuda"),
        uniform(8, 8192, "e4m3", "cuda"),
        uniform(64, 8192, "e4m3", "cuda"),
        _ragged("e4m3"),
        uniform(64, 8192, "int8", "cuda"),
        uniform(2, 256, "float16", "cpu"),
        uniform(2, 256, "float16", "cpu", order="contiguous"),
        uniform(2, 256, "e4m3", "cpu"),
    )

    def build(self, case: Case, device: torch.device) -> Prepared:
        return build(case, device)

    @suite.throughput("GB/s")
    def track_bandwidth(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


class ContiguousCopy(suite.Suite):
    """What `.contiguous()` of the production input would cost: the K and V of every attended row, gathered by torch.

    Never a part of a decode row; it stands here so that nobody has to guess.
    """

    op = "contiguous_copy"
    control = True
    impl = _COPY_IMPL
    cases = (
        Case(
            label="contiguous-copy B=64 S=8192 float16 combined fragmented cold",
            bottleneck="write-bandwidth",
            devices=("cuda",),
            kv_dtype="float16",
            args={"batch": 64, "context": 8192},
        ),
    )

    def build(self, case: Case, device: torch.device) -> Prepared:
        pool = kv_pool.paged_pool(
            seq_lens=[case.args["context"]] * case.args["batch"],
            num_kv_heads=_NUM_KV_HEADS,
            head_dim=_HEAD_DIM,
            kv_dtype="float16",
            device=device,
        )
        rows = pool.row_tables[0].flatten()
        outs = [torch.empty(rows.numel(), _NUM_KV_HEADS, _HEAD_DIM, dtype=torch.float16, device=device) for _ in range(2)]

        def call() -> None:
            for pool_rows, out in zip((pool.k_rows, pool.v_rows), outs, strict=True):
                torch.index_select(pool_rows, 0, rows, out=out)

        def check() -> float:
            for pool_rows, out in zip((pool.k_rows, pool.v_rows), outs, strict=True):
                if not torch.equal(out[::_CHECK_STEP], pool_rows[rows[::_CHECK_STEP].long()]):
                    raise verify.VerificationError(f"{case.label}: a gathered row is not the row of the pool")
            return 0.0

        written = float(sum(out.numel() * out.element_size() for out in outs))
        return Prepared(
            calls=[call],
            work=Work(moved=2 * written + 4.0 * rows.numel(), written=written),
            poison=lambda: [out.fill_(-1.0) for out in outs],
            check=check,
        )

    @suite.throughput("GB/s")
    def track_bandwidth(self, outcomes: Outcomes, case: str) -> float:
        return self.value(outcomes, case)


if __name__ == "__main__":
    sys.exit(suite.main(sys.modules[__name__]))
