"""What a trial holds the kernels against: torch's SDPA over contiguous K and V, and the bare Triton launch of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from asv_bench import kv_pool
from asv_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

functional: Any = LazyModule("torch.nn.functional")
attention: Any = LazyModule("torch.nn.attention")

dynamo: Any = LazyModule("torch._dynamo")
flex_attention: Any = LazyModule("torch.nn.attention.flex_attention")

Call = Callable[[], object]
Attention = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def peers(q: torch.Tensor, pool: kv_pool.PagedPool, outs: torch.Tensor) -> Iterator[tuple[str, list[Call], list[Call]]]:
    """SDPA's backends by name, each with a call a working set, and the same followed by a copy to `outs`, to be checked.

    There is none for an e4m3 cache and for lengths that differ.

    Args:
        q: [batch, num_q_heads, head_dim].
        pool: The cell's.
        outs: [sets, batch, num_q_heads, head_dim].
    """
    if not_contiguous(pool) is not None:
        return
    sets = gathered(pool)
    for name, backend in sdpa_backends(q.device).items():
        yield name, *contiguous_calls(sdpa(backend), q, sets, outs)


def not_contiguous(pool: kv_pool.PagedPool) -> str | None:
    """Why torch's attentions cannot attend what a pool's tables name, gathered or not; None where they can."""
    if pool.k_rows.dtype == torch.uint8:
        return "it takes no e4m3 bytes"
    return None if len(set(pool.seq_lens.tolist())) == 1 else "it takes sequences of one length"


def gathered(pool: kv_pool.PagedPool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each set, copied to [batch, num_kv_heads, max_seq_len, head_dim]."""
    sets = []
    for table in pool.row_tables:
        k, v = (rows[table.long()].transpose(1, 2).contiguous() for rows in (pool.k_rows, pool.v_rows))
        sets.append((k, v))
    return sets


def sdpa_backends(device: torch.device) -> dict[str, Any]:
    """The backends of SDPA that are held against, by name."""
    backends = attention.SDPBackend
    if device.type != "cuda":
        return {"sdpa-math": backends.MATH}
    return {"sdpa-cudnn": backends.CUDNN_ATTENTION, "sdpa-flash": backends.FLASH_ATTENTION}


def sdpa(backend: Any) -> Attention:
    """SDPA by one backend of it, which raises where it cannot serve."""

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with attention.sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # type: ignore[no-any-return]

    return attended


def flex() -> Attention:
    """flex_attention without a score modification, compiled anew: each shape is a compilation of its own, and torch keeps only some."""
    dynamo.reset()
    compiled: Attention = functools.partial(torch.compile(flex_attention.flex_attention, dynamic=False), enable_gqa=True)
    return compiled


def contiguous_calls(
    attend: Attention, q: torch.Tensor, sets: Sequence[tuple[torch.Tensor, torch.Tensor]], outs: torch.Tensor
) -> tuple[list[Call], list[Call]]:
    """A call a set, and the same with a copy of its result to `outs`: the result is an output of its own, whose copy is not to be timed.

    Args:
        attend: Takes q [batch, num_q_heads, 1, head_dim], K and V.
        q: [batch, num_q_heads, head_dim].
        sets: Of `gathered`.
        outs: [sets, batch, num_q_heads, head_dim].
    """
    query = q[:, :, None]
    timed: list[Call] = [lambda k=k, v=v: attend(query, k, v) for k, v in sets]  # type: ignore[misc]
    checked: list[Call] = [
        lambda call=call, out=out: out.copy_(call()[:, :, 0])  # type: ignore[misc]
        for call, out in zip(timed, outs, strict=True)
    ]
    return timed, checked


def bare_launch(call: Call) -> Call:
    """The Triton launch that `call` ends in, made again with the same arguments and nothing around it.

    Raises:
        LookupError: The call launches no Triton kernel, or several.
    """
    from triton.runtime.jit import JITFunction

    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    original = JITFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((kernel, args, kwargs))
        return original(kernel, *args, **kwargs)

    JITFunction.run = run
    try:
        call()
    finally:
        JITFunction.run = original
    if len(seen) != 1:
        raise LookupError(f"a call launched {len(seen)} Triton kernels, expected one; hold it against its launches one by one")
    kernel, args, kwargs = seen[0]
    return lambda: kernel.run(*args, **kwargs)
