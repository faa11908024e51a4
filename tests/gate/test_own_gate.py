"""A change cannot weaken the gate that judges it: what it edits is without effect, or is named for review."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from ci import case as cases
from ci import gate, lost_rows
from ci.baseline_file import load, to_json
from ci.errors import UsageError
from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.repo import Commit, Repository
from tests.gate.conftest import Project

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ci"))
from gate_builders import a_baseline

BASELINE_FILE = "baselines/NVIDIA_H200.json"


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path} has changed: {old!r} is gone"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def _lower_the_baseline(root: Path) -> None:
    data = json.loads((root / BASELINE_FILE).read_text(encoding="utf-8"))
    for row in data["rows"].values():
        row["values"] = [[value / 2 for value in run] for run in row["values"]]
    (root / BASELINE_FILE).write_text(json.dumps(data), encoding="utf-8")


def _waive(root: Path) -> None:
    data = json.loads((root / BASELINE_FILE).read_text(encoding="utf-8"))
    terms = {"change": "REGRESSED", "reason": "r", "approver": "me", "reference": "r", "expires": "2999-01-01"}
    data["waivers"] = [{"row": name, **terms} for name in data["rows"]]
    (root / BASELINE_FILE).write_text(json.dumps(data), encoding="utf-8")


EDITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "baseline": (_lower_the_baseline, "a baseline or its schema"),
    "waiver": (_waive, "a baseline or its schema"),
    "band": (lambda root: _edit(root / "ci/screen.py", "ALPHA", "ALPHA "), "the gate itself"),
    "instrument": (lambda root: _edit(root / "asv_bench/microbench.py", "PROTOCOL", "PROTOCOL "), "the instrument or a suite"),
    "tolerance": (lambda root: _edit(root / "asv_bench/verify.py", "_RTOL", "_RTOL "), "the instrument or a suite"),
    "asv's configuration": (lambda root: _edit(root / "asv.conf.json", '"rapid_llm"', '"x"'), "asv's configuration"),
    "a plugin": (lambda root: (root / "ci/plugins/rounds.py").unlink(), "the gate itself"),
    "a workflow": (lambda root: (root / ".github/workflows/gpu-gate.yml").unlink(), "the workflows that run the gate"),
    "the command": (lambda root: _edit(root / "Makefile", "-m ci gate", "-m ci --help #"), "the commands of the gate"),
    "a suite": (lambda root: (root / "asv_bench/bench_kv_write.py").unlink(), "the instrument or a suite: asv_bench/bench_kv_write.py"),
    "a benchmark's name": (lambda root: _edit(root / "asv_bench/bench_kv_write.py", "track_calls", "track_x"), "the instrument or a suite"),
    "a version": (lambda root: _edit(root / "asv_bench/suite.py", "work_version", "work_version "), "the instrument or a suite"),
    "packages": (lambda root: _edit(root / "pyproject.toml", "scipy>=1.12", "scipy"), "the packages that the gate is installed with"),
    "pinned versions": (lambda root: (root / "constraints.txt").unlink(), "pinned versions"),
    "a start-up module": (lambda root: (root / "sitecustomize.py").touch(), "files that are neither product, tests nor docs"),
    "pytest's set-up": (lambda root: (root / "conftest.py").touch(), "files that are neither product, tests nor docs"),
    "git's own rules": (lambda root: (root / ".gitattributes").touch(), "files that are neither product, tests nor docs"),
    "a package's stand-in": (lambda root: (root / "asv.py").touch(), "files that are neither product, tests nor docs"),
    "moved out of sight": (lambda root: Path(root, "ci/rows.py").rename(root / "rapid_llm/rows.py"), "the gate itself: ci/rows.py"),
}


@pytest.fixture
def change(project: Project) -> Project:
    """A branch of a clone whose base branch has a baseline."""
    (project.path / BASELINE_FILE).write_text(to_json(a_baseline(5)), encoding="utf-8")
    project.commit("baseline")
    project.git("checkout", "-q", "-b", "change")
    return project


@pytest.mark.parametrize("name", EDITS)
def test_what_weakens_the_gate_is_named_for_review(change: Project, name: str) -> None:
    """Case 17 too: a widened band shows up in the report."""
    edit, what = EDITS[name]
    edit(change.path)
    change.commit(name)
    repository = Repository(change.path)
    head, tip = repository.head(), repository.base(None)
    notices = repository.review_notices(repository.merge_base(tip, head), head)
    assert any(notice.startswith(f"The change touches {what}") for notice in notices), notices
    stored = gate.stored_baseline(repository, tip, "NVIDIA_H200")
    assert stored is not None
    assert load(stored).waivers == []
    assert load(stored) == a_baseline(5)


PASSED = GateResult(
    verdict=RunVerdict.PASS,
    exit_code=0,
    reason="1 row compared, none regressed",
    mode="ab",
    device="CPU",
    base="a" * 40,
    head="b" * 40,
    rows=(RowOutcome(RowKey("x"), RowVerdict.PASS, "", "other"),),
    environment={"device": {"type": "cpu"}},
)


def _judged(change: Project) -> GateResult:
    change.commit("change")
    repository = Repository(change.path)
    return lost_rows.judged(PASSED, lost_rows.suites(repository, Commit(change.git("rev-parse", "main"), "merge-base")))


def test_a_merge_base_whose_suites_cannot_be_listed_is_no_pass(change: Project) -> None:
    suite = change.path / "asv_bench" / "bench_kv_write.py"
    text = suite.read_text(encoding="utf-8")
    suite.write_text(text + "\nraise RuntimeError('no suites today')\n", encoding="utf-8")
    broken = change.commit("broken")
    suite.write_text(text, encoding="utf-8")
    _delete_suites(change)
    change.commit("change")
    found = lost_rows.suites(Repository(change.path), Commit(broken, "merge-base"))
    result = lost_rows.judged(PASSED, found)
    assert (found.before, result.exit_code) == (None, 3)
    assert "no suites today" in result.reason


def test_a_merge_base_without_suites_has_none_to_miss(change: Project) -> None:
    change.git("rm", "-rq", "asv_bench")
    bare = change.commit("no suites")
    change.git("checkout", "-q", "main", "--", "asv_bench")
    change.commit("suites")
    assert lost_rows.judged(PASSED, lost_rows.suites(Repository(change.path), Commit(bare, "merge-base"))) == PASSED


def test_an_unchanged_suite_loses_no_row(change: Project) -> None:
    (change.path / "rapid_llm" / "new.py").touch()
    assert _judged(change) == PASSED


SUITES_OF_WRITES = ("bench_kv_write", "bench_rope_write", "bench_allocator")
"""The others build on the first."""


def _delete_suites(change: Project) -> None:
    for name in SUITES_OF_WRITES:
        (change.path / "asv_bench" / f"{name}.py").unlink()


def test_a_deleted_suite_is_missed_without_a_baseline(change: Project) -> None:
    _delete_suites(change)
    _edit(change.path / "asv_bench" / "bench_paged_decode.py", '"""', '"""Other words. ')
    result = _judged(change)
    assert (result.exit_code, result.verdict) == (3, RunVerdict.INCOMPLETE)
    missing = {row.key.benchmark for row in result.rows if row.verdict is RowVerdict.MISSING}
    assert "bench_kv_write.Allocator.track_calls" in missing
    assert {name.partition(".")[0] for name in missing} == {"bench_kv_write", "bench_allocator"}  # the other has rows on a GPU only
    assert "bench_allocator" in result.reason


def test_the_gate_itself_ends_with_3_for_a_deleted_suite(change: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command, with the measuring left out: what was measured passes, and what is gone does not."""
    monkeypatch.setattr(gate, "_measure_pairs", lambda *_: None)
    monkeypatch.setattr(cases, "_in_pairs", lambda *_: PASSED)
    monkeypatch.setenv("RAPID_LLM_BENCH_DEVICE", "cpu")
    options = gate.Options(change.path / "report", compiled=False)
    assert gate.gate(change.path, options, Console(quiet=True)).exit_code == 0
    _delete_suites(change)
    change.commit("change")
    result = gate.gate(change.path, options, Console(quiet=True))
    assert result.exit_code == 3
    assert any(notice.startswith("The change deletes suites") for notice in result.notices)
    for name in ("index.html", "summary.md", "junit.xml", "verdict.json"):
        text = (change.path / "report" / name).read_text(encoding="utf-8")
        assert "bench_kv_write" in text
        assert "MISSING" in text


def _gate_without_measuring(change: Project, monkeypatch: pytest.MonkeyPatch) -> GateResult:
    monkeypatch.setattr(gate, "_measure_pairs", lambda *_: None)
    monkeypatch.setattr(cases, "_in_pairs", lambda *_: PASSED)
    monkeypatch.setenv("RAPID_LLM_BENCH_DEVICE", "cpu")
    return gate.gate(change.path, gate.Options(change.path / "report", compiled=False), Console(quiet=True))


def test_what_is_named_for_review_reaches_the_report_and_leaves_the_exit_code(change: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command, with the measuring left out: a name for a person in every form of the report, and no verdict of its own."""
    for name in ("baseline", "waiver", "band", "instrument", "tolerance", "a version", "a workflow", "packages", "pinned versions"):
        EDITS[name][0](change.path)
    for name in ("the command", "a start-up module", "pytest's set-up", "a package's stand-in"):
        EDITS[name][0](change.path)
    change.commit("everything")
    result = _gate_without_measuring(change, monkeypatch)
    assert result.exit_code == 0
    kinds = {what for _, what in EDITS.values() if ":" not in what} - {"asv's configuration"}
    told = " ".join(notice for notice in result.notices if notice.startswith("The change touches "))
    assert sorted(kind for kind in kinds if kind not in told) == []
    for file in ("index.html", "summary.md", "verdict.json"):
        text = (change.path / "report" / file).read_text(encoding="utf-8")
        assert text.count("The change touches ") >= len(kinds), file


def test_asvs_configuration_ends_the_gate_with_2_before_anything_is_measured(change: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    _edit(change.path / "asv.conf.json", '".ci.plugins.rounds"', '".ci.plugins.round"')
    change.commit("without a plugin")
    monkeypatch.setenv("RAPID_LLM_BENCH_DEVICE", "cpu")
    with pytest.raises(UsageError, match=r"asv\.conf\.json leaves out the plugin \.ci\.plugins\.rounds") as refused:
        gate.gate(change.path, gate.Options(change.path / "report", compiled=False), Console(quiet=True))
    assert refused.value.exit_code == 2
    assert not (change.path / "report" / "verdict.json").exists()
    assert not list((change.path / ".asv").glob("records/*"))


def test_a_renamed_benchmark_is_missed_and_another_version_is_named(change: Project) -> None:
    suite = change.path / "asv_bench" / "bench_kv_write.py"
    text = suite.read_text(encoding="utf-8")
    suite.write_text(re.sub(r"\btrack_calls\b", "track_allocations", text), encoding="utf-8")
    result = _judged(change)
    assert result.exit_code == 3
    missing = {row.key.benchmark for row in result.rows if row.verdict is RowVerdict.MISSING}
    assert missing == {"bench_kv_write.Allocator.track_calls", "bench_kv_write.KVWriteDecode.track_calls"}
    suite.write_text(text, encoding="utf-8")
    _edit(change.path / "asv_bench" / "suite.py", 'work_version: ClassVar[str] = "w1"', 'work_version: ClassVar[str] = "w1x"')
    versions = _judged(change)
    assert versions.exit_code == 0
    assert any(re.match(r"The change gives \d+ rows another version: bench_", notice) for notice in versions.notices)


def test_a_baseline_of_the_change_alone_is_no_baseline(change: Project) -> None:
    """The change brings a baseline for a device that the base branch has none of."""
    (change.path / "baselines" / "OTHER.json").write_text(to_json(a_baseline(5)), encoding="utf-8")
    change.commit("its own")
    repository = Repository(change.path)
    assert gate.stored_baseline(repository, repository.base(None), "OTHER") is None
    own = gate.stored_baseline(repository, repository.head(), "OTHER")
    assert own is not None
    assert msgspec.to_builtins(load(own)) == msgspec.to_builtins(a_baseline(5))
