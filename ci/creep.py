"""Anchors against creep: many steps, each within the band of a baseline that is refreshed behind them, still add up.

Distances are in ln latency, + is slower. Both the anchor and the present reference are held against the controls of their own runs, so
that another GPU, or a clock that moved between them, is taken off.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from ci import noise
from ci.baseline_file import Anchor, Baseline, Row
from ci.compared import MIN_FLOOR
from ci.model import Direction, RowKey, RowOutcome, RowVerdict
from ci.references import Reference, all_held, references_of
from ci.rows import COMPARED_ROWS, WAIVED, at_effect, percent, serving_classes
from ci.screen import ALPHA, SCREENED

CREEP = "CREEP"
"""Flag of a row that is slower than its anchor by `MIN_CREEP` or more, beyond chance."""
MIN_CREEP = 0.03
MAX_CREEP = 0.05
"""Distance over which a row fails unless a waiver says CREEP."""

_TAKEN_OFF = (WAIVED, SCREENED)
"""Flags that a row which fails by its creep loses: no other waiver excuses it, and no second look at the last change clears it."""


@dataclass(frozen=True)
class Standing:
    """Where a row's present reference lies, seen from its anchor."""

    offset: float
    """ln latency from the anchor to the present reference, the controls taken off."""
    level: float
    """ln latency of the anchor."""
    num_runs: int
    """Runs that the anchor rests on."""
    commit: str


def _value(y: float, direction: Direction) -> float:
    return math.exp(-y if direction == "higher" else y)


def _controls(references: Mapping[RowKey, Reference], row: Reference) -> dict[str, noise.Array]:
    """Runs of the controls that serve the row, in the row's own set."""
    wanted = serving_classes([row.bottleneck])
    found = {}
    for control in references.values():
        if control.control and control.bottleneck in wanted:
            runs = control.by_set.get(row.run_set) if control.by_set else control.runs
            if runs is not None:
                found[str(control.key)] = runs
    return found


def _normalised(row: Reference, controls: Mapping[str, noise.Array]) -> noise.Array:
    if not controls:
        return row.runs
    runs: noise.Array = noise.control_normalised(row.runs[None, :], np.stack(list(controls.values())))[0]
    return runs


def anchor_of(baseline: Baseline, row: Row) -> Anchor:
    """The anchor that a refresh leaves in a row: the stored one, or the row's present values, which are still those of the anchor."""
    if row.anchor is not None:
        return row.anchor
    references = all_held(references_of(baseline))
    reference = references[row.key]
    controls = _controls(references, reference)
    levels = {str(key): other.level_us for key, other in references.items() if key == row.key or str(key) in controls}
    last = max(baseline.runs_of(row), key=lambda run: run.time)
    return Anchor(
        commit=last.commit,
        time=last.time,
        unit=row.unit,
        values=[_value(float(y), row.direction) for y in _normalised(reference, controls)],
        controls={name: _value(float(np.median(runs)), _direction(baseline, name)) for name, runs in sorted(controls.items())},
        floors_us={name: level for name, level in sorted(levels.items()) if level is not None},
    )


def _direction(baseline: Baseline, name: str) -> Direction:
    """Whether more is better in a row of the baseline."""
    return baseline.rows[name].direction


def standing(baseline: Baseline, row: Row, references: Mapping[RowKey, Reference]) -> Standing | None:
    """Where the row stands from its anchor; None where no control of the anchor is left to compare by.

    A host row is held against the floors of both sides, or, where one side lacks them, of neither.
    """
    present = all_held(references)
    floors = {} if row.anchor is None else row.anchor.floors_us
    if row.anchor is not None and (str(row.key) not in floors or present[row.key].level_us is None):
        present, floors = references, {}
    reference = present[row.key]
    controls = _controls(present, reference)
    runs = _normalised(reference, controls)
    now = float(np.median(runs))
    if row.anchor is None:
        return Standing(0.0, now, int(runs.size), max(baseline.runs_of(row), key=lambda run: run.time).commit)
    anchor = row.anchor
    level = float(np.median(noise.log_latency(anchor.values, row.direction)))
    levels = {str(key): other.level_us for key, other in present.items()}

    def floor_moved(name: str) -> float:
        """ln from the anchor's level of a row's floors to the present one; 0 for rows that are held against none."""
        now_us = levels[name]
        return math.log(now_us / floors[name]) if name in floors and now_us is not None else 0.0

    shared = [
        float(np.median(found) - noise.log_latency([anchor.controls[name]], _direction(baseline, name))[0]) - floor_moved(name)
        for name, found in controls.items()
        if name in anchor.controls and (name in floors) == (levels[name] is not None)
    ]
    if anchor.controls and not shared:
        return None
    shift = float(np.median(shared)) if shared else 0.0
    return Standing(now - level - floor_moved(str(row.key)) - shift, level, len(anchor.values), anchor.commit)


def follow_improvements(baseline: Baseline, names: Iterable[str]) -> Baseline:
    """Takes the present values of rows for their anchor where they are better than the anchor by .5 % or more: what was gained is held."""
    references = references_of(baseline)
    rows = dict(baseline.rows)
    for name in names:
        found = standing(baseline, rows[name], references)
        if found is not None and found.offset < -math.log1p(MIN_FLOOR):
            rows[name] = msgspec.structs.replace(rows[name], anchor=None)
    return msgspec.structs.replace(baseline, rows=rows)


def with_anchors_of(made: Baseline, previous: Baseline) -> Baseline:
    """`made`, its rows held against the anchors of the baseline that it replaces, so that recording anew does not forget them.

    Rows whose unit, version or inputs differ have no common measure with the old ones, and are their own anchors.
    """
    rows = dict(made.rows)
    for name, row in made.rows.items():
        old = previous.rows.get(name)
        if old is None or row.control or old.control:
            continue
        if all(getattr(old, field) == getattr(row, field) for field in ("unit", "direction", "version", "input_hash", "bottleneck")):
            rows[name] = msgspec.structs.replace(row, anchor=anchor_of(previous, old), replaced=old.replaced)
    whole = msgspec.structs.replace(made, rows=rows, anchor_commit=previous.anchor_commit)
    return follow_improvements(whole, [name for name, row in rows.items() if row.anchor is not None])


def marked(
    rows: Sequence[RowOutcome],
    spreads: Mapping[RowKey, tuple[float, float]],
    baseline: Baseline,
    num_head_runs: int,
    now: datetime.datetime,
    references: Mapping[RowKey, Reference],
) -> tuple[list[RowOutcome], list[str]]:
    """Flags rows that crept away from their anchors, and turns those into failures that are too far and not waived.

    A row is flagged where it is slower than its anchor by 3 % or more and chance is excluded (t, at the level of Holm's first step over
    the compared rows). Over 5 % it is REGRESSED, with the anchor as its baseline, unless a waiver of the row says CREEP. A row that was
    never refreshed is flagged only: its band is that of its anchor.

    Args:
        rows: As judged against the baseline.
        spreads: SD and degrees of freedom of each compared row.
        baseline: With its anchors.
        num_head_runs: Runs under test.
        now: For the expiry of waivers.
        references: Of the baseline.
    Returns:
        The rows, and a notice for each that crept.
    """
    waived = {waiver.row for waiver in baseline.waivers if waiver.change == CREEP and waiver.expires >= now.date()}
    judged, notices = [], []
    for outcome in rows:
        row = baseline.rows.get(str(outcome.key))
        comparable = outcome.verdict in COMPARED_ROWS and outcome.effect is not None and outcome.key in spreads
        if row is None or not comparable or (row.anchor is None and outcome.verdict is RowVerdict.REGRESSED):
            judged.append(outcome)
            continue
        from_anchor = standing(baseline, row, references)
        if from_anchor is None:
            notices.append(
                f"creep: {outcome.key} cannot be held against its anchor, whose controls are gone; refresh it with --new-anchor and say why"
            )
            judged.append(outcome)
            continue
        sd, nu = spreads[outcome.key]
        distance = math.log1p(outcome.effect or 0.0) + from_anchor.offset
        p_value = noise.t_upper_tail(distance / noise.predictive_sd(sd, from_anchor.num_runs, num_head_runs), nu)
        if math.expm1(distance) < MIN_CREEP or p_value > ALPHA / len(spreads):
            judged.append(outcome)
            continue
        made, told = _crept(outcome, row, from_anchor, distance, p_value, waived=str(outcome.key) in waived)
        judged.append(made)
        notices.append(told)
    return judged, notices


def _crept(outcome: RowOutcome, row: Row, anchor: Standing, distance: float, p_value: float, *, waived: bool) -> tuple[RowOutcome, str]:
    """The outcome of a row that is beyond chance slower than its anchor, and the notice."""
    size = percent(math.expm1(distance))
    told = f"creep: {outcome.key} is {size} latency from its anchor {anchor.commit[:12]}, though {outcome.verdict.value} by stored values"
    flags = tuple(dict.fromkeys((*outcome.flags, CREEP)))
    fails = row.anchor is not None and math.expm1(distance) > MAX_CREEP and not waived
    if not fails:
        if waived and outcome.verdict is not RowVerdict.REGRESSED:
            flags = tuple(dict.fromkeys((*flags, WAIVED)))
        return replace(outcome, flags=flags), f"{told}; find the commits that slowed it down"
    remedy = "mend it, or waive it (CREEP) in the baseline with a reason and a date"
    flags = tuple(flag for flag in flags if flag not in _TAKEN_OFF)
    if outcome.verdict is RowVerdict.BLIND:
        return replace(outcome, flags=flags), f"{told}; {remedy}"
    made = replace(
        outcome,
        verdict=RowVerdict.REGRESSED,
        reason=f"{size} latency from its anchor {anchor.commit[:12]}, over {percent(MAX_CREEP)} and beyond chance; {remedy}",
        flags=flags,
        p_value=p_value,
        floor=MAX_CREEP,
    )
    if made.value is not None:
        made = at_effect(made, made.value, math.expm1(distance), (1 / (1 + MAX_CREEP) - 1, MAX_CREEP))
    return made, f"{told}; {remedy}"
