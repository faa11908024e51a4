"""Runs of one commit become one run, and a gate's shards one verdict, or are refused with the reason."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ci import baseline as baselines
from ci import gate, lost_rows, run
from ci.compare import compare_baseline
from ci.device import Device
from ci.errors import GateError, InputError, UsageError
from ci.gate import Options
from ci.merge import load_kept, merge_runs
from ci.model import GateResult
from ci.run import RunPlan
from ci.shards import FILE_NAME, Share, measure, read, verdict
from ci.shards import _runs_of as runs_of

COMMIT = "3e3e3654d8185cb17ecef74835389b7a4fc7fc55"


@pytest.fixture
def kept(tmp_path: Path, root: Path) -> Callable[[str], Path]:
    """Copies of the accepted H200 runs."""

    def copy(name: str) -> Path:
        target = tmp_path / "kept" / name
        shutil.copytree(root / "docs" / "data" / "baseline-t1" / "runs" / name, target)
        return target

    return copy


def change_records(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    for path in folder.glob("records/*/*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        change(data)
        path.write_text(json.dumps(data), encoding="utf-8")


def test_a_merged_run_has_the_processes_and_samples_of_all(kept: Callable[[str], Path], tmp_path: Path) -> None:
    parts = [kept("boot1-1"), kept("boot2-1")]
    merge_runs(parts, tmp_path / "merged")
    merged, *single = [load_kept(folder) for folder in (tmp_path / "merged", *parts)]
    assert len(merged.processes) == 6
    measured = 0
    for key, row in merged.rows.items():
        here = [run.rows[key] for run in single]
        assert row.state == here[0].state, key
        if row.state == "measured":
            measured += 1
            assert row.samples == (*here[0].samples, *here[1].samples)
            assert len(row.records) == 6
    assert measured > 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data["environment"].update(driver="570.1"), "driver '580.159.04'"),
        (lambda data: data["environment"]["device"].update(name="NVIDIA H100"), "device.name 'NVIDIA H200'"),
        (lambda data: data["environment"].update(torch="2.12.0"), "torch"),
        (lambda data: data.update(protocol="another"), "the protocol"),
    ],
)
def test_runs_that_differ_are_refused_with_both_values(
    kept: Callable[[str], Path], tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    parts = [kept("boot1-1"), kept("boot2-1")]
    change_records(parts[1], change)
    with pytest.raises(InputError, match="measure both alike") as refusal:
        merge_runs(parts, tmp_path / "merged")
    assert says in str(refusal.value)
    assert not (tmp_path / "merged").exists()


def test_runs_of_two_commits_are_refused(kept: Callable[[str], Path], tmp_path: Path) -> None:
    parts = [kept("boot1-1"), kept("boot2-1")]
    (file,) = parts[1].glob("results/NVIDIA_H200/3e3e*.json")
    other = file.with_name(file.name.replace(COMMIT[:8], "f" * 8))
    other.write_text(file.read_text(encoding="utf-8").replace(COMMIT, "f" * 40), encoding="utf-8")
    file.unlink()
    change_records(parts[1], lambda data: data.update(commit="f" * 40))
    with pytest.raises(InputError, match="only runs of one commit"):
        merge_runs(parts, tmp_path / "merged")


def test_a_run_is_merged_once(kept: Callable[[str], Path], tmp_path: Path) -> None:
    part = kept("boot1-1")
    with pytest.raises(InputError, match="a run is merged once"):
        merge_runs([part, part], tmp_path / "merged")


def test_another_state_of_a_suite_is_refused(kept: Callable[[str], Path], tmp_path: Path) -> None:
    parts = [kept("boot1-1"), kept("boot2-1")]
    (file,) = parts[1].glob("results/NVIDIA_H200/3e3e*.json")
    file.write_text(file.read_text(encoding="utf-8").replace('"t1.p1.w1"', '"t2.p1.w1"'), encoding="utf-8")
    with pytest.raises(InputError, match="one state of the suites"):
        merge_runs(parts, tmp_path / "merged")


# Shards of a gate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "total"), [(1, 12), (2, 12), (5, 12), (7, 13)])
def test_shares_are_a_whole(count: int, total: int) -> None:
    shares = [Share(index, count).of(total) for index in range(1, count + 1)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no part of a whole"):
        Share.parse(text)


def test_two_shards_measure_one_run_each() -> None:
    assert [runs_of(Share(index, 2), 3) for index in (1, 2)] == [{1: 3}, {2: 3}]
    assert [runs_of(Share(index, 6), 3) for index in range(1, 7)] == [{1: 1}, {1: 1}, {1: 1}, {2: 1}, {2: 1}, {2: 1}]
    assert runs_of(Share(1, 1), 3) == {1: 3, 2: 3}
    with pytest.raises(UsageError, match="cannot be dealt out"):
        runs_of(Share(1, 3), 3)


@pytest.fixture
def repository(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose main has the H200's baseline, and whose suites, which are told to be the same at both commits, are not there."""
    monkeypatch.setattr(lost_rows, "suites", lambda repository, base: lost_rows.Suites({}, {}))
    path = tmp_path / "repository"
    (path / "baselines").mkdir(parents=True)
    shutil.copy(root / "docs" / "data" / "baseline-t1" / "NVIDIA_H200.json", path / "baselines")
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", *command], cwd=path, check=True)
    return path


def shard(folder: Path, kept: Path, repository: Path, **fields: Any) -> Path:
    tip = subprocess.run(["git", "rev-parse", "main"], cwd=repository, check=True, capture_output=True, text=True).stdout.strip()
    told = {
        "schema": "rapid_llm/shard/1",
        "index": 1,
        "count": 2,
        "mode": "baseline",
        "device": "NVIDIA H200",
        "tip": tip,
        "base": tip,
        "head": COMMIT,
        "processes": 3,
        "select": None,
        "notices": [],
    }
    told.update(fields)
    folder.mkdir(parents=True)
    (folder / FILE_NAME).write_text(json.dumps(told), encoding="utf-8")
    shutil.copytree(kept, folder / "runs" / str(told["index"]))
    return folder


def outcome(result: GateResult) -> list[tuple[str, str, float | None]]:
    return [(str(row.key), row.verdict.value, row.effect) for row in result.rows]


def test_two_shards_give_the_verdict_of_one_gate(kept: Callable[[str], Path], repository: Path, tmp_path: Path, root: Path) -> None:
    parts = [kept("boot1-1"), kept("boot3-1")]
    folders = [shard(tmp_path / f"s{index}", part, repository, index=index) for index, part in enumerate(parts, 1)]
    result = verdict(repository, folders[::-1], tmp_path / "report")
    baseline = baselines.load((root / "docs" / "data" / "baseline-t1" / "NVIDIA_H200.json").read_bytes())
    whole = compare_baseline([load_kept(part) for part in parts], baseline)
    assert outcome(result) == outcome(whole)
    assert (result.verdict, result.exit_code, result.runs) == (whole.verdict, whole.exit_code, 2)
    assert "Measured in 2 shards" in result.notices[-1]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"head": "e" * 40}, "no shards of one gate: head"),
        ({"device": "NVIDIA H100"}, "no shards of one gate: device"),
        ({"index": 1}, "1, 1 came"),
        ({"index": 3, "count": 3}, "no shards of one gate: count"),
        ({"schema": "else"}, "does not follow"),
    ],
)
def test_what_is_no_whole_gate_is_refused(
    kept: Callable[[str], Path], repository: Path, tmp_path: Path, second: dict[str, Any], says: str
) -> None:
    folders = [
        shard(tmp_path / "s1", kept("boot1-1"), repository),
        shard(tmp_path / "s2", kept("boot2-1"), repository, **{"index": 2, **second}),
    ]
    with pytest.raises(GateError) as refusal:
        verdict(repository, folders, tmp_path / "report")
    assert says in str(refusal.value)


def test_a_missing_shard_never_passes(kept: Callable[[str], Path], repository: Path, tmp_path: Path) -> None:
    folder = shard(tmp_path / "s1", kept("boot1-1"), repository)
    with pytest.raises(InputError, match="shards 1 to 2, and 1 came"):
        verdict(repository, [folder], tmp_path / "report")
    with pytest.raises(InputError, match="is no shard of a gate"):
        verdict(repository, [folder, tmp_path], tmp_path / "report")


def test_a_shard_measures_its_share_and_says_what_it_is_part_of(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[RunPlan] = []
    kept: list[Path] = []
    monkeypatch.setattr(gate, "detect", lambda: Device("NVIDIA H200", "cuda"))
    monkeypatch.setattr(run, "run_asv", lambda places, plan, console: plans.append(plan))
    monkeypatch.setattr(run, "load", lambda places, device, commit: None)
    monkeypatch.setattr(run, "keep", lambda places, device, commits, directory: kept.append(directory))
    console = Console(file=io.StringIO())
    for index in (1, 2):
        measure(repository, Options(tmp_path / f"s{index}"), Share(index, 2), console)
    assert [plan.rounds for plan in plans] == [3, 3]
    assert [path.relative_to(tmp_path).as_posix() for path in kept] == ["s1/runs/1", "s2/runs/2"]
    told = [read(tmp_path / f"s{index}") for index in (1, 2)]
    assert [shard.index for shard in told] == [1, 2]
    assert {(shard.mode, shard.device, shard.count, shard.head) for shard in told} == {("baseline", "NVIDIA H200", 2, told[0].tip)}

    plans.clear()
    measure(repository, Options(tmp_path / "pairs", ignore_baseline=True, pairs=13, resume=False), Share(1, 2), console)
    assert [(len(plan.commits), plan.rounds) for plan in plans] == [(2, 7)]
    assert read(tmp_path / "pairs").mode == "aa"


def test_a_folder_that_is_no_shard_is_left_alone(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not empty and no shard"):
        measure(repository, Options(tmp_path / "mine"), Share(1, 2), Console(file=io.StringIO()))
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_pairs_of_two_shards_are_the_pairs_of_one_comparison(kept: Callable[[str], Path], repository: Path, tmp_path: Path) -> None:
    """Pair i is process i of both commits, shard by shard."""
    folders, other = [], "f" * 40
    for index, name in enumerate(("boot1-1", "boot2-1"), 1):
        part = kept(name)
        (file,) = part.glob("results/NVIDIA_H200/3e3e*.json")
        text = file.read_text(encoding="utf-8").replace(COMMIT, other)
        file.with_name(file.name.replace(COMMIT[:8], other[:8])).write_text(text, encoding="utf-8")
        for record in sorted(part.glob("records/*/*.json")):
            copy = record.parent.parent / other[:12] / f"other-{record.name}"
            copy.parent.mkdir(exist_ok=True)
            data = json.loads(record.read_text(encoding="utf-8"))
            data.update(commit=other, process=copy.stem)
            copy.write_text(json.dumps(data), encoding="utf-8")
        folder = shard(tmp_path / f"s{index}", part, repository, index=index, mode="ab", base=other, processes=6)
        (folder / "runs" / str(index)).rename(folder / "runs" / "pairs")
        folders.append(folder)
    result = verdict(repository, folders, tmp_path / "report")
    assert result.mode == "ab"
    compared = [row for row in result.rows if row.num_pairs]
    assert len(compared) > 20
    assert all(row.num_pairs == 6 and row.effect == pytest.approx(0.0, abs=1e-12) for row in compared), "a commit against its own numbers"
