"""Measures a gate as one shard and as two on two GPUs of one host: wall times, and whether the verdicts agree.

    python -m tests.two_gpus [--repository CLONE] [--keep FOLDER] [-- arguments of the gate]

Each shard runs in a clone of its own with one GPU (CUDA_VISIBLE_DEVICES), as runners do. Two shards should take at most .6 times as long
as one.
The exit status is 1 if they take longer, or if the verdicts differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.6


def clone(repository: Path, target: Path) -> Path:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(repository), str(target)], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", head], cwd=target, check=True)
    return target


def start(place: Path, gpu: int, share: str, folder: Path, more: list[str]) -> subprocess.Popen[bytes]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
    command = [sys.executable, "-m", "ci", "gate", "--shard", share, "--report", str(folder), "--no-resume", *more]
    return subprocess.Popen(command, cwd=place, env=env, stdin=subprocess.DEVNULL)


def judge(place: Path, shards: list[Path], report: Path) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-m", "ci", "merge", *map(str, shards), "--report", str(report)], cwd=place)
    result = json.loads((report / "verdict.json").read_text(encoding="utf-8"))["result"]
    rows = {f"{row['key']['benchmark']}{row['key']['params']}": row["verdict"] for row in result["rows"]}
    return {"exit": done.returncode, "verdict": result["verdict"], "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, default=ROOT)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("more", nargs="*", help="arguments of the gate, such as --pairs 12 --no-baseline")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="two-gpus-") as temporary:
        scratch = (options.keep or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        places = [clone(options.repository.resolve(), scratch / f"clone{gpu}") for gpu in (0, 1)]
        # Compiles every kernel once, so that neither side pays for it.
        warm = [
            subprocess.Popen(
                [sys.executable, "-m", "ci", "run", "--rounds", "1"], cwd=place, env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
            )
            for gpu, place in enumerate(places)
        ]
        for child in warm:
            child.wait()
        started = time.monotonic()
        alone = start(places[0], 0, "1/1", scratch / "one" / "1", options.more).wait()
        one_s = time.monotonic() - started
        started = time.monotonic()
        running = [start(place, gpu, f"{gpu + 1}/2", scratch / "two" / str(gpu + 1), options.more) for gpu, place in enumerate(places)]
        codes = [child.wait() for child in running]
        two_s = time.monotonic() - started
        if alone or any(codes):
            print(f"a shard failed: exit status {alone} alone, {codes} in two")
            return 1
        whole = judge(places[0], [scratch / "one" / "1"], scratch / "report-one")
        merged = judge(places[0], [scratch / "two" / "1", scratch / "two" / "2"], scratch / "report-two")
    print(f"one shard {one_s:.0f} s, two shards {two_s:.0f} s: {two_s / one_s:.2f} times (at most {LIMIT})")
    print(f"verdicts: {whole['verdict']} ({whole['exit']}) and {merged['verdict']} ({merged['exit']})")
    rows, others = whole["rows"], merged["rows"]
    assert isinstance(rows, dict)
    assert isinstance(others, dict)
    for name in sorted(rows.keys() | others.keys()):
        if rows.get(name) != others.get(name):
            print(f"    {name}: {rows.get(name)} alone, {others.get(name)} in two")
    return 0 if two_s <= LIMIT * one_s and whole["verdict"] == merged["verdict"] else 1


if __name__ == "__main__":
    sys.exit(main())
