"""The whole way on this machine's CPU: a planted slowdown is found, its reverse is an improvement, a commit against itself passes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.gate.conftest import Project

SELECT = r"KVWritePrefill.*T=512 float16|\.Allocator.*bump"
"""A row that the plant slows down, and one that it leaves alone."""

ONE_ROW = "KVWritePrefill.*T=512 float16"
SLOWED = "bench_kv_write.KVWritePrefill.track_bandwidth"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _verdict(project: Project, root: Path) -> dict[str, Any]:
    text = (project.path / "report" / "verdict.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not strict JSON"))
    jsonschema.validate(data, json.loads((root / "baselines" / "schema" / "verdict.schema.json").read_text(encoding="utf-8")))
    result: dict[str, Any] = data["result"]
    return result


def _asv_continuous(project: Project, select: str) -> subprocess.CompletedProcess[str]:
    """One more round by asv itself, on top of the rounds that the gate had asv measure of the same rows and commits."""
    more = ("-a", "rounds=1", "--append-samples", "--bench", r"^(?!bench_compiled\.)")
    return project.run("asv", "continuous", "main", "HEAD", *more, RAPID_LLM_BENCH_SELECT=select)


def test_a_planted_slowdown_is_a_regression_of_the_gate_and_of_asv(project: Project, root: Path) -> None:
    project.git("checkout", "-q", "-b", "twice")
    project.write_twice()
    head = project.commit("write twice")

    done = project.ci("gate", "--select", SELECT, "--pairs", "8")
    assert done.returncode == 1, done.stdout + done.stderr
    data = _verdict(project, root)
    assert data["mode"] == "ab"
    assert data["head"] == head
    slow = [row for row in data["rows"] if row["verdict"] == "REGRESSED"]
    (row,) = slow
    assert row["key"]["benchmark"] == SLOWED
    assert row["effect"] > 0.4
    for text in (done.stdout, data["reason"]):
        assert row["key"]["params"][0] in text
    for name in ("index.html", "summary.md", "junit.xml"):
        assert "REGRESSED" in (project.path / "report" / name).read_text(encoding="utf-8")

    again = project.ci("report")
    assert again.returncode == 1
    assert _verdict(project, root) == data

    by_asv = _asv_continuous(project, SELECT)
    assert by_asv.returncode == 1, by_asv.stdout
    assert any(line.startswith("| +") and SLOWED in line for line in by_asv.stdout.splitlines())


def test_the_same_change_reversed_is_an_improvement(project: Project, root: Path) -> None:
    project.write_twice()
    project.commit("write twice")
    project.git("checkout", "-q", "-b", "once")
    project.git("revert", "--no-edit", "HEAD")

    # One row at eight pairs: the sign-flip test still decides when one pair is turned by the machine's noise.
    done = project.ci("gate", "--select", ONE_ROW, "--pairs", "8", "--no-compiled")
    assert done.returncode == 0, done.stdout + done.stderr
    data = _verdict(project, root)
    (row,) = [row for row in data["rows"] if row["verdict"] == "IMPROVED"]
    assert row["key"]["benchmark"] == SLOWED
    assert row["effect"] < -0.25
    by_asv = _asv_continuous(project, ONE_ROW)
    assert by_asv.returncode == 0, by_asv.stdout
    assert "PERFORMANCE INCREASED" in by_asv.stdout
