"""The site of a long history: every planted step at its commit with its sign, from nothing and after one new commit."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ci import baseline as baselines
from ci.errors import InputError, UsageError
from ci.history import assets, branch, site
from ci.history.series import all_series
from ci.history.store import read_history
from tests.history import generate


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[generate.Planted]]:
    folder = tmp_path_factory.mktemp("tree") / "results"
    return folder, generate.write(folder, commits=700, rows=24, devices=2, steps=6, per_benchmark=6)


def found_steps(folder: Path, cache: Path) -> set[tuple[str, str, int, str, bool]]:
    history = read_history([folder], cache / "results")
    return {
        (series.line.machine, series.benchmark.name, series.index, commit, change.worse)
        for series in all_series(history, cache / "steps")
        for change in series.changes()
        for commit, revision in history.revisions.items()
        if revision == change.first
    }


def planted_steps(planted: list[generate.Planted]) -> set[tuple[str, str, int, str, bool]]:
    """As found: a latency that grows is worse, a throughput that grows is better."""
    made = set()
    for step in planted:
        lower = int(step.benchmark.removeprefix("bench_made.Suite")[:2]) % 4 == 3
        made.add((step.device, step.benchmark, step.index, generate.commit_hash(step.commit), (step.factor > 1) == lower))
    return made


def test_every_planted_step_is_found_at_its_commit_with_its_sign(tree: tuple[Path, list[generate.Planted]], tmp_path: Path) -> None:
    folder, planted = tree
    wanted = planted_steps(planted)
    assert len(wanted) == 12
    assert {worse for *_, worse in wanted} == {True, False}
    assert found_steps(folder, tmp_path) == wanted


def test_one_new_commit_gives_the_site_that_a_build_from_nothing_gives(
    tree: tuple[Path, list[generate.Planted]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    shutil.copytree(tree[0], folder)
    newest = [path for path in folder.glob("*/*.json") if path.name.startswith(generate.commit_hash(699)[:8])]
    held = {path: path.read_bytes() for path in newest}
    for path in newest:
        path.unlink()
    site.build([folder], tmp_path / "grown", project="made", now=None)
    for path, content in held.items():
        path.write_bytes(content)
    read: list[Path] = []
    from ci.history import store

    original = store._read_file
    monkeypatch.setattr(store, "_read_file", lambda path, *rest: (read.append(path), original(path, *rest))[1])
    site.build([folder], tmp_path / "grown", project="made")
    assert sorted(read) == sorted(newest), "only what is new is read"
    site.build([folder], tmp_path / "fresh", project="made")
    for path in sorted((tmp_path / "fresh").rglob("*")):
        if path.is_file() and path.name not in ("info.json", "index.html", "regressions.xml"):
            assert path.read_bytes() == (tmp_path / "grown" / path.relative_to(tmp_path / "fresh")).read_bytes(), path.name


def test_a_changed_file_and_other_benchmarks_are_read_again(tree: tuple[Path, list[generate.Planted]], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    shutil.copytree(tree[0], folder)
    name = "bench_made.Suite00.track_rate"
    first = read_history([folder], tmp_path / "cache").lines[0].values[name][-1, 0]
    path = next(path for path in folder.glob("Device_0/*.json") if path.name.startswith(generate.commit_hash(699)[:8]))
    data = json.loads(path.read_text(encoding="utf-8"))
    data["results"][name][0][0] = first * 2
    path.write_text(json.dumps(data), encoding="utf-8")
    assert read_history([folder], tmp_path / "cache").lines[0].values[name][-1, 0] == first * 2
    benchmarks = json.loads((folder / "benchmarks.json").read_text(encoding="utf-8"))
    benchmarks[name]["version"] = "2"
    (folder / "benchmarks.json").write_text(json.dumps(benchmarks), encoding="utf-8")
    assert name not in read_history([folder], tmp_path / "cache").lines[0].values, "results of another version are another measurement"


def test_the_accepted_runs_of_the_h200_make_one_commit(root: Path, tmp_path: Path) -> None:
    runs = sorted((root / "baselines" / "asv").iterdir())
    told = site.build(runs, tmp_path / "html", project="rapid_llm")
    measured = len(baselines.load(root / "baselines" / "NVIDIA_H200.json").rows)
    assert told.startswith(f"1 commits, {measured} series on 1 lines")
    page = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    assert "Decode read, 8-bit (dequant)" in page
    assert "KV write, decode (launch)" in page


def test_a_long_foreign_history_is_shown(shared_data: Path, tmp_path: Path) -> None:
    """The bad runner falls and comes back, the regression of one device lasts, and the third device improved."""
    site.build([shared_data / "thematrix_gpu_asv" / "results"], tmp_path / "html", project="thematrix")
    page = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    index = json.loads((tmp_path / "html" / "index.json").read_text(encoding="utf-8"))
    assert len(index["machines"]) >= 10
    regressions = json.loads((tmp_path / "html" / "regressions.json").read_text(encoding="utf-8"))["regressions"]
    slower = [item for item in regressions if item[2].get("machine", "").startswith("gpu01") and "gflopss" in item[0]]
    assert len(slower) >= 5, "the lasting regression of gpu01"
    assert all(after < before for item in slower for _, _, before, after in item[6])
    assert "slower" in page
    assert "faster" in page


def test_what_is_no_site_is_not_replaced(tree: tuple[Path, list[generate.Planted]], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="no site"):
        site.build([tree[0]], tmp_path / "mine", project="made")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_direction_that_nothing_tells_is_refused(tmp_path: Path) -> None:
    benchmarks = {"b.track_x": {"name": "b.track_x", "params": [], "param_names": [], "unit": "score", "type": "track", "version": "1"}}
    (tmp_path / "benchmarks.json").write_text(json.dumps(benchmarks), encoding="utf-8")
    with pytest.raises(InputError, match=r"which way is better for b\.track_x"):
        site.build([tmp_path], tmp_path / "html", project="made")


def test_a_broken_file_is_named_and_left_out(tree: tuple[Path, list[generate.Planted]], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    shutil.copytree(tree[0], folder)
    (folder / "Device_0" / "broken.json").write_text('{"version": 2, "commit_hash": ', encoding="utf-8")
    site.build([folder], tmp_path / "html", project="made")
    assert "broken.json is no asv result" in (tmp_path / "html" / "index.html").read_text(encoding="utf-8")


def test_another_asv_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(assets._TEXT, "asv.js", [("what is not there", "")])
    with pytest.raises(UsageError, match=r"install asv 0\.6\.6"):
        assets.write(tmp_path)


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@example.invalid", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_runs_are_added_to_the_history_branch_whoever_pushes_meanwhile(root: Path, tmp_path: Path) -> None:
    remote, here = tmp_path / "remote.git", tmp_path / "here"
    git(tmp_path, "init", "-q", "--bare", "-b", "main", str(remote))
    git(tmp_path, "clone", "-q", str(remote), str(here))
    (here / "code").write_text("code", encoding="utf-8")
    git(here, "add", ".")
    git(here, "commit", "-qm", "code")
    git(here, "push", "-q", "origin", "HEAD:main")
    runs = [root / "docs" / "data" / "baseline-t1" / "runs" / name for name in ("boot1-1", "boot2-1")]
    assert "3e3e3654d818 on NVIDIA_H200" in branch.add(here, runs[:1], branch="history", remote="origin")
    listed = git(here, "ls-tree", "-r", "--name-only", "origin/history").splitlines() if git(here, "fetch", "-q", "origin") == "" else []
    assert "NVIDIA_H200/results/benchmarks.json" in listed
    assert "code" not in listed
    assert (here / ".asv" / "history" / "NVIDIA_H200" / "results" / "benchmarks.json").is_file()
    assert "laid out" in branch.add(here, [], branch="history", remote="origin")
    assert git(here, "status", "--porcelain") in ("", "?? .asv/")
    assert git(here, "worktree", "list").count("\n") == 0
    assert "has these results already" in branch.add(here, runs[:1], branch="history", remote="origin")
    branch.add(here, runs[1:], branch="history", remote="origin")
    git(here, "fetch", "-q", "origin")
    assert git(here, "rev-list", "--count", "origin/history") == "2"


def test_a_remote_that_cannot_be_asked_gets_no_new_history(root: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main", str(tmp_path / "here"))
    here = tmp_path / "here"
    git(here, "commit", "-q", "--allow-empty", "-m", "one")
    with pytest.raises(UsageError, match="cannot be asked"):
        branch.add(here, [root / "docs" / "data" / "baseline-t1" / "runs" / "boot1-1"], branch="history", remote=str(tmp_path / "gone"))


def test_the_page_on_long_histories_has_the_figures_of_its_raw_output(root: Path) -> None:
    page = (root / "docs" / "history-site.md").read_text(encoding="utf-8")
    raw = (root / "docs" / "data" / "scale.txt").read_text(encoding="utf-8")
    for figure in ("0.48 s", "2.69 s", "0.40 MB", "33.8 s", "442 MiB", "12.7 s", "8.3 s", "24 of 24", "12 of 12"):
        assert figure in page
        assert figure in raw
