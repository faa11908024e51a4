"""Attention over the paged KV cache, as a layer of a model."""

from __future__ import annotations

import torch
from torch import nn

from rapid_llm.errors import ShapeError
from rapid_llm.kernels.ops import kv_write, paged_decode_attention
from rapid_llm.kv_cache import KVCacheManager
from rapid_llm.modules.sequence_table import DecodeStep, PrefillStep

__all__ = ["PagedAttention"]


class PagedAttention(nn.Module):
    """Writes new K and V to the cache and attends: the prompt to itself, a decoded token to its sequence's rows.

    It has no parameters; projections and rotary embedding are its caller's.
    """

    def __init__(
        self,
        layer: int,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        backend: str | None = None,
    ) -> None:
        """Makes the layer.

        Args:
            layer: Its number in the cache.
            num_q_heads: A multiple of num_kv_heads.
            num_kv_heads, head_dim: As in the cache.
            k_scale, v_scale: Scales of an e4m3 or int8 cache, as `kv_write` takes them.
            backend: Backend that has to serve the calls; None leaves the choice to the dispatch.

        Raises:
            ShapeError: The head counts do not divide.
        """
        super().__init__()
        if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
            raise ShapeError(
                f"PagedAttention expected num_q_heads to be a positive multiple of num_kv_heads, got {num_q_heads} and "
                f"{num_kv_heads}; every K/V head serves the same number of query heads."
            )
        self.layer = layer
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.backend = backend

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KVCacheManager,
        step: PrefillStep | DecodeStep,
    ) -> torch.Tensor:
        """Attends the tokens of one step.

        A prefill attends K and V as they come in; they pass through the cache's dtype only for later steps.

        Args:
            q: [num_tokens, num_q_heads, head_dim], fp16 or bf16. Prefill: the tokens of one sequence; decode: one
                token of each sequence, in the order of the batch.
            k, v: [num_tokens, num_kv_heads, head_dim].
            cache: Holds this layer's rows.
            step: Says where K and V go, and what a decoded token attends.

        Returns:
            [num_tokens, num_q_heads, head_dim], dtype of q.

        Raises:
            ShapeError: q, k or v has another shape than this layer's or the step's.
        """
        num_tokens = step.slot_mapping.shape[0]
        num_heads = {"q": self.num_q_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            expected = (num_tokens, num_heads[name], self.head_dim)
            if tuple(tensor.shape) != expected:
                raise ShapeError(
                    f"PagedAttention expected {name} of shape {expected} for this step, got {tuple(tensor.shape)}; "
                    "pass the tokens of the step, split into heads."
                )
        # Strided views of the layer's combined buffer, as they are: a copy would cost more than the attention.
        k_rows, v_rows = cache.layer_views(self.layer)
        k_scale, v_scale = self.k_scale, self.v_scale
        kv_write(k, v, step.slot_mapping, k_rows, v_rows, k_scale=k_scale, v_scale=v_scale, backend=self.backend)
        if isinstance(step, PrefillStep):
            return _causal_attention(q, k, v)
        return paged_decode_attention(
            q,
            k_rows,
            v_rows,
            step.row_table,
            step.seq_lens,
            k_scale=k_scale,
            v_scale=v_scale,
            backend=self.backend,
        )


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)
