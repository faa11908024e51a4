"""`python -m tests.gate.kill --moments 50`: kills a three-row gate at random moments, checks what is left, and lets it end."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from tests.gate.conftest import Project
from tests.gate.test_faults import THREE_ROWS, kill_at_random, whole_files

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gate.kill", description=__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rapid-llm-kill-") as scratch:
        project = Project(Path(scratch) / "project")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(project.path)], check=True)
        project.git("checkout", "-q", "-B", "main")
        began_s = time.monotonic()
        killed = kill_at_random(project, THREE_ROWS, options.moments, options.seed, device=options.device)
        done = project.ci(*THREE_ROWS, RAPID_LLM_BENCH_DEVICE=options.device)
        print(f"{options.moments} moments, {killed} gates killed while they ran, in {time.monotonic() - began_s:.0f} s; no row lost")
        print(f"then: exit {done.returncode}, samples {whole_files(project)}")
        print(done.stderr, end="")


if __name__ == "__main__":
    main()
