"""Finds the fastest config of a kernel with a timer that is handed in.

Each candidate is verified alone, on outputs that were made wrong before its call; only verified ones are timed. They are compared in
rounds that go over all of them in turn, so that a drift of the device meets each alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rapid_llm.errors import TuningError

if TYPE_CHECKING:
    import torch

__all__ = ["AutotuneSearcher", "SearchResult", "Timer", "Trial", "TuningProblem"]

Config = TypeVar("Config")

Timer = Callable[[Sequence[Callable[[], object]]], float]
"""Gives the time of one of the calls in microseconds. It has to tell configs apart at the sizes of a decode step: one that waits for the
device in each iteration reads that wait."""

_ROUNDS = 5
_MIN_GAIN = 0.01
_NEAR = 1.10
_SD_OF_MAD = 1.4826
_NOISE_FACTOR = 2.0


@dataclass(frozen=True)
class TuningProblem(Generic[Config]):
    """One call to tune.

    Attributes:
        name: Of the kernel and case, for messages.
        calls: The operation on rotating working sets.
        applied: Context in which the calls run with a config.
        poison: Makes every output wrong.
        check: Compares the outputs with a reference: returns the largest absolute difference, raises where it is too large.
        state: Tensors that the calls or the poison change and that others read; they are as before when the search ends.
    """

    name: str
    calls: Sequence[Callable[[], object]]
    applied: Callable[[Config], AbstractContextManager[object]]
    poison: Callable[[], object]
    check: Callable[[], float]
    state: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class Trial(Generic[Config]):
    """What became of one candidate.

    Attributes:
        config: The candidate.
        times_us: One reading a round, in microseconds; empty where it has no number.
        max_abs_diff: Of its verification; None where it failed.
        reason: Why it has no number; None where it has one.
    """

    config: Config
    times_us: tuple[float, ...]
    max_abs_diff: float | None
    reason: str | None

    @property
    def latency_us(self) -> float:
        """Median of the readings, in microseconds; inf where there is none."""
        return statistics.median(self.times_us) if self.times_us else math.inf

    @property
    def noise_us(self) -> float:
        """Standard deviation of the readings, from their median absolute deviation, in microseconds."""
        return _SD_OF_MAD * statistics.median(abs(us - self.latency_us) for us in self.times_us) if self.times_us else 0.0


@dataclass(frozen=True)
class SearchResult(Generic[Config]):
    """What a search found.

    Attributes:
        best: The trial of the config to use.
        kept_current: Whether that is the config that was in use before.
        trials: Of every candidate, in the order given, the current one first.
    """

    best: Trial[Config]
    kept_current: bool
    trials: tuple[Trial[Config], ...]


class AutotuneSearcher:
    """Searches with an injected timer."""

    def __init__(self, timer: Timer, *, rounds: int = _ROUNDS, min_gain: float = _MIN_GAIN) -> None:
        """Takes the timer.

        Args:
            timer: See `Timer`; `asv_bench.tune` passes graph replay.
            rounds: Readings of each candidate that the first reading leaves within 10 % of the best.
            min_gain: Smallest gain, as a fraction, for which the current config is given up.
        """
        self._timer = timer
        self._rounds = rounds
        self._min_gain = min_gain

    def search(self, problem: TuningProblem[Config], candidates: Sequence[Config], *, current: Config) -> SearchResult[Config]:
        """Verifies and times `current` and the candidates, and chooses.

        The current config is kept unless another is faster by more than `min_gain` and by more than twice the noise of the two.

        Raises:
            TuningError: No candidate could be verified and timed (each is listed with its reason), or the timer gave no time.
        """
        before = [tensor.clone() for tensor in problem.state]
        try:
            trials = [self._tried(problem, config) for config in dict.fromkeys([current, *candidates])]
            trials = self._compared(problem, trials)
        finally:
            for tensor, value in zip(problem.state, before, strict=True):
                tensor.copy_(value)
        good = [trial for trial in trials if trial.reason is None]
        if not good:
            reasons = "\n".join(f"    {trial.config}: {trial.reason}" for trial in trials)
            raise TuningError(
                f"No config of {problem.name} could be verified and timed, so none is stored; mend what the reasons name:\n{reasons}"
            )
        best = min(good, key=lambda trial: trial.latency_us)
        if trials[0].reason is None and not self._beats(best, trials[0]):
            best = trials[0]
        return SearchResult(best, best.config == current, tuple(trials))

    def _beats(self, one: Trial[Config], current: Trial[Config]) -> bool:
        noise_us = _NOISE_FACTOR * math.hypot(one.noise_us, current.noise_us)
        return current.latency_us - one.latency_us > max(self._min_gain * current.latency_us, noise_us)

    def _tried(self, problem: TuningProblem[Config], config: Config) -> Trial[Config]:
        """Verifies a candidate on poisoned outputs, and reads its time once."""
        try:
            with problem.applied(config):
                difference = _verified(problem)
                first_us = self._read_us(problem)
                difference = max(difference, _verified(problem))
        except TuningError:
            raise
        except Exception as error:  # a candidate that does not compile, fit or compute is out, and the search goes on
            message = str(error).splitlines()
            return Trial(config, (), None, f"{type(error).__name__}: {message[0][:200] if message else 'no message'}")
        return Trial(config, (first_us,), difference, None)

    def _compared(self, problem: TuningProblem[Config], trials: list[Trial[Config]]) -> list[Trial[Config]]:
        """Reads those that are near the best, and the current one, once more in each further round."""
        limit_us = _NEAR * min((trial.latency_us for trial in trials), default=math.inf)
        near = [i for i, trial in enumerate(trials) if trial.reason is None and (i == 0 or trial.latency_us <= limit_us)]
        readings = {i: list(trials[i].times_us) for i in near}
        for turn in range(1, self._rounds):
            for i in near if turn % 2 else reversed(near):
                with problem.applied(trials[i].config):
                    readings[i].append(self._read_us(problem))
        return [Trial(t.config, tuple(readings.get(i, t.times_us)), t.max_abs_diff, t.reason) for i, t in enumerate(trials)]

    def _read_us(self, problem: TuningProblem[Config]) -> float:
        reading = self._timer(problem.calls)
        if isinstance(reading, bool) or not isinstance(reading, (int, float)) or not 0 < reading < math.inf:
            raise TuningError(f"The timer gave {reading!r} for {problem.name}, expected positive finite microseconds; nothing was stored.")
        return float(reading)


def _verified(problem: TuningProblem[Config]) -> float:
    """Makes every output wrong, makes each call once, and checks."""
    problem.poison()
    for call in problem.calls:
        call()
    difference = problem.check()
    if not 0 <= difference < math.inf:
        raise ValueError(f"the check returned {difference} for a difference")
    return float(difference)
