"""The launch record of a call, and the device that stands in for a GPU; where there is one, it launches what the stand-in compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def _hash_of(*calls: Callable[[], object]) -> str:
    return launches.hash_of(launches.record_form(calls))


def test_the_hash_follows_what_is_launched() -> None:
    x = torch.zeros(4)
    once = _hash_of(lambda: x.add_(1.0))
    assert once == _hash_of(lambda: x.add_(1.0))
    assert once != _hash_of(lambda: x.add_(2.0))
    assert once != _hash_of(lambda: x.add_(1.0).add_(1.0))


def test_a_like_call_is_the_second_of_the_calls_and_part_of_the_hash() -> None:
    x, made = torch.zeros(4), []

    def call(*, extra: bool = False) -> None:
        made.append(extra)
        x.add_(1.0)
        if extra:
            x.mul_(1.0)

    plain = launches.record_form([call, call, lambda: call(extra=True)], reset=lambda: made.append(None))
    assert made == [None, False, None, False, None, False]
    other = launches.record_form([call, lambda: call(extra=True)])
    assert plain.first == plain.like == other.first
    assert [launch.name for launch in other.like] == ["aten.add_.Tensor", "aten.mul_.Tensor"]
    assert launches.hash_of(plain) != launches.hash_of(other)


def test_the_name_of_a_triton_kernel_is_no_part_of_the_hash_and_everything_else_is() -> None:
    known = {"kind": "triton", "name": "a", "code": "c", "grid": (1, 2, 3), "threads": 128, "shared_bytes": 0, "arguments": ("1",)}
    plain = launches.Launch(**known)
    hashes = {launches.hash_of(launches.Recorded([plain], [plain]))}
    changes = {"code": "d", "grid": (1, 2, 4), "threads": 64, "shared_bytes": 16, "arguments": ("2",), "direct": True}
    for name, value in {"name": "b", **changes}.items():
        other = launches.Launch(**{**known, name: value})
        changed = {launches.hash_of(launches.Recorded(*made)) for made in (([other], [plain]), ([plain], [other]))}
        assert len(changed - hashes) == (0 if name == "name" else 2)
        hashes |= changed
    assert len(hashes) == 1 + 2 * len(changes)


_LIKE_CALLS = """
import contextlib, json
from unittest import mock
from triton.compiler import CompiledKernel
from asv_bench import launches, machine_code
from asv_bench.stand_in import DEVICES, standing_in
from rapid_llm.kernels import direct_launch
from rapid_llm.kernels.decode_split import paged_decode_kernel
from rapid_llm.kernels.kv_write import kv_write_kernel
from rapid_llm.kernels.ops.accepted import AcceptedCalls
from tests.kernels.direct_launches import decode
from tests.kernels.direct_writes import write
from tests.kernels.launcher_bench import patched_run
from tests.kernels.stub_driver import StubDriver, installed

again = direct_launch.Launches.again
def twice(own, *given):
    return again(own, *given) and again(own, *given)
def one_less(own, pointers, factors):
    return again(own, pointers, factors[:-1])

FAULTS = {
    "none": contextlib.nullcontext,
    "twice": lambda: mock.patch.object(direct_launch.Launches, "again", twice),
    "never": lambda: mock.patch.object(direct_launch.Launches, "again", return_value=False),
    "no key": lambda: mock.patch.object(AcceptedCalls, "find", return_value=None),
    "one argument less": lambda: mock.patch.object(direct_launch.Launches, "again", one_less),
}
told = {}
unpatched = dict(vars(CompiledKernel))
for fault, planted in FAULTS.items():
    for name, make in (("decode", decode), ("write", write)):
        for launch in (False, True):
            driver = StubDriver()
            for kernel in (paged_decode_kernel, kv_write_kernel):
                kernel.device_caches.clear()
            with (
                standing_in(DEVICES["sm_90"]),
                installed(driver),
                mock.patch.object(machine_code, "code_hash", lambda ptx, name, **more: name),
                mock.patch.object(CompiledKernel, "asm", {"ptx": ""}, create=True),
                planted(),
            ):
                calls = [make(), make()]
                with patched_run():
                    calls[0]()  # makes the workspace, and no launch is kept
                driver.launches.clear()
                try:
                    made = launches.record_form(calls, launch=launch)
                    same = [one.arguments for one in made.first][:1] * len(made.like) == [one.arguments for one in made.like]
                    paths = [one.direct for one in made.like]
                    told[f"{name} {fault} {launch}"] = [len(made.first), paths, same, len(driver.launches)]
                except LookupError as error:
                    told[f"{name} {fault} {launch}"] = str(error)
assert unpatched == dict(vars(CompiledKernel))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def like_calls(root: Path) -> dict[str, Any]:
    """Of an operation under a fault: launches of the first call, path of each of the like call, whether the arguments are the first's,
    and the launches that reached the device; of calls that are started, and of calls that are only recorded."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _LIKE_CALLS], cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("op", ["decode", "write"])
def test_what_a_like_call_launches_is_recorded(like_calls: dict[str, Any], op: str) -> None:
    """Whichever way it goes; where calls are started, each launch is passed on to the device."""
    expected = {"none": ([True], 3), "twice": ([True, True], 4), "never": ([False], 3), "no key": ([False], 3)}
    for fault, (paths, reached) in expected.items():
        assert like_calls[f"{op} {fault} False"] == [1, paths, True, 0], fault
        assert like_calls[f"{op} {fault} True"] == [1, paths, True, reached], fault


def test_a_direct_launch_with_another_number_of_arguments_is_refused(like_calls: dict[str, Any]) -> None:
    for op in ("decode", "write"):
        assert "parameters and was launched with" in like_calls[f"{op} one argument less False"]


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
        for made, told in zip(launches.record_form(prepared.calls), (row["launches"], row["like_launches"]), strict=True):
            here = [launch.record() for launch in made]
            assert here == [{key: launch[key] for key in here[0]} for launch in told]
        assert launches.row_hash(prepared) == row["launch_hash"]
