"""Measures the site and the comparison on a history of 10,000 commits, 200 rows and 2 devices (docs/data/scale.txt has its output).

    python -m tests.history.scale [--commits 10000] [--rows 200] [--folder /somewhere/with/2/GB]

Each step runs in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ci.compare import compare_history
from ci.history.series import all_series
from ci.history.store import read_history
from ci.report import write_report
from ci.results import load_commit
from tests.history import generate

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent.parent


def timed(what: str, limit_s: float, *command: str) -> None:
    """Runs a command and prints its time, the processor's share of it, and the largest memory of a process so far."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "ci", *command], cwd=ROOT, env=env, capture_output=True, text=True)
    took, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{what}: {took:.1f} s, of which the processor {busy:.1f} s (at most {limit_s:g} s), exit status {done.returncode}", flush=True)
    said = done.stdout.strip().splitlines()
    told = said[-1].partition(": ")[2] if said else done.stderr.strip()
    print(f"    {told.partition(': ')[2]}; largest process so far {after.ru_maxrss / 1024:.0f} MiB", flush=True)


def within(what: str, limit_s: float, work: Callable[[], T]) -> T:
    """Does something in this process and prints its time."""
    started, busy = time.monotonic(), time.process_time()
    made = work()
    took, busy = time.monotonic() - started, time.process_time() - busy
    print(f"{what}: {took:.2f} s, of which the processor {busy:.2f} s (at most {limit_s:g} s)", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-") as temporary:
        place = options.folder or Path(temporary)
        tree, html = place / "results", place / "html"
        shape = {"commits": options.commits + 1, "rows": options.rows, "devices": options.devices}
        planted = generate.write(tree, **shape)
        newest = generate.commit_hash(options.commits)[:8]
        held = {path: path.read_bytes() for path in tree.glob(f"*/{newest}-*.json")}
        for path in held:
            path.unlink()
        load = os.getloadavg()[0]
        print(f"{options.commits:,} commits, {options.rows} rows, {options.devices} devices, {len(planted)} planted steps", flush=True)
        print(f"{os.cpu_count()} cores ({platform.machine()}), load {load:.1f} before; Python {platform.python_version()}", flush=True)
        base, head = (generate.commit_hash(options.commits - age) for age in (2, 1))
        result = within(
            "compare two commits of one device",
            1,
            lambda: compare_history([load_commit(tree, "Device_0", base)], [load_commit(tree, "Device_0", head)], device="Device_0"),
        )
        pages = within(f"report of {len(result.rows)} rows", 5, lambda: write_report(result, place / "report"))
        print(f"    index.html has {pages[0].stat().st_size / 1e6:.2f} MB", flush=True)
        site = ["site", str(tree), "--output", str(html), "--project", "made"]
        timed("site from nothing", 150, *site)
        for path, content in held.items():
            path.write_bytes(content)
        timed("site after one new commit", 15, *site)
        history = read_history([tree], place / "check" / "results")
        commits = {revision: commit for commit, revision in history.revisions.items()}
        found = {
            (series.line.machine, series.benchmark.name, series.index, commits[change.first], change.worse)
            for series in all_series(history, place / "check" / "steps")
            for change in series.changes()
        }
        wanted = set()
        for step in planted:
            lower = not history.benchmarks[step.benchmark].higher_is_better
            wanted.add((step.device, step.benchmark, step.index, generate.commit_hash(step.commit), (step.factor > 1) == lower))
        print(f"steps at their commit with their sign: {len(found & wanted)} of {len(wanted)}; others: {len(found - wanted)}", flush=True)
        listed = {
            (item[2]["machine"], item[7], item[3], commits[jump[1]])
            for item in json.loads((html / "regressions.json").read_text(encoding="utf-8"))["regressions"]
            for jump in item[6]
        }
        drops = {step[:4] for step in wanted if step[4]}
        print(f"drops on the regressions page: {len(listed & drops)} of {len(drops)}; others: {len(listed - drops)}", flush=True)


if __name__ == "__main__":
    main()
