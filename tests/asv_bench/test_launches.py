"""The launch record of a call, and the device that stands in for a GPU; where there is one, it launches what the stand-in compiles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asv_bench import launches


def test_torch_operations_are_recorded_in_order_and_views_are_not() -> None:
    x = torch.zeros(4, 6)

    def call() -> None:
        x[1:].t().add_(1.0)
        torch.empty(3)
        x.sum().item()

    made = launches.record(call)
    assert [launch.name for launch in made] == ["aten.add_.Tensor", "aten.sum.default", "aten._local_scalar_dense.default"]
    assert made[0].arguments == ("float32[6, 3]/[1, 6]", "1.0")


def test_the_hash_follows_what_is_launched() -> None:
    x = torch.zeros(4)
    once = launches.hash_of(launches.record(lambda: x.add_(1.0)))
    assert once == launches.hash_of(launches.record(lambda: x.add_(1.0)))
    assert once != launches.hash_of(launches.record(lambda: x.add_(2.0)))
    assert once != launches.hash_of(launches.record(lambda: x.add_(1.0).add_(1.0)))


def test_the_name_of_a_triton_kernel_is_no_part_of_the_hash_and_everything_else_is() -> None:
    known = {"kind": "triton", "name": "a", "code": "c", "grid": (1, 2, 3), "threads": 128, "shared_bytes": 0, "arguments": ("1",)}
    hashes = {launches.hash_of([launches.Launch(**known)]), launches.hash_of([launches.Launch(**{**known, "name": "b"})])}
    assert len(hashes) == 1
    for name, value in (("code", "d"), ("grid", (1, 2, 4)), ("threads", 64), ("shared_bytes", 16), ("arguments", ("2",))):
        changed = launches.hash_of([launches.Launch(**{**known, name: value})])
        assert changed not in hashes
        hashes.add(changed)


_STAND_IN = """
import json, torch
from asv_bench.stand_in import DEVICES, standing_in
with standing_in(DEVICES["sm_86"]) as cuda:
    x = torch.empty(8, 6, dtype=torch.float16, device=cuda)
    told = [str(x.device), x.is_cuda, x[:, 1:].data_ptr() % 16, x.sum().tolist(), list(x.nonzero().shape)]
    told += [str(torch.zeros(3).device), torch.cuda.get_device_capability(cuda), torch.cuda.get_device_properties(cuda).L2_cache_size]
print(json.dumps([*told, str(torch.zeros(1).device)]))
"""


def test_the_stand_in_says_that_it_is_a_gpu_and_goes_away(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _STAND_IN], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["cuda:0", True, 2, 0.0, [48, 2], "cuda:0", [8, 6], 6 * 2**20, "cpu"]


@pytest.mark.gpu
def test_a_gpu_launches_exactly_what_the_stand_in_compiles(tmp_path: Path, root: Path) -> None:
    from asv_bench import suite

    select, output = "decode B=8 S=8192 float16 combined|prefill T=4096 float16", tmp_path / "compiled.json"
    command = [sys.executable, "-m", "asv_bench.compiled", "--source", str(root), "--cache", str(tmp_path), "--output", str(output)]
    subprocess.run([*command, "--select", select, "--this-device"], cwd=root, check=True, timeout=280)
    rows = json.loads(output.read_text(encoding="utf-8"))["architectures"]["this-device"]["rows"]
    assert len(rows) == 2
    known = {row.id: row for row in suite.all_rows()}
    for name, row in rows.items():
        prepared = known[name].suite().build(known[name].case, torch.device("cuda"))
        prepared.calls[0]()  # the first call of a process also makes a workspace
        made = [launch.record() for launch in launches.record(prepared.calls[0])]
        told = [{key: launch[key] for key in made[0]} for launch in row["launches"]]
        assert made == told
        assert launches.row_hash(prepared) == row["launch_hash"]
