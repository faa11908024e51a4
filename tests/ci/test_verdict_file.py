"""The verdict as a file (case 39)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from gate_builders import HEAD_COMMIT, a_baseline, a_run

from ci.compare import compare_baseline
from ci.errors import InputError
from ci.model import GateResult
from ci.schemas import SCHEMA_DIR
from ci.verdict_file import dump, load


@pytest.fixture(scope="module")
def result() -> GateResult:
    return compare_baseline([a_run(100, commit=HEAD_COMMIT, factors={"decode_b": 0.9})], a_baseline(5))


def _refuse(constant: str) -> Any:
    raise AssertionError(f"the file has the bare constant {constant}")


def test_a_verdict_reads_back_as_it_was(result: GateResult) -> None:
    assert load(dump(result)) == result
    assert load(dump(result).encode()) == result
    assert dump(load(dump(result))) == dump(result)


def test_the_file_is_strict_json_of_the_committed_schema(result: GateResult) -> None:
    data = json.loads(dump(result), parse_constant=_refuse)
    jsonschema.validate(data, json.loads((SCHEMA_DIR / "verdict.schema.json").read_text(encoding="utf-8")))
    assert (data["schema"], data["result"]["exit_code"]) == ("rapid_llm/verdict/1", 1)


def test_what_json_cannot_say_becomes_null(result: GateResult) -> None:
    """Case 39: an infinite smallest detectable regression is unknown, not a bare Infinity."""
    blind = replace(result, rows=(replace(result.rows[0], mde80=math.inf, p_value=math.nan),), environment={"x": [math.inf, 1.0]})
    data = json.loads(dump(blind), parse_constant=_refuse)
    assert (data["result"]["rows"][0]["mde80"], data["result"]["rows"][0]["p_value"]) == (None, None)
    assert data["result"]["environment"] == {"x": [None, 1.0]}
    assert load(dump(blind)).rows[0].mde80 is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("[]", "has the schema 'list'"),
        ('{"schema": "rapid_llm/verdict/2"}', "rapid_llm/verdict/2"),
        ('{"schema": "rapid_llm/verdict/1"}', "result"),
        ('{"schema": "rapid_llm/verdict/1", "result": {"verdict": "FINE"}}', "verdict"),
        ('{"schema": NaN}', "NaN"),
    ],
)
def test_a_broken_file_is_named_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        load(text, name="report/verdict.json")
    assert "report/verdict.json" in str(caught.value)
    assert reason in str(caught.value)
