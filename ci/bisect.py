"""From a good and a bad commit to the first bad one: the search, without the measuring.

The order of a search is git's, with the gate's test in place of a script: both ends first, then halves. A step that cannot be decided is
left out, as by `git bisect skip`, and what is left in the end may be more than one commit. A commit is named alone only where it is slower
than the last good commit, and slower than the commit before it by a comparison of the two: a step that went wrong by chance leads to a
pair that does not differ, and so to no name. One slowdown is looked for. Where a history has several, one of them is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

import msgspec

from ci.errors import InputError, UsageError, one_line
from ci.jsonio import decode_json, strict_dumps
from ci.repo import Commit

SCHEMA_ID: Final = "rapid_llm/bisect/1"


class Answer(str, Enum):
    """What one comparison with a good commit says of the other one."""

    GOOD = "good"
    BAD = "bad"
    UNCONFIRMED = "unconfirmed"
    SKIP = "skip"


@dataclass(frozen=True)
class Measured:
    """One comparison: `effect` is the relative change of latency, + is slower; None where there is none."""

    answer: Answer
    effect: float | None
    reason: str


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decided comparison, as the file keeps it."""

    base: str
    """Hash of the commit that was taken as good."""
    commit: str
    pairs: int
    """Pairs of processes of the last measurement."""
    answer: Answer
    effect: float | None
    reason: str

    @property
    def shown(self) -> str:
        """Effect and answer for a person; a step without an answer says why."""
        size = "" if self.effect is None else f"{100 * self.effect:+.1f} % latency: "
        return f"{size}{self.answer.value}" if self.answer in (Answer.GOOD, Answer.BAD) else f"{size}{self.answer.value} ({self.reason})"


class BisectFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bisect so far: ``bisect.json`` in the report's folder."""

    schema: Literal["rapid_llm/bisect/1"]
    row: str
    good: str
    bad: str
    device: str
    steps: list[Step]
    suspects: list[str]
    """Hashes of the commits of which one is the first bad one, in the order of history; all of them until something is decided."""
    confirmed: bool
    """Whether the one suspect is slower than the commit before it."""

    def is_of(self, row: str, good: Commit, bad: Commit, device: str) -> bool:
        """Whether its steps answer for this search."""
        return (self.row, self.good, self.bad, self.device) == (row, good.sha, bad.sha, device)


def dump(file: BisectFile) -> str:
    """The bisect as deterministic strict JSON."""
    return strict_dumps(msgspec.to_builtins(file))


def load(data: bytes, *, name: str) -> BisectFile:
    """Reads what `dump` wrote.

    Raises:
        InputError: It is no strict JSON, or of another layout; the message names the file.
    """
    try:
        return msgspec.convert(decode_json(data, name=name), BisectFile)
    except msgspec.ValidationError as error:
        raise InputError(f"{name} does not follow {SCHEMA_ID} ({error}): remove it to begin anew.") from error


@dataclass(frozen=True)
class Search:
    """What is known of commits 0 (good) to `num` (bad) in the order of history."""

    num: int
    low: int = 0
    """The last commit that is known to be good."""
    high: int = 0
    """The first commit that is known to be bad."""
    skipped: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def between(cls, num: int) -> Search:
        """A search of which the ends are known."""
        return cls(num, 0, num)

    def next_probe(self) -> int | None:
        """The commit to compare next: the one in the middle, or the nearest to it that was not skipped; None where none is left."""
        middle = (self.low + self.high) // 2
        left = [i for i in range(self.low + 1, self.high) if i not in self.skipped]
        return min(left, key=lambda i: (abs(i - middle), i), default=None)

    def after(self, probe: int, answer: Answer) -> Search:
        """The search when commit `probe` was compared with commit 0."""
        if answer is Answer.GOOD:
            return Search(self.num, probe, self.high, self.skipped)
        if answer is Answer.BAD:
            return Search(self.num, self.low, probe, self.skipped)
        return Search(self.num, self.low, self.high, self.skipped | {probe})

    @property
    def suspects(self) -> range:
        """Commits of which one is the first bad one."""
        return range(self.low + 1, self.high + 1)


def steps_at_most(num: int) -> int:
    """Comparisons of a search over `num` commits in which nothing is skipped: the ends, the halves, and the pair that was found."""
    return 1 if num == 1 else 2 + math.ceil(math.log2(num))


Measure = Callable[[Commit, Commit, int, float | None], Measured]
"""Compares a good commit with another one in so many pairs; the last argument is the effect that is looked for, where it is known."""


class Bisect:
    """One search with its steps; those that are given are not measured again."""

    def __init__(
        self,
        commits: Sequence[Commit],
        measure: Measure,
        pairs: int,
        *,
        known: Sequence[Step] = (),
        decided: Callable[[Bisect, bool], None] = lambda search, fresh: None,
    ) -> None:
        """Prepares a search.

        Args:
            commits: The good commit, then all up to the bad one, in the order of history; at least two.
            measure: Makes one comparison.
            pairs: Pairs of processes of a comparison; one that stays unconfirmed is made again with twice as many, once.
            known: Steps of an interrupted search.
            decided: Called when a step is decided, the last of `steps`, and whether it was measured now.
        """
        self._commits, self._measure, self._pairs, self._decided = commits, measure, pairs, decided
        self._known = {(step.base, step.commit): step for step in known}
        self.steps: list[Step] = []
        self.suspects: list[Commit] = list(commits[1:])
        self.confirmed = False

    def run(self) -> None:
        """Searches; `suspects` and `confirmed` then say what was found.

        Raises:
            UsageError: The bad commit is not shown to be slower than the good one.
            InputError: The two cannot be compared.
        """
        good, bad = self._commits[0], self._commits[-1]
        ends = self._step(good, bad, None)
        if ends.answer is Answer.SKIP:
            raise InputError(f"{bad.short} cannot be compared with {good.short} ({ends.reason}): name ends that have the row.")
        if ends.answer is not Answer.BAD:
            raise UsageError(
                f"{bad.short} is not shown to be slower than {good.short} ({ends.shown}): "
                "name other ends, or measure more pairs with --pairs."
            )
        search = Search.between(len(self._commits) - 1)
        while (probe := search.next_probe()) is not None:
            search = search.after(probe, self._step(good, self._commits[probe], ends.effect).answer)
            self.suspects = [self._commits[i] for i in search.suspects]
        if len(self.suspects) == 1:
            # Where the commit before is the good end itself, the two have been compared already.
            self.confirmed = search.low == 0 or self._step(self._commits[search.low], self.suspects[0], ends.effect).answer is Answer.BAD

    def _step(self, base: Commit, commit: Commit, wanted: float | None) -> Step:
        step = self._known.get((base.sha, commit.sha))
        fresh = step is None or (step.answer is Answer.UNCONFIRMED and step.pairs < 2 * self._pairs)
        if step is None or fresh:
            pairs = self._pairs
            found = self._measure(base, commit, pairs, wanted)
            if found.answer is Answer.UNCONFIRMED:
                pairs *= 2
                found = self._measure(base, commit, pairs, wanted)
            step = Step(base.sha, commit.sha, pairs, found.answer, found.effect, one_line(found.reason))
        self.steps.append(step)
        self._decided(self, fresh)
        return step

    @property
    def expected(self) -> int:
        """How many steps there will be about: more where some are left out."""
        return max(len(self.steps), steps_at_most(len(self._commits) - 1))

    def all_steps(self) -> list[Step]:
        """What to keep: the steps of this search, and those of an interrupted one that it has not come to yet."""
        return list({**self._known, **{(step.base, step.commit): step for step in self.steps}}.values())

    @property
    def conclusion(self) -> str:
        """What was found, in one sentence."""
        named = [f"{commit.short} {commit.label!r}" for commit in self.suspects]
        if len(named) == 1 and self.confirmed:
            return f"The first bad commit is {named[0]}."
        if len(named) == 1:
            return (
                f"No commit can be named: the steps lead to {named[0]}, but it is not shown to be slower than the commit before it; "
                "measure more pairs with --pairs."
            )
        return f"The first bad commit is one of {', '.join(named)}: those before the last of them could not be decided."
