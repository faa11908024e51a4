"""What breaks around a gate: kills, a full disk, results that cannot be written, damaged caches. Nothing is lost, nothing passes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ci.errors import ExitCode
from ci.jsonio import read_bounded, write_atomic
from ci.model import RowVerdict
from ci.verdict_file import load
from tests.gate.conftest import Project

PAIRS = 2
"""Enough to be killed in and between; too few for a pass, so that the verdict says of each row that all of them are there and whole."""
COMMAND = ("gate", "--select", "Allocator.*bump", "--pairs", str(PAIRS), "--no-compiled")
THREE_ROWS = ("gate", "--select", "Allocator", "--pairs", "6", "--no-compiled")


ALLOCATOR = "bench_kv_write.Allocator.track_calls"


def whole_files(project: Project, benchmark: str = ALLOCATOR) -> dict[str, int]:
    """Samples by file of asv's results; every JSON file that is there has to be whole."""
    counts = {}
    for path in sorted((project.path / ".asv").glob("*/**/*.json")):
        if "src" in path.parts or "env" in path.parts:
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        if path.parent.parent.name == "results" and path.name != "machine.json":
            columns = dict(zip(data["result_columns"], data["results"][benchmark], strict=False))
            counts[path.name] = max(len(samples or []) for samples in columns["samples"])
    return counts


def no_verdict(project: Project) -> None:
    """A gate that did not end left no verdict, whole or not."""
    assert not (project.path / "report" / "verdict.json").exists()


def _children_of(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK_OF_THIS_TEST={session}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def killed_at(project: Project, command: Sequence[str], delay_s: float, mark: int, *, everything: bool, device: str = "cpu") -> bool:
    """Starts the gate and kills it after a while, without warning: with all its processes, or alone. Whether it was still running."""
    env = {**os.environ, "RAPID_LLM_BENCH_DEVICE": device, "MARK_OF_THIS_TEST": str(mark)}
    gate = subprocess.Popen(
        [sys.executable, "-m", "ci", *command], cwd=project.path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(delay_s)
    running = gate.poll() is None
    gate.send_signal(signal.SIGKILL)
    gate.wait()
    deadline_s = time.monotonic() + 60
    while left := _children_of(mark):
        for process in left if everything else ():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not everything:
            # The asv of the killed gate still measures: the next gate says so instead of measuring at the same time.
            refused = project.ci(*command, RAPID_LLM_BENCH_DEVICE=device)
            if _children_of(mark):
                assert refused.returncode == 2, refused.stdout + refused.stderr
                assert "asv of one that was killed" in refused.stderr
            everything = True
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return running


def kill_at_random(
    project: Project, command: Sequence[str], moments: int, seed: int, *, device: str = "cpu", benchmark: str = ALLOCATOR
) -> int:
    """Kills gates at random moments and checks after each what is left; returns how many were killed while they ran."""
    draw = random.Random(seed)
    killed, before = 0, {}
    for number in range(moments):
        killed += killed_at(project, command, draw.uniform(0.2, 9.0), number, everything=number % 3 != 2, device=device)
        if (project.path / "report" / "verdict.json").exists():
            # It came to its end before the kill: the next one starts anew.
            before = {}
            continue
        after = whole_files(project, benchmark)
        assert all(after.get(name, 0) >= count for name, count in before.items()), f"finished rows are lost: {before}, then {after}"
        before = after
    return killed


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_a_gate_killed_at_any_moment_goes_on_and_passes_nothing(project: Project) -> None:
    """Case 36; `python -m tests.gate.kill --moments 50` takes fifty."""
    assert kill_at_random(project, COMMAND, 2, seed=os.getpid()) >= 1
    done = project.ci(*COMMAND)
    assert done.returncode == ExitCode.INCOMPLETE, done.stdout + done.stderr
    assert min(whole_files(project).values()) == PAIRS
    verdict = load(read_bounded(project.path / "report" / "verdict.json"), name="verdict.json")
    compared = [row for row in verdict.rows if row.verdict is not RowVerdict.SKIPPED]
    assert compared
    for row in compared:
        assert row.reason == f"{PAIRS} pairs of processes, but at least 6 are needed; measure more rounds"


@pytest.mark.slow
def test_a_selection_of_nothing_is_refused(project: Project) -> None:
    done = project.ci("run", "--select", "no such row")
    assert done.returncode == 2, done.stdout
    assert "selects no row" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_disk_and_results_that_cannot_be_written_are_sentences(project: Project) -> None:
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    env = {**os.environ, "RAPID_LLM_BENCH_DEVICE": "cpu"}
    command = [sys.executable, "-m", "ci", *COMMAND]
    done = subprocess.run(command, cwd=project.path, env=env, capture_output=True, text=True, preexec_fn=full, timeout=200)
    assert done.returncode in (2, 3), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().startswith("ci: ")
    no_verdict(project)

    shutil.rmtree(project.path / ".asv" / "results", ignore_errors=True)
    (project.path / ".asv" / "results").touch()
    taken = project.ci(*COMMAND)
    assert taken.returncode in (2, 3), taken.stdout + taken.stderr
    assert "Traceback" not in taken.stderr
    no_verdict(project)


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("old", encoding="utf-8")
    code = (
        "import resource, sys; from pathlib import Path; from ci.jsonio import write_atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        f"write_atomic(Path({str(tmp_path / 'file.json')!r}), 'x' * 1000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    assert "File too large" in done.stderr
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {"file.json": "old"}


def _write(path: Path, number: int) -> None:
    for turn in range(50):
        write_atomic(path, json.dumps({"number": number, "turn": turn, "text": "x" * 20_000}))


def test_many_writers_leave_a_whole_file(tmp_path: Path) -> None:
    """Eight processes, fifty writes each; a reader at any time sees one of them whole."""
    path = tmp_path / "file.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, number)) for number in range(8)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            assert len(json.loads(path.read_text(encoding="utf-8"))["text"]) == 20_000
            reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert reads > 0
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    assert json.loads(path.read_text(encoding="utf-8"))["turn"] == 49


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"schema": "other"}', b"\xff\x00"])
def test_a_corrupt_compile_cache_is_made_again(tmp_path: Path, damage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """Case 27: a damaged record of the cache is told and made anew, with the same content."""
    from asv_bench import compile_cache, compiled

    record = {"schema": compiled.SCHEMA, "source": "key"}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    assert compile_cache.cached(path) == record
    path.write_bytes(damage)
    found = compile_cache.cached(path)
    assert found is None or found.get("schema") != compiled.SCHEMA
    assert (found is None) == ("compiling again" in capfd.readouterr().err)
    assert compile_cache.cached(tmp_path / "absent.json") is None
