"""A baseline against itself: each of its runs, held out and judged against the rest, must look like what it is, an unchanged commit."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ci.baseline_file import Baseline, Row, Runs
from ci.errors import BaselineError
from ci.model import CommitResult, RowVerdict
from ci.references import references_of, run_estimate
from ci.rows import percent
from ci.screen import ALPHA, judge

_NAMED = 3


def _without(values: Runs | None, index: int) -> Runs | None:
    return None if values is None else [run for number, run in enumerate(values) if number != index]


def held_out(baseline: Baseline, index: int) -> Baseline:
    """A baseline of one run set without one of its runs."""

    def reduced(row: Row) -> Row:
        floors, latencies = _without(row.host_floors_us, index), _without(row.latency_us, index)
        return msgspec.structs.replace(row, values=_without(row.values, index) or [], latency_us=latencies, host_floors_us=floors)

    runs = [run for number, run in enumerate(baseline.runs) if number != index]
    return msgspec.structs.replace(baseline, runs=runs, rows={name: reduced(row) for name, row in baseline.rows.items()})


def noisy_rows(baseline: Baseline, runs: Sequence[CommitResult], rows: Collection[str], *, accept: bool) -> set[str]:
    """Judges each run against the others, by the gate's own rule.

    A row is noisy where a held-out run is REGRESSED at a level that leaves the whole self-test the gate's 1 %: each run's test is one of
    many, and would alone refuse as many sound baselines as the baseline has runs, in per cent.

    Args:
        baseline: Of one run set, made of `runs`.
        runs: In the order of the baseline.
        rows: Names of the rows that are to be accepted; the others are not looked at.
        accept: Return noisy rows instead of refusing them.
    Returns:
        Names of the noisy rows.
    Raises:
        BaselineError: The controls of a run moved against those of the other runs, or a row is noisy; the message names the run.
    """
    noisy: dict[str, str] = {}
    compared = [name for name, row in baseline.rows.items() if not row.control]
    for index, run in enumerate(runs):
        judged = judge([run], references_of(held_out(baseline, index)), estimate=run_estimate)
        if judged.unfit is not None:
            raise BaselineError(f"{run.source}, run {index + 1} of {len(runs)}, can never become part of a baseline: {judged.unfit}")
        for outcome in judged.rows:
            name = str(outcome.key)
            sure = outcome.p_value is not None and outcome.p_value <= ALPHA / (len(runs) * len(compared))
            if name in rows and not outcome.control and outcome.verdict is RowVerdict.REGRESSED and sure:
                noisy.setdefault(name, f"{name} ({percent(outcome.effect)} latency in run {index + 1}, {run.source})")
    if noisy and not accept:
        told = ", ".join(list(noisy.values())[:_NAMED]) + (f" and {len(noisy) - _NAMED} more" if len(noisy) > _NAMED else "")
        raise BaselineError(
            f"a run held against the other runs of the same state looks like a regression in {len(noisy)} row(s): {told}; "
            "measure that run again, or accept the rows with --accept-noisy"
        )
    return set(noisy)
