"""One round of measurements: starts the measuring process, watches it, and files its record.

The measuring process is started anew for each round and commit. It appends what it finds to a journal line by line; when it dies or
hangs in a row, that row is failed with the reason and a new process goes on with the next, so that one fault costs one row. This module
runs in asv's process and imports neither torch nor the library under test.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asv_bench import records
from asv_bench.suite import Outcomes, SuiteRow, all_rows

SELECT_VARIABLE = "RAPID_LLM_BENCH_SELECT"
SKIP_VARIABLE = "RAPID_LLM_BENCH_SKIP"
RECORDS_VARIABLE = "RAPID_LLM_RECORDS_DIR"
PROGRESS_VARIABLE = "RAPID_LLM_PROGRESS"
TIMEOUT_VARIABLE = "RAPID_LLM_ROW_TIMEOUT_S"
LOCK_VARIABLE = "RAPID_LLM_MEASURING_LOCK"

_CONTROL_CLASS = {"dequant": "read-bandwidth"}
"""Classes that are served by the controls of another."""

_ROW_TIMEOUT_S = 180.0
_POLL_S = 0.05
_STDERR_TAIL = 400
_BOOTSTRAP = """
import importlib.util, sys
path = sys.argv.pop(1)
spec = importlib.util.spec_from_file_location("asv_bench", path + "/__init__.py", submodule_search_locations=[path])
module = importlib.util.module_from_spec(spec)
sys.modules["asv_bench"] = module
spec.loader.exec_module(module)
from asv_bench.worker import main
main()
"""
"""Loads this very copy of the instrument, while `rapid_llm` comes from the commit's checkout on PYTHONPATH."""


class SessionError(RuntimeError):
    """The measuring process could not be used at all."""


class SelectionError(ValueError):
    """The selection is no expression, or selects nothing."""


def selected_rows() -> list[SuiteRow]:
    """All rows, or those whose id the regular expression in RAPID_LLM_BENCH_SELECT finds, with the controls that serve their classes.

    Raises:
        SelectionError: The variable holds no regular expression, or selects nothing.
    """
    rows = _without_skipped(all_rows())
    pattern = os.environ.get(SELECT_VARIABLE)
    if not pattern:
        return rows
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise SelectionError(f"{SELECT_VARIABLE}={pattern!r} is no regular expression ({error}); mend it") from error
    chosen = [row for row in rows if not row.suite.control and wanted.search(row.id)]
    if not chosen:
        raise SelectionError(
            f"--select (or {SELECT_VARIABLE}) {pattern!r} selects no row; it is a regular expression, searched in names like {rows[0].id!r}"
        )
    classes = {_CONTROL_CLASS.get(row.case.bottleneck, row.case.bottleneck) for row in chosen}
    return [row for row in rows if row.suite.control and row.case.bottleneck in classes] + chosen


def _without_skipped(rows: list[SuiteRow]) -> list[SuiteRow]:
    """Without the rows that the JSON list in RAPID_LLM_BENCH_SKIP names: the gate knows their launches to be unchanged."""
    skipped = set(json.loads(os.environ.get(SKIP_VARIABLE) or "[]"))
    return [row for row in rows if row.id not in skipped]


def measure() -> Outcomes:
    """Measures the selected rows in fresh processes, files the process record, and returns the outcome of each row by its id."""
    rows = selected_rows()
    started_at = datetime.datetime.now(datetime.timezone.utc)
    process = f"{started_at:%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(3)}"
    header: dict[str, Any] | None = None
    outcomes: Outcomes = {}
    remaining = [row.id for row in rows]
    while remaining:
        events, death = _run_worker(remaining)
        current: str | None = None
        for event in events:
            if event["event"] == "header":
                header = header or event
            elif event["event"] == "start":
                current = event["row"]
            elif event["event"] == "row":
                outcomes[event["row"]] = event["outcome"]
                current = None
            elif event["event"] == "end" and header is not None:
                environment = header["environment"]
                environment["state_at_start"], environment["state"] = environment["state"], event["state"]
        if death is None and events and events[-1]["event"] == "end":
            break
        death = death or "ended in the middle without an error"
        if header is None or current is None:
            raise SessionError(f"the measuring process {death}")
        outcomes[current] = _failed(next(row for row in rows if row.id == current), f"the measuring process {death}")
        remaining = remaining[remaining.index(current) + 1 :]
    missing = [row.id for row in rows if row.id not in outcomes]
    if missing or header is None:
        raise SessionError(f"the measuring process left out {missing[:3]} and told no reason")
    records.write(
        _records_dir(),
        process=process,
        started_at=started_at,
        header=header,
        rows=[outcomes[row.id] for row in rows],
    )
    return outcomes


def _failed(row: SuiteRow, reason: str) -> dict[str, Any]:
    return records.complete({**row.describe(), "status": "failed", "reason": reason})


def _records_dir() -> Path:
    configured = os.environ.get(RECORDS_VARIABLE)
    return Path(configured) if configured else Path(__file__).resolve().parent.parent / ".asv" / "records"


@contextlib.contextmanager
def _measuring() -> Iterator[int | None]:
    """Holds the lock that the gate named; the measuring process inherits it, so that one whose parents were killed keeps gates away."""
    path = os.environ.get(LOCK_VARIABLE)
    if not path:
        yield None
        return
    with Path(path).open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield file.fileno()


def _run_worker(row_ids: list[str]) -> tuple[list[dict[str, Any]], str | None]:
    """Runs one measuring process; returns its events and, if it did not end by itself, how it ended."""
    timeout_s = float(os.environ.get(TIMEOUT_VARIABLE, _ROW_TIMEOUT_S))
    with tempfile.TemporaryDirectory(prefix="rapid-llm-") as scratch, _measuring() as lock:
        wanted, journal, errors = (Path(scratch, name) for name in ("rows.json", "journal.jsonl", "stderr.txt"))
        wanted.write_text(json.dumps(row_ids), encoding="utf-8")
        journal.touch()
        with errors.open("w", encoding="utf-8") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(Path(__file__).parent), str(wanted), str(journal)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=False,
                pass_fds=() if lock is None else (lock,),
            )
            try:
                death = _watch(child, journal, timeout_s)
            finally:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        if death is not None:
            said = _last_words(errors.read_text(encoding="utf-8", errors="replace"))
            death = f"{death}{': ' + said[-_STDERR_TAIL:] if said else ''}"
        return _events(journal), death


def _watch(child: subprocess.Popen[bytes], journal: Path, timeout_s: float) -> str | None:
    """Waits for the child; kills it when its journal has not grown for `timeout_s`."""
    progress = os.environ.get(PROGRESS_VARIABLE)
    size, grew_s, copied = 0, time.monotonic(), 0
    while True:
        code = child.poll()
        if progress:
            copied = _copy_new(journal, Path(progress), copied)
        if code is not None:
            return None if code == 0 else f"died with {_exit_text(code)}"
        now_size = journal.stat().st_size
        if now_size != size:
            size, grew_s = now_size, time.monotonic()
        elif time.monotonic() - grew_s > timeout_s:
            child.kill()
            child.wait()
            return f"hung for {timeout_s:.0f} s and was stopped"
        time.sleep(_POLL_S)


def _last_words(stderr: str) -> str:
    """The error of the last traceback, whose message may go on for lines of advice; else the last line that says something."""
    _, traceback, rest = stderr.rpartition("Traceback (most recent call last):")
    errors = [line for line in rest.splitlines() if line[:1].strip()] if traceback else []
    lines = errors[:1] or [line for line in stderr.splitlines() if line.strip()][-1:]
    return lines[0].strip() if lines else ""


def _copy_new(journal: Path, progress: Path, start: int) -> int:
    with journal.open("rb") as source:
        source.seek(start)
        new = source.read()
    if new:
        with progress.open("ab") as target:
            target.write(new)
    return start + len(new)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _events(journal: Path) -> list[dict[str, Any]]:
    """Complete lines of the journal; a line that was cut off by a death is no event."""
    text = journal.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]
