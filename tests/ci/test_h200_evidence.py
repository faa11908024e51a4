"""The docs' H200 figures against the raw files they rest on."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import msgspec
import pytest

from ci import baseline as baselines
from ci import compared
from ci.baseline_file import OLD_SCHEMA_ID, load_waivers
from ci.baseline_record import gathered
from ci.compare import compare_baseline
from ci.errors import BaselineError
from ci.model import CommitResult, GateResult, ProcessRecord, RowResult, RowVerdict, RunVerdict
from ci.results import load_commit, read_tree
from ci.spread import spread_table
from ci.tables import table
from ci.verdict_file import load as load_verdict

COMMIT, FIRST_COMMIT = "c0d5bb8d3527", "3e3e3654d818"


def _runs(root: Path) -> list[Path]:
    return sorted((root / "baselines" / "asv").iterdir())


def _first(root: Path) -> Path:
    """The first baseline, of timers `t1` and the first schema, and its runs."""
    return root / "docs" / "data" / "baseline-t1"


def _verdict(root: Path, name: str) -> GateResult:
    return load_verdict((root / "docs" / "data" / "planted-h200" / f"{name}.verdict.json").read_text(encoding="utf-8"))


def test_the_table_of_the_docs_is_the_one_that_its_command_prints(root: Path) -> None:
    page = (root / "docs" / "h200.md").read_text(encoding="utf-8")
    assert page.partition("\n---\n\n")[2] == table(_runs(root))


def test_rows_that_came_later_are_as_their_command_prints_them(root: Path) -> None:
    page = (root / "docs" / "h200.md").read_text(encoding="utf-8")
    lines = page.partition("<!-- later -->\n")[2].partition("<!-- end of later -->")[0].splitlines()
    printed = table(sorted((root / "docs" / "data" / "rows-h200").iterdir())).splitlines()
    accepted = page.partition("\n---\n\n")[2]
    cases = [line.split(" | ")[0] for line in lines if line.startswith("| ") and not line.startswith(("| case", "| ---"))]
    assert len(cases) == 5
    assert [case for case in cases if case in accepted] == []
    assert [line for line in lines if line and line not in printed] == []


def test_how_far_processes_differ_is_what_its_command_prints(root: Path) -> None:
    page = (root / "docs" / "h200.md").read_text(encoding="utf-8")
    assert page.partition("<!-- spread -->\n")[2].partition("<!-- end of spread -->")[0] == spread_table(_runs(root))


def _loaded(folders: list[Path]) -> list[CommitResult]:
    runs = []
    for folder in folders:
        tree = read_tree(folder / "results")
        (machine,) = tree.machines
        (found,) = tree.commits(machine)
        runs.append(load_commit(folder / "results", machine, found.commit, records_dir=folder / "records"))
    return runs


def test_the_baseline_holds_the_committed_runs(root: Path) -> None:
    stored = baselines.load(root / "baselines" / "NVIDIA_H200.json")
    again = baselines.record(_loaded(_runs(root)), reason=stored.reason, accepted_by=stored.accepted_by)
    assert msgspec.structs.replace(again, previous_hash=stored.previous_hash) == stored
    host = [row for row in stored.rows.values() if row.timer == "bench_host"]
    assert len(host) == 8
    assert all(row.host_floors_us is not None for row in host)
    assert len(stored.runs) >= 5
    assert len({run.boot for run in stored.runs}) >= 3
    assert {run.commit[:12] for run in stored.runs} == {COMMIT}


def test_each_accepted_run_passes_against_them_and_only_waived_rows_are_blind(root: Path) -> None:
    stored = baselines.load(root / "baselines" / "NVIDIA_H200.json")
    for run in _loaded(_runs(root)):
        result = compare_baseline([run], stored, now=datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc))
        assert (result.verdict, result.exit_code) == (RunVerdict.PASS, 0), result.reason
        assert {str(row.key) for row in result.rows if "BLIND" in row.flags} == {waiver.row for waiver in stored.waivers}


def test_what_one_run_finds_in_host_rows_is_what_the_pages_say(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the floor of their own blocks; as measured, as a file without floors would have it; and with the floor alone, no controls."""
    stored = baselines.load(root / "baselines" / "NVIDIA_H200.json")
    rows = {name: msgspec.structs.replace(row, host_floors_us=None) for name, row in stored.rows.items()}
    (run,) = _loaded(_runs(root)[:1])
    found = []
    for baseline in (stored, msgspec.structs.replace(stored, rows=rows), stored):
        if len(found) == 2:
            monkeypatch.setattr(compared, "_serving", lambda *_: [])
        result = compare_baseline([run], baseline, now=datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc))
        found.append([100 * (row.mde80 or 0) for row in result.rows if row.section == "allocator"])
    over_floor, measured, alone = found
    assert len(over_floor) == len(measured) == len(alone) == 6
    page = (root / "docs" / "h200.md").read_text(encoding="utf-8")
    assert {f"{mde:.1f}" for mde in over_floor} == {"8.8"}
    assert "a regression of 8.8 % would be found in each of the six rows" in page
    assert f"As measured it was {min(measured):.1f} to {max(measured):.1f} %" in page
    assert {f"{mde:.1f}" for mde in alone} == {"11.6"}
    told = "8.8 % with floor and controls, 11.6 % with the floor alone and "
    told += f"{min(measured):.1f} to {max(measured):.1f} % with the controls alone"
    assert told in (root / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_a_file_of_the_first_schema_still_loads(root: Path) -> None:
    path = _first(root) / "NVIDIA_H200.json"
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == OLD_SCHEMA_ID
    stored = baselines.load(path)
    runs = sorted((_first(root) / "runs").iterdir())
    again = gathered(_loaded(runs), reason=stored.reason, accepted_by=stored.accepted_by, allow_single_boot=False)
    assert msgspec.structs.replace(again, waivers=load_waivers(path.with_name("NVIDIA_H200.waivers.json"))) == stored
    assert {run.commit[:12] for run in stored.runs} == {FIRST_COMMIT}


def test_one_of_its_runs_would_be_refused_today_for_its_host_control(root: Path) -> None:
    """It was recorded before runs were held against each other; the host of run 2 took 1.5 times as long for the control row."""
    runs = sorted((_first(root) / "runs").iterdir())
    with pytest.raises(BaselineError, match=r"boot1-2.*run 2 of 5, can never become part of a baseline: .*class host moved by \+46\.9 %"):
        baselines.record(_loaded(runs), accepted_by="A")


def test_the_planted_slowdown_was_found_in_every_write_row_and_nowhere_else(root: Path) -> None:
    result = _verdict(root, "gate-planted")
    assert (result.verdict, result.exit_code) == (RunVerdict.REGRESSION, 1)
    slow = [row for row in result.rows if row.verdict is RowVerdict.REGRESSED]
    assert len(slow) == 11
    assert {row.key.benchmark.partition(".track_")[0] for row in slow} == {"bench_kv_write.KVWritePrefill", "bench_kv_write.KVWriteDecode"}
    assert all(0.66 < (row.effect or 0) < 1.03 for row in slow)
    assert all(abs(row.effect or 0) < 0.007 for row in result.rows if row.control)


def test_the_unchanged_commit_passes_under_the_rule_that_its_false_red_mended(root: Path) -> None:
    """The run said UNFIT because a control of a class without rows had moved; its samples are judged again as a run."""
    told = _verdict(root, "gate-unchanged")
    assert told.verdict is RunVerdict.RUNNER_UNFIT
    stored = baselines.load(_first(root) / "NVIDIA_H200.json")
    rows = {
        row.key: RowResult(row.key, row.unit, row.direction, row.record.version, "measured", row.samples, None, (row.record,))
        for row in told.rows
        if row.samples and row.record is not None
    }
    assert len(rows) == 33
    process = ProcessRecord("p", told.head, "", "", told.environment, told.ceilings, (), "verdict", protocol=stored.protocol.hash)
    head = CommitResult("NVIDIA_H200", told.head, "", 0, rows, {}, "verdict", (process,))
    known = msgspec.structs.replace(stored, rows={name: row for name, row in stored.rows.items() if row.key in rows})
    result = compare_baseline([head], known, now=datetime.datetime(2026, 11, 30, tzinfo=datetime.timezone.utc))
    assert (result.verdict, result.exit_code) == (RunVerdict.PASS, 0)
    unconfirmed = [row for row in result.rows if row.verdict is RowVerdict.UNCONFIRMED]
    assert len(unconfirmed) == 4
    (moved,) = [row for row in result.rows if "MOVED" in row.flags]
    assert "Matmul" in moved.key.benchmark


def test_the_reversed_slowdown_was_an_improvement_for_the_gate_and_for_asv(root: Path) -> None:
    folder = root / "docs" / "data" / "planted-h200"
    gate = (folder / "gate-reversed.txt").read_text(encoding="utf-8")
    assert "PASS (exit code 0)" in gate
    assert "1 improved" in gate
    assert "-39.6 % latency" in gate
    asv = (folder / "asv-continuous-reversed.txt").read_text(encoding="utf-8")
    assert "PERFORMANCE INCREASED" in asv
    assert "    1.66 |" in asv
    assert asv.rstrip().endswith("exit 0")
    page = (root / "docs" / "planted-slowdown.md").read_text(encoding="utf-8")
    assert "-39.6 %" in page
    assert "ratio 1.66" in page
