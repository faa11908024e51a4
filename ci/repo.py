"""What the gate asks git: commits, the merge-base, the baseline on the base branch, and what a change touches."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci.errors import UsageError, one_line

if TYPE_CHECKING:
    import git

BASE_BRANCHES = ("main", "origin/main")

REVIEWED = {
    "baselines/": "a baseline or its schema",
    "asv_bench/": "the instrument or a suite",
    "ci/": "the gate itself",
    "asv.conf.json": "asv's configuration",
    "constraints": "pinned versions",
    ".github/": "the workflows that run the gate",
    "Makefile": "the commands of the gate",
    "pyproject.toml": "the packages that the gate is installed with",
}
"""Paths whose change is shown for review: with them a change could move its own verdict."""

PRODUCT = ("rapid_llm/", "tests/", "docs/")
"""Paths that the gate measures or never runs. All others are shown too: a module or folder at the top could stand in for a package."""

_MAX_NAMED_FILES = 5


def review_lines(changed: Sequence[str]) -> list[str]:
    """What a reviewer has to look at in a change of these files, one sentence for each kind.

    Args:
        changed: Paths within the repository; of a renamed file both.
    """
    kinds: dict[str, list[str]] = {}
    for path in dict.fromkeys(changed):
        what = next((what for prefix, what in REVIEWED.items() if path.startswith(prefix)), None)
        if what is None and not path.startswith(PRODUCT) and not ("/" not in path and path.endswith((".md", "LICENSE"))):
            what = "files that are neither product, tests nor docs"
        if what is not None:
            kinds.setdefault(what, []).append(path)
    lines = []
    for what, files in kinds.items():
        lines.append(f"The change touches {what}: {_some(files)}.")
    return lines


def _some(files: Sequence[str]) -> str:
    """The first of some files, and how many more there are."""
    rest = len(files) - _MAX_NAMED_FILES
    return f"{', '.join(files[:_MAX_NAMED_FILES])}{f' and {rest} more' if rest > 0 else ''}"


@dataclass(frozen=True)
class Commit:
    """A commit and what to call it."""

    sha: str
    label: str

    @property
    def short(self) -> str:
        return self.sha[:12]


class Repository:
    """The checkout that the gate works in."""

    def __init__(self, path: Path) -> None:
        """Opens the repository that holds `path`.

        Raises:
            UsageError: git is missing, this is no repository, or git refuses it.
        """
        try:
            import git as module
        except ImportError as error:
            raise UsageError(f"The gate needs git and cannot use it ({str(error).splitlines()[0]}): install git.") from error
        self._git: Any = module
        try:
            self.repo: git.Repo = module.Repo(path, search_parent_directories=True)
        except (module.InvalidGitRepositoryError, module.NoSuchPathError) as error:
            raise UsageError(f"{path} is not in a git repository: the gate compares commits, run it in a clone.") from error
        if self.repo.working_tree_dir is None:
            raise UsageError(f"{path} is a bare repository: run the gate in a clone with a working tree.")
        self.root = Path(self.repo.working_tree_dir)
        try:
            self.repo.git.rev_parse("--git-dir")
        except module.GitCommandError as error:
            if "dubious ownership" in str(error):
                raise UsageError(
                    f"git refuses {self.root} because another user owns it: run `git config --global --add safe.directory {self.root}`."
                ) from error
            raise UsageError(f"git cannot use {self.root} ({str(error.stderr).strip()}): mend the repository.") from error

    def commit(self, name: str) -> Commit:
        """The commit that a name stands for.

        Raises:
            UsageError: There is none.
        """
        try:
            return Commit(self.repo.commit(name).hexsha, name)
        except (self._git.BadName, self._git.GitCommandError, ValueError, IndexError) as error:
            hint = "make a first commit" if not self.repo.head.is_valid() else "fetch it, or name another with --base"
            raise UsageError(f"{name!r} is no commit of {self.root}: {hint}.") from error

    def head(self) -> Commit:
        """The commit under test, named by its branch where there is one."""
        sha = self.commit("HEAD").sha
        branch = os.environ.get("GITHUB_HEAD_REF") or ("" if self.repo.head.is_detached else self.repo.active_branch.name)
        return Commit(sha, branch or "HEAD")

    def base(self, name: str | None) -> Commit:
        """The tip of the base branch: `name`, or the first of main and origin/main that exists.

        Raises:
            UsageError: None of them exists.
        """
        if name is not None:
            return self.commit(name)
        for candidate in BASE_BRANCHES:
            try:
                return self.commit(candidate)
            except UsageError:
                continue
        raise UsageError(
            f"There is no branch {' or '.join(BASE_BRANCHES)} in {self.root}: run `git fetch origin main`, or name the base with --base."
        )

    def merge_base(self, base: Commit, head: Commit) -> Commit:
        """Where the change under test left the base branch.

        Raises:
            UsageError: The history that is here does not reach it.
        """
        try:
            found = self.repo.merge_base(base.sha, head.sha)
        except self._git.GitCommandError as error:
            raise UsageError(
                f"git could not find a merge-base of {base.label} and {head.label}: {str(error).splitlines()[-1].strip()}."
            ) from error
        if not found:
            cure = (
                "run `git fetch --unshallow` (in GitHub Actions: fetch-depth: 0)"
                if self.is_shallow
                else "name a related commit with --base"
            )
            raise UsageError(f"{base.label} and {head.label} have no common commit in {self.root}: {cure}.")
        return Commit(found[0].hexsha, f"merge-base with {base.label}")

    def first_parent_path(self, good: Commit, bad: Commit) -> list[Commit]:
        """The commits from `good` to `bad`, both included, along first parents, in the order of history; their labels are their subjects.

        Raises:
            UsageError: They are the same, or `good` is not on the path.
        """
        if good.sha == bad.sha:
            raise UsageError(f"{good.label} and {bad.label} are the same commit {good.short}: name two ends.")
        listed = self.repo.git.rev_list("--first-parent", "--reverse", "--parents", f"{good.sha}..{bad.sha}").splitlines()
        if not listed or good.sha not in listed[0].split()[1:2]:
            cure = "run `git fetch --unshallow`" if self.is_shallow else f"name a commit that `git log --first-parent {bad.short}` shows"
            raise UsageError(f"{good.label} ({good.short}) is not on the first-parent path to {bad.label} ({bad.short}): {cure}.")
        shas = [good.sha, *(line.split()[0] for line in listed)]
        return [Commit(sha, one_line(str(self.repo.commit(sha).summary))) for sha in shas]

    @property
    def is_shallow(self) -> bool:
        return bool(self.repo.git.rev_parse("--is-shallow-repository") == "true")

    def read(self, commit: Commit, path: str) -> bytes | None:
        """Content of a file in a commit, or None if it has none there."""
        try:
            blob = self.repo.commit(commit.sha).tree / path
        except KeyError:
            return None
        return bytes(blob.data_stream.read())

    def export(self, commit: Commit, folder: str, target: Path) -> None:
        """Writes one folder of a commit's tree under `target`.

        Raises:
            UsageError: The commit has no such folder.
        """
        buffer = io.BytesIO()
        try:
            self.repo.archive(buffer, commit.sha, path=folder)
        except self._git.GitCommandError as error:
            raise UsageError(f"{commit.label} ({commit.short}) has no folder {folder}: name a commit of this project.") from error
        buffer.seek(0)
        with tarfile.open(fileobj=buffer) as archive:
            archive.extractall(target, filter="data")

    def empty_commit_on(self, commit: Commit) -> Commit:
        """A commit with the same tree on top of `commit`, for a comparison of a commit with itself; no branch points to it.

        It is made from the commit's own date, so that the same one comes out each time and an interrupted run can go on.
        """
        parent = self.repo.commit(commit.sha)
        when = f"{parent.committed_date} +0000"
        identity = {"NAME": "rapid_llm gate", "EMAIL": "gate@rapid-llm.invalid", "DATE": when}
        env = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in identity.items()}
        with self.repo.git.custom_environment(**env):
            sha = self.repo.git.commit_tree(parent.tree.hexsha, p=parent.hexsha, m=f"A/A: {commit.short} against itself")
        return Commit(sha, f"{commit.label} again")

    def review_notices(self, base: Commit, head: Commit) -> list[str]:
        """What a reviewer has to look at: changed baselines, instrument, gate and configuration, and what is not committed."""
        changed = []
        if base.sha != head.sha:
            # Without renames both names are listed; -z keeps names as they are.
            changed = [path for path in self.repo.git.diff("--name-only", "--no-renames", "-z", base.sha, head.sha).split("\0") if path]
        notices = review_lines(changed)
        gone = self.repo.git.diff(
            "--name-only", "--no-renames", "--diff-filter=D", base.sha, head.sha, "--", "asv_bench/bench_*.py"
        ).splitlines()
        if gone:
            notices.append(f"The change deletes suites, and their rows are not measured any more: {', '.join(gone)}.")
        dirty = [line[3:] for line in self.repo.git.status("--porcelain").splitlines()]
        product = [path for path in dirty if path.startswith("rapid_llm/")]
        if product:
            notices.append(f"Uncommitted changes are not measured: {_some(product)}. Commit them.")
        instrument = [path for path in dirty if path.startswith(("asv_bench/", "ci/", "asv.conf.json"))]
        if instrument:
            notices.append(f"The instrument has uncommitted changes, which are in effect: {_some(instrument)}.")
        return notices
