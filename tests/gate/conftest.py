"""Clones of this project in which a change can be planted, and the gate run on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PLANT_FILE = "rapid_llm/kernels/ops/kv.py"
PLANT_LINE = "        accepted.run(k, v, slot_mapping, k_rows, v_rows, k_scale=k_factor, v_scale=v_factor, **accepted.options)\n"


@dataclass
class Project:
    """A clone with a history of its own."""

    path: Path

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def write_times(self, times: int) -> None:
        """Makes every KV write really do its work several times."""
        file = self.path / PLANT_FILE
        text = file.read_text(encoding="utf-8")
        assert text.count(PLANT_LINE) == 1, "the line that the plant doubles has moved"
        file.write_text(text.replace(PLANT_LINE, PLANT_LINE * times), encoding="utf-8")

    def run(self, *command: str, timeout_s: float = 600, **env: str) -> subprocess.CompletedProcess[str]:
        known = {**os.environ, "RAPID_LLM_BENCH_DEVICE": "cpu", **env}
        return subprocess.run([sys.executable, "-m", *command], cwd=self.path, capture_output=True, text=True, env=known, timeout=timeout_s)

    def ci(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("ci", *arguments, **env)


def made_project(path: Path, root: Path) -> Project:
    """The tracked and new files of the checkout `root`, committed as one commit on main."""
    made = Project(path)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in listed:
        if not name.startswith(("tests/", "docs/", "baselines/asv/", "baselines/compiled/")) and (root / name).is_file():
            target = made.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
    made.git("init", "-q", "-b", "main")
    made.git("config", "user.name", "test")
    made.git("config", "user.email", "test@example.invalid")
    made.commit("base")
    return made


@pytest.fixture
def project(tmp_path: Path, root: Path) -> Project:
    """A project of the test's own."""
    return made_project(tmp_path / "project", root)
