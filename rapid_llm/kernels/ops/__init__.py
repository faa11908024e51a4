"""The public calls. What installs measurements is `rapid_llm.kernels.ops.dispatch.set_perf_provider`."""

from rapid_llm.kernels.ops.attention import decode_request, paged_decode_attention
from rapid_llm.kernels.ops.contiguous import contiguous_decode_attention, contiguous_decode_request
from rapid_llm.kernels.ops.kv import e4m3_scale, int8_scales, kv_write, quantize_e4m3, quantize_request, write_request
from rapid_llm.kernels.ops.layout import layout_tags
from rapid_llm.kernels.ops.rope import rope_norm_kv_write, rope_write_request

__all__ = [
    "contiguous_decode_attention",
    "contiguous_decode_request",
    "decode_request",
    "e4m3_scale",
    "int8_scales",
    "kv_write",
    "layout_tags",
    "paged_decode_attention",
    "quantize_e4m3",
    "quantize_request",
    "rope_norm_kv_write",
    "rope_write_request",
    "write_request",
]
