"""The tuning command: on the interpreter it goes the whole way on tiny shapes (R38, R70, R71)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asv_bench import tune
from rapid_llm.kernels.autotune import config_store


def _run(root: Path, *arguments: str) -> Any:
    command = [sys.executable, "-m", "asv_bench.tune", *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_on_the_interpreter_says_so_and_stores_verified_configs(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "configs.json"
    done = _run(root, "--store", str(path))
    assert done.returncode == 0, done.stderr
    assert "Triton's interpreter on a CPU, tiny shapes, wall clock: it shows that the search works, not what is fast" in done.stdout
    entries = json.loads(path.read_text("utf-8"))["entries"].values()
    assert {entry["key"]["kernel"] for entry in entries} == {"triton_paged_decode", "triton_kv_write"}
    for entry in entries:
        assert entry["latency_us"] > 0
        assert entry["environment"]["commit"]
    assert done.stdout.count("3 of 3 configs verified and timed") == 2


def test_a_selection_of_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--select", "no such case"]) == 2
    assert "finds no case" in capsys.readouterr().err


def test_on_a_gpu_every_case_of_the_kernel_suites_is_tuned() -> None:
    labels = {case.label for _, case in tune.cases("cuda")}
    assert {"decode B=1 S=32768 float16 combined fragmented cold", "prefill T=4096 e4m3 combined fragmented cold"} <= labels
    assert all("cuda" in case.devices for _, case in tune.cases("cuda"))


def test_the_packaged_file_of_a_device_is_the_one_that_dispatch_asks() -> None:
    assert config_store.stores("NVIDIA H200")[-1].path == Path(config_store.__file__).parent / "configs" / "NVIDIA_H200.json"
