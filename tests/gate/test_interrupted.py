"""An interrupt loses nothing that was finished and leaves nothing half-written; a bad selection measures nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gate.conftest import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SELECT = r"\.Allocator.*bump"


def _finished_rounds(project: Project) -> list[int]:
    """Samples of each commit in asv's results; every file has to be whole."""
    counts = []
    for path in sorted((project.path / ".asv").rglob("*.json")):
        if "src" in path.parts or "env" in path.parts:
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        if path.parent.parent.name == "results" and path.name != "machine.json":
            columns = dict(zip(data["result_columns"], data["results"]["bench_kv_write.Allocator.track_calls"], strict=False))
            counts.append(len(columns["samples"][0]))
    return counts


def _processes_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(folder) in (entry / "environ").read_text(encoding="utf-8", errors="replace"):
                    found.append((entry / "cmdline").read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
    return found


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_an_interrupted_gate_goes_on_where_it_stopped(project: Project) -> None:
    env = {**os.environ, "RAPID_LLM_BENCH_DEVICE": "cpu", "MARK_OF_THIS_TEST": str(project.path)}
    command = [sys.executable, "-m", "ci", "gate", "--select", SELECT, "--pairs", "6", "--no-compiled"]
    gate = subprocess.Popen(command, cwd=project.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 200
    while len(rounds := _finished_rounds(project)) < 2 or min(rounds) < 2:
        assert time.monotonic() < deadline_s
        assert gate.poll() is None, gate.communicate()
        time.sleep(0.2)
    time.sleep(1.5)  # into the next process
    gate.send_signal(signal.SIGINT)
    _, told = gate.communicate(timeout=60)
    assert gate.returncode == 130
    assert told.strip() == "ci: interrupted; what was measured is kept, run the same command again to go on"
    time.sleep(0.5)
    assert _processes_in(project.path) == []
    done = min(_finished_rounds(project))
    assert 2 <= done < 6
    assert not [path for path in project.path.rglob("*writing*") if "src" not in path.parts]
    assert not (project.path / "report" / "verdict.json").exists()

    again = project.ci("gate", "--select", SELECT, "--pairs", "6", "--no-compiled")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"going on after {done} pairs of an interrupted run" in again.stdout
    assert min(_finished_rounds(project)) == 6
    assert not (project.path / ".asv" / "gate-state.json").exists()


@pytest.mark.parametrize(("pattern", "why"), [("no such row", "selects no row")])
def test_a_selection_of_nothing_is_refused(project: Project, pattern: str, why: str) -> None:
    done = project.ci("run", "--select", pattern)
    assert done.returncode == 2, done.stdout
    assert why in done.stderr
    assert "Traceback" not in done.stderr
