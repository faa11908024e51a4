"""Faults of a GPU in one row of a gate: no memory, an illegal address, a kernel that hangs, a damaged Triton cache, two gates at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci.case import load_kept
from ci.model import RowResult
from tests.gate.conftest import PLANT_FILE, PLANT_LINE, Project
from tests.gate.test_faults import kill_at_random, whole_files

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]

SELECT = r"KVWriteDecode.*T=(1|8|64) float16"
"""Three rows of one launch; the second has the fault."""
CUDA = {"RAPID_LLM_BENCH_DEVICE": "cuda"}

FAULTS = {
    "no memory": ("torch.empty(1 << 46, dtype=torch.uint8, device=k.device)", "out of memory"),
    "illegal address": ("_wild[(1,)](k)", "illegal memory access"),
    "hung kernel": ("torch.cuda._sleep(1 << 45)", "hung for 20 s"),
}
_WILD = """

import triton
import triton.language as tl


@triton.jit
def _wild(ptr):
    tl.store(ptr + (1 << 40), 0.0)
"""


def plant(project: Project, code: str) -> None:
    """Puts the fault before the write of eight tokens."""
    file = project.path / PLANT_FILE
    text = file.read_text(encoding="utf-8")
    assert text.count(PLANT_LINE) == 1, "the line before which the fault is planted has moved"
    planted = text.replace(PLANT_LINE, f"        if k.shape[0] == 8:\n            {code}\n{PLANT_LINE}")
    file.write_text(planted + _WILD, encoding="utf-8")


def rows_of(project: Project) -> dict[str, RowResult]:
    kept = load_kept(project.path / "kept")
    rows = {key.params[0]: row for key, row in kept.rows.items() if key.benchmark.endswith("KVWriteDecode.track_calls")}
    return {name.split()[1]: row for name, row in rows.items() if " float16 " in name}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_device_costs_one_row_and_passes_nothing(project: Project, fault: str) -> None:
    code, says = FAULTS[fault]
    plant(project, code)
    project.commit(fault)
    done = project.ci("run", "--rounds", "1", "--select", SELECT, "--keep", "kept", **CUDA, RAPID_LLM_ROW_TIMEOUT_S="20")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    rows = rows_of(project)
    assert {name: row.state for name, row in rows.items() if row.state != "skipped"} == {
        "T=1": "measured",
        "T=8": "failed",
        "T=64": "measured",
    }
    assert says in str(rows["T=8"].reason)


def test_a_damaged_triton_cache_is_made_again(project: Project, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command = ("run", "--rounds", "1", "--select", SELECT, "--keep")
    env = {**CUDA, "TRITON_CACHE_DIR": str(cache)}
    assert project.ci(*command, "first", **env).returncode == 0
    damaged = [path for path in cache.rglob("*") if path.is_file() and path.suffix in (".cubin", ".json")]
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    done = project.ci(*command, "second", **env)
    # Whatever Triton makes of it: no number that was not measured, no traceback, and what does not run says where to look.
    said = done.stdout + done.stderr
    assert done.returncode in (0, 3), said
    assert "Traceback" not in done.stderr
    if done.returncode == 3:
        assert "may be damaged: delete it and run again" in " ".join(said.split()), said
    shutil.rmtree(cache)
    assert project.ci(*command, "third", **env).returncode == 0


def test_two_gates_on_one_gpu_are_one_too_many(project: Project, tmp_path: Path) -> None:
    other = Project(tmp_path / "other")
    subprocess.run(["git", "clone", "-q", str(project.path), str(other.path)], check=True)
    other.git("checkout", "-q", "-B", "main")
    command = [sys.executable, "-m", "ci", "run", "--rounds", "3", "--select", SELECT]
    first = subprocess.Popen(command, cwd=project.path, env={**os.environ, **CUDA}, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not list((project.path / ".asv" / "logs").glob("*.log")):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        refused = other.ci("run", "--rounds", "1", "--select", SELECT, **CUDA)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "Another gate is measuring on GPU-" in refused.stderr
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGINT)
        first.wait(timeout=60)


def test_a_gate_killed_on_the_gpu_goes_on(project: Project) -> None:
    """Case 36 with the GPU busy; `python -m tests.gate.kill --device cuda --moments 50` takes fifty."""
    command = ("gate", "--select", SELECT, "--pairs", "6", "--no-compiled")
    benchmark = "bench_kv_write.KVWriteDecode.track_calls"
    assert kill_at_random(project, command, 3, seed=1, device="cuda", benchmark=benchmark) >= 1
    done = project.ci(*command, **CUDA)
    # Six pairs decide nothing over three rows; what counts is that each round is there once.
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert min(whole_files(project, benchmark).values()) == 6
