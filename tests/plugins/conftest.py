"""A toy project with its own history, measured by asv with this project's plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

_SUITE = """
import json
import os
import pathlib
import time

import toy


class Copy:
    params = [["small", "large"]]
    param_names = ["case"]
    rounds = 2
    version = "1"

    def setup_cache(self):
        process = os.getpid()
        self._record(process)
        return process

    def _record(self, process):
        # what rapid_llm's measuring process leaves beside its samples
        rows = []
        for case in self.params[0]:
            for method in (self.track_rate, self.track_latency):
                try:
                    self.setup(process, case)
                    outcome = {"status": "ok", "value": method(process, case)}
                except (NotImplementedError, KeyError) as error:
                    outcome = {"status": "skipped" if isinstance(error, NotImplementedError) else "failed", "reason": repr(error)}
                rows.append({"benchmark": f"bench_toy.Copy.{method.__name__}", "params": [case], "op": "copy", "impl": "toy",
                             "control": False, "bottleneck": case, "timer": case, "unit": method.unit, "version": "1", **outcome})
        commit = os.environ["ASV_COMMIT"]
        name = f"p{process}-{time.time_ns()}"
        record = {"schema": "rapid_llm/process-record/1", "process": name, "commit": commit, "env_name": os.environ["ASV_ENV_NAME"],
                  "started_at": "2026-11-30T00:00:00Z", "environment": {"device": {"type": "cpu", "name": "CPU toy"}, "torch": "1"},
                  "protocol": "t1", "rows": rows}
        folder = pathlib.Path(os.environ["RAPID_LLM_RECORDS_DIR"], commit[:12])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(record))

    def setup(self, process, case):
        if case in toy.SKIPPED:
            raise NotImplementedError("not here")

    def track_rate(self, process, case):
        # the process makes the samples differ, as noise would
        return toy.rate(case) * (1 + process % 9973 * 1e-7)

    track_rate.unit = "GB/s"
    track_rate.higher_is_better = True

    def track_latency(self, process, case):
        return 1e3 / self.track_rate(process, case)

    track_latency.unit = "us"
    track_latency.higher_is_better = False


class Compiled:
    rounds = 1

    def track_spills(self):
        return toy.SPILLS

    track_spills.unit = "bytes"
    track_spills.higher_is_better = False
    track_spills.exact = True
"""

_TOY = """
SKIPPED = {skipped!r}
SPILLS = {spills!r}


def rate(case):
    values = {values!r}
    return values[case]
"""


@dataclass
class Toy:
    """The toy's checkout and what can be done with it."""

    path: Path

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(
        self, small: float = 100.0, large: float = 200.0, *, without: str | None = None, skipped: tuple[str, ...] = (), spills: int = 1000
    ) -> str:
        """Commits a state of the library: its rates, a case it cannot serve, cases it skips, a figure without noise."""
        values = {name: value for name, value in (("small", small), ("large", large)) if name != without}
        (self.path / "toy" / "__init__.py").write_text(_TOY.format(values=values, skipped=skipped, spills=spills), encoding="utf-8")
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", f"{values} {spills}")
        return self.git("rev-parse", "HEAD")

    def asv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "RAPID_LLM_BENCH_DEVICE": "cpu"}
        return subprocess.run(
            [sys.executable, "-m", "asv", *arguments], cwd=self.path, capture_output=True, text=True, env=env, timeout=200
        )

    def continuous(self, base: str, head: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.asv("continuous", base, head, *arguments)


@pytest.fixture
def toy(tmp_path: Path, root: Path) -> Toy:
    made = Toy(tmp_path / "toy")
    (made.path / "toy").mkdir(parents=True)
    (made.path / "asv_bench").mkdir()
    (made.path / "asv_bench" / "bench_toy.py").write_text(_SUITE, encoding="utf-8")
    (made.path / "asv_bench" / "__init__.py").write_text(
        f"import importlib.util\n"
        f"_spec = importlib.util.spec_from_file_location('throughput', {str(root / 'asv_bench' / 'throughput.py')!r})\n"
        f"throughput = importlib.util.module_from_spec(_spec)\n"
        f"_spec.loader.exec_module(throughput)\n"
        f"throughput.register()\n",
        encoding="utf-8",
    )
    config = json.loads((root / "asv.conf.json").read_text(encoding="utf-8"))
    (made.path / "asv.conf.json").write_text(json.dumps({**config, "project": "toy"}), encoding="utf-8")
    (made.path / "ci").symlink_to(root / "ci")
    (made.path / ".gitignore").write_text("ci\n.asv\n__pycache__\n", encoding="utf-8")
    made.git("init", "-q", "-b", "main")
    made.git("config", "user.name", "toy")
    made.git("config", "user.email", "toy@example.invalid")
    return made


@pytest.fixture
def compared(toy: Toy) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Commits two states and compares them."""

    def compare(base: dict[str, object], head: dict[str, object]) -> subprocess.CompletedProcess[str]:
        return toy.continuous(toy.commit(**base), toy.commit(**head))  # type: ignore[arg-type]

    return compare
