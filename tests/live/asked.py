"""What an action is asked for, and the loop that every action shares."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.device import detect
from tests.live.kept import Kept, made_with
from tests.live.measure import LiveError
from tests.live.places import ROOT, Clone, clone, workplace
from tests.live.watch import OutOfTimeError, Watch


@dataclass(frozen=True)
class Asked:
    """The options of an action; each action reads those that it knows.

    Attributes:
        action: Its name.
        out: Folder for the results.
        words: The command line after `python -m tests.live`.
        select: Regular expression over row ids, None for the action's own choice.
        seconds: After which the action has ended.
        work: Folder for the clones that stays, None for a temporary one.
        pairs, gates, processes, groups: Counts, None for the action's own choice.
        sizes: Slow-downs in percent.
        quick: The least of everything: shows that it runs, the figures mean nothing.
        cold: Empty Triton caches.
        compiled: Whether gates compile too.
        how: How `lowered` lowers the rows.
    """

    action: str
    out: Path
    words: tuple[str, ...] = ()
    select: str | None = None
    seconds: float = 530.0
    work: Path | None = None
    pairs: int | None = None
    gates: int | None = None
    processes: int | None = None
    groups: int | None = None
    sizes: tuple[float, ...] = (2.0,)
    quick: bool = False
    cold: bool = False
    compiled: bool = True
    how: str | None = None
    root: Path = ROOT

    @property
    def command(self) -> str:
        return shlex.join(["python", "-m", "tests.live", *self.words])

    @property
    def device_type(self) -> str:
        return detect().type

    def gate_arguments(self, select: str | None = None, pairs: int | None = None) -> list[str]:
        """Arguments of `python -m ci gate` that follow from the options."""
        chosen, count = self.select or select, self.pairs or pairs or (1 if self.quick else None)
        arguments = ["--base", "main"]
        arguments += ["--select", chosen] if chosen else []
        arguments += ["--pairs", str(count)] if count else []
        return arguments if self.compiled else [*arguments, "--no-compiled"]


@dataclass
class Session:
    """An action under way: its options, its watch, its clone, and the file that it keeps."""

    asked: Asked
    watch: Watch
    clone: Clone
    work: Path
    kept: Kept

    def write(self, *, complete: bool = False, why: str | None = None) -> None:
        """Writes what is known by now."""
        self.kept.write(complete=complete, elapsed_s=self.watch.elapsed_s, why=why)


@contextmanager
def _opened(asked: Asked) -> Iterator[Session]:
    asked.out.mkdir(parents=True, exist_ok=True)
    watch = Watch(asked.seconds)
    watch.say(f"{asked.action}: cloning {asked.root}")
    with workplace(asked.work) as work:
        kept = Kept(asked.out / f"{asked.action}.json", made_with(asked.action, asked.command, asked.root))
        yield Session(asked, watch, clone(asked.root, work / "clone"), work, kept)


def perform(asked: Asked, action: Callable[[Session], Any]) -> int:
    """Runs an action to its end, or to the end of its time.

    Returns:
        0 where all that was asked for was measured, 3 where time ran out or a step failed: what was measured by then is kept.
    """
    with _opened(asked) as session:
        try:
            action(session)
        except (OutOfTimeError, LiveError) as error:
            session.write(why=str(error))
            session.watch.say(f"stopped: {error}")
            return 3
        session.write(complete=True)
        session.watch.say(f"done: {session.kept.path}")
        return 0
