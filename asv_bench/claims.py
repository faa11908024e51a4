"""A call for everything that a Triton KernelSpec of the registry says it serves: dtypes, and the largest head_dim.

The suites launch what a server does; a spec claims more than that. Each claim is compiled for each architecture like a row of a suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from asv_bench import kv_pool
from rapid_llm.kernels import ops
from rapid_llm.kernels.ops import registry
from rapid_llm.kernels.ops.spec import KernelSpec

BACKEND = "triton"

_BATCH, _CONTEXT, _TOKENS = 4, 4096, 16384
_NUM_Q_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Claim:
    """One combination that a spec says it serves.

    Attributes:
        id: As a row's.
        spec: Of the registry.
        call: Makes the public call for tensors on the device; the backend is forced, so that a refusal is seen.
    """

    id: str
    spec: KernelSpec
    call: Callable[[torch.device], object]


def claims() -> Iterator[Claim]:
    """The claims of every Triton spec whose operation is known here."""
    for name in registry.names():
        spec = registry.get(name)
        make = _CALLS.get(spec.op)
        if spec.backend != BACKEND or make is None:
            continue
        for q_dtype in spec.q_dtypes:
            for kv_dtype in spec.kv_dtypes:
                if kv_dtype not in (q_dtype, "e4m3", "int8"):
                    continue
                for head_dim in _head_dims(spec):
                    label = f"{q_dtype} {kv_dtype} head_dim={head_dim}"
                    yield Claim(f"claim.{name}({label})", spec, _bound(make, q_dtype, kv_dtype, head_dim))


def ops_without_calls() -> list[KernelSpec]:
    """Triton specs whose operation has no call here: a suite has to launch them."""
    specs = map(registry.get, registry.names())
    return [spec for spec in specs if spec.backend == BACKEND and spec.op not in _CALLS]


def _head_dims(spec: KernelSpec) -> tuple[int, ...]:
    largest = [limit.maximum for limit in spec.shape_limits if limit.dim == "head_dim" and limit.maximum is not None]
    return (_HEAD_DIM, *largest)


def _bound(make: Callable[..., object], q_dtype: str, kv_dtype: str, head_dim: int) -> Callable[[torch.device], object]:
    return lambda device: make(getattr(torch, q_dtype), kv_dtype, head_dim, device)


def _pool(kv_dtype: str, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    rows = torch.empty(2 * _TOKENS, 2 * _NUM_KV_HEADS, head_dim, dtype=kv_pool.pool_dtype(kv_dtype), device=device)
    scales: dict[str, Any] = {"k_scale": 0.5, "v_scale": 0.25} if kv_dtype == "e4m3" else {}
    if kv_dtype == "int8":
        scales = {name: torch.empty(_NUM_KV_HEADS, dtype=torch.float32, device=device) for name in ("k_scale", "v_scale")}
    return rows[:, :_NUM_KV_HEADS], rows[:, _NUM_KV_HEADS:], scales


def _decode(dtype: torch.dtype, kv_dtype: str, head_dim: int, device: torch.device) -> Any:
    k_rows, v_rows, scales = _pool(kv_dtype, head_dim, device)
    q = torch.empty(_BATCH, _NUM_Q_HEADS, head_dim, dtype=dtype, device=device)
    table = torch.empty(_BATCH, _CONTEXT, dtype=torch.int32, device=device)
    lengths = torch.empty(_BATCH, dtype=torch.int32, device=device)
    return ops.paged_decode_attention(q, k_rows, v_rows, table, lengths, backend=BACKEND, **scales)


def _write(dtype: torch.dtype, kv_dtype: str, head_dim: int, device: torch.device) -> Any:
    k_rows, v_rows, scales = _pool(kv_dtype, head_dim, device)
    k, v = (torch.empty(_TOKENS, _NUM_KV_HEADS, head_dim, dtype=dtype, device=device) for _ in range(2))
    slots = torch.empty(_TOKENS, dtype=torch.int32, device=device)
    return ops.kv_write(k, v, slots, k_rows, v_rows, backend=BACKEND, **scales)


def _quantize(dtype: torch.dtype, kv_dtype: str, head_dim: int, device: torch.device) -> Any:
    del kv_dtype
    x = torch.empty(_TOKENS, 2 * _NUM_KV_HEADS, head_dim, dtype=dtype, device=device)
    return ops.quantize_e4m3(x[:, :_NUM_KV_HEADS], 0.5, backend=BACKEND)


def _rope_write(dtype: torch.dtype, kv_dtype: str, head_dim: int, device: torch.device) -> Any:
    k_rows, v_rows, scales = _pool(kv_dtype, head_dim, device)
    heads = _NUM_Q_HEADS + 2 * _NUM_KV_HEADS
    qkv = torch.empty(_BATCH, heads, head_dim, dtype=dtype, device=device)
    q, k, v = qkv[:, :_NUM_Q_HEADS], qkv[:, _NUM_Q_HEADS:-_NUM_KV_HEADS], qkv[:, -_NUM_KV_HEADS:]
    positions, slots = (torch.empty(_BATCH, dtype=torch.int32, device=device) for _ in range(2))
    cos_sin = torch.empty(_CONTEXT, head_dim, dtype=torch.float32, device=device)
    weight = torch.empty(head_dim, dtype=dtype, device=device)
    return ops.rope_norm_kv_write(
        q, k, v, positions, cos_sin, slots, k_rows, v_rows, q_weight=weight, k_weight=weight, backend=BACKEND, **scales
    )


_CALLS: dict[str, Callable[..., object]] = {
    "paged_decode_attention": _decode,
    "kv_write": _write,
    "quantize_e4m3": _quantize,
    "rope_norm_kv_write": _rope_write,
}
