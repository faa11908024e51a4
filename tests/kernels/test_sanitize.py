"""The command that runs the kernel tests under compute-sanitizer, with a stand-in for the tool."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import sanitize

_TOOL = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
echo "========= COMPUTE-SANITIZER" > "$2"
[ "$SUMMARY" = none ] || echo "========= $SUMMARY" >> "$2"
[ "$HANGS" = 1 ] && exec sleep 60
echo "3 passed in 0.1s"
exit "$STATUS"
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compute-sanitizer that runs nothing and says what the environment tells it."""
    path = tmp_path / "bin" / "compute-sanitizer"
    path.parent.mkdir()
    path.write_text(_TOOL, encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    monkeypatch.setenv("STATUS", "0")
    return tmp_path


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [
        ("ERROR SUMMARY: 0 errors", "0", 0),
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "0", 0),
        ("ERROR SUMMARY: 2 errors", "0", 1),
        ("RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", "0", 1),
        ("ERROR SUMMARY: 0 errors", "1", 1),
        ("none", "0", 1),
    ],
)
def test_only_passed_tests_and_a_summary_of_nothing_are_clean(
    tool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, status: str, expected: int
) -> None:
    monkeypatch.setenv("SUMMARY", said)
    monkeypatch.setenv("STATUS", status)
    assert sanitize.main(["--out", str(tool / "out"), "--select", "memcheck write$"]) == expected
    (outcome,) = json.loads((tool / "out" / "summary.json").read_text(encoding="utf-8"))
    assert outcome["tests"] == "3 passed in 0.1s"
    assert "| memcheck | write | 3 passed in 0.1s |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "status", "expected"),
    [("ERROR SUMMARY: 128 errors", "1", 0), ("ERROR SUMMARY: 0 errors", "0", 1), ("ERROR SUMMARY: 0 errors", "1", 1), ("none", "1", 1)],
)
def test_what_is_broken_on_purpose_has_to_be_found(
    tool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, status: str, expected: int
) -> None:
    monkeypatch.setenv("SUMMARY", said)
    monkeypatch.setenv("STATUS", status)
    assert sanitize.main(["--out", str(tool / "out"), "--select", "memcheck a broken"]) == expected
    assert ("NOT FOUND" in capsys.readouterr().out) == (expected == 1)


def test_what_is_out_of_time_is_stopped_and_not_clean(
    tool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUMMARY", "ERROR SUMMARY: 0 errors")
    monkeypatch.setenv("HANGS", "1")
    assert sanitize.main(["--out", str(tool / "out"), "--select", "memcheck write$", "--seconds", "1"]) == 1
    assert "stopped: out of time" in capsys.readouterr().out


def test_without_the_tool_or_with_no_part_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: Path
) -> None:
    assert sanitize.main(["--out", str(tmp_path / "x"), "--select", "nothing"]) == 2
    assert "memcheck decode" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main(["--out", str(tmp_path / "x")]) == 2
    assert "comes with the CUDA toolkit" in capsys.readouterr().err


def test_the_pages_table_is_that_of_the_kept_run(root: Path) -> None:
    kept = json.loads((root / "docs" / "data" / "sanitizer-h200" / "summary.json").read_text(encoding="utf-8"))
    outcomes = [sanitize.Outcome(**outcome) for outcome in kept]
    page = (root / "docs" / "sanitizer.md").read_text(encoding="utf-8")
    assert sanitize.table(outcomes) in page
    for outcome in outcomes:
        assert outcome.clean or f'"{outcome.tool} {outcome.part}" was stopped' in page


def test_what_the_merge_costs_is_the_medians_of_the_kept_readings(root: Path) -> None:
    kept = json.loads((root / "docs" / "data" / "sanitizer-h200" / "merge-before-after.json").read_text(encoding="utf-8"))["processes"]
    page = (root / "docs" / "sanitizer.md").read_text(encoding="utf-8")
    told = {
        "B=1 S=1024 float16": "{:.2f} to {:.2f} us (+{:.1f} %)",
        "B=1 S=32768 float16": "{:.2f} to {:.2f} (+{:.1f} %)",
        "B=8 S=8192 float16": "8 x 8k {:.2f} to {:.2f}",
        "B=8 S=8192 e4m3": "e4m3 {:.2f} to {:.2f} (+{:.1f} %)",
        "B=1 S=32768 e4m3": "{:.2f} and {:.2f} us (+{:.1f} %)",
    }
    for row, text in told.items():
        before, after = (statistics.median(us for process in kept[side] for us in process[row]) for side in ("before", "after"))
        assert text.format(before, after, 100 * (after / before - 1)).replace("+0.", "+.") in page
    first, second = (statistics.median(process["B=1 S=32768 e4m3"]) for process in kept["after"])
    assert f"are {100 * (first / second - 1):.1f} % apart".replace(" 0.", " .") in page


def test_every_part_has_tests() -> None:
    """A word of pytest's that selects nothing would be a clean part. `-k` looks for its words in the tests' names."""
    command = [sys.executable, *sanitize._PYTEST, "--collect-only", "tests/kernels", "--ignore", "tests/kernels/test_compile.py"]
    done = subprocess.run(command, cwd=sanitize.ROOT, capture_output=True, text=True, timeout=100, check=True)
    by_file: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        path, found, test = line.partition("::")
        if found:
            by_file.setdefault(path.removeprefix("tests/kernels/test_").removesuffix(".py"), []).append(test.lower())
    never, graphs = sanitize._NEVER.split(" or "), sanitize._GRAPHS.split(" or ")
    for part in sanitize.PARTS:
        for name in part.files:
            chosen = [
                test
                for test in by_file[name]
                if not any(word in test for word in never) and any(word in test for word in graphs) == part.graphs
            ]
            assert chosen, f"{part.tool} {part.name}: nothing of {name}"
