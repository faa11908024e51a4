"""What the compiler makes of the rows, without a GPU: planted faults are named, a rename or a comment changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from asv_bench import bench_compiled, compiled, machine_code, sass, stand_in, suite
from ci import compiled_run
from ci.compiled import compare_compiled, identical_rows, summary_lines
from ci.compiled_model import CompiledFile, CompiledResult
from rapid_llm.kernels.ops import registry
from tests.planted.agreement import table
from tests.planted.faults import DECODE_ROW, FAULTS, HARMLESS, WRITE_ROW, Edit, Fault, planted_copy

ARCH = "sm_90"
SELECT = f"{DECODE_ROW}|{WRITE_ROW}"

_CLAIM = r"^claim\.triton_quantize_e4m3\(float16"
_CONVERTS = Edit("rapid_llm/kernels/kv_quant.py", "CONVERT=has_e4m3_convert(x.device)", "CONVERT=True")
NEEDS_E4M3 = Fault("an instruction that the claimed architecture lacks", _CLAIM, (_CONVERTS,))
HONEST = Fault(
    "a spec that claims less",
    _CLAIM,
    (_CONVERTS, Edit("rapid_llm/kernels/backends/triton.py", "min_capability=(8, 0)", "min_capability=(8, 9)", 4)),
)


def _arguments(source: Path, cache: Path, output: Path, select: str, arches: tuple[str, ...]) -> list[str]:
    command = ["--source", str(source), "--cache", str(cache), "--output", str(output)]
    return [*command, "--select", select, "--architectures", *arches]


def compile_sources(source: Path, cache: Path, root: Path) -> CompiledFile:
    """The record of the sources, made by the command that the gate starts."""
    output = cache / "base.json"
    command = [sys.executable, "-m", "asv_bench.compiled", *_arguments(source, cache, output, SELECT, (ARCH,))]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return compiled_run.read_compiled(output)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def base(cache: Path, root: Path) -> CompiledFile:
    return compile_sources(root, cache, root)


@pytest.fixture(scope="module")
def heads(cache: Path, root: Path, base: CompiledFile) -> dict[str, CompiledFile]:
    """The record of each fault, of what is harmless and of the claims, each in a process of its own, by name."""
    jobs, outputs = [], {}
    for fault in (*FAULTS, *HARMLESS, NEEDS_E4M3, HONEST):
        folder = cache / fault.name.replace(" ", "-")
        outputs[fault.name] = folder / "compiled.json"
        arches = {NEEDS_E4M3: ("sm_80", ARCH), HONEST: ("sm_80", ARCH, "sm_100")}.get(fault, (ARCH,))
        jobs.append(_arguments(planted_copy(root, fault, folder), cache, outputs[fault.name], fault.rows, arches))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.planted.compile_jobs"],
        cwd=root,
        env={**env, "PYTHONPATH": str(root)},
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return {name: compiled_run.read_compiled(output) for name, output in outputs.items()}


@pytest.fixture(scope="module")
def planted(base: CompiledFile, heads: dict[str, CompiledFile]) -> dict[str, CompiledResult]:
    """The verdict on each fault."""

    def judge(head: CompiledFile) -> CompiledResult:
        rows = {name: row for name, row in base.architectures[ARCH].rows.items() if name in head.architectures[ARCH].rows}
        side = msgspec.structs.replace(base.architectures[ARCH], rows=rows)
        return compare_compiled(msgspec.structs.replace(base, architectures={ARCH: side}), head, {})

    return {fault.name: judge(heads[fault.name]) for fault in (*FAULTS, *HARMLESS)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_with_figure_and_architecture(planted: dict[str, CompiledResult], fault: Fault) -> None:
    result = planted[fault.name]
    (finding,) = result.findings
    assert finding.architecture == ARCH
    named = {(change.metric, change.verdict.value) for change in finding.changes}
    assert set(fault.metrics) <= named
    assert result.exit_code == (1 if "REGRESSED" in {verdict for _, verdict in named} else 0)
    (line, *_) = summary_lines(result.findings)
    assert line.startswith(f"{finding.kernel}: ")
    assert line.endswith(f"on {ARCH}")


@pytest.mark.slow
@pytest.mark.parametrize("change", HARMLESS, ids=lambda fault: fault.name)
def test_a_rename_or_a_comment_changes_nothing(planted: dict[str, CompiledResult], change: Fault) -> None:
    result = planted[change.name]
    assert result.findings == ()
    assert set(result.counts[ARCH]) == {"IDENTICAL"}
    assert result.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the work done twice", "another grid", "like calls launch twice"])
def test_identical_code_is_not_an_identical_launch_record(base: CompiledFile, heads: dict[str, CompiledFile], name: str) -> None:
    """They leave every cubin as it was."""
    rows = heads[name].architectures[ARCH].rows
    assert {launch.code for row in rows.values() for launch in row.launches} <= set(base.codes)
    assert identical_rows(base, heads[name], ARCH) == set()


@pytest.mark.slow
def test_the_same_sources_are_read_from_the_cache(cache: Path, root: Path, base: CompiledFile) -> None:
    started_s = time.monotonic()
    again = compile_sources(root, cache, root)
    assert again == base
    assert time.monotonic() - started_s < 5


@pytest.mark.slow
def test_a_spec_that_claims_an_architecture_compiles_there_or_is_failed(heads: dict[str, CompiledFile]) -> None:
    for fault, state in ((NEEDS_E4M3, "failed"), (HONEST, "unsupported")):
        found = heads[fault.name].architectures
        assert {row.state for row in found["sm_80"].rows.values()} == {state}
        assert {row.state for row in found[ARCH].rows.values()} == {"compiled"}


def test_a_checkout_without_the_library_is_refused(tmp_path: Path, root: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "asv_bench.compiled",
        "--source",
        str(tmp_path),
        "--cache",
        str(tmp_path),
        "--output",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "has no folder rapid_llm" in done.stderr


def test_an_architecture_whose_process_dies_fails_the_row_it_was_at(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.write_text('{"device": {"name": "A10"}}\n{"start": "a"}\n{"row": {"id": "a", "state": "compiled"}}\n{"start": "b"}\n{"ro')
    result = compiled._result("sm_86", journal, -11)
    assert result["rows"]["a"]["state"] == "compiled"
    assert result["rows"]["b"]["state"] == "failed"
    assert result["died"] == "the process that compiles for sm_86 ended with -11 in b"


# Disassembly --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cubins(cache: Path, heads: dict[str, CompiledFile]) -> dict[str, bytes]:
    """Two machine codes of each kind that the planted sources left, of two architectures."""
    assert heads
    kinds: dict[bytes, dict[str, bytes]] = {}
    for path in sorted((cache / "assembled").glob("*.cubin")):
        alike = kinds.setdefault(sass._kind(path.read_bytes()), {})
        if len(alike) < 2:
            alike[path.stem] = path.read_bytes()
    assert len(kinds) >= 2
    assert any(len(alike) == 2 for alike in kinds.values())
    return {name: cubin for alike in kinds.values() for name, cubin in alike.items()}


@pytest.mark.slow
def test_code_that_is_disassembled_together_reads_as_it_does_alone(cubins: dict[str, bytes], tmp_path: Path) -> None:
    tool = compiled.tool("cuobjdump")
    together = sass.disassemble(cubins, tool)
    for name, cubin in cubins.items():
        path = tmp_path / name
        path.write_bytes(cubin)
        alone = subprocess.run([str(tool), "-sass", str(path)], capture_output=True, text=True, check=True, timeout=60).stdout
        assert machine_code.listing(together[name]) == machine_code.listing(alone) != ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "ended with 3 and printed 0 of"),
        (r"printf '\t\tFunction : other\n'", "ended with 0 and printed 1 of"),
        ("""{tool} "$@" | sed '0,/ BRA /{{/ BRA /d}}'""", "of code: its output has changed"),
    ],
    ids=["it fails", "another kernel", "an instruction is missing"],
)
def test_a_disassembler_that_does_not_print_all_of_the_code_is_refused(
    cubins: dict[str, bytes], tmp_path: Path, script: str, message: str
) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text(f"#!/bin/sh\n{script.format(tool=compiled.tool('cuobjdump'))}\n", encoding="utf-8")
    tool.chmod(0o755)
    with pytest.raises(machine_code.ToolError, match=message):
        sass.disassemble(cubins, tool)


# Suites -------------------------------------------------------------------------------------------------------------


def _compile_time_suites() -> list[type[bench_compiled.Compiled]]:
    found = [value for value in vars(bench_compiled).values() if isinstance(value, type) and issubclass(value, bench_compiled.Compiled)]
    return [value for value in found if value is not bench_compiled.Compiled]


def test_r93_compile_time_rows_are_no_throughputs_and_declare_their_direction() -> None:
    """They are exempt from "a run-time unit ends in /s", and no part of what the measuring process measures."""
    assert not [row for row in suite.all_rows() if row.benchmark.startswith("bench_compiled")]
    assert len(_compile_time_suites()) == 7
    for made in _compile_time_suites():
        (method,) = (value for name, value in vars(made).items() if name.startswith("track_"))
        assert not method.unit.endswith("/s")
        assert method.higher_is_better is (method.unit == "warps")


def test_the_gate_and_the_instrument_know_the_same_architectures() -> None:
    assert compiled.ARCHITECTURES == compiled_run.ARCHITECTURES == tuple(stand_in.DEVICES)
    assert compiled.THIS_DEVICE == compiled_run.THIS_DEVICE


def test_suites_hand_out_what_was_compiled() -> None:
    names = bench_compiled._suites()
    launch = {"code": "c", "occupancy_warps": 8, "shared_bytes": 64}
    rows = {row_id: {"state": "compiled", "launches": [launch], "like_launches": [launch, launch]} for row_id in names["PagedDecode"]}
    record = {"architectures": {"sm_90": {"rows": rows}}, "codes": {"c": {"registers": 40, "spill_load_bytes": 4}}}
    count = len(rows)
    assert bench_compiled.Registers().track_registers(record, "sm_90", "PagedDecode") == 40 * count
    assert bench_compiled.Spills().track_spills(record, "sm_90", "PagedDecode") == 4 * count
    assert bench_compiled.Occupancy().track_occupancy(record, "sm_90", "PagedDecode") == 8 * count
    assert bench_compiled.Launches().track_launches(record, "sm_90", "PagedDecode") == count
    assert bench_compiled.LikeLaunches().track_like_launches(record, "sm_90", "PagedDecode") == 2 * count
    with pytest.raises(NotImplementedError, match="not selected"):
        bench_compiled.Launches().setup(record, "sm_90", "KVWritePrefill")
    next(iter(rows.values())).update(state="failed", reason="why")
    with pytest.raises(RuntimeError, match="failed: why"):
        bench_compiled.Launches().track_launches(record, "sm_90", "PagedDecode")


def test_rows_that_the_gate_skips_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from asv_bench import session

    known = [row.id for row in session.selected_rows()]
    monkeypatch.setenv(session.SKIP_VARIABLE, json.dumps(known[-2:]))
    assert [row.id for row in session.selected_rows()] == known[:-2]


def test_like_calls_of_the_committed_rows_launch_what_the_first_does(root: Path) -> None:
    """The same kernels with the same arguments, and directly where the kernel remembers a call form."""
    for architecture in compiled.ARCHITECTURES:
        path = root / "baselines" / "compiled" / f"{architecture}.json"
        rows = compiled_run.load_baseline(path.read_bytes(), name=str(path)).rows
        direct = {name for name, row in rows.items() if registry.get(row.impl).remembers}
        assert 0 < len(direct) < len(rows)
        for name, row in rows.items():
            assert row.like_launches == tuple(msgspec.structs.replace(one, direct=name in direct) for one in row.launches), name


def test_the_page_has_the_table_of_its_raw_output(root: Path) -> None:
    flags, times = (json.loads((root / "docs" / "data" / "planted-compiled" / f"{name}.json").read_bytes()) for name in ("static", "timed"))
    assert table(flags, times) in (root / "docs" / "compiled.md").read_text(encoding="utf-8")
