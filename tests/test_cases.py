"""Every case of docs/cases.md names tests that exist, and no case is missing."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

CASES = (1, 2, 4, 5, 7, 9, 10, 11, 14, 15, 17, 18, 20, 21, 23, 25, 27, 28, 30, 32, 34, 35, 36, 38, 39, 40, 42, 43, 45, 46)
"""The numbers are those of a longer list, so that they have gaps."""


@functools.cache
def _tests_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def named_tests(cell: str) -> list[tuple[str, str]]:
    """The (file, test) pairs of a cell like "`a/test_b.py`: `test_c`, `test_d`<br>..."."""
    found = []
    for part in cell.split("<br>"):
        file, *names = re.findall(r"`([^`]+)`", part)
        found += [(file, name) for name in names]
    return found


def missing_tests(root: Path, cell: str) -> list[str]:
    """The tests of a cell that do not exist."""
    return [
        f"{file}::{name}"
        for file, name in named_tests(cell)
        if not (root / "tests" / file).is_file() or name not in _tests_in(root / "tests" / file)
    ]


def rows_of(page: str) -> list[list[str]]:
    """The cells of a page's table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if re.match(r"\| *\d", line)]


@pytest.fixture(scope="module")
def rows(root: Path) -> dict[int, list[str]]:
    return {int(row[0]): row for row in rows_of((root / "docs" / "cases.md").read_text(encoding="utf-8"))}


def test_no_case_is_missing(rows: dict[int, list[str]]) -> None:
    assert tuple(rows) == CASES


@pytest.mark.parametrize("number", CASES)
def test_a_case_names_tests_that_exist(rows: dict[int, list[str]], root: Path, number: int) -> None:
    cell = rows[number][2]
    assert named_tests(cell) != []
    assert missing_tests(root, cell) == []


def test_a_name_that_is_gone_is_seen(root: Path) -> None:
    assert missing_tests(root, "`test_cases.py`: `test_no_case_is_missing`, `test_of_nothing`<br>`gone.py`: `test_x`") == [
        "test_cases.py::test_of_nothing",
        "gone.py::test_x",
    ]
