"""What the process says of its machine: states that cannot be read are unknown, and stop nothing (case 28)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from asv_bench import environment, worker


def _says(monkeypatch: pytest.MonkeyPatch, **fields: str) -> dict[str, Any]:
    line = ", ".join(fields.get(name, "[N/A]") for name in environment._SMI_FIELDS)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, line + "\n", "")

    monkeypatch.setattr(environment.subprocess, "run", run)
    return environment.collect_state(torch.device("cuda"))


@pytest.mark.parametrize(
    ("said", "clock"), [("1168", 1168.0), ("0", 0.0), ("[N/A]", None), ("N/A", None), ("[Insufficient Permissions]", None), ("", None)]
)
def test_a_state_that_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch, said: str, clock: float | None) -> None:
    """59 % of 1,980 MHz, 0, refused: the number, or None, and never an error."""
    state = _says(monkeypatch, sm_clock_mhz=said, throttle_reasons="Active" if said == "" else "0x0000000000000004")
    assert state["sm_clock_mhz"] == clock
    assert state["throttle_reasons"] == (None if said == "" else ["sw_power_cap"])


def test_a_query_that_is_refused_leaves_everything_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(255, command)

    for fault in (refuse, lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError("nvidia-smi"))):
        monkeypatch.setattr(environment.subprocess, "run", fault)
        assert set(environment.collect_state(torch.device("cuda")).values()) == {None}
    monkeypatch.setattr(environment.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "\n", ""))
    assert set(environment.collect_state(torch.device("cuda")).values()) == {None}


# ---------------------------------------------------------------- other processes


@pytest.mark.parametrize(
    ("listed", "foreign"),
    [("", None), ("4711\n", 0), ("4711\n4712\n4713\n", 2), ("4711\n4711\n", 0)],
)
def test_processes_on_the_gpu_besides_this_one(monkeypatch: pytest.MonkeyPatch, listed: str, foreign: int | None) -> None:
    """One of those listed is this one, whichever number a container's driver gives it; none listed is not known."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, listed if "compute-apps" in command[1] else "", "")

    monkeypatch.setattr(environment.subprocess, "run", run)
    assert environment.foreign_processes(torch.device("cuda")) == foreign
    assert environment.collect_state(torch.device("cuda"))["foreign_processes"] == foreign


def test_a_cpu_has_no_foreign_processes() -> None:
    """Every machine has other processes on its CPU: that says nothing, and nothing is recorded."""
    assert "foreign_processes" not in environment.collect_state(torch.device("cpu"))


def test_a_process_that_comes_and_goes_between_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([None, 0, 2, 0])
    monkeypatch.setattr(worker, "foreign_processes", lambda device: next(counts))
    monkeypatch.setattr(worker, "collect_state", lambda device: {"foreign_processes": 0, "sm_clock_mhz": 1.0})
    bench = worker.Bench.__new__(worker.Bench)
    bench.device, bench._most_foreign = torch.device("cuda"), None
    for _ in range(3):
        bench.look_around()
    assert bench.last_state() == {"foreign_processes": 2, "sm_clock_mhz": 1.0}


# ---------------------------------------------------------------- modified files


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *words], check=True, capture_output=True)


def test_tracked_files_that_differ_from_the_commit_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the checkout under test and of the instrument's own; a new file that git does not know is no part of either."""
    folders = [tmp_path / "tree" / "asv_bench", tmp_path / "checkout"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "kernel.py").write_text("a = 1\n", encoding="utf-8")
    for top in (tmp_path / "tree", tmp_path / "checkout"):
        _git(top, "init", "-q")
        _git(top, "add", "-A")
        _git(top, "commit", "-q", "-m", "first")
    monkeypatch.setattr(environment, "__file__", str(folders[0] / "environment.py"))
    monkeypatch.setenv("ASV_BUILD_DIR", str(folders[1]))
    (folders[1] / "untracked.py").write_text("b = 1\n", encoding="utf-8")
    assert environment.modified_files() == []
    (folders[1] / "kernel.py").write_text("a = 2\n", encoding="utf-8")
    assert environment.modified_files() == ["kernel.py"]
    (folders[0] / "kernel.py").unlink()
    assert environment.modified_files() == ["asv_bench/kernel.py", "kernel.py"]
    monkeypatch.setenv("ASV_BUILD_DIR", str(tmp_path / "absent"))
    assert environment.modified_files() is None
