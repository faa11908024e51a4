"""Scales of a pool on a GPU by its dtype, for tests that name them as floats."""

from typing import Any

import torch

__all__ = ["scales_on_device"]


def scales_on_device(dtype: torch.dtype, scales: dict[str, float], num_kv_heads: int) -> dict[str, Any]:
    """`scales` as the calls take them: of an int8 pool each head has its own, the named one, its double, and so on."""
    if dtype != torch.int8:
        return dict(scales)
    return {name: scale * (1.0 + torch.arange(num_kv_heads, device="cuda")) for name, scale in scales.items()}
