"""Valid files made invalid: changes of bytes, tokens and structure, each told by three numbers so that a finding can be repeated."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from typing import Any

Mutation = tuple[int, int, int]
"""Which change, where (counted round the places there are), and with what."""

TOKENS: tuple[bytes, ...] = (
    b"null", b"true", b"false", b"NaN", b"Infinity", b"-Infinity", b"-0", b"0", b"-1", b"1e400", b"-1e-400", b"1e308", b"5e-324", b"1" * 30,
    b"9" * 5000, b"0.5", b'""', b'" "', b"[]", b"{}", b"[[]]", b"[null]", b'"NaN"', b'"1"', rb'"\ud800"', rb'"\u0000"', rb'"a\nb"',
    rb'"\u001b[31m"', b'"../../../etc/passwd"', b'"/dev/zero"', b'"<script>"', b'"(a+)+$"', b'"' + b"x" * 70_000 + b'"', b"[" * 3000,
    b'{"a":' * 3000, b"'x'", b"01", b"+1", b"0x10", b"1_000", b";", b"//", b"\xff\xfe", b"\x00", "\"é🚀\"".encode(), b'"2999-01-01"',
    b'{"schema": 1}', b'"ok"', b'"skipped"', b'"higher"', b'"lower"', b"2", b"99",
)  # fmt: skip
"""What a token is replaced by: constants, extremes, other types, what other languages write, and what means something elsewhere."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1e308, 5e-324, -0.5, 10**30, 2**63, float("nan"), float("inf"), "", " ", "x", "\ud800", "\x00", "a\nb",
    "../x",
    "0" * 40, "f" * 40, "2999-01-01", [], [None], [[]], [1, 1], ["x"], {}, {"x": 1}, {"": None},
)  # fmt: skip

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[{}\[\]:,]')


def mutate(data: bytes, mutations: Sequence[Mutation]) -> bytes:
    """`data` with the mutations applied one after the other."""
    for kind, where, what in mutations:
        data = _KINDS[kind % len(_KINDS)](data, where, what)
    return data


def _flip(data: bytes, where: int, what: int) -> bytes:
    at = where % max(1, len(data))
    return data[:at] + bytes([what % 256]) + data[at + 1 :]


def _drop(data: bytes, where: int, what: int) -> bytes:
    at = where % max(1, len(data))
    return data[:at] + data[at + 1 + what % 40 :]


def _cut(data: bytes, where: int, what: int) -> bytes:
    at = where % max(1, len(data))
    return data[:at] if what % 2 else data[at:]


def _repeat(data: bytes, where: int, what: int) -> bytes:
    at = where % max(1, len(data))
    return data[: at + what % 200] + data[at:]


def _encode(data: bytes, where: int, what: int) -> bytes:
    text = data.decode("utf-8", "replace")
    return (data + b";", b"\xef\xbb\xbf" + data, text.encode("utf-16"), text.encode("utf-32"), text.encode("cp037", "replace"), b"")[
        what % 6
    ]


def _token(data: bytes, where: int, what: int) -> bytes:
    found = list(_TOKEN.finditer(data))
    if not found:
        return TOKENS[what % len(TOKENS)]
    token = found[where % len(found)]
    return data[: token.start()] + TOKENS[what % len(TOKENS)] + data[token.end() :]


def _swap_tokens(data: bytes, where: int, what: int) -> bytes:
    found = list(_TOKEN.finditer(data))
    if len(found) < 2:
        return data
    first, second = sorted((found[where % len(found)], found[what % len(found)]), key=lambda token: token.start())
    between = data[first.end() : second.start()]
    return data if first is second else data[: first.start()] + second.group() + between + first.group() + data[second.end() :]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a parsed file."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            waiting.append(node[key])
    return found


def _structure(data: bytes, where: int, what: int) -> bytes:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError):
        return _token(data, where, what)
    places = _places(parsed)
    if not places:
        return json.dumps(VALUES[what % len(VALUES)]).encode()
    node, key = places[where % len(places)]
    deed, what = what % 8, what // 8
    if deed == 0:
        del node[key]
    elif deed == 1:
        node[key] = [node[key]]
    elif deed == 2:
        node[key] = {"x": node[key]}
    elif deed == 3:
        other, other_key = places[what % len(places)]
        node[key] = copy.deepcopy(other[other_key])
    elif deed == 4 and isinstance(node, dict):
        node[str(VALUES[what % len(VALUES)])] = node.pop(key)
    elif deed == 4:
        node.insert(key, copy.deepcopy(node[key]))
    elif deed == 5 and isinstance(node[key], str):
        node[key] = node[key] + ("x", "\n", " ", "\x1b[0m", "é")[what % 5]
    elif deed == 6 and isinstance(node[key], int | float) and not isinstance(node[key], bool):
        node[key] = node[key] * (0, -1, 2, 0.5, 1e6, 1 + 1e-9)[what % 6]
    else:
        node[key] = VALUES[what % len(VALUES)]
    return json.dumps(parsed).encode()


_KINDS = (_structure, _token, _structure, _flip, _drop, _cut, _repeat, _encode, _token, _swap_tokens)
