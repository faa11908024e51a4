"""`python -m ci` on bad input: one clear sentence, and the documented exit code (case 42 among others)."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.__main__ import main
from ci.baseline_command import expression

Run = subprocess.CompletedProcess[str]


def _git(path: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=path, check=True, capture_output=True, text=True).stdout.strip()


def _ci(path: Path, *arguments: str, **env: str) -> Run:
    root = Path(__file__).resolve().parents[2]
    known = {**os.environ, "PYTHONPATH": str(root), "RAPID_LLM_BENCH_DEVICE": "cpu", "NO_COLOR": "1", **env}
    return subprocess.run([sys.executable, "-m", "ci", *arguments], cwd=path, capture_output=True, text=True, env=known, timeout=120)


def _refused(done: Run, code: int, *words: str) -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    said = done.stderr.strip()
    assert said.count("\n") == 0, said
    assert said.startswith("ci: ")
    assert said.endswith(".") or ";" in said
    for word in words:
        assert word in said, said


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    _git(path, "init", "-q", "-b", "main")
    _git(path, "config", "user.name", "test")
    _git(path, "config", "user.email", "test@example.invalid")
    for number in range(3):
        (path / "file").write_text(f"{number}\n", encoding="utf-8")
        _git(path, "add", "-A")
        _git(path, "commit", "-q", "-m", f"commit {number}")
    return path


def test_not_a_repository(tmp_path: Path) -> None:
    _refused(_ci(tmp_path, "gate", GIT_CEILING_DIRECTORIES=str(tmp_path.parent)), 2, "not in a git repository", "run it in a clone")


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q", "-b", "main")
    _refused(_ci(tmp_path, "gate"), 2, "'HEAD' is no commit", "make a first commit")


def test_an_unknown_base(repository: Path) -> None:
    _refused(_ci(repository, "gate", "--base", "nowhere"), 2, "'nowhere' is no commit", "--base")


def test_no_main_branch(repository: Path) -> None:
    _git(repository, "branch", "-m", "trunk")
    _refused(_ci(repository, "gate"), 2, "no branch main or origin/main", "git fetch origin main")


def test_a_shallow_clone_whose_history_does_not_reach_the_merge_base(repository: Path, tmp_path: Path) -> None:
    _git(repository, "checkout", "-q", "-b", "topic", "HEAD~1")
    (repository / "other").write_text("x", encoding="utf-8")
    _git(repository, "add", "-A")
    _git(repository, "commit", "-q", "-m", "topic")
    shallow = tmp_path / "shallow"
    _git(tmp_path, "clone", "-q", "--depth", "1", "--no-single-branch", f"file://{repository}", str(shallow))
    _refused(_ci(shallow, "gate"), 2, "no common commit", "git fetch --unshallow", "fetch-depth: 0")


def test_a_repository_of_another_owner(repository: Path) -> None:
    done = _ci(repository, "gate", GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    _refused(done, 2, "another user owns it", "safe.directory")


def test_git_is_not_installed(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    _refused(_ci(repository, "gate", PATH=str(tmp_path / "empty")), 2, "install git")


def test_a_detached_head_is_fine(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ci.repo import Repository

    _git(repository, "checkout", "-q", "--detach")
    monkeypatch.delenv("GITHUB_HEAD_REF", raising=False)
    assert Repository(repository).head().label == "HEAD"
    monkeypatch.setenv("GITHUB_HEAD_REF", "feature/über-тест")
    assert Repository(repository).head().label == "feature/über-тест"


def test_an_empty_commit_for_a_comparison_with_itself_comes_out_the_same_each_time(repository: Path) -> None:
    from ci.repo import Repository

    opened = Repository(repository)
    head = opened.head()
    first, again = opened.empty_commit_on(head), opened.empty_commit_on(head)
    assert first == again
    assert first.sha != head.sha
    assert opened.repo.commit(first.sha).tree == opened.repo.commit(head.sha).tree
    assert opened.merge_base(head, first).sha == head.sha
    assert _git(repository, "status", "--porcelain") == ""
    assert _git(repository, "branch", "--contains", first.sha) == ""


def test_an_unknown_device(repository: Path) -> None:
    _refused(_ci(repository, "gate", RAPID_LLM_BENCH_DEVICE="tpu"), 2, "'tpu' names no device", "auto, cpu or cuda")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
def test_a_gpu_that_is_not_there(repository: Path) -> None:
    _refused(_ci(repository, "gate", RAPID_LLM_BENCH_DEVICE="cuda"), 2, "nvidia-smi shows no GPU")


def test_a_baseline_that_was_demanded_and_is_not_there(repository: Path) -> None:
    _refused(_ci(repository, "gate", "--require-baseline"), 4, "There is no baselines/CPU_", "baseline record")


@pytest.mark.parametrize(
    ("content", "why"),
    [("", "is empty"), ('{"schema": "rapid_llm/base', "JSON"), ("[]", ""), ('{"schema": "other/1"}', ""), ('{"a": NaN}', "")],
)
def test_a_broken_baseline_on_the_base_branch(repository: Path, content: str, why: str) -> None:
    from ci.device import Device, cpu_name

    file = repository / "baselines" / f"{Device(f'CPU {cpu_name()}', 'cpu').key}.json"
    file.parent.mkdir()
    file.write_text(content, encoding="utf-8")
    _git(repository, "add", "-A")
    _git(repository, "commit", "-q", "-m", "baseline")
    _refused(_ci(repository, "gate"), 4, file.name, why)


def test_a_commit_that_is_none(repository: Path) -> None:
    _refused(_ci(repository, "run", "deadbeef"), 2, "'deadbeef' is no commit")


@pytest.mark.parametrize("command", ["gate", "report"])
def test_what_draws_is_not_installed_whole(repository: Path, command: str) -> None:
    """Before anything is measured, and before anything is written."""
    root = Path(__file__).resolve().parents[2]
    half = repository.parent / "half"
    half.mkdir()
    (half / "jsonschema.py").write_text("raise ModuleNotFoundError(\"No module named 'jsonschema'\")\n", encoding="utf-8")
    kept = repository / "report" / "verdict.json"
    if command == "report":
        kept.parent.mkdir()
        shutil.copy(root / "docs/data/planted-h200/gate-planted.verdict.json", kept)
    done = _ci(repository, command, PYTHONPATH=os.pathsep.join([str(half), str(root)]))
    _refused(done, 2, "The report cannot be drawn", "No module named 'jsonschema'", "install the extra `gate`", sys.executable)
    assert "measuring" not in done.stdout
    assert [path.name for path in (repository / "report").iterdir()] == (["verdict.json"] if command == "report" else [])


def test_a_report_without_a_verdict(tmp_path: Path) -> None:
    _refused(_ci(tmp_path, "report"), 2, "no verdict at report", "python -m ci gate")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "x"}'])
def test_a_report_from_a_broken_verdict(tmp_path: Path, content: str) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "verdict.json").write_text(content, encoding="utf-8")
    done = _ci(tmp_path, "report")
    assert done.returncode in (2, 3, 4)
    _refused(done, done.returncode, "verdict.json")


def test_no_baseline_to_show(tmp_path: Path) -> None:
    _refused(_ci(tmp_path, "baseline", "show", "nothing.json"), 2, "no baseline at nothing.json")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["compare"], "needs a commit under test"),
        (["compare", "abc"], "something to compare with"),
        (["compare", "abc", "--base", "def", "--baseline", "x.json"], "not both"),
        (["compare", "--runs", "x"], "needs a --baseline"),
        (["compare", "abcdefgh", "--base", "def", "--results", "nowhere"], "nowhere"),
    ],
)
def test_compare_without_what_it_needs(tmp_path: Path, arguments: list[str], why: str) -> None:
    done = _ci(tmp_path, *arguments)
    assert done.returncode in (2, 3)
    _refused(done, done.returncode, why)


def test_a_foreign_tree_is_compared_from_the_command_line(shared_data: Path, tmp_path: Path) -> None:
    results = shared_data / "thematrix_gpu_asv" / "results"
    machine = "gpu00-Standard-NC6-Promo_1x1-acc"
    done = _ci(tmp_path, "compare", "c3eaad27", "--base", "4f7b31a9", "--results", str(results), "--machine", machine)
    assert done.returncode == 5, done.stdout
    assert "RUNNER UNFIT" in done.stdout
    verdict = json.loads((tmp_path / "report" / "verdict.json").read_text(encoding="utf-8"))
    assert verdict["result"]["exit_code"] == 5
    unknown = _ci(tmp_path, "compare", "c3eaad27", "--base", "4f7b31a9", "--results", str(results), "--machine", "gpu99")
    _refused(unknown, 2, "no results of machine 'gpu99'", machine)


def test_usage_errors_are_argparse_s(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["gate", "--pairs", "0"], ["run", "--rounds", "x"], ["nonsense"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
        assert "usage:" in capsys.readouterr().err


def test_help_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    for code in ("0  pass", "1  a regression", "2  ", "3  incomplete", "4  ", "5  the runner is unfit", "6  a result is wrong"):
        assert code in printed


def test_an_unusable_report_folder_is_a_sentence(repository: Path) -> None:
    (repository / "taken").write_text("x", encoding="utf-8")
    _refused(_ci(repository, "gate", "--report", "taken"), 2, "taken is no folder")
    _refused(_ci(repository, "gate", "--report", "taken/x"), 2, "taken/x")


def test_a_fault_of_the_gate_itself_is_no_regression(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ci import __main__ as command

    def broken(options: object, console: object) -> int:
        raise AssertionError("a bug")

    monkeypatch.setitem(command._COMMANDS, "report", broken)
    assert main(["report"]) == 3
    assert "a bug" in capsys.readouterr().err


def test_a_commit_cannot_be_compared_with_itself_in_a_shallow_clone(repository: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    _git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(shallow))
    _refused(_ci(shallow, "gate"), 2, "shallow clone", "git fetch --unshallow")


def test_a_selection_that_is_no_expression_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["gate", "--select", "("])
    assert left.value.code == 2
    assert "no regular expression" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "finds"),
    [("bench_kv_write.KVWrite.track_calls(decode T=1 (x) [y] +2.0)", True), ("decode T=1", True), ("track_calls(decode", None)],
)
def test_a_row_is_selected_by_its_whole_name_as_reports_have_it(given: str, finds: bool | None) -> None:
    name = "bench_kv_write.KVWrite.track_calls(decode T=1 (x) [y] +2.0)"
    if finds is None:
        with pytest.raises(argparse.ArgumentTypeError, match="no regular expression"):
            expression(given)
    else:
        assert re.search(expression(given), name) is not None
        assert re.search(expression(given), name.replace("T=1", "T=2")) is None
