"""One `python -m ci gate` in a clone, with what it took: seconds by phase, processes, rows, and every process record."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci import verdict_file
from ci.case import RUN_NAMES
from ci.model import RowVerdict
from tests.live.measure import INTERRUPT_S, LiveError, interrupt
from tests.live.watch import OutOfTimeError, Watch
from tests.statistics import compact

_POLL_S = 0.1
_PHASES = {"compiled": "compiled", "1": "screen", "2": "second run", "pairs": "pairs"}
_PASSING = (RowVerdict.PASS, RowVerdict.CLEARED, RowVerdict.IMPROVED)


@dataclass(frozen=True)
class Ended:
    """A gate that ended by itself.

    Attributes:
        report: Its folder.
        exit_code: Of the command.
        wall_s: Of the command.
        seen_s: When each folder of the report's `runs/` was first there whole, in seconds from the start.
        said: Its last lines.
    """

    report: Path
    exit_code: int
    wall_s: float
    seen_s: Mapping[str, float]
    said: str
    resumed: bool = False
    """Whether it went on after an interrupted one, so that `wall_s` is of the rest."""


def run_gate(clone: Path, report: Path, arguments: Sequence[str], watch: Watch, env: Mapping[str, str] | None = None) -> Ended:
    """Runs the gate in a clone, and interrupts it when the time is over: what it measured is kept, and the same call goes on.

    Args:
        clone: Where to run it.
        report: Folder of the report.
        arguments: Further arguments of `python -m ci gate`.
        watch: Of the action.
        env: Further variables.
    Raises:
        OutOfTimeError: It was interrupted.
    """
    command = [sys.executable, "-m", "ci", "gate", "--report", str(report), *arguments]
    seen: dict[str, float] = {}
    log = report.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    resumed = (report / "unfinished.json").exists()
    began_s = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command, cwd=clone, env={**os.environ, **(env or {})}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while child.poll() is None:
                for name in RUN_NAMES:
                    whole = report / "runs" / name / ("head.json" if name == "compiled" else "")
                    if name not in seen and whole.exists():
                        seen[name] = time.monotonic() - began_s
                        watch.say(f"{name} is there")
                if watch.left_s < INTERRUPT_S:
                    raise OutOfTimeError("the gate was interrupted; with the same --work and --out it goes on")
                time.sleep(_POLL_S)
        finally:
            interrupt(child)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return Ended(report, child.returncode, time.monotonic() - began_s, seen, "\n".join(said[-40:]), resumed)


def phases(seen_s: Mapping[str, float], wall_s: float) -> list[tuple[str, float]]:
    """Seconds of each phase of a gate, in order; they add up to `wall_s`.

    Args:
        seen_s: When what a phase leaves was there, by the name of its folder.
        wall_s: Of the whole; what comes after the last phase is the report.
    """
    made: list[tuple[str, float]] = []
    before_s = 0.0
    for name, at_s in sorted(seen_s.items(), key=lambda one: one[1]):
        made.append((_PHASES.get(name, name), round(at_s - before_s, 2)))
        before_s = at_s
    return [*made, ("report", round(wall_s - before_s, 2))]


def summary(ended: Ended) -> dict[str, Any]:
    """What is kept of a gate: exit code, verdict, seconds, counts.

    Raises:
        LiveError: It left no verdict; the message has its last words.
    """
    path = ended.report / "verdict.json"
    if not path.is_file():
        raise LiveError(f"the gate ended with {ended.exit_code} and without a verdict: {ended.said}")
    result = verdict_file.load(path.read_text(encoding="utf-8"))
    rows = [row for row in result.rows if not row.control and row.verdict is not RowVerdict.SKIPPED]
    processes = {name: len(_record_files(ended.report / "runs" / name)) for name in RUN_NAMES if name != "compiled"}
    return {
        "exit_code": ended.exit_code,
        "verdict": result.verdict.value,
        "reason": result.reason,
        "mode": result.mode,
        "resumed": ended.resumed,
        "wall_s": round(ended.wall_s, 1),
        "phases_s": phases(ended.seen_s, ended.wall_s),
        "processes": {name: count for name, count in processes.items() if count},
        "num_rows": len(rows),
        "num_controls": sum(row.control and row.verdict is not RowVerdict.SKIPPED for row in result.rows),
        "verdicts": dict(sorted(Counter(row.verdict.value for row in rows).items())),
        "not_passed": [f"{row.key}: {row.verdict.value}: {row.reason}" for row in rows if row.verdict not in _PASSING],
        "moved": [f"{row.key}: {row.reason}" for row in result.rows if "MOVED" in row.flags],
        "base": result.base,
        "head": result.head,
        # A gate that ends with another code than its verdict's has failed after it, and said why.
        **({} if ended.exit_code == result.exit_code else {"said": ended.said}),
    }


def _record_files(folder: Path) -> list[Path]:
    return sorted((folder / "records").rglob("*.json"))


def keep(ended: Ended, out: Path, name: str) -> None:
    """Writes the verdict, `NAME.verdict.json.gz`, and what every process on the way read.

    The processes of all the gate's rows go to `NAME.processes.json`, those of the looks, which have the picked rows alone, to
    `NAME.looks.json`: statistics take processes with the same rows.
    """
    verdict = (ended.report / "verdict.json").read_bytes()
    (out / f"{name}.verdict.json.gz").write_bytes(gzip.compress(verdict, mtime=0))
    base = verdict_file.load(verdict.decode("utf-8")).base
    looks: list[compact.Labelled] = []
    others: list[compact.Labelled] = []
    for run_name in RUN_NAMES:
        for path in _record_files(ended.report / "runs" / run_name):
            record = json.loads(path.read_text(encoding="utf-8"))
            arm = "base" if record["commit"] == base else "head"
            (looks if run_name.startswith("look") else others).append(compact.Labelled(record, {"run": run_name, "arm": arm}))
    for found, suffix in ((looks, ".looks.json"), (others, compact.SUFFIX)):
        if found:
            compact.write(out / f"{name}{suffix}", sorted(found, key=lambda one: (one.record["started_at"], one.record["process"])))
