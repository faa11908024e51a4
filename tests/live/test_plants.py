"""The slow-downs do what they say, the kernels stay right with them, and the compiler leaves the wait in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.errors import UsageError
from tests.live import disturbed
from tests.live.plants import SLOWED, apply, chosen, edits, loop_ns, plant

KNOBS = {"decode_fp16": 21, "decode_e4m3": 22, "prefill_fp16": 23_000, "prefill_e4m3": 24_000, "launch": 25, "host": 26}
RUN = """
import torch
from rapid_llm.kernels import kv_write as module
from rapid_llm.kernels.configs import WriteConfig

grids, kernel = [], module.kv_write_kernel

class Recorded:
    def __getitem__(self, grid):
        grids.append(grid)
        return kernel[grid]

module.kv_write_kernel = Recorded()
for tokens, tile in ((1024, 128), (8, 1)):
    k, v = torch.randn(tokens, 1, 16, dtype=torch.float16), torch.randn(tokens, 1, 16, dtype=torch.float16)
    slots = torch.randperm(tokens + 5)[:tokens].to(torch.int32)
    k_rows, v_rows = torch.zeros(tokens + 5, 1, 16, dtype=torch.float16), torch.zeros(tokens + 5, 1, 16, dtype=torch.float16)
    config = WriteConfig(tokens=tile, block=16, num_warps=1)
    module.kv_write(k, v, slots, k_rows, v_rows, k_scale=1.0, v_scale=1.0, config=config)
    assert torch.equal(k_rows[slots.long()], k) and torch.equal(v_rows[slots.long()], v)
assert grids == [(9, 1, 2), (8, 1, 2)], grids
from rapid_llm.kernels.paged_decode import paged_decode
q = torch.randn(2, 2, 16, dtype=torch.float16)
rows = torch.randn(64, 1, 16, dtype=torch.float16)
table = torch.randperm(64).to(torch.int32).reshape(2, 32)
out = torch.full_like(q, float("nan"))
paged_decode(q, rows, rows, table, torch.tensor([32, 7], dtype=torch.int32), out, k_scale=1.0, v_scale=1.0, softmax_scale=0.25)
for i, length in enumerate((32, 7)):
    keys = rows[table[i, :length].long(), 0].float()
    expected = torch.softmax(0.25 * q[i].float() @ keys.T, -1) @ keys
    assert torch.allclose(out[i].float(), expected, atol=5e-3), (out[i], expected)
"""


def copied(root: Path, target: Path) -> Path:
    shutil.copytree(root / "rapid_llm", target / "rapid_llm", ignore=shutil.ignore_patterns("__pycache__"))
    return target


def text_of(root: Path) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted((root / "rapid_llm").rglob("*.py")))


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_each_knob_is_planted(root: Path, tmp_path: Path, device_type: str) -> None:
    before = text_of(root)
    planted = text_of(plant_copy(root, tmp_path, device_type))
    for knob in KNOBS.values():
        assert planted.count(str(knob)) > before.count(str(knob)), knob
    for path in (tmp_path / "rapid_llm").rglob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")


def plant_copy(root: Path, target: Path, device_type: str) -> Path:
    plant(copied(root, target), KNOBS, device_type)
    return target


def test_what_has_moved_is_told(root: Path, tmp_path: Path) -> None:
    plant_copy(root, tmp_path, "cpu")
    apply(copied(root, tmp_path / "again"), edits({}, "cpu"))
    (tmp_path / "rapid_llm" / "kv_cache.py").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"rapid_llm/kv_cache\.py has 0 times what a slow-down is planted at"):
        apply(tmp_path, edits({}, "cpu")[2:])


def test_every_slowed_row_is_a_row_of_the_suites(root: Path) -> None:
    code = "import json; from asv_bench.suite import all_rows; print(json.dumps({r.id: r.case.devices for r in all_rows()}))"
    rows = json.loads(subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout)
    for slowed in SLOWED:
        assert "cuda" in rows[slowed.row]
        assert "cpu" in rows[slowed.on_cpu]
    assert [slowed.name for slowed in chosen("KVWriteDecode", "cuda")] == ["launch"]
    with pytest.raises(UsageError, match="finds none of the rows"):
        chosen("Matmul", "cpu")


def test_first_guesses_have_the_size_of_the_row() -> None:
    by_name = {slowed.name: slowed for slowed in SLOWED}
    assert by_name["prefill_fp16"].first_knob(0.02, 36.0, "cuda", 10.0) == 2000
    assert by_name["decode_fp16"].first_knob(0.01, 600.0, "cuda", 10.0) == 1200
    assert by_name["prefill_fp16"].first_knob(0.02, 300.0, "cpu", 15.0) == 400
    assert by_name["host"].first_knob(0.02, 300.0, "cuda", 15.0) == 400
    assert by_name["launch"].first_knob(0.01, 0.1, "cuda", 10.0) == 1
    assert 0.5 < loop_ns(10_000, 3) < 1000


@pytest.mark.slow
def test_planted_kernels_are_right_and_do_more(root: Path, tmp_path: Path) -> None:
    """In the interpreter: 23 % more programs for a prompt, none for a decode step, the results as before."""
    plant_copy(root, tmp_path, "cuda")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_compiler_leaves_the_wait_in(root: Path, tmp_path: Path) -> None:
    """Each two steps cost a product and an exclusive or in the machine code of an H200's architecture; a chain it could fold would not."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    products = []
    for steps in (1, 13):
        source = copied(root, tmp_path / str(steps))
        plant(source, {"launch": steps}, "cuda")
        cache, output = tmp_path / f"cache-{steps}", tmp_path / f"{steps}.json"
        command = [sys.executable, "-m", "asv_bench.compiled", "--source", str(source), "--cache", str(cache), "--output", str(output)]
        command += ["--architectures", "sm_90", "--select", "KVWriteDecode.*T=64 float16"]
        subprocess.run(command, cwd=root, env=env, check=True, capture_output=True)
        (row,) = json.loads(output.read_text(encoding="utf-8"))["architectures"]["sm_90"]["rows"].values()
        listing = (cache / "sass" / f"{row['launches'][0]['code']}.txt").read_text(encoding="utf-8")
        products.append(sum("IMAD" in line and "0x5" in line for line in listing.splitlines()))
    assert products[1] - products[0] >= 6, products


def test_the_disturbances_are_planted_where_they_say(root: Path, tmp_path: Path) -> None:
    """The planted module is imported by anything but a measuring process without effect; in one, readings are larger."""
    source = copied(root, tmp_path)
    apply(source, [disturbed.planted_edit("timers")])
    code = (
        "import sys, types, importlib\n"
        "from asv_bench import timing\n"
        "def reading(): return timing.Timing('t', 'device', (1.0, 2.0, 3.0)).reading_us\n"
        "import rapid_llm; assert reading() == 2.0\n"
        "sys.modules['asv_bench.worker'] = types.ModuleType('asv_bench.worker')\n"
        "importlib.reload(rapid_llm); print(rapid_llm.__file__, reading())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(root)])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(source / "rapid_llm" / "__init__.py"), str(2.0 * disturbed.FACTOR)]
