"""Strict reading and writing of JSON: what the gate reads is checked, what it writes any parser accepts.

asv writes Python's dialect (bare ``NaN`` and ``Infinity``); that is read only where `allow_constants` says so, and never
written.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from ci.errors import GateError, InputError


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

    try:
        parsed: object = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as exc:
        shown = "is empty" if not text.strip() else f"is not valid JSON: {exc.msg} at line {exc.lineno} column {exc.colno}"
        raise error(f"{name} {shown}; restore the file or measure again") from exc
    except RecursionError as exc:
        raise error(f"{name} is nested too deeply to be read; restore the file or measure again") from exc
    return parsed


def read_json(path: Path, *, allow_constants: bool = False, error: type[GateError] = InputError) -> object:
    """Reads one file with `decode_json`.

    Raises:
        GateError: `error`, when the file cannot be opened or parsed; the message names it.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise error(f"{path} cannot be read: {exc.strerror or exc}") from exc
    return decode_json(data, name=str(path), allow_constants=allow_constants, error=error)


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
