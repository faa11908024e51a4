"""Short ways to a verdict, for the tests of comparisons with a baseline."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from gate_builders import HEAD_COMMIT, a_baseline, a_run

from ci.baseline import Baseline
from ci.compare import compare_baseline
from ci.model import CommitResult, GateResult, RowOutcome

NOW = datetime.datetime(2026, 11, 30, tzinfo=datetime.timezone.utc)
BASELINE = a_baseline(10)


def head(seed: int = 100, **changes: Any) -> CommitResult:
    return a_run(seed, commit=HEAD_COMMIT, **changes)


def compare(runs: CommitResult | Sequence[CommitResult], baseline: Baseline = BASELINE) -> GateResult:
    return compare_baseline([runs] if isinstance(runs, CommitResult) else list(runs), baseline, now=NOW)


def outcome(result: GateResult, name: str) -> RowOutcome:
    (row,) = [row for row in result.rows if row.key.benchmark == name]
    return row


def verdicts(result: GateResult) -> dict[str, str]:
    return {row.key.benchmark: row.verdict.value for row in result.rows if not row.control}
