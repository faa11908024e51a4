"""Refreshing a baseline: rows that really changed take the values of new runs, every other row stays as it is."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ci import self_test
from ci.baseline_check import MIN_BOOTS, RECORD, boots_of
from ci.baseline_file import Baseline, Replaced, Row, Runs, Waiver, content_hash
from ci.baseline_record import gathered, of_one_kind
from ci.creep import MIN_CREEP, anchor_of, follow_improvements, standing
from ci.errors import BaselineError, UsageError
from ci.model import CommitResult, RowOutcome, RowVerdict
from ci.references import references_of, run_estimate
from ci.rows import percent, serving_classes
from ci.screen import judge

_CHANGED = (RowVerdict.REGRESSED, RowVerdict.IMPROVED, RowVerdict.NOT_COMPARABLE, RowVerdict.NEW)


@dataclass(frozen=True)
class Refreshed:
    """A refreshed baseline and what became of it."""

    baseline: Baseline
    replaced: tuple[str, ...]
    added: tuple[str, ...]
    notices: tuple[str, ...] = ()


def refresh(
    previous: Baseline,
    runs: Sequence[CommitResult],
    *,
    accepted_by: str,
    reason: str,
    rows: str | None = None,
    previous_hash: str | None = None,
    waivers: Sequence[Waiver] | None = None,
    allow_single_boot: bool = False,
    accept_noisy: bool = False,
    new_anchor: bool = False,
) -> Refreshed:
    """Replaces the rows of a baseline that really changed by the values of new runs.

    A row changed where the gate's own test of the mean of all new runs says REGRESSED or IMPROVED, where it is measured in another way,
    and where it is new. It keeps what it had in `replaced`, and its anchor. The anchor moves where the row is IMPROVED and .5 % better than
    it, since what was gained is to be held, where the old values cannot be compared any more, and where `new_anchor` says so.

    Args:
        previous: The baseline as it stands.
        runs: As for `ci.baseline_record.record`; rows that they do not have are kept.
        accepted_by: Who answers for it.
        reason: Why, for the reviewer; it stands beside each replaced value.
        rows: Regular expression; the rows whose name it finds are replaced, whatever the test says, and no others.
        previous_hash: sha256 of the previous file; of `previous` as it would be written where None.
        waivers: Take the place of the previous ones where given.
        allow_single_boot, accept_noisy: As for `record`.
        new_anchor: Take the new values as the anchor of the rows that are replaced.
    Returns:
        The baseline, `previous` itself where no row changed.
    Raises:
        UsageError: `rows` finds no row, or no reason is given.
        BaselineError: What `record` refuses; a device, software or protocol other than the baseline's; controls that moved from those of
            the baseline, are missing or are measured in another way.
    """
    if not reason.strip():
        raise UsageError("a refresh needs a reason: say with --reason why the rows changed.")
    run_set = _new_name(previous)
    fresh = gathered(runs, accepted_by=accepted_by, reason=reason, allow_single_boot=allow_single_boot, run_set=run_set)
    differs = of_one_kind(previous, fresh)
    if differs is not None:
        raise BaselineError(f"{differs}, so that one file cannot hold both; replace the whole baseline with {RECORD}")
    references = references_of(previous)
    for run in runs:
        unfit = judge([run], references, estimate=run_estimate).unfit
        if unfit is not None:
            raise BaselineError(f"{run.source} cannot refresh the baseline: {unfit}")
    outcomes = {str(outcome.key): outcome for outcome in judge(runs, references, estimate=run_estimate).rows}
    _same_controls(previous, fresh, outcomes)
    chosen = _chosen(fresh, outcomes, rows)
    if not chosen:
        return Refreshed(previous, (), ())
    _have_controls(previous, fresh, chosen)
    noisy = self_test.noisy_rows(fresh, runs, chosen, accept=accept_noisy)
    made = dict(previous.rows)
    for name in chosen:
        made[name] = _replaced(previous, fresh.rows[name], outcomes[name], reason, noisy=name in noisy, new_anchor=new_anchor)
    made.update(_controls(previous, fresh))
    whole = _without_unused(msgspec.structs.replace(previous, runs=[*previous.runs, *fresh.runs], rows=made))
    whole = follow_improvements(whole, [name for name in chosen if outcomes[name].verdict is RowVerdict.IMPROVED])
    whole = msgspec.structs.replace(
        whole,
        protocol=msgspec.structs.replace(
            previous.protocol,
            timers=sorted({row.timer for row in whole.rows.values()}),
            l2=sorted({*previous.protocol.l2, *fresh.protocol.l2}),
        ),
        accepted_by=accepted_by,
        reason=reason,
        waivers=previous.waivers if waivers is None else list(waivers),
        previous_hash=previous_hash or content_hash(previous),
        advisory=any(boots_of(whole, name) < MIN_BOOTS for name in whole.run_sets),
    )
    old = tuple(name for name in chosen if name in previous.rows)
    return Refreshed(whole, old, tuple(name for name in chosen if name not in previous.rows), tuple(_notices(previous, whole, old)))


def _new_name(previous: Baseline) -> str:
    number = len(previous.run_sets) + 1
    while str(number) in previous.run_sets:
        number += 1
    return str(number)


def _same_controls(previous: Baseline, fresh: Baseline, outcomes: Mapping[str, RowOutcome]) -> None:
    controls = {name for side in (previous, fresh) for name, row in side.rows.items() if row.control}
    other = [outcomes[name] for name in sorted(controls) if outcomes[name].verdict is RowVerdict.NOT_COMPARABLE]
    if other:
        raise BaselineError(
            f"the control row {other[0].key} is measured in another way than in the baseline ({other[0].reason}), so that old and "
            f"new runs have nothing in common; replace the whole baseline with {RECORD}"
        )


def _chosen(fresh: Baseline, outcomes: Mapping[str, RowOutcome], pattern: str | None) -> list[str]:
    names = [name for name, row in sorted(fresh.rows.items()) if not row.control]
    if pattern is None:
        return [name for name in names if outcomes[name].verdict in _CHANGED]
    found = [name for name in names if re.search(pattern, name)]
    if not found:
        raise UsageError(f"--rows {pattern!r} finds no row of the runs; it is searched in names like {(names or ['none'])[0]!r}.")
    return found


def _have_controls(previous: Baseline, fresh: Baseline, chosen: Collection[str]) -> None:
    """Refuses new values that could not be normalised as the old ones were."""
    wanted = serving_classes(fresh.rows[name].bottleneck for name in chosen)
    lost = sorted(name for name, row in previous.rows.items() if row.control and row.bottleneck in wanted and name not in fresh.rows)
    if lost:
        raise BaselineError(f"the runs lack the control row {lost[0]}, which serves rows to be refreshed; measure the controls with them")


def _replaced(previous: Baseline, row: Row, outcome: RowOutcome, reason: str, *, noisy: bool, new_anchor: bool) -> Row:
    """The new row, with what the old one leaves it."""
    row = msgspec.structs.replace(row, noisy=noisy)
    old = previous.rows.get(str(row.key))
    if old is None:
        return row
    last = max(previous.runs_of(old), key=lambda run: run.time)
    latencies = [value for run in old.latency_us or [] for value in run]
    entry = Replaced(
        commit=last.commit,
        time=last.time,
        value=float(np.median([value for run in old.values for value in run])),
        unit=old.unit,
        reason=reason,
        latency_us=float(np.median(latencies)) if latencies else None,
    )
    keeps_anchor = outcome.verdict is not RowVerdict.NOT_COMPARABLE and not new_anchor
    return msgspec.structs.replace(row, replaced=[*old.replaced, entry], anchor=anchor_of(previous, old) if keeps_anchor else None)


def _of_all_runs(old: Runs | None, new: Runs | None, num_old: int, num_new: int) -> Runs:
    """Values of a control row over the old runs and the new ones; empty for runs that did not measure it."""
    return [*(old if old is not None else [[] for _ in range(num_old)]), *(new if new is not None else [[] for _ in range(num_new)])]


def _controls(previous: Baseline, fresh: Baseline) -> dict[str, Row]:
    """The control rows with the new runs behind the old ones; what describes them is as in the newest that has it."""
    made = {}
    counts = (len(previous.runs), len(fresh.runs))
    for name, row in {**previous.rows, **fresh.rows}.items():
        if not row.control:
            continue
        old, new = previous.rows.get(name), fresh.rows.get(name)
        values = [None if side is None else side.values for side in (old, new)]
        latencies = [None if side is None else side.latency_us for side in (old, new)]
        floors = [None if side is None else side.host_floors_us for side in (old, new)]
        unknown = any(side is not None and side.latency_us is None for side in (old, new))
        made[name] = msgspec.structs.replace(
            row,
            values=_of_all_runs(values[0], values[1], *counts),
            latency_us=None if unknown else _of_all_runs(latencies[0], latencies[1], *counts),
            host_floors_us=None if floors == [None, None] else _of_all_runs(floors[0], floors[1], *counts),
        )
    return made


def _without_unused(baseline: Baseline) -> Baseline:
    """Leaves out the runs that no row has values of any more."""
    used = {row.run_set for row in baseline.rows.values() if not row.control}
    kept = [index for index, run in enumerate(baseline.runs) if run.run_set in used]
    rows = {}
    for name, row in baseline.rows.items():
        if not row.control:
            rows[name] = row
            continue
        measured = [baseline.runs[index].run_set for index in kept if row.values[index]]
        if measured:
            rows[name] = msgspec.structs.replace(
                row,
                values=[row.values[index] for index in kept],
                latency_us=None if row.latency_us is None else [row.latency_us[index] for index in kept],
                host_floors_us=None if row.host_floors_us is None else [row.host_floors_us[index] for index in kept],
                run_set=measured[-1],
            )
    return msgspec.structs.replace(baseline, runs=[baseline.runs[index] for index in kept], rows=rows)


def _notices(previous: Baseline, made: Baseline, replaced: Sequence[str]) -> list[str]:
    references = references_of(made)
    told = []
    for name in replaced:
        row = made.rows[name]
        found = standing(made, row, references)
        if row.anchor is None:
            old = previous.rows[name]
            before = old.anchor.commit if old.anchor is not None else previous.runs_of(old)[-1].commit
            told.append(f"anchor: that of {name} moves from {before[:12]} to the new runs")
        elif found is not None and math.expm1(found.offset) >= MIN_CREEP:
            told.append(f"creep: {name} now stands {percent(math.expm1(found.offset))} latency from its anchor {found.commit[:12]}")
    return told
