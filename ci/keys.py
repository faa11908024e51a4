"""Row keys from parameter texts: one spelling for asv's results and for the records of the processes."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ci.model import RowKey

KeyNormaliser = Callable[[RowKey], RowKey]

_BARE_WORDS = ("None", "nan", "inf", "-inf")
"""Reprs that are no strings although `ast.literal_eval` gives no number for them."""


def _literal(text: str) -> object:
    """The Python literal that `text` spells, or None where it spells none (None itself counts as none)."""
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    return value


def param_text(value: object) -> str:
    """The text by which a parameter is known in a `RowKey`.

    asv stores parameters as reprs, records as plain JSON values or as reprs; both come to the same text. A string loses its
    quotes unless its text is itself a literal, so that the string ``'1'`` (which keeps its quotes) and the number ``1`` stay
    two keys. What is no plain string, integer, float or boolean keeps its repr.
    """
    if not isinstance(value, str):
        return repr(value)
    literal = _literal(value)
    if isinstance(literal, bool | int | float):
        return repr(literal)
    if isinstance(literal, str):
        inner = literal
        return value if not inner or inner in _BARE_WORDS or _literal(inner) is not None else inner
    return value


def key_fault(key: RowKey) -> str | None:
    """Why a key cannot identify a row from run to run, or None."""
    for text in key.params:
        if " at 0x" in text:
            return f"parameter {text!r} contains a memory address, which differs in every process; use a plain string"
        if "\n" in text or "\r" in text:
            return f"parameter {text!r} contains a line break; use a plain string of one line"
        if text in _BARE_WORDS[1:]:
            return f"parameter {text} is not a number that equals itself or is finite; use a plain string"
    return None


def without_mappings(key: RowKey) -> RowKey:
    """Drops parameters that are dict literals: measured values that someone keyed a row by (foreign histories only)."""
    return RowKey(key.benchmark, tuple(text for text in key.params if not isinstance(_literal(text), dict)))
