"""Time of an action: what has passed, what is left, and whether the next step still fits."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

_MARGIN_S = 5.0
_SLACK = 1.15
"""A step may take so much longer than the longest of its kind."""


class OutOfTimeError(RuntimeError):
    """The seconds of the action do not suffice for the next step."""


class Watch:
    """Counts down from the start of an action.

    Args:
        seconds: After which the action has to have ended.
        now: Monotonic clock in seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s = now()
        self.seconds = seconds
        self.longest_s: dict[str, float] = defaultdict(float)

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._began_s

    @property
    def left_s(self) -> float:
        """Until a step has to be stopped, with a margin to write what is known."""
        return self.seconds - self.elapsed_s - _MARGIN_S

    def say(self, text: str) -> None:
        print(f"{self.elapsed_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    def has_room_for(self, *kinds: str) -> bool:
        """Whether steps of these kinds fit, by the longest of each so far; a kind that has not been seen takes no time."""
        return self.left_s > _SLACK * sum(self.longest_s[kind] for kind in kinds)

    @contextlib.contextmanager
    def step(self, kind: str, text: str) -> Iterator[None]:
        """Tells that a step begins, and keeps how long it took.

        Raises:
            OutOfTimeError: Nothing is left, or too little for what the longest one of this kind took.
        """
        if not self.has_room_for(kind):
            raise OutOfTimeError(f"{self.left_s:.0f} s are left, and {kind} took {self.longest_s[kind]:.0f} s before")
        self.say(text)
        began_s = self._now()
        try:
            yield
        finally:
            self.longest_s[kind] = max(self.longest_s[kind], self._now() - began_s)
