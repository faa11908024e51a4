"""The confirm stage on arrays: pairs of processes, looked at three times, each look with a share of the level.

A row that the screen picked is measured in pairs of fresh processes of merge-base and HEAD. After 12, 24 and 48 pairs a one-sided sign-flip
test is made of each row that is still open, with Holm's correction over all rows that were picked, however many of them are decided by now.
The levels of the looks add up to the level of the whole, so that looking more than once costs nothing (Bonferroni over the looks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ci import noise
from ci.model import RowVerdict

LOOKS = (12, 24, 48)
"""Pairs after which the rows that are still open are tested."""
SHARES = (0.2, 0.3, 0.5)
"""Of the level, for each look."""
ALPHA = 0.01
"""Chance that rows of which none is slower give a regression."""
CLEARED_SDS = 1.4
"""A row is cleared where the effect and so many of its standard errors stay under the floor."""


@dataclass(frozen=True)
class Series:
    """One row in pairs.

    Attributes:
        key: Seeds the Monte Carlo flips, so that a verdict is reproducible.
        d: [n], ln latency of HEAD less that of the merge-base, in the order of measurement.
        delta0: Margin in ln latency that counts as no change: the bias that a rebuild may have.
        floor: Relative change of latency under which nothing counts as a regression.
    """

    key: str
    d: noise.Array
    delta0: float
    floor: float

    def first(self, pairs: int) -> Series:
        """The first `pairs` pairs alone."""
        return Series(self.key, self.d[:pairs], self.delta0, self.floor)

    def margin(self, side: int) -> noise.Array:
        """Differences towards `side` (1 slower, -1 faster), less the margin, clipped."""
        return noise.clip_differences(side * self.d - self.delta0)

    def p_value(self, side: int) -> float:
        """One-sided p of "no slower" (side 1) or "no faster" (side -1)."""
        return noise.sign_flip_p(side * self.d - self.delta0, key=f"{self.key} {side:+d}")

    def size(self, side: int) -> float:
        """Change towards `side` in ln latency, the margin added back; negative where the row moved the other way."""
        return float(self.margin(side).mean()) + self.delta0

    def error(self, side: int) -> float:
        """Standard error of `size`."""
        return float(self.margin(side).std(ddof=1)) / math.sqrt(self.d.size)

    @property
    def side(self) -> int:
        """Where the row went: 1 slower, -1 faster."""
        return 1 if float(noise.clip_differences(self.d).mean()) >= 0 else -1

    @property
    def effect(self) -> float:
        """Relative change of latency."""
        return math.expm1(self.side * self.size(self.side))

    def reaches_floor(self, side: int) -> bool:
        """Whether the change towards `side` is as large as the floor."""
        return math.expm1(self.size(side)) >= self.floor

    def limit(self, side: int, level: float) -> float:
        """Change towards `side` in ln latency up to which the test does not reject at `level`, at this scatter of the pairs."""
        return self.delta0 + noise.sign_flip_limit(side * self.d - self.delta0, level, key=f"{self.key} {side:+d}")

    def edges(self, slow: float, fast: float) -> tuple[float, float]:
        """(fastest, slowest) relative change of latency within which the row passes: below its floor, or not beyond chance.

        Args:
            slow, fast: Level of the test on each side.
        """
        margin = math.log1p(self.floor)
        return math.expm1(-max(margin, self.limit(-1, fast))), math.expm1(max(margin, self.limit(1, slow)))

    @property
    def cleared(self) -> bool:
        """Whether a slow-down as large as the floor can be ruled out."""
        return math.expm1(self.size(1) + CLEARED_SDS * self.error(1)) < self.floor


@dataclass(frozen=True)
class Decision:
    """What the pairs said of a row.

    Attributes:
        verdict: REGRESSED, IMPROVED, CLEARED, or UNCONFIRMED while neither is sure.
        effect: Relative change of latency over the pairs that decided.
        p_value: Of the side to which the row went.
        pairs: How many decided.
        look: The look that decided, from 1; the last one made for an UNCONFIRMED row.
    """

    verdict: RowVerdict
    effect: float
    p_value: float
    pairs: int
    look: int


def decide(
    rows: Sequence[Series],
    *,
    looks: Sequence[int] = LOOKS,
    alpha: float = ALPHA,
    shares: Sequence[float] = SHARES,
    family: int | None = None,
) -> list[Decision]:
    """Decides the rows that a screen picked.

    Args:
        rows: All of them: they are the family of Holm's test at each look, the decided ones with a p-value of 1.
        looks: Numbers of pairs at the looks made so far. A row with fewer pairs is tested on those it has.
        alpha: Level of the whole.
        shares: Of the level, for each look in turn.
        family: Size of the family where it is larger than `rows`: rows that were picked and could not be paired.
    Returns:
        A decision for each row, in order. An UNCONFIRMED one is open as long as a further look is left to make.
    """
    size = max(len(rows), family or 0)
    decided: dict[int, Decision] = {}
    left: dict[int, Decision] = {}
    for number, (pairs, share) in enumerate(zip(looks, shares, strict=False), 1):
        seen = {i: row.first(pairs) for i, row in enumerate(rows) if i not in decided}
        slow, fast = np.ones(size), np.ones(size)
        for i, row in seen.items():
            slow[i], fast[i] = row.p_value(1), row.p_value(-1)
        slower, faster = noise.holm(slow, alpha * share), noise.holm(fast, alpha * share)
        for i, row in seen.items():
            if slower[i] and row.reaches_floor(1):
                verdict = RowVerdict.REGRESSED
            elif faster[i] and row.reaches_floor(-1):
                verdict = RowVerdict.IMPROVED
            elif row.cleared:
                verdict = RowVerdict.CLEARED
            else:
                verdict = RowVerdict.UNCONFIRMED
            p_value = float(slow[i] if row.side > 0 else fast[i])
            made = Decision(verdict, row.effect, p_value, int(row.d.size), number)
            (left if verdict is RowVerdict.UNCONFIRMED else decided)[i] = made
    return [decided.get(i) or left[i] for i in range(len(rows))]
