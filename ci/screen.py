"""Judges runs under test against the runs of a reference: screen, control normalisation, Holm, and the fitness of the runner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ci import noise
from ci.compared import MIN_LEARNED_RUNS, Compared, Estimator, in_set, numbers
from ci.host_floor import DISTURBED
from ci.model import CommitResult, RowKey, RowOutcome, RowResult, RowVerdict
from ci.references import Reference, held
from ci.rows import at_effect, counted, describe, mismatch, percent, serving_classes, stateful_outcome

ALPHA = 0.01
"""Chance that a run without a regression fails (Holm over the rows)."""
WIDE_MDE = 0.05
BLIND_MDE = 0.10
NEAR_LIMIT = 0.10
UNFIT_SHIFT = 0.02
UNFIT_SDS = 4.0
UNFIT_MIN_ROWS = 4
CLEARED_SDS = 1.4
SCREENED = "SCREENED"


@dataclass(frozen=True)
class Judged:
    """Outcomes of all rows, and what they say together."""

    rows: list[RowOutcome]
    unfit: str | None
    notices: list[str]
    spreads: Mapping[RowKey, tuple[float, float]] = field(default_factory=dict)
    """Moderated SD of a run and its degrees of freedom, of each row that was compared."""


def _unfit(rows: Sequence[Compared], controls: Sequence[Compared]) -> str | None:
    """What shows that the machine moved, or None.

    Only controls that serve a compared row decide: one of a class without rows (a matrix product at the power limit, say) shows the
    machine to the reader and says nothing of the rows.
    """
    used = sorted({(row.reference.run_set, name) for row in rows for name in serving_classes([row.reference.bottleneck])})
    for run_set, name in used:
        group = [control for control in in_set(controls, run_set) if control.reference.bottleneck == name]
        if not group:
            continue
        limit = max(math.log1p(UNFIT_SHIFT), UNFIT_SDS * float(np.median([control.sd for control in group])))
        for run in range(len(group[0].deviations)):
            moved = float(np.median([control.deviations[run] for control in group]))
            if abs(moved) > limit:
                told = ", ".join(f"{c.key} ({percent(math.expm1(c.deviations[run]))} latency)" for c in group[:3])
                return (
                    f"the control rows of class {name} moved by {percent(math.expm1(moved))} latency in run {run + 1}, "
                    f"over {percent(math.expm1(limit))}: {told}; look at clocks, throttling and other tenants, and run again"
                )
    disturbed = _floors_moved([row for row in (*rows, *controls) if row.floor_moves])
    if disturbed is not None or controls or len(rows) < UNFIT_MIN_ROWS:
        return disturbed
    for run in range(len(rows[0].deviations)):
        for side, word in ((1, "slower"), (-1, "faster")):
            if all(side * row.deviations[run] > row.edge for row in rows):
                sizes = sorted(math.expm1(row.deviations[run]) for row in rows)
                return (
                    f"all rows moved together, suspect the machine: all {len(rows)} rows were {word} in run {run + 1} "
                    f"(latency {percent(sizes[0])} to {percent(sizes[-1])}); look at clocks, throttling and other tenants, "
                    "and run again"
                )
    return None


def _floors_moved(hosts: Sequence[Compared]) -> str | None:
    """Whether the floors of host rows moved further than they may be divided away, or None."""
    for run in range(len(hosts[0].floor_moves) if hosts else 0):
        moved = float(np.median([row.floor_moves[run] for row in hosts]))
        if abs(moved) > math.log1p(DISTURBED):
            return (
                f"the floors of the {len(hosts)} host rows moved by {percent(math.expm1(moved))} in run {run + 1}, over "
                f"{percent(DISTURBED)}: the host is not the one of the reference; look at its other tenants, and run again"
            )
    return None


def _verdict(row: Compared, slow: bool, fast: bool) -> tuple[RowVerdict, str]:
    """Verdict and reason of one row; `slow` and `fast` say whether Holm rejects on that side."""
    num_head = len(row.deviations)
    size = f"{percent(row.effect)} latency{'' if row.reference.level_us is None else ' over its floor'}"
    if slow and row.effect >= row.floor:
        return RowVerdict.REGRESSED, f"{size}, over the floor of {percent(row.floor)} and beyond chance"
    if row.floor_rose:
        rose = percent(math.expm1(max(row.floor_moves)))
        return RowVerdict.UNCONFIRMED, f"{size}, but that floor rose by {rose}, over {percent(DISTURBED)}, and could hide a slow-down"
    if fast and math.expm1(-row.z) >= row.floor:
        return RowVerdict.IMPROVED, f"{size}, beyond chance; refresh the baseline to hold it"
    if not row.screened(1) and row.z <= row.edge:
        return RowVerdict.PASS, f"{size}, within the band"
    if num_head > 1 and math.expm1(row.z + CLEARED_SDS * row.error(num_head)) < row.floor:
        return RowVerdict.CLEARED, f"{size} over {num_head} runs, under the floor of {percent(row.floor)}"
    why = "chance is not excluded" if num_head > 1 else "a second run has to confirm it"
    return RowVerdict.UNCONFIRMED, f"{size}, beyond the screen's band, but {why}"


def _outcome(row: Compared, slow: bool, fast: bool, mde80: float, fast_level: float) -> RowOutcome:
    verdict, reason = _verdict(row, slow, fast)
    flags = list(describe(row.head, verdict, reason).flags)
    if row.screened(1):
        flags.append(SCREENED)
    if abs(abs(row.z) - row.edge) <= NEAR_LIMIT * row.edge:
        flags.append("NEAR LIMIT")
    if row.num_base < MIN_LEARNED_RUNS:
        flags.append("DECLARED NOISE")
    if mde80 > WIDE_MDE and verdict is not RowVerdict.REGRESSED:
        flags.append("BLIND" if mde80 > BLIND_MDE else "WIDE")
    return _filled(row, verdict, reason, tuple(dict.fromkeys(flags)), mde80, _edges(row, fast_level))


def _edges(row: Compared, fast_level: float) -> tuple[float, float]:
    """(fastest, slowest) relative change of latency within which the row passes: beyond it a run is screened, or the row IMPROVED."""
    sure = noise.t_upper_quantile(fast_level, row.nu) * row.error(len(row.deviations))
    return math.expm1(-max(row.edge, math.log1p(row.floor), sure)), math.expm1(row.edge)


def _filled(
    row: Compared, verdict: RowVerdict, reason: str, flags: tuple[str, ...], mde80: float | None, edges: tuple[float, float]
) -> RowOutcome:
    """The row's figures: HEAD's as measured, by the estimator of runs; the base's at the level of floors and controls that HEAD had."""
    sign = -1 if row.reference.direction == "higher" else 1
    value = math.exp(sign * (row.centre + row.shift + row.z))
    made = replace(
        describe(row.head, verdict, reason),
        flags=flags,
        control=row.reference.control,
        p_value=row.p_value(1 if row.z >= 0 else -1),
        floor=row.floor,
        mde80=mde80,
    )
    return at_effect(made, value, row.effect, edges)


def _control_outcome(row: Compared) -> RowOutcome:
    limit = max(math.log1p(UNFIT_SHIFT), UNFIT_SDS * row.sd)
    flags = describe(row.head, RowVerdict.PASS, "").flags + (("MOVED",) if abs(row.z) > limit else ())
    reason = f"{percent(row.effect)} latency: shows the machine, and is not judged itself"
    return _filled(row, RowVerdict.PASS, reason, flags, None, (math.expm1(-limit), math.expm1(limit)))


def _absent(reference: Reference, where: str) -> RowOutcome:
    return RowOutcome(
        key=reference.key,
        verdict=RowVerdict.MISSING,
        reason=f"the reference has it, {where} has not",
        section=reference.section,
        control=reference.control,
        unit=reference.unit,
        direction=reference.direction,
        baseline_latency_us=reference.latency_us,
    )


def judge(
    heads: Sequence[CommitResult],
    references: Mapping[RowKey, Reference],
    *,
    estimate: Estimator,
    incomparable: Mapping[RowKey, str] | None = None,
    pairs: int | None = None,
) -> Judged:
    """Judges runs of a commit against reference runs.

    Args:
        heads: Runs of one commit, in the order of measurement. One is tested alone; the mean of several at its smaller error.
        references: Accepted runs of each row; a row and the controls of its set have the same runs, in the same order.
        estimate: ln latency of a row in one run.
        incomparable: Rows that the reference knows in another form only, with the reason.
        pairs: Pairs of the last look of the confirmation that screened rows go through; None where a second run has to confirm them.
    Returns:
        An outcome of every row that either side has.
    """
    known = dict(incomparable or {})
    outcomes: list[RowOutcome] = []
    comparable: list[tuple[Reference, list[RowResult]]] = []
    for key in sorted(set(references).union(known, *(head.rows for head in heads))):
        found = [head.rows.get(key) for head in heads]
        present = [row for row in found if row is not None]
        reference = references.get(key)
        if not present:
            if reference is not None:
                outcomes.append(_absent(reference, "the run"))
            continue
        # Whatever went wrong in any run stands; what went wrong most gravely is told.
        faults = [stateful_outcome(row, has_reference=reference is not None or key in known) for row in present]
        grave = sorted((fault for fault in faults if fault is not None), key=lambda fault: _GRAVITY.index(fault.verdict))
        if grave:
            outcomes.append(grave[0])
        elif key in known:
            outcomes.append(describe(present[-1], RowVerdict.NOT_COMPARABLE, known[key]))
        elif reference is None:
            outcomes.append(describe(present[-1], RowVerdict.NEW, "the reference does not have it"))
        elif len(present) < len(heads):
            outcomes.append(_absent(reference, f"run {found.index(None) + 1}"))
        else:
            why = next(filter(None, (_why_not(row, reference) for row in present)), None)
            if why is not None:
                outcomes.append(describe(present[-1], RowVerdict.NOT_COMPARABLE, why))
            else:
                comparable.append((reference, present))
    comparable, told = held(comparable)
    rows, controls, notices = numbers(comparable, estimate)
    notices = [*told, *notices]
    slow = noise.holm([row.p_value(1) for row in rows], ALPHA)
    fast_p = [row.p_value(-1) for row in rows]
    fast = noise.holm(fast_p, ALPHA)
    for i, (row, rejected_slow, rejected_fast) in enumerate(zip(rows, slow, fast, strict=True)):
        mde80 = _mde80(row, len(rows), pairs)
        outcomes.append(_outcome(row, bool(rejected_slow), bool(rejected_fast), mde80, noise.holm_level(fast_p, i, ALPHA)))
    outcomes.extend(_control_outcome(row) for row in controls)
    few = [row for row in rows if row.num_base < MIN_LEARNED_RUNS]
    if few:
        notices.append(
            f"{counted(len(few), 'row')} with fewer than {MIN_LEARNED_RUNS} reference runs, of which no noise can be learned; "
            f"an SD of {100 * noise.DECLARED_SD:.0f} % is declared for them"
        )
    return Judged(outcomes, _unfit(rows, controls), notices, {row.key: (row.sd, row.nu) for row in rows})


def _mde80(row: Compared, num_rows: int, pairs: int | None) -> float:
    """The smallest regression that is found with probability .8, by the way that would confirm it."""
    if pairs is None:
        return noise.mde80_baseline(row.sd, row.nu, row.num_base, floor=row.floor, num_rows=num_rows, alpha=ALPHA)
    reference = row.reference
    process_sd = row.sd if math.isnan(reference.process_sd) else reference.process_sd
    floor = max(row.floor, reference.pair_floor)
    return noise.mde80_confirmed(row.sd, row.nu, row.num_base, process_sd=process_sd, pairs=pairs, floor=floor, delta0=reference.delta0)


_GRAVITY = (
    RowVerdict.VIOLATION,
    RowVerdict.UNVERIFIED,
    RowVerdict.FAILED,
    RowVerdict.INVALID,
    RowVerdict.SKIPPED,
)


def _why_not(row: RowResult, reference: Reference) -> str | None:
    if row.direction != reference.direction:
        return f"better is {row.direction} here, but {reference.direction} on the other side"
    return mismatch(row, reference.unit, reference.version, reference.control, reference.input_hash)


__all__ = ["ALPHA", "SCREENED", "Judged", "judge"]
