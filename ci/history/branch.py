"""The branch that holds the history: adds kept runs, pushes it, and lays it out for the site."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ci.errors import InputError, UsageError
from ci.merge import load_kept

PLACE = ".asv/history"
_TRIES = 5
_START = "refs/heads/benchmark-history-start"
"""Where the first commit of a new history is made; gone afterwards."""
_IDENTITY = ["-c", "user.name=rapid_llm benchmarks", "-c", "user.email=benchmarks@rapid-llm.invalid"]


def _git(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise UsageError(f"git {arguments[0]} failed in {folder} ({said[-1]}): mend the repository or its remote, and run this again.")
    return done


def add(root: Path, runs: Sequence[Path], *, branch: str, remote: str) -> str:
    """Commits the runs to `branch` of `remote` and pushes; somebody else's push in between is fetched and built upon.

    The branch holds one kept run a device: its results tree with every commit, and the records of the newest runs. It is laid out in
    ``.asv/history`` of `root`, where `make site` finds it; without runs that is all that is done.

    Raises:
        InputError: A folder is no kept run of one commit.
        UsageError: git refused.
    """
    loaded = [(load_kept(folder), folder) for folder in runs]
    with tempfile.TemporaryDirectory(prefix="rapid-llm-history-") as scratch:
        work = Path(scratch) / "history"
        _git(root, "worktree", "add", "--detach", "--no-checkout", str(work), "HEAD")
        try:
            for _ in range(_TRIES):
                _start(work, branch, remote)
                for result, folder in loaded:
                    _copy(folder, work / result.machine)
                _git(work, "add", "--all", ".")
                if _git(work, "diff", "--cached", "--quiet", check=False).returncode == 0:
                    _lay_out(work, root)
                    return f"{branch} has these results already" if runs else f"{branch} of {remote}: laid out in {PLACE}"
                told = ", ".join(f"{result.commit[:12]} on {result.machine}" for result, _ in loaded)
                _git(work, *_IDENTITY, "commit", "--quiet", "-m", f"Results of {told}")
                if _git(work, "push", "--quiet", remote, f"HEAD:refs/heads/{branch}", check=False).returncode == 0:
                    _lay_out(work, root)
                    return f"{branch}: {told}"
        finally:
            _git(root, "worktree", "remove", "--force", str(work), check=False)
            _git(root, "update-ref", "-d", _START, check=False)
    raise UsageError(f"{remote} did not take {branch} in {_TRIES} tries: somebody pushes at the same time, or the push is not allowed.")


def _lay_out(work: Path, root: Path) -> None:
    """Puts the branch's folders into the checkout, in the place of what an earlier call put there."""
    place = root / PLACE
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(work, place, ignore=shutil.ignore_patterns(".git"), symlinks=True)


def _start(work: Path, branch: str, remote: str) -> None:
    """An empty work tree on the branch as the remote has it, or on nothing."""
    if _git(work, "fetch", "--quiet", remote, f"refs/heads/{branch}", check=False).returncode == 0:
        _git(work, "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD")
    elif _git(work, "ls-remote", "--exit-code", remote, f"refs/heads/{branch}", check=False).returncode == 2:
        _git(work, "update-ref", "-d", _START, check=False)
        _git(work, "symbolic-ref", "HEAD", _START)
        _git(work, "read-tree", "--empty")
    else:
        raise UsageError(f"{remote} cannot be asked for {branch}: check the remote, its address and the permission to read it.")


def _copy(run: Path, target: Path) -> None:
    """Adds a run's results to a device's tree; its records replace those of earlier runs, whose classes they carry on."""
    if target.is_symlink():
        raise InputError(f"{target.name} in the history branch is a link: remove it.")
    for path in sorted((run / "results").rglob("*.json")):
        place = target / path.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    shutil.rmtree(target / "records", ignore_errors=True)
    for path in sorted((run / "records").rglob("*.json")):
        place = target / path.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
