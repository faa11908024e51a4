"""Checks of what an allocator of cache rows is given."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rapid_llm.errors import DTypeError, ShapeError

__all__ = ["check_count", "flat_rows", "raise_for"]


def check_count(call: str, name: str, value: int) -> None:
    """Refuses what is no count before anything is changed: bool and float would pass through the arithmetic of the cursor.

    Raises:
        ShapeError: It is no int, or negative.
    """
    if type(value) is not int or value < 0:
        raise ShapeError(f"{call} expected {name} of 0 or more, got {value!r}; pass a plain int.")


def flat_rows(call: str, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`rows` flat and int64.

    Raises:
        DTypeError: No tensor of int32 or int64.
        ShapeError: On another device.
    """
    if not isinstance(rows, torch.Tensor) or rows.dtype not in (torch.int32, torch.int64):
        got = str(rows.dtype) if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise DTypeError(f"{call} expected rows as an int32 or int64 tensor, got {got}; pass what was allocated.")
    if rows.device != device:
        raise ShapeError(f"{call} expected rows on {device}, got {rows.device}; move them there.")
    return rows.reshape(-1).long()


def raise_for(call: str, what: str, flat: torch.Tensor, wrong: torch.Tensor | npt.NDArray[np.bool_]) -> None:
    """Refuses a call for the rows where an element of `wrong` is set, and names the first of them.

    Raises:
        ShapeError: An element is set.
    """
    named = flat[wrong if isinstance(wrong, torch.Tensor) else torch.from_numpy(wrong)]
    if named.numel():
        more = f" (and {named.numel() - 1} more)" if named.numel() > 1 else ""
        raise ShapeError(f"{call} expected rows that were allocated here, but row {int(named[0])}{more} {what}; nothing was changed.")
