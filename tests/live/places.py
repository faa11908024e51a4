"""Clones of the checkout in which an action works, so that it changes nothing here."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ci.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
BASE_BRANCH = "main"


@dataclass(frozen=True)
class Clone:
    """A clone with branches of its own; `main` is the commit that is measured."""

    path: Path

    def git(self, *arguments: str) -> str:
        """What git prints.

        Raises:
            UsageError: git refuses; the message has its words.
        """
        done = subprocess.run(["git", *arguments], cwd=self.path, capture_output=True, text=True)
        if done.returncode:
            raise UsageError(f"git {arguments[0]} failed in {self.path}: {done.stderr.strip()}; mend the clone, or name another --work.")
        return done.stdout.strip()

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD")

    def commit(self, message: str) -> str:
        """Commits what the clone's tree holds, nothing included; returns the hash."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.head

    def branch(self, name: str, message: str, plant: Callable[[], None] = lambda: None) -> str:
        """Goes to a branch that is one commit on `main`, and makes it where there is none yet; returns the commit.

        A branch that is there stays: an action that goes on measures the same commit.

        Args:
            name: Of the branch.
            message: Of the commit.
            plant: Changes the clone's tree before the commit.
        """
        if name in self.git("branch", "--format=%(refname:short)").splitlines():
            self.git("checkout", "-q", "-f", name)
            return self.head
        self.git("checkout", "-q", "-f", "-b", name, BASE_BRANCH)
        plant()
        return self.commit(message)

    def checkout_at(self, target: Path, commit: str = BASE_BRANCH) -> Path:
        """One more checkout of a commit, in a folder of its own; one that is there already is brought to the commit."""
        if target.exists():
            Clone(target).git("checkout", "-q", "-f", "--detach", self.git("rev-parse", commit))
        else:
            self.git("worktree", "add", "-q", "--force", "--detach", str(target), commit)
        return target


def changed_files(root: Path) -> list[str]:
    """Tracked files that differ from HEAD: no action measures them."""
    done = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=root, capture_output=True, text=True)
    return [line[3:] for line in done.stdout.splitlines()]


def clone(root: Path, target: Path) -> Clone:
    """A clone of HEAD at `target`; one that is there already and has this commit on `main` is used again.

    Raises:
        UsageError: git refuses, or the clone that is there is of another commit.
    """
    made = Clone(target)
    head = Clone(root).head
    if (target / ".git").is_dir():
        if made.git("rev-parse", BASE_BRANCH) != head:
            raise UsageError(f"{target} is a clone of another commit than {head[:12]}: name another --work.")
        made.git("checkout", "-q", "-f", BASE_BRANCH)
        return made
    target.parent.mkdir(parents=True, exist_ok=True)
    Clone(root).git("clone", "-q", str(root), str(target))
    made.git("checkout", "-q", "-B", BASE_BRANCH, head)
    made.git("config", "user.name", "live")
    made.git("config", "user.email", "live@example.invalid")
    return made


@contextlib.contextmanager
def workplace(work: Path | None) -> Iterator[Path]:
    """The folder that the clones are in: the one that was named, which stays, or a temporary one."""
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield work.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="rapid-llm-live-") as scratch:
        yield Path(scratch)
