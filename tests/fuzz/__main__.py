"""`python -m tests.fuzz --inputs 200000 --json FILE`: many mutated files of every kind; each finding with the numbers that repeat it.

The inputs are made in blocks, each with a seed of its own. With `--json` the summary is written after each block, and the same command
goes on after the last one that is in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from ci.jsonio import strict_dumps, write_atomic
from tests.fuzz.targets import ROOT, Finding, Target, check_mutated, targets

BLOCK = 10_000
SLOW_CPU_S = 5.0
"""Of the processor: a shared machine makes any input slow by the clock."""
HUNG_S = 60.0


def block(kinds: list[Target], inputs: int, seed: int, until_s: float) -> dict[str, Any] | None:
    """What came of `inputs` mutated files, dealt evenly to the kinds; None where the time was over before their end."""
    draw = random.Random(seed)
    read: Counter[str] = Counter()
    fed: Counter[str] = Counter()
    findings: dict[str, str] = {}
    began_s = time.monotonic()
    slowest_s = 0.0
    for number in range(inputs):
        if time.monotonic() > until_s:
            return None
        target = kinds[number % len(kinds)]
        mutations = [(draw.randrange(10), draw.randrange(1 << 20), draw.randrange(1 << 20)) for _ in range(draw.choice((1, 1, 2, 3)))]
        one_s, one_cpu_s = time.monotonic(), time.process_time()
        fed[target.name] += 1
        try:
            read[target.name] += check_mutated(target, mutations)
            took_s, cpu_s = time.monotonic() - one_s, time.process_time() - one_cpu_s
            if cpu_s > SLOW_CPU_S or took_s > HUNG_S:
                raise Finding(f"{target.name}: took {took_s:.1f} s, of which the processor {cpu_s:.1f} s")
        except Finding as finding:
            findings.setdefault(str(finding)[:160], f"{target.name} {mutations}")
        slowest_s = max(slowest_s, time.monotonic() - one_s)
    counts = {name: {"inputs": fed[name], "read": read[name]} for name in sorted(fed)}
    took = {"seconds": round(time.monotonic() - began_s, 1), "slowest_input_s": round(slowest_s, 2)}
    return {"seed": seed, "inputs": inputs, **took, "kinds": counts, "findings": findings}


def _asked(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.rstrip()


def where() -> dict[str, Any]:
    """The code, the machine and the versions that a summary is of."""
    return {
        "commit": _asked(["git", "rev-parse", "HEAD"]),
        "modified_files": [line[3:] for line in _asked(["git", "status", "--porcelain"]).splitlines()],
        "device": f"CPU, {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("asv", "hypothesis", "msgspec", "torch")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first block; each later one has the next")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long; a block that was begun is made again")
    parser.add_argument("--target", help="one kind of file only")
    parser.add_argument("--json", type=Path, help="summary, and where to go on")
    options = parser.parse_args()
    kinds = [target for target in targets() if options.target in (None, target.name)]
    if not kinds:
        parser.error(f"{options.target!r} is no kind of file; there are: {', '.join(target.name for target in targets())}")
    asked = {"inputs": options.inputs, "seed": options.seed, "target": options.target}
    summary: dict[str, Any] = {"command": " ".join(["python -m tests.fuzz", *sys.argv[1:]]), **asked, **where(), "blocks": []}
    if options.json and options.json.exists():
        before = json.loads(options.json.read_text(encoding="utf-8"))
        differing = [name for name in (*asked, "commit", "packages") if before[name] != summary[name]]
        if differing:
            parser.error(f"{options.json} is of another {differing[0]}; name another file")
        summary = before
    until_s = time.monotonic() + options.seconds
    while (done := sum(one["inputs"] for one in summary["blocks"])) < options.inputs:
        one = block(kinds, min(BLOCK, options.inputs - done), options.seed + len(summary["blocks"]), until_s)
        if one is None:
            break
        summary["blocks"].append(one)
        summary["ended_at"] = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
        if options.json:
            write_atomic(options.json, strict_dumps(summary))
    blocks = summary["blocks"]
    total = sum(one["inputs"] for one in blocks)
    read: Counter[str] = Counter()
    for one in blocks:
        read.update({name: counts["read"] for name, counts in one["kinds"].items()})
    took_s = sum(one["seconds"] for one in blocks)
    print(f"{total} inputs from seed {options.seed} in {took_s:.0f} s, {read.total()} read, the rest refused")
    for name, count in sorted(read.items()):
        print(f"  {name}: {count} read")
    findings = {what: how for one in blocks for what, how in one["findings"].items()}
    for what, how in findings.items():
        print(f"FINDING: {what}\n  {how}")
    return 1 if findings or total < options.inputs else 0


if __name__ == "__main__":
    sys.exit(main())
