"""Calls by all that validation and dispatch looked at: a call that is like an earlier one repeats neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rapid_llm.kernels.ops.dispatch import Selection
from rapid_llm.kernels.ops.spec import KernelSpec

__all__ = ["Accepted", "AcceptedCalls", "cache_form"]

_MAX_ACCEPTED = 4096
_BYTES = (torch.uint8, torch.int8)

CallKey = tuple[object, ...]


class Accepted(NamedTuple):
    """What validation and dispatch made of a call.

    Attributes:
        spec: The chosen kernel.
        run: What its target was. A kernel that is loaded anew has to see none of the memory of the one before.
        options: For `run`, beside the arguments of the call.
    """

    spec: KernelSpec
    run: Callable[..., Any]
    options: dict[str, Any]


class AcceptedCalls:
    """The calls of one operation."""

    def __init__(self) -> None:
        self.known: dict[CallKey, Accepted] = {}

    def cache_clear(self) -> None:
        """Forgets them; where another device stands in."""
        self.known.clear()

    def find(self, key: CallKey | None) -> Accepted | None:
        """What was made of a like call; None where there was none, its kernel has been loaded anew, or `key` is None."""
        accepted = None if key is None else self.known.get(key)
        return None if accepted is None or accepted.spec.load() is not accepted.run else accepted

    def add(self, key: CallKey | None, selection: Selection, options: dict[str, Any]) -> Accepted:
        """Keeps what was decided; where `key` is None, nothing is kept and the kernel is given no memory.

        Args:
            key: The call's, which holds all that the decision rests on.
            selection: What dispatch chose.
            options: For its kernel, beside the arguments of the call.
        """
        spec = selection.spec
        if key is None:
            return Accepted(spec, spec.load(), options)
        accepted = Accepted(spec, spec.load(), {**options, "memory": {}} if spec.remembers else options)
        if len(self.known) >= _MAX_ACCEPTED:
            self.known.clear()
        self.known[key] = accepted
        return accepted


def cache_form(k_rows: torch.Tensor, v_rows: torch.Tensor) -> CallKey | None:
    """What validation and layout tags look at of K and V rows; None where that is not known from these, or the two cannot be one cache.

    Whether K and V share a storage is known from their distance only where there are two rows or more: two storages cannot have the
    second begin between two rows of the first. Where a row begins matters for bytes only (`kv:16bit-aligned`).
    """
    shape, dtype, pointer = k_rows.shape, k_rows.dtype, k_rows.data_ptr()
    if shape[0] < 2 or v_rows.dtype != dtype:
        return None
    return (
        dtype, shape, k_rows.stride(), v_rows.shape, v_rows.stride(), v_rows.data_ptr() - pointer,
        dtype in _BYTES and (pointer % 2 or k_rows.storage_offset() % 2 or v_rows.storage_offset() % 2),
    )  # fmt: skip
