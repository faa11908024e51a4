"""The kernels compile without a GPU for each supported compute capability, within its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAPABILITIES = [80, 86, 89, 90, 100, 120]
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Most shared memory of one program. Source: CUDA C++ Programming Guide, technical specifications per capability."""


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """Compiles in a process without the interpreter, all capabilities in one, for the imports take longer than a kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), *map(str, CAPABILITIES)],
        env=environment, capture_output=True, text=True, check=False, timeout=450,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    reports: dict[str, Any] = json.loads(done.stdout)
    return reports


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_and_fits(reports: dict[str, Any], capability: int) -> None:
    report = reports[str(capability)]
    assert len(report) == 43
    too_large = {name: facts for name, facts in report.items() if facts["shared_bytes"] > SHARED_BYTES[capability]}
    assert too_large == {}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_e4m3_instructions_only_where_the_device_has_them(reports: dict[str, Any], capability: int) -> None:
    """Below 8.9 there is no e4m3 conversion: reading and writing go by integer arithmetic."""
    converts = {name for name, facts in reports[str(capability)].items() if facts["converts"]}
    decodes = {"split-fp16-e4m3-128", "split-bf16-e4m3-96", "swap-fp16-e4m3-128", "stream-fp16-e4m3-128", "stream-swap-fp16-e4m3-128"}
    e4m3_kernels = {*decodes, "quantize", *(name for name in reports[str(capability)] if "-u8" in name)}
    assert converts == (e4m3_kernels if capability >= 89 else set())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_k_and_v_are_copied_ahead(reports: dict[str, Any], capability: int) -> None:
    """The code copies a tile in its loop and at least one before it: a table that is looked up in the loop can undo that unseen."""
    tiles = {name: facts["tiles"] for name, facts in reports[str(capability)].items() if "tiles" in facts}
    assert len(tiles) == 15
    if capability not in (
        90,
        100,
    ):  # without wgmma or its successor a V whose tokens are in the dot's M goes through registers, so the rule never takes it
        tiles = {name: count for name, count in tiles.items() if "swap" not in name}
    assert {name: count for name, count in tiles.items() if count < 2} == {}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_threads_that_sum_the_same_values_have_the_same_sum(reports: dict[str, Any], capability: int) -> None:
    """A product fused into a sum with another thread's rounded one differs from thread to thread, and then which is stored is a race."""
    assert {name: facts["fused_sums"] for name, facts in reports[str(capability)].items() if facts["fused_sums"]} == {}
