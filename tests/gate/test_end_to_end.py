"""The whole way on this machine's CPU: a planted slowdown is found, its reverse is an improvement, a commit against itself passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.gate.conftest import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _verdict(project: Project, root: Path) -> dict[str, Any]:
    text = (project.path / "report" / "verdict.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not strict JSON"))
    jsonschema.validate(data, json.loads((root / "baselines" / "schema" / "verdict.schema.json").read_text(encoding="utf-8")))
    return data


def test_a_planted_slowdown_is_a_regression_of_the_gate_and_of_asv(project: Project, root: Path) -> None:
    project.git("checkout", "-q", "-b", "twice")
    project.write_twice()
    head = project.commit("write twice")

    done = project.ci("gate", "--select", "KVWritePrefill")
    assert done.returncode == 1, done.stdout + done.stderr
    data = _verdict(project, root)
    assert data["mode"] == "ab"
    assert data["head"] == head
    slow = [row for row in data["rows"] if row["verdict"] == "REGRESSED"]
    assert {row["key"]["benchmark"] for row in slow} == {"bench_kv_write.KVWritePrefill.track_bandwidth"}
    assert len(slow) == 2
    for row in slow:
        assert row["effect"] > 0.4
        assert row["key"]["params"][0] in done.stdout
        assert row["key"]["params"][0] in data["reason"]
    for name in ("index.html", "summary.md", "junit.xml"):
        assert "REGRESSED" in (project.path / "report" / name).read_text(encoding="utf-8")

    again = project.ci("report")
    assert again.returncode == 1
    assert _verdict(project, root) == data

    by_asv = project.run("asv", "continuous", "main", "HEAD", "-a", "rounds=3", RAPID_LLM_BENCH_SELECT="KVWritePrefill")
    assert by_asv.returncode == 1, by_asv.stdout
    worse = [line for line in by_asv.stdout.splitlines() if line.startswith("| +")]
    assert worse
    assert all("bench_kv_write.KVWritePrefill" in line for line in worse)


def test_the_same_change_reversed_is_an_improvement(project: Project, root: Path) -> None:
    project.write_twice()
    project.commit("write twice")
    project.git("checkout", "-q", "-b", "once")
    project.git("revert", "--no-edit", "HEAD")

    done = project.ci("gate", "--select", "KVWritePrefill", "--pairs", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    data = _verdict(project, root)
    improved = [row for row in data["rows"] if row["verdict"] == "IMPROVED"]
    assert len(improved) == 2
    assert all(row["effect"] < -0.25 for row in improved)
    by_asv = project.run("asv", "continuous", "main", "HEAD", "-a", "rounds=3", RAPID_LLM_BENCH_SELECT="KVWritePrefill")
    assert by_asv.returncode == 0, by_asv.stdout
    assert "PERFORMANCE INCREASED" in by_asv.stdout
