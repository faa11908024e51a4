"""The verdict as a file: strict JSON that any parser reads, and that gives back the same `GateResult`."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from ci.errors import ExitCode, InputError
from ci.jsonio import decode_json, strict_dumps
from ci.model import GateResult, RowVerdict
from ci.rows import INCOMPLETE_ROWS, VERDICTS, WAIVED, WRONG_ROWS

SCHEMA_ID = "rapid_llm/verdict/1"
_NO_PASS = (RowVerdict.REGRESSED, *INCOMPLETE_ROWS, *WRONG_ROWS)


class VerdictFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layout of the file; infinite numbers are null, with the flag BLIND beside an infinite `mde80`."""

    schema: Literal["rapid_llm/verdict/1"]
    result: GateResult


def _finite(value: Any) -> Any:
    """Replaces what JSON cannot say: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def dump(result: GateResult) -> str:
    """The verdict as deterministic strict JSON (schema ``rapid_llm/verdict/1``)."""
    return strict_dumps(_finite({"schema": SCHEMA_ID, "result": msgspec.to_builtins(result)}))


def load(text: str | bytes, *, name: str = "the verdict") -> GateResult:
    """Reads what `dump` wrote.

    Args:
        text: The file's content.
        name: What messages call it.
    Raises:
        InputError: It is no strict JSON, of another schema, or misses a field.
    """
    data = decode_json(text.encode() if isinstance(text, str) else text, name=name)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA_ID:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"{name} has the schema {found!r}, not {SCHEMA_ID!r}; write it with this version of the gate")
    try:
        result = msgspec.convert(data, VerdictFile).result
    except msgspec.ValidationError as exc:
        raise InputError(f"{name} does not follow {SCHEMA_ID}: {exc}; write it with this version of the gate") from exc
    fault = _contradiction(result)
    if fault is not None:
        raise InputError(f"{name} {fault}; compute the verdict again")
    return result


def _contradiction(result: GateResult) -> str | None:
    """Why the parts of a verdict do not go together, or None: a damaged file must not turn a failure into a pass."""
    try:
        verdict = VERDICTS[ExitCode(result.exit_code)]
    except (ValueError, KeyError):
        return f"has the exit code {result.exit_code}, which no verdict has"
    if verdict is not result.verdict:
        return f"says {result.verdict.value} and has the exit code of {verdict.value}"
    if result.exit_code != ExitCode.PASS:
        return None
    failing = [row for row in result.rows if row.verdict in _NO_PASS and WAIVED not in row.flags]
    if failing:
        return f"passes although {failing[0].key} is {failing[0].verdict.value}"
    if result.compiled is not None and result.compiled.exit_code != ExitCode.PASS:
        return "passes although its compiled rows do not"
    return None
