"""The bisect on a repository: the answers of the paired test, the commits between, the command and its file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import pytest
from rich.console import Console

from ci import bisect, bisect_run
from ci.bisect import Answer, BisectFile, Step
from ci.confirm import compare_pairs
from ci.device import Device
from ci.errors import BaselineError, ExitCode, InputError, UnfitError, UsageError
from ci.lost_rows import Listed
from ci.model import GateResult, RowVerdict, RunVerdict
from ci.repo import Commit, Repository
from tests.ci.gate_builders import BASE_COMMIT, a_run

Find = Callable[..., tuple[ExitCode, str, list[str]]]


def _compared(factor: float, *, sd: float = 0.002, shift: float = 1.0, pairs: int = 12) -> GateResult:
    base = a_run(1, processes=pairs, sd=sd, commit=BASE_COMMIT)
    return compare_pairs(base, a_run(2, processes=pairs, sd=sd, factors={"decode_a": factor}, shift=shift))


def test_the_answers_of_the_paired_test() -> None:
    slower = bisect_run.answer(_compared(0.9), "decode_a", None)
    assert slower.answer is Answer.BAD
    assert slower.effect == pytest.approx(1 / 0.9 - 1, rel=0.1)
    assert bisect_run.answer(_compared(1.1), "decode_a", 0.1).answer is Answer.GOOD
    assert bisect_run.answer(_compared(1.0), "decode_a", 0.1).answer is Answer.GOOD
    missing = bisect_run.answer(_compared(1.0), "decode_z", 0.1)
    assert (missing.answer, missing.effect) == (Answer.SKIP, None)


def test_a_row_that_is_not_slower_is_good_only_where_what_is_looked_for_would_have_been_found() -> None:
    result = _compared(1.0)
    (row,) = [row for row in result.rows if str(row.key) == "decode_a"]
    assert row.mde80 is not None
    assert bisect_run.answer(result, "decode_a", row.mde80 * 1.01).answer is Answer.GOOD
    missed = bisect_run.answer(result, "decode_a", row.mde80 * 0.99)
    assert missed.answer is Answer.UNCONFIRMED
    assert "could be missed" in missed.reason
    same = replace(result, rows=tuple(replace(row, flags=(*row.flags, "IDENTICAL")) for row in result.rows))
    assert bisect_run.answer(same, "decode_a", row.mde80 * 0.99).answer is Answer.GOOD


@pytest.mark.parametrize("verdict", list(RowVerdict))
def test_a_verdict_that_compares_nothing_is_a_skip(verdict: RowVerdict) -> None:
    result = _compared(1.0)
    result = replace(result, rows=tuple(replace(row, verdict=verdict) for row in result.rows))
    expected = {
        RowVerdict.PASS: Answer.GOOD,
        RowVerdict.CLEARED: Answer.GOOD,
        RowVerdict.IMPROVED: Answer.GOOD,
        RowVerdict.REGRESSED: Answer.BAD,
        RowVerdict.UNCONFIRMED: Answer.UNCONFIRMED,
    }
    assert bisect_run.answer(result, "decode_a", 0.5).answer is expected.get(verdict, Answer.SKIP)


def test_a_machine_that_moved_ends_the_bisect() -> None:
    moved = _compared(1.0, shift=0.9)
    assert moved.verdict is RunVerdict.RUNNER_UNFIT
    with pytest.raises(UnfitError, match=r"^The runner is unfit: control rows .*moved") as told:
        bisect_run.answer(moved, "decode_a", 0.1)
    assert told.value.exit_code == ExitCode.UNFIT
    with pytest.raises(BaselineError):
        bisect_run.answer(replace(moved, exit_code=int(ExitCode.BASELINE)), "decode_a", 0.1)


class _Repo:
    """A repository whose README says how fast a commit is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "test")
        self.git("config", "user.email", "test@example.invalid")

    def git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=self.path, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, subject: str) -> str:
        self.git("commit", "-q", "--allow-empty", "-m", subject)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> _Repo:
    return _Repo(tmp_path)


def test_the_path_follows_first_parents(repo: _Repo) -> None:
    first = repo.commit("first [bold]")
    repo.git("checkout", "-q", "-b", "side")
    side = repo.commit("side")
    repo.git("checkout", "-q", "main")
    second = repo.commit("second")
    repo.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    merge, last = repo.git("rev-parse", "HEAD"), repo.commit("last")
    repository = Repository(repo.path)

    path = repository.first_parent_path(repository.commit(first), repository.commit("main"))
    assert [commit.sha for commit in path] == [first, second, merge, last]
    assert [commit.label for commit in path] == ["first [bold]", "second", "merge", "last"]
    for good, bad, why in ((side, "main", "first-parent path"), (last, first, "first-parent path"), ("main", last, "same commit")):
        with pytest.raises(UsageError, match=why):
            repository.first_parent_path(repository.commit(good), repository.commit(bad))


ROW = "decode_a"


@pytest.fixture
def found(repo: _Repo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Find:
    """`python -m ci bisect` with a gate that measures the effect which a commit's subject names."""

    measured: list[str] = []

    def compare(repository: Repository, device: Device, row: str, base: Commit, commit: Commit, *rest: object) -> GateResult:
        subject = repository.repo.commit(commit.sha).summary
        measured.append(subject)
        if "broken" in subject:
            raise InputError("A commit could not be measured: it cannot be imported.")
        return _compared(0.9 if "slow" in subject and "slow" not in repository.repo.commit(base.sha).summary else 1.0)

    row = Listed(ROW, [], ["cpu"], control=False, bottleneck="read-bandwidth", unit="GB/s", version="v1")
    rows = {ROW: row, "control": msgspec.structs.replace(row, control=True), "elsewhere": msgspec.structs.replace(row, devices=["cuda"])}
    monkeypatch.setattr(bisect_run, "listed", lambda root: rows)
    monkeypatch.setattr(bisect_run, "_compare", compare)
    monkeypatch.setattr(bisect_run, "detect", lambda: Device("CPU toy", "cpu"))

    def find(row: str, good: str, bad: str, pairs: int = 12) -> tuple[ExitCode, str, list[str]]:
        measured.clear()
        console = Console(record=True, width=160)
        code = bisect_run.find(repo.path, row, good, bad, pairs, tmp_path / "report", console)
        return code, console.export_text(), list(measured)

    return find


def test_the_command_names_the_commit_and_keeps_its_steps(repo: _Repo, found: Find, root: Path) -> None:
    shas = [repo.commit(subject) for subject in ("start", "fast 1", "broken", "slow [2]", "slow 3")]
    code, told, measured = found(ROW, shas[0], "main")
    assert measured == ["slow 3", "broken", "fast 1", "slow [2]"]
    assert code is ExitCode.INCOMPLETE
    assert "step 1 of about 4: " in told
    assert f"{shas[4][:12]} 'slow 3' +11." in told
    assert f"The first bad commit is one of {shas[2][:12]} 'broken', {shas[3][:12]} 'slow [2]'" in told
    assert "skip (A commit could not be measured" in told

    path = repo.path / "report" / "bisect.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(data, json.loads((root / "baselines" / "schema" / "bisect.schema.json").read_text(encoding="utf-8")))
    assert data["suspects"] == shas[2:4]
    code, told, measured = found(ROW, shas[0], "main")
    assert (code, measured) == (ExitCode.INCOMPLETE, [])
    assert told.count("(measured before)") == 4

    code, told, measured = found(ROW, shas[0], shas[1 + 2])
    assert measured == ["slow [2]", "fast 1", "broken"], "another end is another bisect"
    assert "bisect.json is of another row, other ends or another device, and is replaced" in told

    with pytest.raises(UsageError, match=r"is not shown to be slower than .* good\): name other ends"):
        found(ROW, shas[0], shas[1])
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"bisect\.json does not follow rapid_llm/bisect/1"):
        found(ROW, shas[0], "main")


def test_the_command_confirms_the_commit_against_the_one_before(repo: _Repo, found: Find) -> None:
    shas = [repo.commit(subject) for subject in ("start", "fast 1", "fast 2", "slow 3", "slow 4")]
    code, told, measured = found(ROW, shas[0], "main")
    assert code is ExitCode.PASS
    assert measured == ["slow 4", "fast 2", "slow 3", "slow 3"]
    assert f"The first bad commit is {shas[3][:12]} 'slow 3'." in told
    data = json.loads((repo.path / "report" / "bisect.json").read_text(encoding="utf-8"))
    assert data["confirmed"] is True
    assert data["suspects"] == [shas[3]]
    assert data["steps"][-1]["base"] == shas[2]


def test_the_command_refuses_what_it_cannot_decide(repo: _Repo, found: Find) -> None:
    shas = [repo.commit(subject) for subject in ("broken", "broken 2")]
    for arguments, why in (
        (("decode_b", *shas), r"have no row 'decode_b': name one of theirs, such as decode_a"),
        (("control", *shas), "is a control"),
        (("elsewhere", *shas), "is not measured on CPU toy"),
        ((ROW, *shas, 6), "6 pairs cannot show a regression of one row at 0.01"),
    ):
        with pytest.raises(UsageError, match=why):
            found(*arguments)
    with pytest.raises(InputError, match="could not be measured"):
        found(ROW, *shas)


def test_the_file_reads_back_and_is_of_one_search() -> None:
    good, bad = Commit("a" * 40, "main"), Commit("b" * 40, "x")
    step = Step(good.sha, bad.sha, 12, Answer.BAD, 0.031, "slower")
    file = BisectFile(bisect.SCHEMA_ID, ROW, good.sha, bad.sha, "CPU_x", [step], [bad.sha], True)
    assert bisect.load(bisect.dump(file).encode(), name="f") == file
    assert file.is_of(ROW, good, bad, "CPU_x")
    assert not file.is_of("decode_b", good, bad, "CPU_x")
    assert not file.is_of(ROW, bad, good, "CPU_x")
    assert not file.is_of(ROW, good, bad, "CPU_y")
    assert step.shown == "+3.1 % latency: bad"
