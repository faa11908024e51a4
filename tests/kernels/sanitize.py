"""The kernel tests under compute-sanitizer: `python -m tests.kernels.sanitize --out FOLDER [--seconds N]`, on a machine with a GPU.

memcheck sees accesses out of bounds, initcheck reads of memory that nobody wrote, racecheck hazards in shared memory, synccheck barriers
that not all threads reach. Each part is a process of its own, and all run at the same time. torch's caching allocator would hide from the
first two an access past a tensor that still lies in its block, so there it is switched off, but for graphs: nothing may be allocated while
one is captured. One part of each of three tools is a kernel that is broken on purpose (`tests.kernels.broken`).

Writes each tool's log and the tests' output to FOLDER, and `summary.json`; prints a table. Ends with 0 where every part passed its tests
and its tool found nothing but what is broken on purpose, 1 otherwise, 2 where compute-sanitizer is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_GRAPHS = "captur or graph or replayed"
_NEVER = "host_little or wait_for or past_two or a_steps or torch"
"""Tests of what the host does, of tens of GB, of the gate's pools, and of the torch backend, whose kernels are not ours."""
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-o", "addopts=", "--tb=short", "-x")
_FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


@dataclass(frozen=True)
class Part:
    """One process: tests of `files`, with or without those that replay graphs, under one tool; without files the tool's broken kernel."""

    name: str
    tool: str
    files: tuple[str, ...] = ()
    graphs: bool = False

    @property
    def command(self) -> list[str]:
        """pytest with the part's tests."""
        if not self.files:
            return [sys.executable, "-m", "tests.kernels.broken", self.tool]
        chosen = f"({_GRAPHS}) and not ({_NEVER})" if self.graphs else f"not ({_GRAPHS} or {_NEVER})"
        return [sys.executable, *_PYTEST, *(f"tests/kernels/test_{name}.py" for name in self.files), "-k", chosen]


@dataclass
class Outcome:
    """What became of a part; `found` is None where the tool wrote no summary, `broken` says that it had to find something."""

    part: str
    tool: str
    tests: str
    status: int | None
    found: int | None
    wall_s: float
    command: list[str] = field(default_factory=list)
    broken: bool = False

    @property
    def clean(self) -> bool:
        """The tests passed and the tool found nothing; or it found what is broken on purpose."""
        return bool(self.found) if self.broken else self.status == 0 and self.found == 0


PARTS = (
    Part("a broken kernel", "memcheck"),
    Part("a broken kernel", "initcheck"),
    Part("a broken kernel", "racecheck"),
    Part("decode", "memcheck", ("paged_decode",)),
    Part("decode variants", "memcheck", ("decode_variants", "gpu_decode", "workspace")),
    Part("write", "memcheck", ("kv_write", "gpu_write")),
    Part("rotated write", "memcheck", ("rope_write",)),
    Part("e4m3 and int8", "memcheck", ("e4m3", "e4m3_quotient", "int8")),
    Part("decode graphs", "memcheck", ("gpu_decode",), graphs=True),
    Part("write graphs", "memcheck", ("gpu_write", "gpu"), graphs=True),
    Part("decode", "initcheck", ("paged_decode",)),
    Part("decode variants", "initcheck", ("decode_variants",)),
    Part("write", "initcheck", ("kv_write",)),
    Part("rotated write", "initcheck", ("rope_write",)),
    Part("decode variants", "racecheck", ("decode_variants",)),
    Part("writes", "racecheck", ("kv_write", "rope_write")),
    Part("decode variants", "synccheck", ("decode_variants", "paged_decode")),
)


def run(parts: tuple[Part, ...], out: Path, seconds: float) -> list[Outcome]:
    """Runs the parts at the same time; what is still running after `seconds` is stopped, and counts as not clean."""
    began_s = time.monotonic()
    running = []
    for part in parts:
        stem = out / f"{part.tool}-{part.name.replace(' ', '-')}"
        command = [
            "compute-sanitizer", "--tool", part.tool, "--target-processes", "all", "--report-api-errors", "no",
            "--log-file", str(stem.with_suffix(".log")), *part.command,
        ]  # fmt: skip
        cached = part.graphs or part.tool in ("racecheck", "synccheck")
        env = dict(os.environ) if cached else {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        with stem.with_suffix(".txt").open("w", encoding="utf-8") as told:
            child = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=told, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        running.append((part, stem, child))
    outcomes = []
    for part, stem, child in running:
        try:
            status: int | None = child.wait(max(0.0, seconds - (time.monotonic() - began_s)))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            status = None
        outcomes.append(_outcome(part, stem, status, time.monotonic() - began_s))
    return outcomes


def _outcome(part: Part, stem: Path, status: int | None, wall_s: float) -> Outcome:
    log = stem.with_suffix(".log")
    found = _FOUND.findall(log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else []
    said = [line for line in stem.with_suffix(".txt").read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    tests = (said[-1] if said else "no output") if status is not None else "stopped: out of time"
    total = sum(int(number) for number in found) if found else None
    broken = not part.files
    if broken:
        tests = "found, as it had to be" if total else f"NOT FOUND: {tests}"
    return Outcome(part.name, part.tool, tests, status, total, round(wall_s, 1), part.command[1:], broken)


def table(outcomes: list[Outcome]) -> str:
    """Markdown: tool, part, what the tests said, what the tool found."""
    lines = ["| tool | tests of | they said | the tool found |", "| --- | --- | --- | ---: |"]
    for outcome in outcomes:
        found = "no summary" if outcome.found is None else str(outcome.found)
        lines.append(f"| {outcome.tool} | {outcome.part} | {outcome.tests} | {found} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.sanitize", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0, help="time for all of it")
    parser.add_argument("--select", default="", metavar="REGEX", help="only parts of which 'TOOL NAME' matches")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit; run this where that is installed", file=sys.stderr)
        return 2
    parts = tuple(part for part in PARTS if re.search(options.select, f"{part.tool} {part.name}"))
    if not parts:
        known = ", ".join(f"{part.tool} {part.name}" for part in PARTS)
        print(f"--select {options.select!r} matches no part; there are {known}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = run(parts, options.out, options.seconds)
    (options.out / "summary.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8")
    print(table(outcomes), end="")
    return 0 if all(outcome.clean for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
