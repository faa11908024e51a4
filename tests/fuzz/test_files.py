"""Every file that the gate reads, damaged: it is read, or refused in one sentence that names it; no traceback, no hang, no pass."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import Mutation
from tests.fuzz.targets import Target, check, check_mutated, targets

EXAMPLES = 100
"""Of each of the 21 kinds of file: 2,100 inputs a run; `python -m tests.fuzz` makes 200,000."""

NUMBER = st.integers(0, (1 << 20) - 1)


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_the_file_as_it_is_is_read(target: Target) -> None:
    assert check(target, target.valid)


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_a_mutated_file_is_read_or_refused_in_one_sentence(target: Target) -> None:
    """Case 25."""

    @settings(max_examples=EXAMPLES, deadline=5000, database=None, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.integers(0, 9), NUMBER, NUMBER), min_size=1, max_size=3))
    def holds(mutations: list[Mutation]) -> None:
        check_mutated(target, mutations)

    holds()


def test_there_are_two_thousand_inputs_a_run() -> None:
    assert len(targets()) * EXAMPLES >= 2000
