"""Runs asv's suites for commits, shows progress, and keeps what a verdict needs."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ci import asv_config
from ci.device import Device, gpu_uuid
from ci.errors import InputError, UsageError
from ci.model import CommitResult
from ci.repo import Commit
from ci.results import load_commit

SELECT_VARIABLE = "RAPID_LLM_BENCH_SELECT"
SKIP_VARIABLE = "RAPID_LLM_BENCH_SKIP"
PROGRESS_VARIABLE = "RAPID_LLM_PROGRESS"
LOCK_VARIABLE = "RAPID_LLM_MEASURING_LOCK"
_MEASURED_SUITES = r"^(?!bench_compiled\.)"
"""asv's own rows of what the compiler made are left to `asv continuous`: the gate compares them without asv."""
_POLL_S = 0.2
_PLAIN_EVERY_S = 20.0
_ASV_ROW_FAILED = 2


@dataclass(frozen=True)
class Places:
    """Where asv and the measuring processes leave their files."""

    root: Path

    @property
    def results(self) -> Path:
        return self.root / ".asv" / "results"

    @property
    def records(self) -> Path:
        return self.root / ".asv" / "records"

    @property
    def measuring(self) -> Path:
        """Lock file of the measuring process."""
        return self.root / ".asv" / "measuring"

    @property
    def logs(self) -> Path:
        return self.root / ".asv" / "logs"


@dataclass(frozen=True)
class RunPlan:
    """Commits to measure, interleaved: `rounds` fresh processes of each."""

    commits: tuple[Commit, ...]
    rounds: int
    append: bool = False
    select: str | None = None
    skip: tuple[str, ...] = ()
    """Ids of rows that are not measured."""


def run_asv(places: Places, plan: RunPlan, console: Console) -> None:
    """Measures with `asv run` and shows progress; rows that fail are in the results, not an error here.

    Raises:
        UsageError: asv's configuration is not the gate's; asv itself could not run (the message has its last words and the log), the
            selection selects nothing, or another gate is measuring in this checkout.
        InputError: A commit's measuring process could not be used at all.
    """
    asv_config.check(places.root / "asv.conf.json")
    places.logs.mkdir(parents=True, exist_ok=True)
    with _only_one(places) as lock, _gpu_free() as gpu_lock:
        _run_asv(places, plan, console, (lock, *gpu_lock))


@contextlib.contextmanager
def _only_one(places: Places) -> Iterator[int]:
    """Holds the checkout's lock; asv inherits it, so that one whose gate was killed keeps others away until it has ended.

    A measuring process holds another one (`Places.measuring`), for when asv was killed too.
    """
    said = f"Another gate is measuring in {places.root}, or the asv of one that was killed: wait for it, or end it."
    with _held(places.root / ".asv" / "lock", said) as lock:
        with _held(places.measuring, said):
            pass
        yield lock


@contextlib.contextmanager
def _gpu_free() -> Iterator[tuple[int, ...]]:
    """Holds the lock of this machine's GPU, whichever checkout a gate measures from; a CPU has none."""
    uuid = gpu_uuid()
    if uuid is None:
        yield ()
        return
    path = Path(tempfile.gettempdir()) / f"rapid-llm-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"
    with _held(path, f"Another gate is measuring on {uuid}, from another checkout: wait for it, or choose another GPU.") as lock:
        yield (lock,)


@contextlib.contextmanager
def _held(path: Path, taken: str) -> Iterator[int]:
    """Holds a lock file, or says that it is taken.

    Raises:
        UsageError: It is taken, or the file system has no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(taken) from error
        except OSError as error:
            raise UsageError(
                f"{path} cannot be locked ({error.strerror}), so that two gates could measure at once: use a clone on a local disk."
            ) from error
        yield handle
    finally:
        os.close(handle)


def _run_asv(places: Places, plan: RunPlan, console: Console, locks: tuple[int, ...]) -> None:
    log = places.logs / f"asv-{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S}.log"
    with tempfile.TemporaryDirectory(prefix="rapid-llm-gate-") as scratch:
        hashes, progress = Path(scratch, "hashes"), Path(scratch, "progress.jsonl")
        hashes.write_text("".join(f"{commit.sha}\n" for commit in plan.commits), encoding="utf-8")
        progress.touch()
        command = [sys.executable, "-m", "asv", "run", "--config", str(places.root / "asv.conf.json"), f"HASHFILE:{hashes}"]
        command += ["--bench", _MEASURED_SUITES, "--interleave-rounds", "-a", f"rounds={plan.rounds}", "--record-samples", "--show-stderr"]
        if plan.append:
            command.append("--append-samples")
        env = dict(os.environ, **{PROGRESS_VARIABLE: str(progress), LOCK_VARIABLE: str(places.measuring)})
        if plan.select:
            env[SELECT_VARIABLE] = plan.select
        if plan.skip:
            env[SKIP_VARIABLE] = json.dumps(plan.skip)
        with log.open("w", encoding="utf-8") as output:
            child = subprocess.Popen(
                command,
                cwd=places.root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=locks,
            )
            try:
                _follow(child, progress, plan, console)
            except BaseException:
                _stop(child)
                raise
    text = log.read_text(encoding="utf-8", errors="replace")
    refused = re.search(r"^.*\b(SessionError|SelectionError): (.*)$", text, flags=re.MULTILINE)
    if refused:
        kind, why = refused.groups()
        if kind == "SelectionError":
            raise UsageError(f"Nothing was measured: {why.strip()} (log: {log}).")
        raise InputError(f"A commit could not be measured: {why.strip()} (log: {log}).")
    if child.returncode not in (0, _ASV_ROW_FAILED):
        said = [line for line in text.splitlines() if line.strip()]
        raise UsageError(f"asv stopped with exit status {child.returncode} ({' / '.join(line.strip() for line in said[-3:])}): see {log}.")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupts asv, which stops its children and finishes the file that it is writing."""
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=10)
    for process in _session_of(child.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    child.wait()


def _session_of(leader: int) -> list[int]:
    """Processes of the session that asv was started in: its children have process groups of their own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.parent.name))
    return found


def _follow(child: subprocess.Popen[bytes], progress: Path, plan: RunPlan, console: Console) -> None:
    processes = plan.rounds * len(plan.commits)
    view = _bar(console, processes) if console.is_terminal else _plain(console, processes)
    with view as show, progress.open("rb") as source:
        done, rows, row = 0, 0, ""
        pending = b""
        while True:
            code = child.poll()
            pending += source.read()
            *lines, pending = pending.split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] == "start":
                    row, rows = event["row"], event["of"]
                    show.update(done + (event["number"] - 1) / rows, row)
                elif event["event"] == "end":
                    done += 1
                    show.update(done, "between processes")
            if code is not None:
                return
            time.sleep(_POLL_S)


class _Shown:
    """Takes the number of processes done (with a fraction) and what is running."""

    def update(self, done: float, row: str) -> None:
        raise NotImplementedError


class _BarShown(_Shown):
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("measuring", total=total, row="starting")

    def update(self, done: float, row: str) -> None:
        self._progress.update(self._task, completed=done, row=row.partition("(")[2].rstrip(")") or row)


class _PlainShown(_Shown):
    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._started_s, self._last_s = console, total, time.monotonic(), 0.0

    def update(self, done: float, row: str) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < _PLAIN_EVERY_S:
            return
        self._last_s = now_s
        elapsed_s = now_s - self._started_s
        left = f", about {elapsed_s / done * (self._total - done):.0f} s left" if done > 0.5 else ""
        self._console.print(f"measuring: {done:.1f} of {self._total} processes, {elapsed_s:.0f} s{left}", highlight=False)


@contextlib.contextmanager
def _bar(console: Console, total: int) -> Iterator[_Shown]:
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        TextColumn("{task.completed:.1f}/{task.total:.0f} processes"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[row]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _BarShown(progress, total)


@contextlib.contextmanager
def _plain(console: Console, total: int) -> Iterator[_Shown]:
    yield _PlainShown(console, total)


def load(places: Places, device: Device, commit: Commit) -> CommitResult:
    """What the last run measured of a commit, joined with its records."""
    return load_commit(places.results, device.key, commit.sha, records_dir=places.records)


def keep(places: Places, device: Device, commits: Sequence[Commit], directory: Path) -> None:
    """Copies the results and records of commits to a folder of their own: `results/` and `records/`.

    A verdict can be computed again from such a folder, and `baseline record` takes it as one run.

    Raises:
        InputError: A commit has no result.
    """
    machine = places.results / device.key
    target = directory / "results" / device.key
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy2(places.results / "benchmarks.json", directory / "results")
    shutil.copy2(machine / "machine.json", target)
    for commit in commits:
        files = sorted(machine.glob(f"{commit.sha[:8]}-*.json"))
        if not files:
            raise InputError(f"{machine} has no result of {commit.short}: measure it first.")
        used = {record.process for result in (load(places, device, commit),) for row in result.rows.values() for record in row.records}
        for file in files:
            shutil.copy2(file, target)
        records = directory / "records" / commit.sha[:12]
        records.mkdir(parents=True, exist_ok=True)
        for process in sorted(used):
            shutil.copy2(places.records / commit.sha[:12] / f"{process}.json", records)


def forget(places: Places, device: Device, commits: Sequence[Commit]) -> None:
    """Removes earlier results and records of commits, so that a run starts from nothing."""
    for commit in commits:
        for file in (places.results / device.key).glob(f"{commit.sha[:8]}-*.json"):
            file.unlink()
        shutil.rmtree(places.records / commit.sha[:12], ignore_errors=True)
