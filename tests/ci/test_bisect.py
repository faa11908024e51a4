"""The bisect: its search over random histories with a measurer that is made up, its answers, its file, and what it refuses."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable

import pytest

from ci import bisect
from ci.bisect import Answer, Bisect, Measured, Search, Step
from ci.errors import InputError, UsageError
from ci.repo import Commit

HISTORIES = 3000
EFFECT = 0.05
PAIRS = 12

Oracle = Callable[[int, int, int], Answer]


def _history(num: int) -> list[Commit]:
    return [Commit(f"{i:012x}".ljust(40, "0"), f"commit {i}") for i in range(num + 1)]


def _place(sha: str) -> int:
    return int(sha[:12], 16)


class _Measurer:
    """Answers by an oracle of the two places in history and the pairs, and counts."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, base: Commit, commit: Commit, pairs: int, wanted: float | None) -> Measured:
        call = _place(base.sha), _place(commit.sha), pairs
        assert (wanted is None) == (len({c[:2] for c in [*self.calls, call]}) == 1), "only the ends are compared without an effect"
        self.calls.append(call)
        answer = self.oracle(*call)
        return Measured(answer, EFFECT if answer is Answer.BAD else 0.0, "made up")


def _truth(first_bad: int) -> Oracle:
    return lambda base, commit, pairs: Answer.BAD if base < first_bad <= commit else Answer.GOOD


def _found(search: Bisect) -> int | None:
    return _place(search.suspects[0].sha) if search.confirmed else None


def test_a_step_is_found_exactly_in_few_comparisons() -> None:
    rng = random.Random(1)
    cases = [(num, first) for num in range(1, 20) for first in range(1, num + 1)]
    cases += [(num, rng.randint(1, num)) for num in (rng.randint(1, 400) for _ in range(HISTORIES))]
    for num, first in cases:
        measurer = _Measurer(_truth(first))
        search = Bisect(_history(num), measurer, PAIRS)
        search.run()
        assert _found(search) == first
        assert len(measurer.calls) <= math.ceil(math.log2(num)) + 2
        assert len(measurer.calls) <= bisect.steps_at_most(num)
        assert len(set(measurer.calls)) == len(measurer.calls)


def test_with_skips_the_suspects_hold_the_first_bad_commit_and_are_no_more_than_needed() -> None:
    rng = random.Random(2)
    named = 0
    for _ in range(HISTORIES):
        num = rng.randint(1, 60)
        first = rng.randint(1, num)
        skipped = {i for i in range(1, num) if rng.random() < rng.choice((0.1, 0.6, 0.95))}
        truth = _truth(first)
        measurer = _Measurer(
            lambda base, commit, pairs, gone=skipped, known=truth: Answer.SKIP if commit in gone else known(base, commit, pairs)
        )
        search = Bisect(_history(num), measurer, PAIRS)
        search.run()
        suspects = [_place(commit.sha) for commit in search.suspects]
        assert first in suspects
        assert set(suspects[:-1]) <= skipped
        assert suspects == list(range(suspects[0], suspects[-1] + 1))
        assert search.confirmed == (len(suspects) == 1)
        named += search.confirmed
        assert len({c[1] for c in measurer.calls}) <= num
    assert 0 < named < HISTORIES


def test_noise_that_is_seen_as_such_never_names_a_wrong_commit() -> None:
    rng = random.Random(3)
    named = 0
    for _ in range(HISTORIES):
        num = rng.randint(1, 60)
        first, doubt = rng.randint(1, num), rng.choice((0.05, 0.3, 0.7))
        ends = {(0, num)}

        def oracle(
            base: int, commit: int, pairs: int, first: int = first, doubt: float = doubt, ends: set[tuple[int, int]] = ends
        ) -> Answer:
            if (base, commit) not in ends and rng.random() < doubt:
                return Answer.UNCONFIRMED
            return _truth(first)(base, commit, pairs)

        measurer = _Measurer(oracle)
        search = Bisect(_history(num), measurer, PAIRS)
        search.run()
        assert _found(search) in (None, first)
        assert first in [_place(commit.sha) for commit in search.suspects]
        named += search.confirmed
        for number, (base, commit, pairs) in enumerate(measurer.calls):
            assert pairs in (PAIRS, 2 * PAIRS)
            assert pairs == PAIRS or measurer.calls[number - 1] == (base, commit, PAIRS)
    assert named > HISTORIES / 10


def test_wrong_answers_on_the_way_name_no_wrong_commit_where_the_last_comparison_is_right() -> None:
    rng = random.Random(4)
    named = unnamed = 0
    for _ in range(HISTORIES):
        num = rng.randint(2, 60)
        first = rng.randint(1, num)

        def oracle(base: int, commit: int, pairs: int, first: int = first, num: int = num) -> Answer:
            # Comparisons of the ends and of neighbours are right; any other is wrong, in any way, each fifth time.
            if commit - base > 1 and commit - base < num and rng.random() < 0.2:
                return rng.choice(list(Answer))
            return _truth(first)(base, commit, pairs)

        search = Bisect(_history(num), _Measurer(oracle), PAIRS)
        search.run()
        assert _found(search) in (None, first)
        named, unnamed = named + search.confirmed, unnamed + (not search.confirmed)
        if len(search.suspects) == 1 and not search.confirmed:
            assert search.conclusion.startswith("No commit can be named: ")
    assert named
    assert unnamed


@pytest.mark.parametrize(("answer", "error"), [(Answer.GOOD, UsageError), (Answer.UNCONFIRMED, UsageError), (Answer.SKIP, InputError)])
def test_ends_that_do_not_differ_are_refused(answer: Answer, error: type[Exception]) -> None:
    measurer = _Measurer(lambda base, commit, pairs: answer)
    with pytest.raises(error, match=r"000000000005 (is not shown to be slower than|cannot be compared with) 000000000000"):
        Bisect(_history(5), measurer, PAIRS).run()
    assert {call[:2] for call in measurer.calls} == {(0, 5)}


def test_an_interrupted_bisect_goes_on_where_it_stopped() -> None:
    rng = random.Random(5)
    for _ in range(300):
        num = rng.randint(2, 60)
        first, stop = rng.randint(1, num), rng.randint(1, 6)
        commits, kept = _history(num), list[Step]()

        def interrupt(search: Bisect, fresh: bool, stop: int = stop, kept: list[Step] = kept) -> None:
            kept[:] = search.all_steps()
            if len(kept) == stop:
                raise KeyboardInterrupt

        whole, before, after = (_Measurer(_truth(first)) for _ in range(3))
        uninterrupted = Bisect(commits, whole, PAIRS)
        uninterrupted.run()
        with contextlib.suppress(KeyboardInterrupt):
            Bisect(commits, before, PAIRS, decided=interrupt).run()
        asked = list(before.calls)
        after.calls = asked  # the measurer's own check counts the ends
        again = Bisect(commits, after, PAIRS, known=kept)
        again.run()
        assert _found(again) == first
        assert after.calls == whole.calls
        assert again.steps == uninterrupted.steps


def test_an_unconfirmed_step_is_measured_again_when_more_pairs_are_asked_for() -> None:
    doubtful = _Measurer(lambda base, commit, pairs: Answer.UNCONFIRMED if commit == 1 and pairs <= 24 else _truth(1)(base, commit, pairs))
    first = Bisect(_history(2), doubtful, 12)
    first.run()
    assert [step.answer for step in first.steps] == [Answer.BAD, Answer.UNCONFIRMED]
    assert first.conclusion.startswith("The first bad commit is one of 000000000001 'commit 1', 000000000002 'commit 2'")
    doubtful.calls.clear()
    same = Bisect(_history(2), doubtful, 12, known=first.all_steps())
    same.run()
    assert doubtful.calls == []
    doubtful.calls.append((0, 2, 12))
    more = Bisect(_history(2), doubtful, 20, known=first.all_steps())
    more.run()
    assert doubtful.calls[1:] == [(0, 1, 20), (0, 1, 40)]
    assert _found(more) == 1


def test_steps_that_were_not_come_to_again_are_kept() -> None:
    other = Step("a" * 40, "b" * 40, 12, Answer.GOOD, 0.0, "known")
    search = Bisect(_history(1), _Measurer(_truth(1)), PAIRS, known=[other])
    search.run()
    assert other in search.all_steps()
    assert other not in search.steps


def test_the_search_probes_the_middle_and_then_what_is_nearest_to_it() -> None:
    search = Search.between(8)
    assert search.next_probe() == 4
    search = search.after(4, Answer.SKIP)
    assert search.next_probe() == 3
    search = search.after(3, Answer.UNCONFIRMED)
    assert search.next_probe() == 5
    assert list(search.after(5, Answer.GOOD).suspects) == [6, 7, 8]
    assert list(search.after(5, Answer.BAD).suspects) == [1, 2, 3, 4, 5]
