"""asv's samples and the process records: each sample needs a record of exactly its value (R94; cases 5, 20, 23, 39)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from asv_rows import GB, NAME, entry_of
from gate_builders import HEAD_COMMIT, record_file, row_file, write_tree

from ci.model import CommitResult
from ci.results import load_commit


def _joined(folder: Path, samples: list[float], records: list[dict[str, Any]], result: object = 2.0) -> CommitResult:
    write_tree(folder, {NAME: GB}, {NAME: entry_of([result], samples=[samples] if samples else None)})
    (folder / "records").mkdir(exist_ok=True)
    for i, record in enumerate(records):
        (folder / "records" / f"{i}.json").write_text(json.dumps(record), encoding="utf-8")
    return load_commit(folder, "box", HEAD_COMMIT, records_dir=folder / "records")


def _record(process: str, value: float | None, **changes: Any) -> dict[str, Any]:
    return record_file(process, [row_file(NAME, value, **changes)], started_at=f"2026-11-29T21:00:0{process[-1]}Z")


def test_each_sample_gets_the_record_of_its_value(tmp_path: Path) -> None:
    """Equal values of two processes are two records; the order is the samples'."""
    result = _joined(tmp_path, [2.0, 3.0, 2.0], [_record("p1", 2.0), _record("p2", 2.0), _record("p3", 3.0)])
    (row,) = result.rows.values()
    assert row.state == "measured"
    assert [record.process for record in row.records] == ["p1", "p3", "p2"]
    assert (len(result.processes), result.foreign, result.notices) == (3, False, ())


def _invalid(result: CommitResult) -> str:
    (row,) = result.rows.values()
    assert (row.state, row.samples) == ("invalid", ())
    return str(row.reason)


def test_a_sample_without_record_is_invalid(tmp_path: Path) -> None:
    """Each record serves one sample, and equality is exact."""
    assert "lacks a RowRecord" in _invalid(_joined(tmp_path / "1", [2.0, 2.0], [_record("p1", 2.0)]))
    assert "lacks a RowRecord" in _invalid(_joined(tmp_path / "2", [2.0], [_record("p1", 2.0000000000000004)]))
    assert "lacks a RowRecord" in _invalid(_joined(tmp_path / "3", [2.0], []))
    other = _record("p1", 2.0)
    other["commit"] = "c" * 40
    assert "lacks a RowRecord" in _invalid(_joined(tmp_path / "4", [2.0], [other]))


def test_a_duplicated_record_is_invalid(tmp_path: Path) -> None:
    assert "twice" in _invalid(_joined(tmp_path, [2.0, 2.0], [_record("p1", 2.0), _record("p1", 2.0)]))


def test_record_and_row_must_agree_in_unit_and_version(tmp_path: Path) -> None:
    """Case 20."""
    assert "'GiB/s'" in _invalid(_joined(tmp_path / "1", [2.0], [_record("p1", 2.0, unit="GiB/s")]))
    assert "'v2'" in _invalid(_joined(tmp_path / "2", [2.0], [_record("p1", 2.0, version="v2")]))


@pytest.mark.parametrize("status", ["failed", "unverified", "violation", "invalid"])
@pytest.mark.parametrize("beside", ["null", "value"])
def test_a_record_without_a_good_number_takes_the_row_down(tmp_path: Path, status: str, beside: str) -> None:
    """R72, case 5: whatever asv stored, an unverified or impossible number is none."""
    bad = _record("p2", None, status=status, reason="wrong row 3")
    result = _joined(tmp_path, [], [bad], None) if beside == "null" else _joined(tmp_path, [2.0], [_record("p1", 2.0), bad])
    (row,) = result.rows.values()
    assert (row.state, row.samples) == (status, ())
    assert "process p2: wrong row 3" in str(row.reason)


def test_more_than_the_peak_is_a_violation_whatever_the_record_says(tmp_path: Path) -> None:
    """R21, case 5: 6,000 GB/s on a 4.8 TB/s device; exactly 100 % is allowed."""
    for number, fraction in enumerate((1.248, 1.0001, math.nextafter(1, 2))):
        (over,) = _joined(tmp_path / str(number), [2.0], [_record("p1", 2.0, peak_fraction=fraction)]).rows.values()
        assert (over.state, over.samples) == ("violation", ())
    (full,) = _joined(tmp_path / "full", [2.0], [_record("p1", 2.0, peak_fraction=1.0)]).rows.values()
    assert full.state == "measured"


def test_skips_keep_their_reason_and_need_asvs_word(tmp_path: Path) -> None:
    """Case 2: a skip is counted as one; beside a crash it explains nothing."""
    skip = _record("p1", None, status="skipped", reason="needs a cuda device")
    (skipped,) = _joined(tmp_path / "1", [], [skip], result=float("nan")).rows.values()
    (failed,) = _joined(tmp_path / "2", [], [skip], result=None).rows.values()
    assert (skipped.state, failed.state) == ("skipped", "failed")
    assert "needs a cuda device" in str(skipped.reason)


def test_an_ok_record_without_asvs_number_is_no_number(tmp_path: Path) -> None:
    (null,) = _joined(tmp_path / "1", [], [_record("p1", 2.0)], result=None).rows.values()
    (nan,) = _joined(tmp_path / "2", [], [_record("p1", 2.0)], result=float("nan")).rows.values()
    assert (null.state, nan.state) == ("failed", "invalid")


def test_rows_that_only_records_know_are_added(tmp_path: Path) -> None:
    """A row that lacks either half is not dropped."""
    stray = record_file("p2", [row_file("bench.A.track_y", 1.0), row_file("bench.A.track_z", None, status="unverified", reason="off by 2")])
    rows = _joined(tmp_path, [2.0], [_record("p1", 2.0), stray]).rows
    assert {key.benchmark[-1]: row.state for key, row in rows.items()} == {"x": "measured", "y": "invalid", "z": "unverified"}


def test_surplus_records_are_told(tmp_path: Path) -> None:
    """An interrupted process may leave a record behind: the row stands, and the reader hears of it."""
    result = _joined(tmp_path, [2.0], [_record("p1", 2.0), _record("p2", 5.0)])
    (row,) = result.rows.values()
    assert row.state == "measured"
    assert "belong to no sample" in result.notices[0]
