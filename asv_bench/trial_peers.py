"""What a trial holds the kernels against: torch's SDPA over contiguous K and V, and the bare Triton launch of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from asv_bench import kv_pool
from asv_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

functional: Any = LazyModule("torch.nn.functional")
attention: Any = LazyModule("torch.nn.attention")

Call = Callable[[], object]


def peers(q: torch.Tensor, pool: kv_pool.PagedPool, outs: torch.Tensor) -> Iterator[tuple[str, list[Call], list[Call]]]:
    """SDPA's backends by name, each with a call a working set, and the same followed by a copy to `outs`, to be checked.

    There is none for an e4m3 cache and for lengths that differ.

    K and V of each set are gathered beforehand to [batch, num_kv_heads, max_seq_len, head_dim].

    Args:
        q: [batch, num_q_heads, head_dim].
        pool: The cell's.
        outs: [sets, batch, num_q_heads, head_dim].
    """
    lens = pool.seq_lens.tolist()
    if pool.k_rows.dtype == torch.uint8 or len(set(lens)) > 1:
        return
    gathered = [[rows[table.long()].transpose(1, 2).contiguous() for rows in (pool.k_rows, pool.v_rows)] for table in pool.row_tables]
    query = q[:, :, None]
    backends = attention.SDPBackend
    named = {"sdpa-cudnn": backends.CUDNN_ATTENTION, "sdpa-flash": backends.FLASH_ATTENTION}
    if q.device.type != "cuda":
        named = {"sdpa-math": backends.MATH}

    def attended(backend: Any, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with attention.sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, k, v, enable_gqa=True)  # type: ignore[no-any-return]

    for name, backend in named.items():
        # The result is an output of its own, as torch makes it: copying it is no part of what is timed.
        timed: list[Call] = [lambda k=k, v=v, backend=backend: attended(backend, k, v) for k, v in gathered]  # type: ignore[misc]
        checked: list[Call] = [
            lambda call=call, out=out: out.copy_(call()[:, :, 0])  # type: ignore[misc]
            for call, out in zip(timed, outs, strict=True)
        ]
        yield name, timed, checked


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
