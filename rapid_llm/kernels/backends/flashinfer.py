"""Rows of FlashInfer (the optional extra `peers`). It is imported when a row is probed for a device and a layout that it could serve.

FlashInfer's batch decode with a plan is no row: its plan reads the lengths on the host, and a call of `paged_decode_attention` reads them
on the device. `python -m asv_bench.peers` measures it with the plan made beforehand.
"""

from __future__ import annotations

import importlib
import importlib.util

from rapid_llm.kernels.ops.spec import KernelSpec, LayoutRequirement, Request, ShapeLimit

__all__ = ["SPECS", "probe"]

_PACKAGE = "flashinfer"
_CALL = "xqa_batch_decode_with_kv_cache"

_LAYOUT = LayoutRequirement(required=("kv:paged", "kv:row-table", "kv:block-table", "kv:contiguous"))

SPECS = (
    KernelSpec(
        name="flashinfer_xqa_decode",
        op="paged_decode_attention",
        target="rapid_llm.kernels.backends.flashinfer_impl:xqa_decode",
        backend="flashinfer",
        device_types=("cuda",),
        min_capability=(9, 0),
        q_dtypes=("float16", "bfloat16"),
        # Over e4m3 bytes it is not claimed: `python -m asv_bench.peers` measures how far off its results are there.
        kv_dtypes=("float16", "bfloat16"),
        layout=_LAYOUT,
        shape_limits=(
            ShapeLimit("block_size", one_of=(16, 32, 64, 128)),
            ShapeLimit("head_dim", maximum=256, multiple_of=16),
        ),
        priority=-1,
        probe="rapid_llm.kernels.backends.flashinfer:probe",
    ),
)


def probe(request: Request) -> str | None:
    """Why FlashInfer cannot run for `request` on this machine; None where it can."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return "the package flashinfer is not installed (the extra rapid-llm[peers] has it)"
    # An import of seconds, which a request that other reasons keep out does not need.
    if request.device_type != "cuda" or not _LAYOUT.accepts(request.layout_tags):
        return None
    try:
        module = importlib.import_module(f"{_PACKAGE}.decode")
    except Exception as error:  # a package that is there and cannot be loaded is not available, whatever it raises
        return f"flashinfer cannot be imported ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return None if hasattr(module, _CALL) else f"this version of flashinfer has no {_CALL}"
