"""The claims of docs/threat-model.md: each names tests that exist, and nothing runs data."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_cases import missing_tests, named_tests, rows_of

CLAIMS = 13
FORBIDDEN_MODULES = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
FORBIDDEN_CALLS = frozenset({"eval", "exec", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "torch.load", "np.load"})


@pytest.mark.parametrize("number", range(1, CLAIMS + 1))
def test_a_claim_names_tests_that_exist(root: Path, number: int) -> None:
    rows = rows_of((root / "docs" / "threat-model.md").read_text(encoding="utf-8"))
    assert [int(row[0].partition(".")[0]) for row in rows] == list(range(1, CLAIMS + 1))
    cell = rows[number - 1][2]
    assert named_tests(cell) != []
    assert missing_tests(root, cell) == []


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def runs_data(source: str) -> list[str]:
    """What in a source text would run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            if _name(node.func) in FORBIDDEN_CALLS:
                found.append(_name(node.func))
            found += ["shell" for word in node.keywords if word.arg == "shell"]
    return found


def test_nothing_runs_data(root: Path) -> None:
    assert runs_data("import pickle\nfrom marshal import loads\neval(x)\nyaml.load(y)\nrun(z, shell=True)\nast.literal_eval(x)\n") == [
        "pickle",
        "marshal",
        "eval",
        "yaml.load",
        "shell",
    ]
    for package in ("ci", "asv_bench", "rapid_llm"):
        for path in (root / package).rglob("*.py"):
            assert runs_data(path.read_text(encoding="utf-8")) == [], path
