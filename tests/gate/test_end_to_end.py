"""The whole way on this machine's CPU: a planted slowdown is found by the gate, by asv and by a bisect, and its reverse is an improvement.

Two commits are measured once, by a gate that is interrupted on its way; each test looks at what it left or goes on from there, and asv and
the bisect measure one more round.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ci import bisect
from ci.bisect import Answer, BisectFile, Step
from ci.device import DEVICE_VARIABLE, detect
from ci.jsonio import write_atomic
from ci.lost_rows import listed
from ci.staged import pattern_of
from tests.gate.conftest import Project, made_project
from tests.gate.test_faults import whole_files

ONE_ROW = r"KVWritePrefill.*T=512 float16"
SELECT = rf"{ONE_ROW}|\.Allocator.*bump"
"""A row that the plant slows down, and one that it leaves alone."""
SLOWED = "bench_kv_write.KVWritePrefill.track_bandwidth"
TIMES = 6
"""So often that a machine with other tenants, whose readings differ by up to two times, shows it in every pair."""
PAIRS = 8
"""The fewest that can show a regression of one row among two."""
GATE = ("ci", "gate", "--select", SELECT, "--pairs", str(PAIRS))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Slowed:
    """A clone whose second commit writes several times, and what the gate said of it."""

    project: Project
    good: str
    bad: str
    interrupted: Interrupted
    gate: subprocess.CompletedProcess[str]
    verdict: dict[str, Any]

    @property
    def rounds(self) -> int:
        """How often both commits have been measured so far."""
        return _finished_rounds(self.project)


@dataclass
class Interrupted:
    """What an interrupted gate said and left."""

    exit_code: int
    told: str
    processes: list[str]
    rounds: int
    unfinished: list[Path]
    has_verdict: bool


def _finished_rounds(project: Project) -> int:
    """Samples of the commit that has fewest; 0 until both have some. Every file has to be whole."""
    counts = whole_files(project, SLOWED)
    return min(counts.values()) if len(counts) == 2 else 0


def _processes_of(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (entry / "environ").read_text(encoding="utf-8", errors="replace"):
                found.append((entry / "cmdline").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return found


def _interrupt(project: Project) -> Interrupted:
    """Starts the gate, and interrupts it in the process after the first round."""
    env = {**os.environ, DEVICE_VARIABLE: "cpu", "MARK_OF_THIS_TEST": str(project.path)}
    command = [sys.executable, "-m", *GATE]
    gate = subprocess.Popen(
        command,
        cwd=project.path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background of a shell ignore it
    )
    deadline_s = time.monotonic() + 300
    while not _finished_rounds(project):
        assert time.monotonic() < deadline_s
        assert gate.poll() is None, gate.communicate()
        time.sleep(0.2)
    time.sleep(1.5)  # into the next process
    gate.send_signal(signal.SIGINT)
    _, told = gate.communicate(timeout=60)
    time.sleep(0.5)
    return Interrupted(
        gate.returncode,
        told.strip(),
        _processes_of(project.path),
        _finished_rounds(project),
        [path for path in project.path.rglob("*writing*") if "src" not in path.parts],
        (project.path / "report" / "verdict.json").exists(),
    )


def _verdict(folder: Path, root: Path) -> dict[str, Any]:
    text = (folder / "verdict.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not strict JSON"))
    jsonschema.validate(data, json.loads((root / "baselines" / "schema" / "verdict.schema.json").read_text(encoding="utf-8")))
    result: dict[str, Any] = data["result"]
    return result


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Slowed:
    """Measured once: pairs of processes of the two commits, by a gate that goes on after an interrupt."""
    project = made_project(tmp_path_factory.mktemp("slowed") / "project", root)
    good = project.git("rev-parse", "HEAD")
    project.git("checkout", "-q", "-b", "often")
    project.write_times(TIMES)
    bad = project.commit("write 'often' [bold]")
    interrupted = _interrupt(project)
    done = project.run(*GATE)
    assert done.returncode == 1, done.stdout + done.stderr
    return Slowed(project, good, bad, interrupted, done, _verdict(project.path / "report", root))


def _asv_continuous(slowed: Slowed, base: str, head: str) -> subprocess.CompletedProcess[str]:
    """One more round by asv itself, on top of the rounds that the gate had asv measure of the same rows and commits."""
    before = slowed.rounds
    more = ("-a", "rounds=1", "--append-samples", "--bench", r"^(?!bench_compiled\.)")
    done = slowed.project.run("asv", "continuous", base, head, *more, RAPID_LLM_BENCH_SELECT=SELECT)
    assert slowed.rounds == before + 1
    return done


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_an_interrupted_gate_leaves_nothing_and_goes_on_where_it_stopped(slowed: Slowed) -> None:
    found = slowed.interrupted
    assert found.exit_code == 130
    assert found.told == "ci: interrupted; what was measured is kept, run the same command again to go on"
    assert found.processes == []
    assert 1 <= found.rounds < PAIRS
    assert found.unfinished == []
    assert not found.has_verdict
    assert f"going on after {found.rounds} pairs of an interrupted run" in slowed.gate.stdout
    (row,) = [row for row in slowed.verdict["rows"] if row["verdict"] == "REGRESSED"]
    assert row["num_pairs"] == PAIRS
    assert not (slowed.project.path / ".asv" / "gate-state.json").exists()


def test_a_planted_slowdown_is_a_regression(slowed: Slowed, root: Path) -> None:
    data, report = slowed.verdict, slowed.project.path / "report"
    assert data["mode"] == "ab"
    assert (data["base"], data["head"]) == (slowed.good, slowed.bad)
    (row,) = [row for row in data["rows"] if row["verdict"] == "REGRESSED"]
    assert row["key"]["benchmark"] == SLOWED
    assert row["effect"] > 1
    for text in (slowed.gate.stdout, data["reason"]):
        assert row["key"]["params"][0] in text
    for name in ("index.html", "summary.md", "junit.xml"):
        assert "REGRESSED" in (report / name).read_text(encoding="utf-8")

    again = slowed.project.ci("report")
    assert again.returncode == 1
    assert _verdict(report, root) == data


def test_the_slowdown_is_a_regression_of_asv(slowed: Slowed) -> None:
    by_asv = _asv_continuous(slowed, slowed.good, slowed.bad)
    assert by_asv.returncode == 1, by_asv.stdout
    assert any(line.startswith("| +") and SLOWED in line for line in by_asv.stdout.splitlines())


def test_the_reverse_is_an_improvement(slowed: Slowed, tmp_path: Path, root: Path) -> None:
    """The same processes with the sides exchanged."""
    done = slowed.project.ci("compare", slowed.good, "--base", slowed.bad, "--report", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    data = _verdict(tmp_path, root)
    assert (data["base"], data["head"]) == (slowed.bad, slowed.good)
    (row,) = [row for row in data["rows"] if row["verdict"] == "IMPROVED"]
    assert row["key"]["benchmark"] == SLOWED
    assert row["effect"] < -0.5
    by_asv = _asv_continuous(slowed, slowed.bad, slowed.good)
    assert by_asv.returncode == 0, by_asv.stdout
    assert "PERFORMANCE INCREASED" in by_asv.stdout


def test_a_bisect_names_the_commit(slowed: Slowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bisect that was interrupted in its second step: the ends are decided, and all pairs of this step but one are measured."""
    project, good, culprit = slowed.project, slowed.good, slowed.bad
    project.commit("after it")
    bad = project.commit("last")
    (row,) = (name for name in listed(project.path) if re.search(ONE_ROW, name))
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    machine = detect().key
    rounds = slowed.rounds
    ends = Step(good, bad, rounds + 1, Answer.BAD, 0.5, "of the interrupted one")
    file = tmp_path / "bisect.json"
    write_atomic(file, bisect.dump(BisectFile(bisect.SCHEMA_ID, row, good, bad, machine, [ends], [], False)))
    state = {"commits": [good, culprit], "select": pattern_of([row]), "skip": [], "device": machine, "name": "pairs"}
    write_atomic(project.path / ".asv" / "gate-state.json", json.dumps(state))

    command = ("bisect", row, "--good", good, "--bad", "HEAD", "--pairs", str(rounds + 1), "--report", str(tmp_path))
    done = project.ci(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"going on after {rounds} pairs of an interrupted run" in done.stdout
    assert slowed.rounds == rounds + 1
    first, second = (line for line in done.stdout.splitlines() if line.startswith("step "))
    assert first == f"step 1 of about 4: {bad[:12]} 'last' +50.0 % latency: bad (measured before)"
    found = re.fullmatch(rf"step 2 of about 4: {culprit[:12]} \"write 'often' \[bold\]\" \+([\d.]+) % latency: bad", second)
    assert found is not None, second
    assert float(found[1]) > 100
    assert f"The first bad commit is {culprit[:12]} \"write 'often' [bold]\"." in done.stdout

    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["suspects"] == [culprit]
    assert data["confirmed"] is True
    assert (tmp_path / "runs" / f"bisect-{good[:12]}-{culprit[:12]}" / "records" / culprit[:12]).is_dir()
    again = project.ci(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("(measured before)") == 2
