"""Rows of the Triton backend. Triton itself is imported when a row is probed on a device that it could run on."""

from __future__ import annotations

import importlib
import importlib.util
import os

from rapid_llm.kernels.ops.spec import KernelSpec, LayoutRequirement, Preference, Request, ShapeLimit

__all__ = ["SPECS", "probe"]

_PROBE = "rapid_llm.kernels.backends.triton:probe"
_MAX_GRID_YZ = 65535
_POOL_DTYPES = ("float16", "bfloat16", "e4m3", "int8")
_FUSED_DTYPES = ("float16", "bfloat16", "e4m3")
_ON_CUDA = Preference("cuda", device_types=("cuda",))
_COMBINED_ON_CUDA = Preference("combined buffer", device_types=("cuda",), layout=LayoutRequirement(required=("kv:combined",)))

SPECS = (
    KernelSpec(
        name="triton_paged_decode",
        op="paged_decode_attention",
        target="rapid_llm.kernels.paged_decode:paged_decode",
        backend="triton",
        device_types=("cuda", "cpu"),
        min_capability=(8, 0),
        q_dtypes=("float16", "bfloat16"),
        kv_dtypes=_POOL_DTYPES,
        layout=LayoutRequirement(required=("kv:paged", "kv:row-table", "kv:16bit-aligned")),
        shape_limits=(
            ShapeLimit("head_dim", maximum=256),
            ShapeLimit("head_dim", multiple_of=2, kv_dtypes=("e4m3", "int8")),
            ShapeLimit("batch", maximum=_MAX_GRID_YZ),
        ),
        preferences=(_ON_CUDA, _COMBINED_ON_CUDA),
        config="rapid_llm.kernels.configs:DecodeConfig",
        probe=_PROBE,
        remembers=True,
    ),
    KernelSpec(
        name="triton_kv_write",
        op="kv_write",
        target="rapid_llm.kernels.kv_write:kv_write",
        backend="triton",
        device_types=("cuda", "cpu"),
        min_capability=(8, 0),
        q_dtypes=("float16", "bfloat16"),
        kv_dtypes=_POOL_DTYPES,
        layout=LayoutRequirement(required=("kv:paged",)),
        preferences=(_ON_CUDA, _COMBINED_ON_CUDA),
        config="rapid_llm.kernels.configs:WriteConfig",
        probe=_PROBE,
        remembers=True,
    ),
    KernelSpec(
        name="triton_rope_norm_kv_write",
        op="rope_norm_kv_write",
        target="rapid_llm.kernels.rope_write:rope_norm_kv_write",
        backend="triton",
        device_types=("cuda", "cpu"),
        min_capability=(8, 0),
        q_dtypes=("float16", "bfloat16"),
        kv_dtypes=_FUSED_DTYPES,
        layout=LayoutRequirement(required=("kv:paged",)),
        shape_limits=(ShapeLimit("head_dim", maximum=256), ShapeLimit("num_q_heads", maximum=16384)),
        preferences=(_ON_CUDA,),
        probe=_PROBE,
    ),
    KernelSpec(
        name="triton_quantize_e4m3",
        op="quantize_e4m3",
        target="rapid_llm.kernels.kv_quant:quantize_e4m3",
        backend="triton",
        device_types=("cuda", "cpu"),
        min_capability=(8, 0),
        q_dtypes=("float16", "bfloat16", "float32"),
        kv_dtypes=("e4m3",),
        preferences=(_ON_CUDA,),
        probe=_PROBE,
    ),
)


def probe(request: Request) -> str | None:
    """Why Triton cannot run for `request` on this machine; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if request.device_type == "cuda":
        return None
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton compiles for no {request.device_type}, and its interpreter is off (TRITON_INTERPRET=1 turns it on)"
    if not importlib.import_module("rapid_llm.kernels.launch").interpreted():
        return "TRITON_INTERPRET=1 was set after Triton had been imported; set it before the process starts"
    return None
