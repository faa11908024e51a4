"""`walls`: where the seconds go, of one measuring process by part and of whole commands."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asv_bench.session import SELECT_VARIABLE
from asv_bench.suite import Suite
from tests.live.asked import Asked, Session
from tests.live.measure import INTERRUPT_S, Instrument, LiveError, Source, alone, interrupt, measured
from tests.live.watch import OutOfTimeError, Watch

FIVE = {
    "cuda": r"decode B=8 S=8192 (float16|e4m3) combined|prefill T=16384 (float16|e4m3) |KVWriteDecode.*T=64 float16",
    "cpu": r"decode B=2 S=256 (float16|e4m3) combined fragmented|prefill T=512 (float16|e4m3) |KVWriteDecode.*T=64 float16",
}
"""Five rows of four classes."""
PAIRS = 2
_PARTS = """
import json, sys, time
marks = [("python", float(sys.argv[1])), ("import torch", time.time())]
def mark(name):
    marks.append((name, time.time()))
sys.path.insert(0, sys.argv[2])
import torch
mark("import the suites, the timers and the library")
from asv_bench import peaks, worker
from asv_bench.environment import collect_environment
from asv_bench.suite import all_rows
all_rows()
mark("start the device")
device = worker.choose_device()
torch.zeros(1, device=device)
if device.type == "cuda":
    torch.cuda.synchronize()
mark("collect the environment")
collect_environment(device)
mark("measure the ceilings")
peaks.measured_ceilings(device)
mark("end")
print(json.dumps([(name, round(until - at, 3)) for (name, at), (_, until) in zip(marks, marks[1:])]))
"""


def parts(session: Session) -> list[tuple[str, float]]:
    """Seconds of the parts of a measuring process before its first row, in order; Python's own start is the first.

    Raises:
        LiveError: The process failed.
    """
    env = Instrument(session.clone.path).environment(Source(session.clone.path, session.clone.head), session.work / "records")
    command = [sys.executable, "-c", _PARTS, str(time.time()), str(session.clone.path)]
    done = subprocess.run(command, cwd=session.work, env=env, capture_output=True, text=True)
    if done.returncode:
        raise LiveError(f"the parts of a process could not be timed: {done.stderr.strip().splitlines()[-1]}")
    found: list[tuple[str, float]] = json.loads(done.stdout)
    return found


def by_row(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds of each measured row: in all, and in the timer; the rest builds the inputs and checks the outputs."""
    return [
        {
            "row": f"{row['benchmark']}({', '.join(row['params'])})",
            "control": row["control"],
            "wall_s": row["wall_s"],
            "timed_s": row["timed_s"],
        }
        for row in record["rows"]
        if row.get("wall_s") is not None
    ]


def process_of(process_s: float, rows: Sequence[Mapping[str, Any]], select: str) -> float:
    """Seconds of a process of the rows that an expression finds and all controls, from those of a process of `rows`."""
    others = (row["wall_s"] for row in rows if not row["control"] and not re.search(select, row["row"]))
    return process_s - math.fsum(others)


def _command(words: Sequence[str], clone: Path, watch: Watch, env: Mapping[str, str]) -> dict[str, Any]:
    """Seconds and exit code of a command in the clone, which is stopped when the time is over.

    Raises:
        OutOfTimeError: It was stopped.
    """
    began_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=clone,
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = child.wait(timeout=max(0.0, watch.left_s - INTERRUPT_S))
    except subprocess.TimeoutExpired as error:
        raise OutOfTimeError(f"{' '.join(words[:2])} did not end in the time that was left, and was stopped") from error
    finally:
        interrupt(child)
    return {"command": f"python -m {' '.join(words)}", "exit_code": code, "wall_s": round(time.monotonic() - began_s, 1)}


def walls(session: Session) -> None:
    """Times, in this order: the parts of a process, a whole one, a run of one, pairs of five rows, a run of three, `asv continuous`.

    What does not fit any more, by the time of one process, is not begun; a folder that has some of it goes on with the rest.

    Raises:
        OutOfTimeError: The time is over; what was timed is kept.
        LiveError: A process failed.
    """
    asked, watch, clone = session.asked, session.watch, session.clone
    session.kept.take_up("parts_s", "process_s", "rows", "commands")
    found = session.kept.found
    if "parts_s" not in found:
        with watch.step("parts", "the parts of a process"):
            found["parts_s"] = parts(session)
        session.write()
    if "process_s" not in found:
        with alone(), watch.step("process", "a whole process"):
            began_s = time.monotonic()
            record = measured(Instrument(clone.path, asked.select), Source(clone.path, clone.head), watch)
            found |= {"process_s": round(time.monotonic() - began_s, 1), "rows": by_row(record)}
        session.write()
    clone.branch("walls", "changes nothing")
    for name, processes, select, words, variables in () if asked.quick else plan(asked):
        if name in [made["name"] for made in found.get("commands", [])]:
            continue
        watch.longest_s[name] = processes * process_of(found["process_s"], found["rows"], select)
        with watch.step(name, name):
            made = _command(words, clone.path, watch, variables)
        found.setdefault("commands", []).append({"name": name, "processes": processes, **made})
        session.write()


def plan(asked: Asked) -> list[tuple[str, int, str, list[str], Mapping[str, str]]]:
    """The commands that are timed: what is said of each, its measuring processes and their rows, its words and variables."""
    chosen = ["--select", asked.select] if asked.select else []
    five = asked.select or FIVE[asked.device_type]
    pairs = asked.pairs or PAIRS
    direct = ["ci", "gate", "--no-baseline", "--no-compiled", "--pairs", str(pairs), "--select", five]
    return [
        ("a run of one process", 1, asked.select or "", ["ci", "run", "--rounds", "1", *chosen], {}),
        (f"{pairs} pairs of five rows", 2 * pairs, five, direct, {}),
        ("a run of three processes", 3, asked.select or "", ["ci", "run", "--rounds", "3", *chosen], {}),
        ("asv continuous of five rows", 2 * Suite.rounds, five, ["asv", "continuous", "main", "HEAD"], {SELECT_VARIABLE: five}),
    ]
