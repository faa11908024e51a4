"""The direct path launches what Triton would: same kernel, arguments, grid and stream; and only where Triton would do nothing more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_SHARED = ("every_alignment_and_stride", "what_decides", "what_takes_the_ordinary_path")
CASES = {
    "tests.kernels.direct_launches": ("every_variant", *_SHARED, "captures"),
    "tests.kernels.direct_writes": ("every_form", *_SHARED, "streams"),
}
"""By module."""


def told(root: Path, module: str, *mutant_and_cases: str) -> dict[str, list[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *mutant_and_cases]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    made: dict[str, list[str]] = json.loads(done.stdout)
    return made


@pytest.fixture(scope="module")
def problems(root: Path) -> dict[str, dict[str, list[str]]]:
    """What differs, by module and case: none is to."""
    return {module: told(root, module) for module in CASES}


@pytest.mark.parametrize(("module", "case"), [(module, case) for module, cases in CASES.items() for case in cases])
def test_the_direct_path_is_tritons(problems: dict[str, dict[str, list[str]]], module: str, case: str) -> None:
    assert set(problems[module]) == set(CASES[module])
    assert problems[module][case] == []


@pytest.mark.parametrize("module", CASES)
@pytest.mark.parametrize(
    ("mutant", "case"),
    [("alignment", "every_alignment_and_stride"), ("state", "what_takes_the_ordinary_path"), ("form", "every_alignment_and_stride")],
)
def test_a_path_that_looks_at_less_is_caught(root: Path, module: str, mutant: str, case: str) -> None:
    assert told(root, module, mutant, case)[case]


def test_a_write_that_forgets_which_scales_divide_is_caught(root: Path) -> None:
    assert told(root, "tests.kernels.direct_writes", "division", "every_form")["every_form"]
