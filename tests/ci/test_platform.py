"""The same everywhere: locale, time zone, names of branches (cases 42 and 46)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gate_builders import HEAD_COMMIT, a_run
from gate_shortcuts import compare

from ci.repo import Repository
from ci.verdict_file import dump


def test_a_report_is_the_same_in_every_locale_and_time_zone(tmp_path: Path, root: Path) -> None:
    """Case 46."""
    result = replace(compare(a_run(100, commit=HEAD_COMMIT)), device="Gerät µ: 1,5 a/b\\c", created_at="2026-11-30T00:00:00Z")
    made = set()
    places = ({"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "de_DE.UTF-8", "TZ": "Pacific/Kiritimati"})
    unset = ("LC_ALL", "LANG", "TZ", "PYTHONUTF8", "PYTHONIOENCODING")
    for number, env in enumerate(places):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "verdict.json").write_text(dump(result), encoding="utf-8")
        known = {name: value for name, value in os.environ.items() if name not in unset}
        done = subprocess.run(
            [sys.executable, "-m", "ci", "report", "--from", str(folder)],
            cwd=tmp_path,
            env={**known, "PYTHONPATH": str(root), "PYTHONCOERCECLOCALE": "0", **env},
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
        made.add(tuple((folder / name).read_bytes() for name in ("verdict.json", "index.html", "summary.md", "junit.xml")))
    assert len(made) == 1


def _opened_without_encoding(path: Path) -> list[str]:
    """Places where a text file is opened in the locale's encoding."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {keyword.arg for keyword in node.keywords}
        words = [argument.value for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)]
        binary = any(word in ("rb", "wb", "ab", "xb", "r+b") for word in words)
        text = name in ("read_text", "write_text") or (name in ("open", "fdopen") and "mode" not in keywords and not binary)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        no_text = name == "open" and isinstance(owner, ast.Name) and owner.id in ("os", "members", "tarfile")
        if text and not no_text and not keywords & {"encoding", "fileobj"}:
            found.append(f"{path.name}:{node.lineno}: {name}")
    return found


def test_files_are_opened_with_an_encoding(root: Path, tmp_path: Path) -> None:
    """Case 46: nothing depends on the locale's encoding."""
    (tmp_path / "x.py").write_text("open('x')\nPath('x').read_text()\nopen('x', 'rb')\nopen('x', encoding='utf-8')\n", encoding="utf-8")
    assert _opened_without_encoding(tmp_path / "x.py") == ["x.py:1: open", "x.py:2: read_text"]
    paths = [path for package in ("ci", "asv_bench", "rapid_llm") for path in (root / package).rglob("*.py")]
    assert [place for path in paths for place in _opened_without_encoding(path)] == []


@pytest.mark.parametrize("name", ["feature/über-тест", "a=b", "x/..y", "-x", "a" * 200, "quote'\"", "no main"])
def test_any_branch_name_is_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Case 42."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    git("-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-q", "--allow-empty", "-m", "x")
    monkeypatch.setenv("GITHUB_HEAD_REF", name)
    repository = Repository(tmp_path)
    assert repository.head().label == name
    assert repository.merge_base(repository.base(None), repository.head()).sha == repository.head().sha


def test_the_gate_is_imported_where_git_is_not_installed(tmp_path: Path, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import ci.__main__"],
        cwd=root,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
