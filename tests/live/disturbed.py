"""`second` and `lowered`: gates on a machine that is not fit to judge, which may not end red."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.live.asked import Session
from tests.live.measure import LiveError, stop
from tests.live.plants import Edit, apply
from tests.live.whole_gate import keep, run_gate, summary

HOW = ("busy", "timers")
BUSY = Path(__file__).with_name("busy.py")
SELECT = {
    "cuda": r"PagedDecode.*\(decode B=8 S=8192 float16 combined|KVWritePrefill.*T=4096 float16",
    "cpu": r"KVWriteDecode.*T=64 float16",
}
"""Two classes on a GPU, one row on a CPU."""
FACTOR = 1.2
"""Over the limits of controls on the device (2 %) and by the host's clock (10 %)."""

_IMPORTED = '__all__ = ["__version__"]\n'
_TIMERS = f"""
import sys

if "asv_bench.worker" in sys.modules:
    from asv_bench import timing

    _reading = timing.Timing.reading_us.fget
    timing.Timing.reading_us = property(lambda self: {FACTOR} * _reading(self))
"""
_STARTS_BUSY = """
import sys

if "asv_bench.worker" in sys.modules:
    import os
    import pathlib
    import subprocess

    import torch

    _kind = "cuda" if torch.cuda.is_available() and os.environ.get("RAPID_LLM_BENCH_DEVICE") != "cpu" else "cpu"
    _script = pathlib.Path(__file__).parents[1] / "tests" / "live" / "busy.py"
    # Its standard input is a pipe of this process, and ends with it.
    _busy = subprocess.Popen([sys.executable, str(_script), _kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert _busy.stdout.readline() == b"busy\\n"
"""
_TOLD = {
    "busy": "each measuring process of the commit starts a process of copies beside it before it measures anything",
    "timers": f"the commit multiplies every reading of its measuring processes by {FACTOR}",
}


def planted_edit(how: str) -> Edit:
    """The edit by which a commit lowers every row.

    Args:
        how: One of `HOW`.
    """
    return Edit("rapid_llm/__init__.py", _IMPORTED, _IMPORTED + {"busy": _STARTS_BUSY, "timers": _TIMERS}[how])


@contextlib.contextmanager
def busy_process(device_type: str) -> Iterator[None]:
    """Another process that copies on the device all the while.

    Raises:
        LiveError: It could not start.
    """
    child = subprocess.Popen(
        [sys.executable, str(BUSY), device_type],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ),
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        if child.stdout.readline() != b"busy\n":
            raise LiveError("the process that keeps the device busy did not start; run tests/live/busy.py by hand")
        yield
        if child.poll() is not None:
            raise LiveError(f"the process that keeps the device busy ended with {child.returncode} while the gate ran")
    finally:
        stop(child)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def second(session: Session) -> None:
    """A gate of a commit that changes nothing, beside a busy process: exit code 5 or a pass, and never a regression.

    Raises:
        OutOfTimeError: The gate did not come to its end.
        LiveError: It left no verdict, or the busy process ended.
    """
    device_type = session.asked.device_type
    session.clone.branch("second", "changes nothing")
    with busy_process(device_type):
        _gate(session, "another process copies on the device from before the gate to its end", expected=(0, 5))


def lowered(session: Session) -> None:
    """A gate of a commit that slows every row down, controls included, as a machine that became slower would: exit code 5.

    Raises:
        OutOfTimeError: The gate did not come to its end.
        LiveError: It left no verdict.
    """
    how = session.asked.how or ("busy" if session.asked.device_type == "cuda" else "timers")
    session.clone.branch(f"lowered-{how}", "lowers every row", lambda: apply(session.clone.path, [planted_edit(how)]))
    session.kept.found["how"] = how
    _gate(session, _TOLD[how], expected=(5,))


def _gate(session: Session, told: str, *, expected: tuple[int, ...]) -> None:
    asked, name = session.asked, session.asked.action
    arguments = asked.gate_arguments(SELECT[asked.device_type])
    with session.watch.step("gate", told):
        ended = run_gate(session.clone.path, session.work / f"report-{name}", arguments, session.watch)
    found = summary(ended)
    as_expected = found["exit_code"] in expected and "REGRESSED" not in found["verdicts"]
    session.kept.found |= {"disturbance": told, "gates": [found], "expected": list(expected), "as_expected": as_expected}
    keep(ended, asked.out, name)
    session.watch.say(f"exit {found['exit_code']}, {found['verdict']}: {found['reason']}")
