"""The direct path launches what Triton would: same kernel, arguments, grid and stream; and only where Triton would do nothing more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = ("every_variant", "every_alignment_and_stride", "what_decides", "what_takes_the_ordinary_path", "captures")


def told(root: Path, *mutant: str) -> dict[str, list[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.direct_launches", *mutant]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    made: dict[str, list[str]] = json.loads(done.stdout)
    return made


@pytest.fixture(scope="module")
def problems(root: Path) -> dict[str, list[str]]:
    """What differs, by case: none is to."""
    return told(root)


@pytest.mark.parametrize("case", CASES)
def test_the_direct_path_is_tritons(problems: dict[str, list[str]], case: str) -> None:
    assert set(problems) == set(CASES)
    assert problems[case] == []


@pytest.mark.parametrize(
    ("mutant", "case"),
    [("alignment", "every_alignment_and_stride"), ("state", "what_takes_the_ordinary_path"), ("form", "every_alignment_and_stride")],
)
def test_a_path_that_looks_at_less_is_caught(root: Path, mutant: str, case: str) -> None:
    assert told(root, mutant)[case]
