"""Process records: strict reading, and the committed schemas (R12, R13, R108; cases 25, 39)."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from gate_builders import HEAD_COMMIT, record_file, row_file

from ci.errors import InputError
from ci.model import RowKey
from ci.records import read_process_record, read_process_records
from ci.schemas import SCHEMA_DIR, schema_texts, write_schemas


def _write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_reads_every_field_of_a_record(tmp_path: Path) -> None:
    """R12: what the process knew of a row arrives, beside where it was measured."""
    row = row_file("bench.A.track_x", 80.5, "B=1", 7, tick_us=0.5, flags=["FLOOR"], rtol=1e-2)
    (record,) = read_process_records(_write(tmp_path / "deep" / "p.json", record_file("p1", [row])).parent.parent)
    (got,) = record.rows
    assert (record.process, record.commit, record.protocol, record.ceilings) == ("p1", HEAD_COMMIT, "protocol-1", {"copy_gb_per_s": 4000.0})
    assert record.environment["device"] == record_file("p1", [])["environment"]["device"]
    assert got.key == RowKey("bench.A.track_x", ("B=1", "7"))
    assert (got.value, got.latency_us, got.moved_bytes, got.quantiles_us, got.tick_us) == (80.5, 12.5, 1e6, (12.0, 13.0), 0.5)
    assert (got.flags, got.rtol, got.l2, got.instrument) == (("FLOOR",), 1e-2, "cold", "device")


def test_keeps_the_records_of_one_commit_in_the_order_of_their_start(tmp_path: Path) -> None:
    _write(tmp_path / "1.json", record_file("late", [], started_at="2026-11-29T22:00:00Z"))
    _write(tmp_path / "2.json", record_file("early", [], started_at="2026-11-29T20:00:00Z"))
    _write(tmp_path / "3.json", record_file("other", [], commit="c" * 40))
    assert [record.process for record in read_process_records(tmp_path, commit=HEAD_COMMIT)] == ["early", "late"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ('{"schema": "rapid_llm/process-record/1"', "is not valid JSON"),
        ("[]", "is no process record"),
        ({"schema": "rapid_llm/process-record/2"}, "rapid_llm/process-record/2"),
        ('{"schema": "rapid_llm/process-record/1", "process": NaN}', "NaN"),
        ('{"schema": "rapid_llm/process-record/1", "schema": "x"}', "twice"),
        (record_file("p", [], commit="abc"), "commit"),
        (record_file("p", [row_file("b", None)]), "gives no value"),
        (record_file("p", [row_file("b", -1.0)]), "value"),
        (record_file("p", [row_file("b", None, status="failed")]), "without a reason"),
        (record_file("p", [row_file("b", 1.0, status="fine")]), "status"),
        ({k: v for k, v in record_file("p", []).items() if k != "environment"}, "environment"),
    ],
)
def test_refuses_a_broken_record_naming_file_and_reason(tmp_path: Path, content: object, reason: str) -> None:
    """Case 25: the file is part of the subject, so that it fails closed."""
    path = _write(tmp_path / "record.json", content)
    with pytest.raises(InputError) as caught:
        read_process_records(tmp_path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_refuses_an_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder of process records"):
        read_process_records(tmp_path / "absent")


def test_committed_schemas_are_those_of_the_classes(tmp_path: Path) -> None:
    """R108: a schema that a reader relies on cannot drift from what is read."""
    write_schemas(tmp_path)
    for name, text in schema_texts().items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text
        assert (SCHEMA_DIR / name).read_text(encoding="utf-8") == text, f"run ci.schemas.write_schemas() to renew {name}"


def test_schema_agrees_with_the_reader(tmp_path: Path) -> None:
    schema = json.loads((SCHEMA_DIR / "process-record.schema.json").read_text(encoding="utf-8"))
    good = record_file("p", [row_file("b", 1.0)])
    jsonschema.validate(good, schema)
    read_process_record(_write(tmp_path / "good.json", good))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record_file("p", [row_file("b", -1.0)]), schema)
