"""What a measuring process does not import: each of these costs it seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_MEASURES = """
import os, sys
os.environ["RAPID_LLM_BENCH_DEVICE"] = "cpu"
from asv_bench import launches, worker
from asv_bench.suite import all_rows
row = next(row for row in all_rows() if "decode B=2 S=256 float16 combined fragmented" in row.id)
machine = worker.Bench(worker.choose_device())
outcome = machine.measure(row)
assert outcome["status"] == "ok", outcome
launches.row_hash(row.suite().build(row.case, machine.device))
print(sorted({"torch._dynamo", "sympy", "torch._inductor"} & set(sys.modules)))
"""


def test_measuring_and_recording_a_row_imports_no_compiler_of_torch(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _MEASURES], cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"
