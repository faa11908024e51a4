"""Strict reading and writing of JSON: what the gate reads is checked, what it writes any parser accepts.

asv writes Python's dialect (bare ``NaN`` and ``Infinity``); that is read only where `allow_constants` says so, and never
written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tempfile
from pathlib import Path

from ci.errors import GateError, InputError

MAX_BYTES = 256 << 20
"""Of one file; the largest that the gate writes have a few MiB, the largest histories of others some ten."""

_MAX_INTEGER = 1 << 64


def decode_json(data: bytes, *, name: str, allow_constants: bool = False, error: type[GateError] = InputError) -> object:
    """Parses UTF-8 JSON (a byte order mark is accepted) and refuses duplicate keys.

    Args:
        data: The bytes of the file.
        name: What the message calls the file.
        allow_constants: Accept bare NaN, Infinity and -Infinity, as asv writes them.
        error: The class of the refusal.
    Raises:
        GateError: `error`, naming file and reason.
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise error(f"{name} is UTF-16, but results and baselines are UTF-8; convert it or measure again")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise error(f"{name} is not UTF-8 ({exc.reason} at byte {exc.start}); restore the file or measure again") from exc

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: dict[str, object] = {}
        for key, value in pairs:
            if key in seen:
                raise error(f"{name} has the key {key!r} twice in one object; keep one of them")
            seen[key] = value
        return seen

    def constant(token: str) -> float:
        if not allow_constants:
            raise error(f"{name} contains the bare constant {token}, which is not JSON; write null and a reason instead")
        return float(token)

    def integer(token: str) -> int:
        value = int(token) if len(token) <= 20 else _MAX_INTEGER
        if abs(value) >= _MAX_INTEGER:
            raise error(f"{name} contains the number {token[:30]}, of {len(token)} digits, which no field can hold; restore the file")
        return value

    def real(token: str) -> float:
        value = float(token)
        if not math.isfinite(value):
            raise error(f"{name} contains the number {token[:30]}, which is beyond what a float can hold; restore the file")
        return value

    try:
        parsed: object = json.loads(
            text, object_pairs_hook=unique, parse_constant=constant, parse_int=integer, parse_float=real if not allow_constants else float
        )
        if "\\ud" in text or "\\uD" in text:
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise error(f"{name} contains half of a surrogate pair, which is no character; restore the file or measure again") from exc
    except json.JSONDecodeError as exc:
        shown = "is empty" if not text.strip() else f"is not valid JSON: {exc.msg} at line {exc.lineno} column {exc.colno}"
        raise error(f"{name} {shown}; restore the file or measure again") from exc
    except RecursionError as exc:
        raise error(f"{name} is nested too deeply to be read; restore the file or measure again") from exc
    return parsed


def read_bounded(path: Path, *, error: type[GateError] = InputError, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes: a pipe or a device would be waited for, or never end.

    Raises:
        GateError: `error`, naming the file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise error(f"{path} cannot be read: it is no regular file; put a file there")
            data = stream.read(limit + 1)
    except (OSError, ValueError) as exc:
        raise error(f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}; name a file that can") from exc
    if len(data) > limit:
        raise error(f"{path} is over {limit:,} bytes and is not read; it is no file of this gate")
    return data


def read_json(path: Path, *, allow_constants: bool = False, error: type[GateError] = InputError) -> object:
    """Reads one file with `decode_json`.

    Raises:
        GateError: `error`, when the file cannot be opened or parsed; the message names it.
    """
    return decode_json(read_bounded(path, error=error), name=str(path), allow_constants=allow_constants, error=error)


def strict_dumps(value: object) -> str:
    """Deterministic strict JSON: sorted keys, two spaces, a final newline.

    Raises:
        ValueError: A number is NaN or infinite.
    """
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2, sort_keys=True) + "\n"


def write_atomic(path: Path, text: str) -> None:
    """Writes UTF-8 text so that a reader sees the old file or the new one, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
