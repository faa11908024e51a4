"""Calls of torch's scaled_dot_product_attention with one backend of it named: where that cannot serve, torch raises and takes no other.

Their caller is `rapid_llm.kernels.ops.contiguous`, which has validated every argument.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["cudnn", "flash", "math"]


def math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
    """By products and a softmax; see `rapid_llm.kernels.ops.contiguous.contiguous_decode_attention`."""
    return _attended(SDPBackend.MATH, q, k, v, softmax_scale)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
    """By the flash attention that torch brings; as `math`."""
    return _attended(SDPBackend.FLASH_ATTENTION, q, k, v, softmax_scale)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float) -> torch.Tensor:
    """By cuDNN; as `math`."""
    return _attended(SDPBackend.CUDNN_ATTENTION, q, k, v, softmax_scale)


def _attended(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q[:, :, None], k, v, scale=softmax_scale, enable_gqa=True)[:, :, 0]
