"""The JSON schemas of the gate's files, generated from the classes that read and write them.

``python -c "from ci.schemas import write_schemas; write_schemas()"`` writes them to ``baselines/schema``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ci.baseline_file import Baseline
from ci.bisect import BisectFile
from ci.case import CaseFile
from ci.compiled_model import CompiledBaseline, CompiledFile
from ci.jsonio import strict_dumps, write_atomic
from ci.records import ProcessFile
from ci.verdict_file import VerdictFile

SCHEMA_DIR = Path(__file__).resolve().parent.parent / "baselines" / "schema"

_FILES: dict[str, Any] = {
    "process-record.schema.json": ProcessFile,
    "baseline.schema.json": Baseline,
    "verdict.schema.json": VerdictFile,
    "case.schema.json": CaseFile,
    "bisect.schema.json": BisectFile,
    "compiled.schema.json": CompiledFile,
    "compiled-baseline.schema.json": CompiledBaseline,
}


def _any(kind: type) -> dict[str, Any]:
    """`object` stands for any JSON value; no other class is without a schema.

    Raises:
        NotImplementedError: Another class, as msgspec asks of a hook.
    """
    if kind is object:
        return {"description": "any JSON value"}
    raise NotImplementedError(f"{kind} has no JSON schema")


def schema_texts() -> dict[str, str]:
    """File name to text of each schema, as the classes stand."""
    texts = {}
    for name, kind in _FILES.items():
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(kind, schema_hook=_any)}
        texts[name] = strict_dumps(schema)
    return texts


def write_schemas(directory: Path = SCHEMA_DIR) -> None:
    """Writes the schemas that belong beside the baselines."""
    for name, text in schema_texts().items():
        write_atomic(directory / name, text)
