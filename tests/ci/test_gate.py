"""What the one command does around a measurement."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from gate_builders import HEAD_COMMIT, a_baseline, a_run, without_row
from rich.console import Console

from asv_bench import microbench
from ci import case as cases
from ci import gate
from ci.compare import compare_baseline
from ci.errors import UsageError
from ci.gate import Options
from ci.model import RowKey, RowVerdict


def test_a_gate_that_is_refused_leaves_no_old_verdict_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report"
    for name in ("1", "pairs", "boot1-1"):
        (report / "runs" / name).mkdir(parents=True)
    for name in ("verdict.json", "index.html", "summary.md", "junit.xml", "notes.txt"):
        (report / name).write_text("old", encoding="utf-8")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="not in a git repository"):
        gate.gate(tmp_path, Options(report), Console())
    assert sorted(path.relative_to(report).as_posix() for path in report.rglob("*")) == ["notes.txt", "runs", "runs/boot1-1"]


def test_a_folder_that_is_no_report_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "index.html").write_text("mine", encoding="utf-8")
    gate.clear(tmp_path)
    assert (tmp_path / "runs" / "1").is_dir()
    assert (tmp_path / "index.html").read_text(encoding="utf-8") == "mine"
    with pytest.raises(UsageError, match="is no folder"):
        gate.clear(tmp_path / "index.html")


def test_a_selected_row_that_is_gone_is_still_missed() -> None:
    baseline = a_baseline(5)
    head = without_row(a_run(1, commit=HEAD_COMMIT), "decode_b")
    kept = {key: row for key, row in head.rows.items() if re.search("decode_[ab]|control", str(key))}
    selected = cases.selected_baseline(baseline, replace(head, rows=kept), "decode_[ab]")
    assert {row.key for row in selected.rows.values()} == {
        RowKey(n) for n in ("decode_a", "decode_b", "control_0", "control_1", "control_2")
    }


def test_rows_that_a_selection_left_out_are_no_skips_of_the_report() -> None:
    head = a_run(1, commit=HEAD_COMMIT)
    key = RowKey("decode_a")
    skipped = replace(head.rows[key], state="skipped", samples=(), records=(), reason="not selected")
    result = replace(head, rows={**head.rows, key: skipped})
    assert key in cases.selected(result, None).rows
    assert key not in cases.selected(result, "decode_b").rows


def test_rows_that_launch_the_same_are_left_out_listed_and_counted() -> None:
    baseline = a_baseline(5)
    head = without_row(a_run(1, commit=HEAD_COMMIT), "decode_b")
    case = cases.CaseFile(mode="baseline", device="x", base="a" * 40, head="b" * 40, skip=["decode_b"], created_at="")
    kept = cases.selected_baseline(baseline, head, "", case.skip)
    assert "decode_b" not in kept.rows
    result = cases._told(case, head, compare_baseline([head], kept))
    (skipped,) = [row for row in result.rows if row.verdict is RowVerdict.SKIPPED]
    assert str(skipped.key) == "decode_b"
    assert "launches exactly what the merge-base does" in skipped.reason
    assert any(notice.startswith("1 rows were not measured") for notice in result.notices)
    assert result.exit_code == 0


def test_a_row_id_becomes_the_key_that_its_row_has() -> None:
    assert cases._key_of("bench_a.B.track_c(decode B=1 (x))") == RowKey("bench_a.B.track_c", ("decode B=1 (x)",))


@pytest.mark.parametrize(("text", "stale"), [('PROTOCOL = "t1"', False), ('PROTOCOL = "t2"', True), ("", False)])
def test_a_baseline_of_another_protocol_is_known_before_anything_is_measured(tmp_path: Path, text: str, stale: bool) -> None:
    baseline = a_baseline(5)
    baseline = msgspec.structs.replace(baseline, protocol=msgspec.structs.replace(baseline.protocol, hash="t1"))
    (tmp_path / "asv_bench").mkdir()
    (tmp_path / "asv_bench" / "microbench.py").write_text(f"import x\n{text}\n", encoding="utf-8")
    said = gate.of_another_protocol(baseline, tmp_path, "NVIDIA_H200")
    assert (said is not None) == stale
    if said:
        assert "baselines/NVIDIA_H200.json" in said
        assert "record it again" in said


def test_the_protocol_is_found_in_the_timers_of_this_checkout(root: Path) -> None:
    stored = a_baseline(5)
    said = gate.of_another_protocol(stored, root, "NVIDIA_H200")
    assert said is not None
    assert microbench.PROTOCOL in said
