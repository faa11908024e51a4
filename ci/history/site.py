"""Builds the history site of results trees."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ci.errors import UsageError
from ci.history import assets, frontend, pages
from ci.history.series import all_series
from ci.history.store import read_history

CACHE = "cache"
_MARK = "info.json"
"""A folder that has it is a site, and may be replaced."""


def commit_order(repository: Path, branch: str) -> dict[str, int]:
    """Place of each commit of a branch in its history, the oldest 0.

    Raises:
        UsageError: git cannot list the branch.
    """
    command = ["git", "rev-list", "--date-order", "--reverse", branch, "--"]
    try:
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise UsageError(
            f"git cannot list the commits of {branch} in {repository} ({said.strip().splitlines()[-1]}): fetch the branch."
        ) from error
    return {commit: index for index, commit in enumerate(done.stdout.split())}


def _tree(folder: Path) -> Path:
    """The results folder in a kept run, or the folder itself."""
    inner = folder / "results"
    return inner if (inner / "benchmarks.json").is_file() else folder


def build(
    folders: Sequence[Path],
    output: Path,
    *,
    project: str,
    commit_url: str = "",
    repository: Path | None = None,
    branch: str = "main",
    reports: Sequence[Path] = (),
    cache: Path | None = None,
    now: datetime.datetime | None = None,
) -> str:
    """Writes the site of results trees into `output`, which is replaced as a whole.

    Args:
        folders: asv results folders, or kept runs (with `results/` and `records/`).
        commit_url: Address of a commit without its hash; "" links nothing.
        repository: Checkout whose `branch` orders the commits; commits that it lacks are left out. By date where None.
        reports: Folders of gate reports to copy and link.
        cache: Folder of what can be kept between two builds (default: beside `output`).
    Returns:
        What was built, in a few words.
    Raises:
        UsageError: There is nothing to show, or `output` is no site.
        InputError: A tree cannot be read.
    """
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not (output / _MARK).is_file())):
        raise UsageError(f"{output} is not empty and no site: name another folder, it would be replaced.")
    now = now or datetime.datetime.now(datetime.timezone.utc)
    cache = cache or output.with_name(f"{output.name}-{CACHE}")
    trees = [_tree(folder) for folder in folders]
    order = None if repository is None else commit_order(repository, branch)
    history = read_history(trees, cache / "results.msgpack", order)
    if not history.lines:
        raise UsageError(
            f"{', '.join(map(str, folders))} hold no result of a commit that can be shown: {'; '.join(history.problems[:3]) or 'empty'}."
        )
    found = all_series(history, cache / "steps.msgpack")
    regressions = frontend.regressions(found)
    records = [tree.parent / "records" for tree in trees if (tree.parent / "records").is_dir()]
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        target = Path(scratch) / "site"
        target.mkdir()
        assets.write(target)
        frontend.write_graphs(history, target)
        frontend.write_list(history, found, target)
        frontend.write_regressions(history, regressions, target, project, commit_url)
        frontend.write_index(history, target, project, commit_url, now)
        front = pages.Front(history, found, pages.sections_of(records), commit_url)
        text = pages.render(
            front,
            project=project,
            reports=pages.copy_reports(reports, target),
            num_regressions=len(regressions),
            now=now,
            problems=history.problems,
        )
        (target / "index.html").write_text(text, encoding="utf-8", newline="\n")
        _replace(target, output)
    changes = sum(len(series.levels) - 1 for series in found)
    size = f"{len(history.revisions)} commits, {len(found)} series on {len(history.lines)} lines"
    return f"{size}, {changes} changes, {len(regressions)} slower than before"


def _replace(made: Path, output: Path) -> None:
    """Puts the new site in the old one's place; a reader sees one or the other."""
    if output.exists():
        old = made.with_name("old")
        os.replace(output, old)
        os.replace(made, output)
        shutil.rmtree(old)
    else:
        os.replace(made, output)
