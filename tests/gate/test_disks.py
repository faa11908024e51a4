"""Real disks that fill up or are read-only under a gate, and a clock that runs backwards: nothing is lost, nothing passes (issue 8.3)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.errors import ExitCode
from ci.jsonio import read_bounded
from ci.model import RowVerdict
from ci.verdict_file import load
from tests.gate.conftest import Project
from tests.gate.test_faults import whole_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAIRS = 2
COMMAND = ("gate", "--select", "Allocator.*bump", "--pairs", str(PAIRS), "--no-compiled")
GATE = f'"{sys.executable}" -m ci {" ".join(COMMAND)}'
"""A gate of too few pairs for a pass: its verdict says of each row that all pairs are there and whole."""


def in_mount_namespace(project: Project, script: str, tmp_path: Path) -> str:
    """Runs a bash script in the clone, where it may mount what no other process sees; returns what it prints."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount in a namespace of its own (unshare -rm)")
    env = {**os.environ, "RAPID_LLM_BENCH_DEVICE": "cpu", "DISK": str(tmp_path / "disk"), "TOLD": str(tmp_path)}
    done = subprocess.run(["unshare", "-rm", "bash", "-uc", script], cwd=project.path, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(told: Path) -> None:
    """A gate's stderr is its sentence and no traceback."""
    said = told.read_text(encoding="utf-8")
    assert "Traceback" not in said
    assert said.strip().startswith("ci: "), said


def all_pairs_are_there(report: Path) -> None:
    verdict = load(read_bounded(report / "verdict.json"), name="verdict.json")
    compared = [row for row in verdict.rows if row.verdict is not RowVerdict.SKIPPED]
    assert compared
    for row in compared:
        assert row.reason == f"{PAIRS} pairs of processes, but at least 6 are needed; measure more rounds"


def test_a_disk_that_fills_up_stops_the_gate_and_the_next_goes_on(project: Project, tmp_path: Path) -> None:
    """The disk of results and records is a tmpfs that is full some processes later; then it grows."""
    script = f"""
        mkdir -p "$DISK" .asv/results .asv/records
        mount -t tmpfs -o size=60k tmpfs "$DISK" && mkdir "$DISK/results" "$DISK/records" || exit 9
        mount --bind "$DISK/results" .asv/results && mount --bind "$DISK/records" .asv/records || exit 9
        {GATE} > /dev/null 2> "$TOLD/full"; echo $?
        ls report/verdict.json 2> /dev/null && exit 8
        cp -r .asv/results "$TOLD/results-when-full"
        mount -o remount,size=4m "$DISK" || exit 9
        {GATE} > "$TOLD/out" 2> "$TOLD/then"; echo $?
        cp -r .asv/results "$TOLD/results"
    """
    first, second = (int(line) for line in in_mount_namespace(project, script, tmp_path).split())
    assert first in (ExitCode.USAGE, ExitCode.INCOMPLETE)
    refused(tmp_path / "full")
    assert second == ExitCode.INCOMPLETE, (tmp_path / "then").read_text(encoding="utf-8")
    all_pairs_are_there(project.path / "report")


def test_results_that_are_read_only_stop_the_gate_and_the_next_goes_on(project: Project, tmp_path: Path) -> None:
    script = f"""
        mkdir -p "$DISK" .asv/results
        mount -t tmpfs -o size=4m tmpfs "$DISK" && mount --bind "$DISK" .asv/results && mount -o remount,ro,bind .asv/results || exit 9
        {GATE} > /dev/null 2> "$TOLD/read-only"; echo $?
        ls report/verdict.json 2> /dev/null && exit 8
        mount -o remount,rw,bind .asv/results || exit 9
        {GATE} > "$TOLD/out" 2> "$TOLD/then"; echo $?
    """
    first, second = (int(line) for line in in_mount_namespace(project, script, tmp_path).split())
    assert first in (ExitCode.USAGE, ExitCode.INCOMPLETE)
    refused(tmp_path / "read-only")
    assert second == ExitCode.INCOMPLETE, (tmp_path / "then").read_text(encoding="utf-8")
    all_pairs_are_there(project.path / "report")


BACKWARDS = """
import datetime, os, time
with open(os.environ["STARTED_PROCESSES"], "a+") as file:
    file.write("x")
    file.seek(0)
    back_s = 86400.0 * len(file.read())
_time = time.time
time.time = lambda: _time() - back_s
class Backwards(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) - datetime.timedelta(seconds=back_s)
datetime.datetime = Backwards
"""
"""A sitecustomize: each process lives a day before the one that was started before it."""


def test_a_clock_that_runs_backwards_costs_no_pair(project: Project, tmp_path: Path) -> None:
    """Each process of the gate starts a day before the last: samples and records still find each other, pair by pair."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(BACKWARDS, encoding="utf-8")
    clock = {"PYTHONPATH": str(tmp_path / "clock"), "STARTED_PROCESSES": str(tmp_path / "started")}
    done = project.ci(*COMMAND, **clock)
    assert done.returncode == ExitCode.INCOMPLETE, done.stdout + done.stderr
    all_pairs_are_there(project.path / "report")
    assert min(whole_files(project).values()) == PAIRS
    records = sorted((project.path / ".asv" / "records").glob("*/*.json"), key=lambda path: path.stat().st_mtime)
    days = [path.name[:8] for path in records]
    assert len(days) == 2 * PAIRS
    assert days == sorted(days, reverse=True)
    assert len(set(days)) > PAIRS, "the clock did not run backwards"
