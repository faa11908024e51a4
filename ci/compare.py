"""Row and run verdicts against a stored baseline, or against the history of a foreign results tree."""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from ci import creep, noise, runner_state
from ci.baseline import Baseline, Problem, check, file_name
from ci.compared import OUTRIGHT, two_run_floors
from ci.errors import BaselineError, ExitCode, UsageError
from ci.model import CommitResult, GateResult, RowKey, RowOutcome, RowResult, RowVerdict
from ci.references import Reference, references_of, run_estimate
from ci.rows import COMPARED_ROWS, RUN_ORDER, VERDICTS, WAIVED, assemble, blank_result, blindness, conclude, percent, section_of
from ci.screen import ALPHA, BLIND_MDE, SCREENED, UNFIT_MIN_ROWS, judge

__all__ = [
    "ALPHA",
    "RUN_ORDER",
    "VERDICTS",
    "baseline_floors",
    "compare_baseline",
    "compare_history",
    "conclude",
    "screened_rows",
    "section_of",
    "waive",
]

_MAX_RUNS = 2
_BAD_RUNNER_SHARE = 0.9
"""Share of a history commit's rows that move together on a bad runner; not all, as the history's own median may have moved."""
_COMPARABLE_KINDS = frozenset({"environment", "runs", "waiver", "age", "advisory"})
"""Problems of a baseline that leave its numbers comparable: its rows are shown, though its verdict is BASELINE INVALID."""


def _value_estimate(row: RowResult) -> float:
    """ln latency of a foreign result: its median, whatever its samples were."""
    return float(np.median(noise.log_latency(row.samples, row.direction)))


def _one_commit(heads: Sequence[CommitResult]) -> CommitResult:
    if not 1 <= len(heads) <= _MAX_RUNS:
        raise UsageError(f"a commit is judged by one run or two, but {len(heads)} came; hand in the runs of this commit")
    if len({head.commit for head in heads}) > 1:
        raise UsageError(f"the runs are of the commits {', '.join(h.commit[:8] for h in heads)}; hand in runs of one commit")
    return heads[-1]


def baseline_floors(baseline: Baseline) -> dict[RowKey, float]:
    """The smallest relative change of latency of each row that counts between two single runs, by the baseline's noise."""
    return two_run_floors(references_of(baseline).values())


def _validity(heads: Sequence[CommitResult], baseline: Baseline, now: datetime.datetime | None, name: str) -> list[Problem]:
    """Problems of the baseline for any process of the runs, each told once."""
    processes = [process for head in heads for process in head.processes]
    if not processes:
        text = f"the run has no process records, so nothing says whether {name} is of its device; measure with this project's suites"
        return [Problem("device", "error", text)]
    found: dict[str, Problem] = {}
    for process in processes:
        try:
            told = check(baseline, process.environment, process.protocol, now=now, name=name)
        except BaselineError as error:
            raise BaselineError(f"{process.source}: {error}") from error
        for problem in told:
            found.setdefault(problem.message, problem)
    return sorted(found.values(), key=lambda problem: problem.severity != "error")


def waive(rows: Sequence[RowOutcome], baseline: Baseline, now: datetime.datetime) -> tuple[list[RowOutcome], list[str]]:
    """Turns unwaived blindness into a verdict, and marks what a waiver excuses; every waiver is told."""
    waivers = {(waiver.row, waiver.change): waiver for waiver in baseline.waivers if waiver.expires >= now.date()}
    alike: dict[str, list[str]] = defaultdict(list)
    for waiver in baseline.waivers:
        if waiver.row in baseline.rows:
            terms = f"may be {waiver.change} until {waiver.expires}, says {waiver.approver} ({waiver.reference}): {waiver.reason}"
            alike[terms].append(waiver.row)
    notices = [f"waiver: {', '.join(names)} {terms}" for terms, names in alike.items()]
    judged = []
    for row in rows:
        blind = row.mde80 is not None and row.mde80 > BLIND_MDE
        if (
            blind
            and row.verdict in (RowVerdict.PASS, RowVerdict.CLEARED, RowVerdict.UNCONFIRMED)
            and (str(row.key), "BLIND") not in waivers
        ):
            size = "no size" if row.mde80 is None or math.isinf(row.mde80) else percent(row.mde80)
            reason = f"only a regression of {size} would be found, over {percent(BLIND_MDE)}; measure it better or waive it"
            row = replace(row, verdict=RowVerdict.BLIND, reason=reason)
        waived = (str(row.key), row.verdict.value) in waivers or (
            blind and row.verdict is not RowVerdict.REGRESSED and (str(row.key), "BLIND") in waivers
        )
        judged.append(replace(row, flags=(*row.flags, WAIVED)) if waived else row)
    return judged, notices


def compare_baseline(
    head_runs: Sequence[CommitResult],
    baseline: Baseline,
    *,
    base: str | None = None,
    head: str | None = None,
    device: str | None = None,
    now: datetime.datetime | None = None,
    name: str | None = None,
    notices: Sequence[str] = (),
    pairs: int | None = None,
) -> GateResult:
    """Judges one or two runs of a commit against the baseline of its device.

    With one run, rows beyond the screen's band carry the flag SCREENED, and `ci.staged` confirms them in pairs. With two, for a merge-base
    that cannot be measured, the mean of both is tested over all comparable rows, so that having picked rows by the first costs nothing.

    Args:
        head_runs: One run, or two in the order of measurement, joined with their records.
        baseline: As loaded; whether it fits the runs' device, protocol and software is checked here.
        base, head, device: What the result calls the two sides and the device; the anchor commit, the runs' commit and the baseline's
            device where None.
        now: For age and expiry, UTC; the present where None.
        name: What messages call the baseline's file.
        notices: Further things for a reviewer.
        pairs: Pairs of the last look of the confirmation, for what the whole can find; None where a second run confirms.
    Raises:
        UsageError: No run, more than two, or runs of different commits.
    """
    last = _one_commit(head_runs)
    now = now or datetime.datetime.now(datetime.timezone.utc)
    problems = _validity(head_runs, baseline, now, name or file_name(baseline))
    errors = [problem for problem in problems if problem.severity == "error"]
    told = [*notices, *(str(problem) for problem in problems)]
    told.extend(notice for run in head_runs for notice in run.notices)
    rows: list[RowOutcome] = []
    unfit = None
    if all(problem.kind in _COMPARABLE_KINDS for problem in errors):
        references = references_of(baseline)
        judged = judge(head_runs, references, estimate=run_estimate, pairs=pairs)
        unfit = judged.unfit and runner_state.explained(judged.unfit, head_runs, [runner_state.of_run(run) for run in baseline.runs])
        rows, waived = waive(judged.rows, baseline, now)
        told.extend([*judged.notices, *waived])
        if unfit is None:
            rows, crept = creep.marked(rows, judged.spreads, baseline, len(head_runs), now, references)
            told.extend(crept)
    result = blank_result("baseline", device or baseline.device.name, base or baseline.anchor_commit, last, told, len(head_runs))
    result = replace(result, head=head or last.commit, base_environment=_environment_of(baseline))
    rows = [
        _with_history(row, [float(np.median(run)) for run in known.values if run] if (known := baseline.rows.get(str(row.key))) else ())
        for row in rows
    ]
    return assemble(rows, result, invalid=str(errors[0]) if errors else None, unfit=unfit)


def _with_history(row: RowOutcome, values: Sequence[float]) -> RowOutcome:
    return replace(row, history=tuple(values))


def _environment_of(baseline: Baseline) -> dict[str, object]:
    """The baseline's environment by the names that process records use."""
    software, device = (
        {name: value for name, value in msgspec.to_builtins(part).items() if value is not None}
        for part in (baseline.environment, baseline.device)
    )
    power = device.pop("power_limit_w", None)
    return {**software, "device": device, **({} if power is None else {"state": {"power_limit_w": power}})}


def screened_rows(result: GateResult) -> list[RowKey]:
    """The rows that one run picked and that have to be confirmed or cleared, in order.

    A machine that is unfit, a baseline that is invalid and a row with a wrong result stay so: nothing is asked for then.
    """
    if result.exit_code in (ExitCode.BASELINE, ExitCode.WRONG, ExitCode.UNFIT):
        return []
    return [row.key for row in result.rows if SCREENED in row.flags and not row.control and row.verdict in COMPARED_ROWS]


def _fit_history(history: Sequence[CommitResult]) -> tuple[list[CommitResult], list[str]]:
    """The commits without those of a bad runner: nine tenths of their rows, four or more, moved over 5 % to one side of the medians."""
    values: dict[tuple[RowKey, str], list[float]] = defaultdict(list)
    for commit in history:
        for key, row in commit.rows.items():
            if row.state == "measured":
                values[key, row.version].append(_value_estimate(row))
    medians = {known: float(np.median(found)) for known, found in values.items() if len(found) > _MAX_RUNS}
    kept, notices = [], []
    for commit in history:
        deviations = [
            _value_estimate(row) - medians[key, row.version]
            for key, row in commit.rows.items()
            if row.state == "measured" and (key, row.version) in medians
        ]
        away = math.log1p(OUTRIGHT)
        together = max(sum(d > away for d in deviations), sum(d < -away for d in deviations))
        if len(deviations) >= UNFIT_MIN_ROWS and together >= _BAD_RUNNER_SHARE * len(deviations):
            notices.append(
                f"commit {commit.commit[:8]} is left out of the history: {together} of {len(deviations)} rows moved together "
                f"(median {percent(math.expm1(float(np.median(deviations))))} latency), suspect the machine"
            )
        else:
            kept.append(commit)
    return kept, notices


def _history_references(history: Sequence[CommitResult], head: CommitResult) -> tuple[dict[RowKey, Reference], dict[RowKey, str]]:
    """References of the rows as the head measures them, and the rows that the history knows in another version or unit only."""
    found: dict[RowKey, list[RowResult]] = defaultdict(list)
    for commit in history:
        for key, row in commit.rows.items():
            if row.state == "measured":
                found[key].append(row)
    references, incomparable = {}, {}
    latest = history[-1].rows if history else {}
    for key, rows in found.items():
        wanted = head.rows.get(key)
        if wanted is None and key not in latest:
            continue
        like = wanted if wanted is not None else rows[-1]
        same = [row for row in rows if (row.version, row.unit, row.direction) == (like.version, like.unit, like.direction)]
        if not same:
            versions = Counter(f"version {row.version[:12]!r} in {row.unit!r}" for row in rows)
            known = versions.most_common(1)[0][0]
            incomparable[key] = f"the history has it as {known}, the run as version {like.version[:12]!r} in {like.unit!r}"
            continue
        references[key] = Reference(
            key=key,
            unit=like.unit,
            direction=like.direction,
            version=like.version,
            bottleneck="",
            timer=like.unit,
            control=False,
            runs=np.array([_value_estimate(row) for row in same]),
        )
    return references, incomparable


def compare_history(
    history: Sequence[CommitResult],
    head_runs: Sequence[CommitResult],
    *,
    device: str | None = None,
    notices: Sequence[str] = (),
) -> GateResult:
    """Judges one or two runs against the commits of a foreign results tree, each of them one run of one value.

    Nothing is known but values: there are no control rows (a run in which all rows move together is unfit), no verification, and no
    file that could promise a band, so that a blind row is flagged rather than failed. Commits of a bad runner are left out and named.

    Args:
        history: Earlier commits on the same machine, by date. The commit under test is not part of its own history.
        device: What the result calls the device; the machine where None.
        head_runs: One run or two; two neighbouring commits may stand for two runs of one state.
        notices: Further things for a reviewer.
    Raises:
        UsageError: No run, or more than two.
    """
    if not 1 <= len(head_runs) <= _MAX_RUNS:
        raise UsageError(f"a history is compared with one run or two, but {len(head_runs)} came; hand in one or two")
    head = head_runs[-1]
    own = {run.commit for run in head_runs}
    kept, told = _fit_history([commit for commit in history if commit.commit not in own])
    references, incomparable = _history_references(kept, head)
    judged = judge(head_runs, references, estimate=_value_estimate, incomparable=incomparable)
    told = [
        *notices,
        "a foreign results tree has values only: no records, no control rows, nothing verified",
        *(notice for notice in judged.notices if "no control rows" not in notice),
        *told,
    ]
    blind = [row for row in judged.rows if "BLIND" in row.flags]
    if blind:
        told.append(f"{blindness(blind)} would be found in {'it' if len(blind) == 1 else 'them'}")
    base = f"{len(kept)} commits up to {kept[-1].commit[:8]}" if kept else "no commits"
    result = blank_result("history", device or head.machine, base, head, told, len(head_runs))
    rows = [_with_history(row, _values_of(kept, row)) for row in judged.rows]
    return assemble(rows, result, unfit=judged.unfit)


def _values_of(history: Sequence[CommitResult], outcome: RowOutcome) -> list[float]:
    """The row's values over the history, in its unit."""
    found = [commit.rows[outcome.key] for commit in history if outcome.key in commit.rows]
    return [float(np.median(row.samples)) for row in found if row.state == "measured" and row.unit == outcome.unit]
