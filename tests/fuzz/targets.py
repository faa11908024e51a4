"""What the fuzzer feeds: a valid file of each kind, how the gate reads it, and what must hold of what was read."""

from __future__ import annotations

import functools
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ci"))
from gate_builders import HEAD_COMMIT, a_baseline, a_run, record_file, row_file, write_tree

from ci import asv_config, baseline_file, compiled_run, results, shards, verdict_file
from ci.baseline_file import Waiver
from ci.compare import compare_baseline
from ci.confirm import compare_pairs
from ci.errors import GateError
from ci.history import store
from ci.merge import load_all_kept
from ci.model import CommitResult, GateResult
from ci.report import render_html, render_junit, render_summary
from ci.terminal import render_terminal
from rapid_llm.errors import EvidenceError
from tests.fuzz import of_product, of_reports
from tests.fuzz.mutate import Mutation, mutate

ROOT = Path(__file__).resolve().parents[2]
BASELINE = a_baseline(5)
SLOWED = a_run(100, commit=HEAD_COMMIT, factors={"decode_b": 0.5})
MAX_MESSAGE = 1000


class Finding(AssertionError):
    """An input that the gate did not read, and did not refuse as it should."""


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        valid: A file that is accepted.
        read: Reads the bytes as the gate does; raises a GateError, or a Finding where what came of them must not be.
        named: What a refusal has to name.
    """

    name: str
    valid: bytes
    read: Callable[[bytes], None]
    named: str


def check(target: Target, data: bytes) -> bool:
    """Whether `data` was read; False where it was refused in one sentence that names the file.

    Raises:
        Finding: Neither.
    """
    try:
        target.read(data)
    except (GateError, EvidenceError) as error:
        said = str(error)
        if "\n" in said or not said.isprintable() or len(said) > MAX_MESSAGE or target.named not in said:
            raise Finding(f"{target.name}: the refusal is no sentence that names {target.named}: {said[:300]!r}") from error
        return False
    except Finding:
        raise
    except Exception as error:
        raise Finding(f"{target.name}: {type(error).__name__}: {error}") from error
    return True


def check_mutated(target: Target, mutations: Sequence[Mutation]) -> bool:
    """`check` on the valid file with mutations."""
    return check(target, mutate(target.valid, mutations))


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rapid-llm-fuzz-")


def _tree(name: str, run: CommitResult = SLOWED) -> Path:
    """A kept run of one commit with its records: `results/` and `records/`."""
    folder = Path(_scratch().name, name)
    entries, stored = {}, {}
    for key, row in run.rows.items():
        entries[key.benchmark] = {"unit": row.unit, "higher_is_better": True, "type": "track"}
        stored[key.benchmark] = [[sorted(row.samples)[1]], [], "v1", None, None, None, [list(row.samples)]]
    write_tree(folder / "results", entries, stored, commit=run.commit, machine="NVIDIA_H200")
    (folder / "records").mkdir(exist_ok=True)
    for process in run.processes:
        rows = [
            row_file(
                record.key.benchmark, record.value, control=record.control, op=record.op, impl=record.impl, phase=record.phase,
                kv_dtype=record.kv_dtype, latency_us=record.latency_us, input_hash=record.input_hash,
            )
            for record in process.rows
        ]  # fmt: skip
        made = record_file(process.process, rows, commit=run.commit, environment=process.environment, started_at=process.started_at)
        (folder / "records" / f"{process.process}.json").write_text(json.dumps(made), encoding="utf-8")
    return folder


def _never_passes(result: GateResult) -> None:
    """The run has a row at half its speed: whatever is damaged, it is no pass."""
    if result.exit_code == 0:
        raise Finding(f"a damaged file turned a regression into a pass: {result.reason}")
    _published(result)


def _published(result: GateResult) -> None:
    """What the product writes of it is strict JSON that reads back."""
    text = verdict_file.dump(result)
    json.loads(text, parse_constant=lambda token: _raise(f"the verdict has the bare constant {token}"))
    text.encode()
    verdict_file.load(text)


def _raise(why: str) -> None:
    raise Finding(why)


def _subject(folder: Path, file: Path) -> Callable[[bytes], None]:
    """Compares the kept run with the baseline while one of its files is damaged; the file is whole again afterwards."""
    valid = file.read_bytes()

    def read(data: bytes) -> None:
        file.write_bytes(data)
        try:
            runs = load_all_kept(folder)
            if len(runs) != 1:
                return
            _never_passes(compare_baseline(runs, BASELINE))
        finally:
            file.write_bytes(valid)

    return read


def _pair(folder: Path, base: Path, file: Path) -> Callable[[bytes], None]:
    valid = file.read_bytes()

    def read(data: bytes) -> None:
        file.write_bytes(data)
        try:
            loaded = [
                results.load_commit(tree / "results", "NVIDIA_H200", commit, records_dir=tree / "records")
                for tree, commit in ((base, "a" * 40), (folder, HEAD_COMMIT))
            ]
            _never_passes(compare_pairs(loaded[0], loaded[1], mode="ab", device="NVIDIA H200"))
        finally:
            file.write_bytes(valid)

    return read


def _history(folder: Path, file: Path) -> Callable[[bytes], None]:
    """A history is read however one of its files looks: the site and the list of problems."""
    valid = file.read_bytes()

    def read(data: bytes) -> None:
        file.write_bytes(data)
        try:
            tree = results.read_tree(folder / "results")
            history = store.read_history([folder / "results"], folder / "cache")
            for problem in (*tree.problems, *history.problems):
                if "\n" in problem or not problem.isprintable():
                    raise Finding(f"a problem is no sentence: {problem[:300]!r}")
        finally:
            file.write_bytes(valid)

    return read


def _read_baseline(data: bytes) -> None:
    loaded = baseline_file.load(data, name="the-file.json")
    text = baseline_file.to_json(loaded)
    if baseline_file.load(text.encode()) != loaded:
        raise Finding("a baseline does not read back")
    _published(compare_baseline([SLOWED], loaded))


def _read_waivers(data: bytes) -> None:
    path = Path(_scratch().name, "the-file.json")
    path.write_bytes(data)
    json.dumps(msgspec.to_builtins(baseline_file.load_waivers(path)), allow_nan=False).encode()


def _read_verdict(data: bytes) -> None:
    result = verdict_file.load(data, name="the-file.json")
    if result.exit_code == 0 and any(row.verdict.value == "REGRESSED" and "WAIVED" not in row.flags for row in result.rows):
        raise Finding("a verdict with a regressed row passes")
    _published(result)
    for text in (render_summary(result), render_junit(result), render_html(result)):
        text.encode()
    render_terminal(result, Console(file=io.StringIO(), width=120))


def _read_compiled_baseline(data: bytes) -> None:
    json.dumps(msgspec.to_builtins(compiled_run.load_baseline(data, name="the-file.json")), allow_nan=False).encode()


def _read_compiled(data: bytes) -> None:
    path = Path(_scratch().name, "the-file.json")
    path.write_bytes(data)
    json.dumps(msgspec.to_builtins(compiled_run.read_compiled(path)), allow_nan=False).encode()


def _read_shard(data: bytes) -> None:
    folder = Path(_scratch().name, "a-shard")
    folder.mkdir(exist_ok=True)
    (folder / shards.FILE_NAME).write_bytes(data)
    shards.read(folder)


def _read_configuration(data: bytes) -> None:
    path = Path(_scratch().name, "asv.conf.json")
    path.write_bytes(data)
    asv_config.check(path)


def _small_baseline() -> bytes:
    waiver = Waiver(next(iter(BASELINE.rows)), "BLIND", "r", "me", "r", baseline_file.datetime.date(2999, 1, 1))
    return baseline_file.to_json(msgspec.structs.replace(BASELINE, waivers=[waiver])).encode()


def _measured_rows() -> bytes:
    """A few rows of a committed baseline."""
    data = json.loads((ROOT / "baselines" / "NVIDIA_H200.json").read_text(encoding="utf-8"))
    return json.dumps({**data, "rows": dict(list(data["rows"].items())[::9])}).encode()


def _compiled_parts() -> tuple[bytes, bytes]:
    row: dict[str, Any] = {"state": "compiled", "op": "op", "impl": "i", "version": "1", "launches": [], "launch_hash": "h"}
    launch = {"kind": "triton", "name": "kernel", "code": "c0", "grid": [8, 1, 1], "threads": 128, "arguments": ["float16@0"]}
    row |= {"launches": [launch], "like_launches": [{**launch, "direct": True}]}
    record = {
        "schema": "rapid_llm/compiled/2", "source": "s", "triton": "3", "torch": "2", "ptxas": {"sm_90": "12"},
        "architectures": {"sm_90": {"device": {"name": "H200"}, "rows": {"x": row}}}, "codes": {"c0": {"registers": 40}},
    }  # fmt: skip
    baseline = {
        "schema": "rapid_llm/compiled-baseline/2", "architecture": "sm_90", "triton": "3", "ptxas": "12", "commit": "a" * 40, "reason": "r",
        "device": {"name": "H200"}, "rows": {"x": row}, "codes": {"c0": {"registers": 40}},
    }  # fmt: skip
    return json.dumps(record).encode(), json.dumps(baseline).encode()


@functools.cache
def targets() -> tuple[Target, ...]:
    """Every kind of file that the gate reads, and those that `dispatch()` does."""
    subject = _tree("subject")
    result = next((subject / "results" / "NVIDIA_H200").glob("bbbbbbbb-*.json"))
    benchmarks, record = subject / "results" / "benchmarks.json", subject / "records" / "p1.json"
    machine = subject / "results" / "NVIDIA_H200" / "machine.json"
    slowed = a_run(7, commit=HEAD_COMMIT, factors={"decode_b": 0.5}, processes=12)
    base, head = _tree("base", a_run(8, processes=12)), _tree("head", slowed)
    paired, paired_record = next((head / "results" / "NVIDIA_H200").glob("bbbbbbbb-*.json")), head / "records" / "p3.json"
    compiled, compiled_baseline = _compiled_parts()
    shard = {
        "schema": "rapid_llm/shard/1", "index": 1, "count": 2, "mode": "ab", "device": "CPU", "tip": "a" * 40, "base": "a" * 40,
        "head": "b" * 40, "processes": 12, "select": "x", "notices": ["n"],
    }  # fmt: skip
    waivers = [{"row": "r", "change": "BLIND", "reason": "r", "approver": "a", "reference": "r", "expires": "2999-01-01"}]
    verdict = verdict_file.dump(compare_baseline([SLOWED], BASELINE)).encode()
    configs, config_bytes = of_product.config_file(Path(_scratch().name))
    measured = Path(_scratch().name, "measured.json")
    case_path, case_bytes = of_reports.case_file(Path(_scratch().name, "report"))
    made = [
        Target("result", result.read_bytes(), _subject(subject, result), str(subject)),
        Target("benchmarks", benchmarks.read_bytes(), _subject(subject, benchmarks), str(subject)),
        Target("record", record.read_bytes(), _subject(subject, record), "p1.json"),
        Target("machine", machine.read_bytes(), _subject(subject, machine), str(subject)),
        Target("result of a pair", paired.read_bytes(), _pair(head, base, paired), str(head)),
        Target("record of a pair", paired_record.read_bytes(), _pair(head, base, paired_record), "p3.json"),
        Target("history", result.read_bytes(), _history(subject, result), str(subject)),
        Target("history's machine", machine.read_bytes(), _history(subject, machine), str(subject)),
        Target("history's benchmarks", benchmarks.read_bytes(), _history(subject, benchmarks), str(subject)),
        Target("baseline", _small_baseline(), _read_baseline, "the-file.json"),
        Target("waivers", json.dumps(waivers).encode(), _read_waivers, "the-file.json"),
        Target("verdict", verdict, _read_verdict, "the-file.json"),
        Target("compiled record", compiled, _read_compiled, "the-file.json"),
        Target("compiled baseline", compiled_baseline, _read_compiled_baseline, "the-file.json"),
        Target("shard", json.dumps(shard).encode(), _read_shard, "shard.json"),
        Target("case", case_bytes, of_reports.read_case(case_path, _published), str(case_path.parent)),
        Target("bisect", of_reports.bisect_file(), of_reports.read_bisect, "the-file.json"),
        Target("config store", config_bytes, of_product.read_configs(configs, Finding), configs.name.removesuffix(".json")),
        Target("evidence", _measured_rows(), of_product.read_evidence(measured), "measured.json"),
        Target("golden records", record.read_bytes(), of_product.read_goldens(measured), "measured.json"),
        Target("asv's configuration", (ROOT / "asv.conf.json").read_bytes(), _read_configuration, "asv.conf.json"),
    ]
    return tuple(made)
