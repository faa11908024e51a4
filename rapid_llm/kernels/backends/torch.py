"""Rows of the torch backend: the default on a CPU, and what serves where Triton does not."""

from rapid_llm.kernels.ops.spec import KernelSpec, LayoutRequirement, Preference

__all__ = ["SPECS"]

_IMPL = "rapid_llm.kernels.backends.torch_impl"
_POOL_DTYPES = ("float16", "bfloat16", "e4m3", "int8")
_FUSED_DTYPES = ("float16", "bfloat16", "e4m3")
_ON_CPU = (Preference("cpu", device_types=("cpu",)),)

SPECS = (
    KernelSpec(
        name="torch_paged_decode",
        op="paged_decode_attention",
        target=f"{_IMPL}:paged_decode",
        backend="torch",
        device_types=("cpu", "cuda"),
        q_dtypes=("float16", "bfloat16"),
        kv_dtypes=_POOL_DTYPES,
        layout=LayoutRequirement(required=("kv:paged", "kv:row-table")),
        preferences=_ON_CPU,
    ),
    KernelSpec(
        name="torch_kv_write",
        op="kv_write",
        target=f"{_IMPL}:kv_write",
        backend="torch",
        device_types=("cpu", "cuda"),
        q_dtypes=("float16", "bfloat16"),
        kv_dtypes=_POOL_DTYPES,
        layout=LayoutRequirement(required=("kv:paged",)),
        preferences=_ON_CPU,
    ),
    KernelSpec(
        name="torch_rope_norm_kv_write",
        op="rope_norm_kv_write",
        target=f"{_IMPL}:rope_norm_kv_write",
        backend="torch",
        device_types=("cpu", "cuda"),
        q_dtypes=("float16", "bfloat16"),
        kv_dtypes=_FUSED_DTYPES,
        layout=LayoutRequirement(required=("kv:paged",)),
        preferences=_ON_CPU,
    ),
    KernelSpec(
        name="torch_quantize_e4m3",
        op="quantize_e4m3",
        target=f"{_IMPL}:quantize_e4m3",
        backend="torch",
        device_types=("cpu", "cuda"),
        q_dtypes=("float16", "bfloat16", "float32"),
        kv_dtypes=("e4m3",),
        preferences=_ON_CPU,
    ),
)
