"""The search: verified alone, timed by what is handed in, ties keep what is there, state as before (R38, R110)."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rapid_llm.errors import TuningError
from rapid_llm.kernels.autotune import AutotuneSearcher, SearchResult, TuningProblem


class Copy:
    """An operation with configs: doubles x into out as the config says, and takes `cost_us[config]` on a made-up device."""

    def __init__(self, cost_us: dict[str, float], *, broken: Sequence[str] = (), lazy: Sequence[str] = ()) -> None:
        self.cost_us, self.broken, self.lazy = cost_us, broken, lazy
        self.x, self.out = torch.arange(8.0), torch.full((8,), 7.0)
        self.config = ""
        self.timed: list[str] = []

    @contextlib.contextmanager
    def applied(self, config: str) -> Iterator[None]:
        before, self.config = self.config, config
        try:
            yield
        finally:
            self.config = before

    def call(self) -> None:
        if self.config == "explodes":
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        if self.config not in self.lazy:
            self.out.copy_(self.x * (3 if self.config in self.broken else 2))

    def check(self) -> float:
        difference = float((self.out - 2 * self.x).abs().max())
        if not difference == 0.0:
            raise AssertionError("elements are off")
        return difference

    def search(self, timer: Callable[[Sequence[Callable[[], object]]], Any], current: str, **options: Any) -> SearchResult[str]:
        problem = TuningProblem("copy", [self.call], self.applied, lambda: self.out.fill_(math.nan), self.check, [self.out])
        return AutotuneSearcher(timer, **options).search(problem, list(self.cost_us), current=current)

    def exact(self, calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        self.timed.append(self.config)
        return self.cost_us[self.config]


def noisy(copy: Copy, relative: float, floor_us: float = 0.0) -> Callable[[Sequence[Callable[[], object]]], float]:
    """A timer that scatters by `relative`, and that reads no less than its floor."""
    scatter = itertools.cycle([0.3, -1.0, 0.6, -0.2, 1.0, -0.6, 0.0])
    return lambda calls: max(floor_us, copy.exact(calls)) * (1 + relative * next(scatter))


def test_two_configs_five_percent_apart_are_told_apart_at_one_sequence() -> None:
    """R38: 12.0 and 11.4 us, as at batch 1, scattering by 0.5 %."""
    copy = Copy({"now": 12.0, "faster": 11.4})
    result = copy.search(noisy(copy, 0.005), "now")
    assert (result.best.config, result.kept_current) == ("faster", False)
    assert result.best.latency_us == pytest.approx(11.4, rel=0.01)


def test_a_timer_that_waits_in_each_iteration_could_not_and_changes_nothing() -> None:
    """R37, R38: its floor of 100 us hides both configs; what is in use stays."""
    copy = Copy({"now": 12.0, "faster": 11.4})
    assert copy.search(noisy(copy, 0.005, floor_us=100.0), "now").kept_current


@pytest.mark.parametrize(("cost_us", "relative"), [(11.99, 0.005), (11.95, 0.0), (11.4, 0.08)])
def test_a_tie_inside_the_noise_keeps_the_current_config(cost_us: float, relative: float) -> None:
    copy = Copy({"other": cost_us, "now": 12.0})
    assert copy.search(noisy(copy, relative), "now").kept_current


def test_a_wrong_candidate_has_no_time_however_fast() -> None:
    """R110."""
    copy = Copy({"now": 12.0, "wrong": 1.0, "right": 10.0}, broken=["wrong"])
    result = copy.search(copy.exact, "now")
    assert result.best.config == "right"
    (wrong,) = [trial for trial in result.trials if trial.config == "wrong"]
    assert (wrong.times_us, wrong.max_abs_diff, wrong.reason) == ((), None, "AssertionError: elements are off")
    assert "wrong" not in copy.timed


def test_each_candidate_is_verified_alone_on_a_poisoned_output() -> None:
    """A candidate that writes nothing would pass on what the one before it left."""
    copy = Copy({"now": 12.0, "writes nothing": 1.0}, lazy=["writes nothing"])
    result = copy.search(copy.exact, "now")
    assert result.best.config == "now"
    assert "writes nothing" not in copy.timed


def test_the_state_is_as_before() -> None:
    copy = Copy({"now": 12.0, "explodes": 1.0, "faster": 6.0})
    before = copy.out.clone()
    copy.search(copy.exact, "now")
    assert torch.equal(copy.out, before)
    with pytest.raises(TuningError):
        copy.search(lambda calls: math.nan, "now")
    assert torch.equal(copy.out, before)
    assert copy.config == ""


def test_when_every_candidate_fails_each_is_named_with_its_reason() -> None:
    """Case 38."""
    copy = Copy({"wrong": 1.0, "explodes": 1.0}, broken=["wrong"])
    with pytest.raises(TuningError) as caught:
        copy.search(copy.exact, "wrong")
    text = str(caught.value)
    assert "No config of copy could be verified and timed, so none is stored" in text
    assert "    wrong: AssertionError: elements are off" in text
    assert "    explodes: RuntimeError: out of resource: shared memory" in text


def test_one_good_of_ten_is_found_and_a_current_config_that_fails_is_given_up() -> None:
    copy = Copy({**{f"wrong {i}": 1.0 for i in range(9)}, "right": 50.0}, broken=[f"wrong {i}" for i in range(9)])
    result = copy.search(copy.exact, "wrong 3")
    assert (result.best.config, result.kept_current) == ("right", False)
    assert next(trial.config for trial in result.trials) == "wrong 3"
    assert len(result.trials) == 10


@pytest.mark.parametrize("reading", [0.0, -1.0, math.nan, math.inf, None, "3", True])
def test_a_timer_that_gives_no_time_ends_the_search(reading: object) -> None:
    copy = Copy({"now": 12.0})
    with pytest.raises(TuningError, match=r"The timer gave .* for copy, expected positive finite microseconds"):
        copy.search(lambda calls: reading, "now")


def test_a_check_that_returns_no_number_is_no_verification() -> None:
    copy = Copy({"now": 12.0})
    copy.check = lambda: math.nan  # type: ignore[method-assign]
    with pytest.raises(TuningError, match="the check returned nan"):
        copy.search(copy.exact, "now")


def test_drift_of_the_device_meets_all_alike() -> None:
    """Readings grow by 2 % a turn; in the order of the candidates the second would lose by that alone."""
    copy = Copy({"now": 12.0, "faster": 11.4})
    turn = itertools.count()
    result = copy.search(lambda calls: copy.exact(calls) * (1 + 0.002 * next(turn)), "now")
    assert result.best.config == "faster"


def test_only_what_is_near_the_best_is_read_again() -> None:
    copy = Copy({"now": 30.0, "slow": 40.0, "fast": 10.0, "near": 10.5})
    result = copy.search(copy.exact, "now", rounds=4)
    assert {t.config: len(t.times_us) for t in result.trials} == {"now": 4, "slow": 1, "fast": 4, "near": 4}
