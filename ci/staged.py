"""The verdict in stages: a run screens the rows against the baseline; pairs with the merge-base confirm or clear what it picked."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from ci import noise, sequential
from ci.baseline import Baseline
from ci.compare import screened_rows, waive
from ci.confirm import as_controls, flags_of, judge_controls
from ci.model import CommitResult, GateResult, RowKey, RowOutcome, RowResult, RowVerdict
from ci.pairs import Pairs, environments, floor_notices, outcome, sort_out
from ci.rows import WAIVED, assemble, counted, is_control, percent
from ci.sequential import LOOKS

Look = tuple[CommitResult, CommitResult]
"""Merge-base and HEAD, measured alternately."""

_BASE_LACKS = (RowVerdict.NEW, RowVerdict.NOT_COMPARABLE)
_TOLD = {
    RowVerdict.REGRESSED: "over the floor of {floor} and beyond chance",
    RowVerdict.IMPROVED: "faster than the merge-base; the stored baseline is ahead of both",
    RowVerdict.CLEARED: "no slower than the merge-base by the floor of {floor}",
    RowVerdict.UNCONFIRMED: "but chance is not excluded over all rows together",
}


def open_rows(screen: GateResult, looks: Sequence[Look]) -> list[RowKey]:
    """The rows that the next look has to measure; none where all are decided, the looks are used up, or the machine moved."""
    family = screened_rows(screen)
    if not looks or not family:
        return family
    if len(looks) >= len(LOOKS):
        return []
    decided = _decided(screen, looks)
    if decided.unfit is not None:
        return []
    left = {row.key for row in decided.rows if row.verdict is RowVerdict.UNCONFIRMED and "MOVED" not in row.flags}
    return [key for key in family if key in left]


def unpaired_rows(screen: GateResult, looks: Sequence[Look]) -> list[RowKey]:
    """Screened rows that the merge-base has no comparable value of."""
    family = set(screened_rows(screen))
    _, others = _paired(looks, family)
    return sorted(row.key for row in others if row.key in family and row.verdict in _BASE_LACKS)


def pattern_of(rows: Collection[RowKey | str]) -> str:
    """A regular expression that selects exactly these rows, by their keys or ids; controls run whatever is selected."""
    return "|".join(f"^{re.escape(name)}$" for name in sorted(map(str, rows)))


def confirm(
    screen: GateResult, looks: Sequence[Look], baseline: Baseline, *, second: GateResult | None = None, now: datetime.datetime | None = None
) -> GateResult:
    """Judges the screened rows by the looks made so far.

    Args:
        screen: The verdict on one run against the baseline.
        looks: In the order of measurement: 12 pairs, 12 more, 24 more. A row of a later look was open after the ones before.
        baseline: For its waivers.
        second: The verdict on two runs, for rows that the merge-base has no value of.
        now: For the expiry of waivers, UTC; the present where None.
    Returns:
        `screen` with the screened rows' verdicts, values and effects of the pairs. Controls and rows whose launches are the same at both
        commits show whether the machine moved; then the runner is unfit.
    """
    family = screened_rows(screen)
    if not family:
        return screen
    decided = _decided(screen, looks)
    missing = set(open_rows(screen, looks))
    found = {row.key: row for row in decided.rows}
    for key in family:
        if key in missing:
            before = found.get(key) or _screen_row(screen, key)
            why = f"look {len(looks) + 1}, which has to confirm or clear it, was not measured; run the gate again"
            found[key] = replace(before, verdict=RowVerdict.INVALID, reason=f"{before.reason}, but {why}")
        elif key not in found:
            found[key] = _unpaired(_screen_row(screen, key), [row for row in decided.others if row.key == key], second)
    waived, _ = waive([found[key] for key in family], baseline, now or datetime.datetime.now(datetime.timezone.utc))
    replaced = {row.key: row for row in (*waived, *(row for row in decided.controls if "MOVED" in row.flags))}
    invalid, notices = _surroundings(looks)
    told = [_summary(waived, len(looks)), *decided.notices] if looks else []
    result = replace(screen, notices=tuple(dict.fromkeys([*screen.notices, *told, *notices])))
    return assemble([replaced.get(row.key, row) for row in screen.rows], result, invalid=invalid, unfit=decided.unfit)


@dataclass(frozen=True)
class _Decided:
    """What the looks say: of the rows that could be paired, of the controls, of the machine, and of what could not be paired."""

    rows: list[RowOutcome]
    controls: list[RowOutcome]
    unfit: str | None
    others: list[RowOutcome]
    notices: list[str] = field(default_factory=list)


def _decided(screen: GateResult, looks: Sequence[Look]) -> _Decided:
    family = screened_rows(screen)
    if not looks:
        return _Decided([], [], None, [])
    pairs, others = _paired(looks, set(family))
    floors = {row.key: row.floor or 0.0 for row in screen.rows}
    rows = [replace(row, least_floor=floors[row.key]) for row in pairs if not row.control]
    decisions = sequential.decide([row.series for row in rows], looks=LOOKS[: len(looks)], family=len(family))
    level = sequential.ALPHA / len(family)
    judged = [_outcome(row, decision, _screen_row(screen, row.key), level) for row, decision in zip(rows, decisions, strict=True)]
    controls, unfit = judge_controls([row for row in pairs if row.control], rows)
    judged, also_unfit = as_controls(rows, judged)
    return _Decided(judged, controls, unfit or also_unfit, others, floor_notices(pairs))


def _screen_row(screen: GateResult, key: RowKey) -> RowOutcome:
    return next(row for row in screen.rows if row.key == key)


def _outcome(row: Pairs, decision: sequential.Decision, before: RowOutcome, level: float) -> RowOutcome:
    word = _TOLD[decision.verdict].format(floor=percent(row.floor))
    measured = f"{percent(decision.effect)} {row.measure} against the merge-base over {decision.pairs} pairs"
    reason = f"{measured}, {word}; {before.reason} of the baseline"
    used = replace(row, d=row.d[: decision.pairs])
    edges = used.series.edges(noise.SCREEN_ALPHA, level * sequential.SHARES[decision.look - 1])
    made = outcome(used, decision.verdict, reason, decision.effect, decision.p_value, before.mde80, edges)
    stale = (WAIVED, "BLIND", "WIDE") if decision.verdict is RowVerdict.REGRESSED else (WAIVED,)
    flags = (*(flag for flag in before.flags if flag not in stale), *flags_of(used, decision.verdict, decision.effect, 0.0))
    return replace(made, flags=tuple(dict.fromkeys(flags)), history=before.history)


def _unpaired(before: RowOutcome, others: Sequence[RowOutcome], second: GateResult | None) -> RowOutcome:
    """A screened row that could not be paired: by two runs where it is the merge-base that lacks it, else as HEAD left it."""
    why = others[0].reason if others else "the pairs do not have it"
    if others and others[0].verdict is RowVerdict.SKIPPED:
        return replace(before, verdict=RowVerdict.INVALID, reason=f"screened, and the pairs skipped it: {why}; run the gate again")
    if not others or others[0].verdict in _BASE_LACKS:
        row = None if second is None else next((row for row in second.rows if row.key == before.key), None)
        if row is None:
            return replace(before, verdict=RowVerdict.INVALID, reason=f"screened, and not confirmed: {why}; run the gate again")
        return replace(row, reason=f"{row.reason}; judged by two runs, because it cannot be paired: {why}")
    return replace(others[0], flags=tuple(dict.fromkeys([*before.flags, *others[0].flags])))


def _summary(rows: Sequence[RowOutcome], num_looks: int) -> str:
    tally = ((sum(row.verdict is verdict for row in rows), verdict.value) for verdict in dict.fromkeys(row.verdict for row in rows))
    return (
        f"{counted(len(rows), 'row')} looked slower than the baseline, measured in up to {LOOKS[num_looks - 1]} pairs of processes of"
        f" merge-base and HEAD: {', '.join(f'{count} {name}' for count, name in tally)}."
    )


def _surroundings(looks: Sequence[Look]) -> tuple[str | None, list[str]]:
    notices: list[str] = []
    for base, head in looks:
        invalid, told = environments(base, head)
        notices.extend(told)
        if invalid is not None:
            return invalid, notices
    return None, notices


def _paired(looks: Sequence[Look], family: Collection[RowKey]) -> tuple[list[Pairs], list[RowOutcome]]:
    """Pairs of the family and of the controls over all looks, and outcomes of what cannot be paired."""
    level = [_level(look) for look in looks]
    base, head = (joined([look[side] for look in level], family) for side in (0, 1))
    return sort_out(base, head)


def _level(look: Look) -> Look:
    """As many samples of each row on both sides, so that a sample that one look lacks does not shift the pairs of the next."""
    sides = []
    for mine, other in (look, look[::-1]):
        counts = {key: len(other.rows[key].samples) for key in mine.rows if key in other.rows}
        rows = {
            key: replace(row, samples=row.samples[: counts.get(key)], records=row.records[: counts.get(key)])
            for key, row in mine.rows.items()
        }
        sides.append(replace(mine, rows=rows))
    return sides[0], sides[1]


def joined(runs: Sequence[CommitResult], family: Collection[RowKey]) -> CommitResult:
    """One commit's looks as one result of the family's rows and the controls: samples and records in the order of measurement."""
    rows: dict[RowKey, RowResult] = {}
    for run in runs:
        for key, row in run.rows.items():
            if key in family or is_control(row):
                rows[key] = row if key not in rows else _appended(rows[key], row)
    return replace(runs[-1], rows=rows, processes=tuple(process for run in runs for process in run.processes))


def _appended(earlier: RowResult, later: RowResult) -> RowResult:
    """The later state stands where it is a failure: what went wrong at any look is told."""
    state, reason = (later.state, later.reason) if earlier.state == "measured" else (earlier.state, earlier.reason)
    return replace(later, state=state, reason=reason, samples=earlier.samples + later.samples, records=earlier.records + later.records)


__all__ = ["Look", "confirm", "joined", "open_rows", "pattern_of", "unpaired_rows"]
