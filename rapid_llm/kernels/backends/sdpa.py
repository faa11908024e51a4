"""Rows of torch's scaled_dot_product_attention, one a backend of it, over K and V that lie contiguous: what a paged kernel is held against.

Each has a backend name of its own, so that it can be forced apart from the others. They serve `contiguous_decode_attention` and nothing
else: of a paged call nothing says in which rows the tokens are but a table on the device.
"""

from __future__ import annotations

import importlib

from rapid_llm.kernels.ops.spec import KernelSpec, LayoutRequirement, Preference, Request, ShapeLimit

__all__ = ["SPECS", "probe_cudnn", "probe_flash"]

_HERE = "rapid_llm.kernels.backends.sdpa"
_IMPL = "rapid_llm.kernels.backends.sdpa_impl"
_OP = "contiguous_decode_attention"
_DTYPES = ("float16", "bfloat16")
_LAYOUT = LayoutRequirement(required=("kv:contiguous",), forbidden=("kv:paged", "kv:row-table", "kv:block-table"))
_NOT_EMPTY = ShapeLimit("seq_len", minimum=1)

SPECS = (
    KernelSpec(
        name="sdpa_math_decode",
        op=_OP,
        target=f"{_IMPL}:math",
        backend="sdpa-math",
        device_types=("cpu", "cuda"),
        q_dtypes=_DTYPES,
        kv_dtypes=_DTYPES,
        layout=_LAYOUT,
        shape_limits=(_NOT_EMPTY,),
        preferences=(Preference("cpu", device_types=("cpu",)),),
    ),
    KernelSpec(
        name="sdpa_flash_decode",
        op=_OP,
        target=f"{_IMPL}:flash",
        backend="sdpa-flash",
        device_types=("cuda",),
        min_capability=(8, 0),
        q_dtypes=_DTYPES,
        kv_dtypes=_DTYPES,
        layout=_LAYOUT,
        shape_limits=(_NOT_EMPTY, ShapeLimit("head_dim", maximum=256, multiple_of=8)),
        preferences=(Preference("cuda", device_types=("cuda",)),),
        probe=f"{_HERE}:probe_flash",
    ),
    KernelSpec(
        name="sdpa_cudnn_decode",
        op=_OP,
        target=f"{_IMPL}:cudnn",
        backend="sdpa-cudnn",
        device_types=("cuda",),
        min_capability=(8, 0),
        q_dtypes=_DTYPES,
        kv_dtypes=_DTYPES,
        layout=_LAYOUT,
        shape_limits=(_NOT_EMPTY, ShapeLimit("head_dim", maximum=128, multiple_of=8)),
        preferences=(Preference("cuda", device_types=("cuda",)),),
        probe=f"{_HERE}:probe_cudnn",
    ),
)


def probe_flash(request: Request) -> str | None:
    """Why torch's flash backend cannot run here; None where it can."""
    if request.device_type != "cuda":
        return None
    found = importlib.import_module("torch").backends.cuda.is_flash_attention_available()
    return None if found else "this build of torch has no flash attention for CUDA"


def probe_cudnn(request: Request) -> str | None:
    """Why torch's cuDNN backend cannot run here; None where it can."""
    if request.device_type != "cuda":
        return None
    found = importlib.import_module("torch").backends.cudnn.is_available()
    return None if found else "this build of torch has no cuDNN"
