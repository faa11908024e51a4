"""One measuring process of a checkout, straight through `asv_bench.session` as asv starts it in a gate, and without asv's own part."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci import run
from ci.errors import ExitCode, GateError
from tests.live.watch import OutOfTimeError, Watch

INTERRUPT_S = 15.0
"""A gate needs some seconds to end when it is interrupted: it stops asv, which writes what it has."""
_MEASURE = "import sys; sys.path.insert(0, sys.argv[1]); from asv_bench import session; session.measure()"
_COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from asv_bench import session, worker
machine = worker.Bench(worker.choose_device())
for row in session.selected_rows():
    if machine.device.type in row.case.devices:
        prepared = row.suite().build(row.case, machine.device)
        prepared.calls[0]()
        del prepared
        machine.release()
"""
"""Builds each row and calls it once: whatever is compiled for it is compiled by then."""


class LiveError(GateError):
    """A step failed; the message has the step's last words."""

    exit_code = ExitCode.INCOMPLETE


@dataclass(frozen=True)
class Source:
    """What a process measures.

    Attributes:
        path: Checkout that `rapid_llm` comes from.
        commit: Its hash, as the record names it.
        env: Further variables of the process, such as TRITON_CACHE_DIR.
    """

    path: Path
    commit: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Instrument:
    """How processes are measured: the checkout whose suites and timers they use, and the rows.

    Attributes:
        path: A checkout; its `asv_bench` is loaded whatever the source is.
        select: Regular expression over row ids; controls that serve the rows' classes always run. None takes all rows.
    """

    path: Path
    select: str | None = None

    def environment(self, source: Source, records: Path) -> dict[str, str]:
        """Variables of a measuring process."""
        paths = os.pathsep.join([str(source.path), *filter(None, [os.environ.get("PYTHONPATH")])])
        made = {**os.environ, "PYTHONPATH": paths, "ASV_BUILD_DIR": str(source.path), "ASV_COMMIT": source.commit}
        made["RAPID_LLM_RECORDS_DIR"] = str(records)
        if self.select:
            made["RAPID_LLM_BENCH_SELECT"] = self.select
        return {**made, **source.env}


def measured(instrument: Instrument, source: Source, watch: Watch) -> dict[str, Any]:
    """The process record that a fresh measuring process of `source` leaves, as JSON.

    Raises:
        OutOfTimeError: It did not end in what the watch had left, and was stopped.
        LiveError: It left no record.
    """
    with tempfile.TemporaryDirectory(prefix="rapid-llm-live-") as scratch:
        records = Path(scratch, "records")
        command = [sys.executable, "-c", _MEASURE, str(instrument.path)]
        _run(command, instrument.environment(source, records), Path(scratch), watch)
        found = sorted(records.rglob("*.json"))
        if len(found) != 1:
            raise LiveError(f"the measuring process of {source.path} left {len(found)} records instead of one; run it again")
        record: dict[str, Any] = json.loads(found[0].read_text(encoding="utf-8"))
        return record


def compile_rows(instrument: Instrument, source: Source, watch: Watch) -> None:
    """Makes a process of `source` compile what its rows need, and measures nothing.

    Raises:
        OutOfTimeError: As `measured`.
        LiveError: A row could not be built or called.
    """
    with tempfile.TemporaryDirectory(prefix="rapid-llm-live-") as scratch:
        command = [sys.executable, "-c", _COMPILE, str(source.path)]
        _run(command, instrument.environment(source, Path(scratch, "records")), Path(scratch), watch)


def _run(command: Sequence[str], env: Mapping[str, str], scratch: Path, watch: Watch) -> None:
    """Runs a command in an empty folder, so that no package comes from there, and stops it when the time is over."""
    empty, errors = scratch / "empty", scratch / "stderr.txt"
    empty.mkdir()
    with errors.open("w", encoding="utf-8") as stderr:
        child = subprocess.Popen(
            command, cwd=empty, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        try:
            code = child.wait(timeout=max(0.0, watch.left_s))
        except subprocess.TimeoutExpired as error:
            raise OutOfTimeError("a process did not end in the time that was left, and was stopped") from error
        finally:
            stop(child)
    if code:
        said = [line.strip() for line in errors.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise LiveError(f"a process ended with {code} and measured nothing: {said[-1][-400:] if said else 'no message'}")


def interrupt(child: subprocess.Popen[Any]) -> None:
    """Ends a command that leads a session, where it has not ended: asks it to, as Ctrl-C does, waits, and ends what is left of it."""
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=INTERRUPT_S)
    for process in run._session_of(child.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    child.wait()


def stop(child: subprocess.Popen[Any]) -> None:
    """Ends a child that leads a session, with the processes of its group, where it has not ended by itself."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Holds the lock of this machine's GPU, as a gate does: two that measure at once would disturb each other.

    Raises:
        UsageError: A gate is measuring.
    """
    with run._gpu_free():
        yield


def unmeasured(record: Mapping[str, Any]) -> list[str]:
    """The rows of a record that have no number and were not skipped, each with its reason."""
    return [f"{row['params'][0]}: {row['status']}: {row['reason']}" for row in record["rows"] if row["status"] not in ("ok", "skipped")]
