"""Paired comparison of two commits measured alternately on one machine: sign-flip test, Holm, and a floor under every effect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ci import noise, runner_state
from ci.identity import device_of
from ci.model import CommitResult, GateResult, RowOutcome, RowVerdict
from ci.pairs import DELTA0, DEVICE_FLOOR, MIN_PAIRS, WALL_CLOCK_FLOOR, Pairs, environments, floor_notices, outcome, sort_out
from ci.rows import assemble, blank_result, blindness, counted, percent, serving_classes
from ci.sequential import ALPHA, Series

__all__ = [
    "ALPHA",
    "DELTA0",
    "DEVICE_FLOOR",
    "MIN_PAIRS",
    "WALL_CLOCK_FLOOR",
    "as_controls",
    "compare_pairs",
    "judge_controls",
    "pairs_needed",
]

ASKED_PAIRS = 12
UNFIT_DEVICE = 0.02
UNFIT_WALL_CLOCK = 0.10
_WIDE_MDE = 0.05
_BLIND_MDE = 0.10


def pairs_needed(num_rows: int, alpha: float = ALPHA) -> int:
    """Pairs with which the sign-flip test can reject at the first step of Holm's test over `num_rows` rows: 2^-n <= alpha / rows.

    At least the 12 that are asked for.
    """
    return max(ASKED_PAIRS, math.ceil(math.log2(max(num_rows, 1) / alpha)))


def _verdict(row: Pairs, slow: bool, fast: bool, p_slow: float) -> tuple[RowVerdict, str]:
    series = row.series
    told = f"{percent(series.effect)} {row.measure} over {row.d.size} pairs"
    if slow and series.reaches_floor(1):
        return RowVerdict.REGRESSED, f"{told}, over the floor of {percent(row.floor)} and beyond chance"
    if fast and series.reaches_floor(-1):
        return RowVerdict.IMPROVED, f"{told}, beyond chance"
    if p_slow >= noise.SCREEN_ALPHA:
        return RowVerdict.PASS, f"{told}, within chance"
    if series.cleared:
        return RowVerdict.CLEARED, f"{told}, under the floor of {percent(row.floor)}"
    return RowVerdict.UNCONFIRMED, f"{told}, but chance is not excluded over all rows together"


def _judge_rows(rows: Sequence[Pairs]) -> list[RowOutcome]:
    """Verdicts of the comparable rows that are no controls."""
    slow_p, fast_p = [row.series.p_value(1) for row in rows], [row.series.p_value(-1) for row in rows]
    slow, fast = noise.holm(slow_p, ALPHA), noise.holm(fast_p, ALPHA)
    outcomes = []
    for i, row in enumerate(rows):
        series = row.series
        verdict, reason = _verdict(row, bool(slow[i]), bool(fast[i]), slow_p[i])
        spread = float(noise.clip_differences(row.d).std(ddof=1))
        mde80 = noise.mde80_paired(spread, row.d.size, floor=row.floor, delta0=series.delta0, num_rows=len(rows), alpha=ALPHA)
        edges = series.edges(noise.SCREEN_ALPHA, noise.holm_level(fast_p, i, ALPHA))
        made = outcome(row, verdict, reason, series.effect, slow_p[i] if series.side > 0 else fast_p[i], mde80, edges)
        outcomes.append(replace(made, flags=(*made.flags, *flags_of(row, verdict, series.effect, mde80))))
    return outcomes


def flags_of(row: Pairs, verdict: RowVerdict, effect: float, mde80: float) -> list[str]:
    """What a reader should know of a paired row besides its verdict; what it could not have found is none of that of a REGRESSED one."""
    flags = ["IDENTICAL"] if row.identical else []
    if mde80 > _WIDE_MDE and verdict is not RowVerdict.REGRESSED:
        flags.append("BLIND" if mde80 > _BLIND_MDE else "WIDE")
    if abs(abs(effect) - row.floor) <= 0.1 * row.floor:
        flags.append("NEAR LIMIT")
    return flags


def judge_controls(controls: Sequence[Pairs], rows: Sequence[Pairs]) -> tuple[list[RowOutcome], str | None]:
    """Outcomes of the controls, and what shows that the machine moved between the two commits.

    Only controls that serve a compared row decide; the others show the machine to the reader.
    """
    used = serving_classes(row.bottleneck for row in rows)
    tested = [row.series for row in controls]
    p_values = [series.p_value(series.side) for series in tested]
    # Half the level a side, as a control counts whichever way it moves.
    rejected = noise.holm(p_values, ALPHA / 2)
    outcomes, moved = [], []
    for row, series, p_value, sure in zip(controls, tested, p_values, rejected, strict=True):
        limit = UNFIT_DEVICE if row.on_device else UNFIT_WALL_CLOCK
        reason = f"{percent(series.effect)} latency: shows the machine, and is not judged itself"
        first = ALPHA / 2 / len(controls)
        edges = replace(series, floor=limit).edges(first, first)
        made = outcome(row, RowVerdict.PASS, reason, series.effect, p_value, None, edges)
        if sure and abs(series.effect) > limit:
            if row.bottleneck in used:
                moved.append(made)
            made = replace(made, flags=(*made.flags, "MOVED"))
        outcomes.append(made)
    if not moved:
        return outcomes, _floors_moved([*controls, *rows])
    return outcomes, (
        f"control rows that no change can touch moved between the commits: {_sizes(moved)}; "
        "look at clocks, throttling and other tenants, and run again"
    )


def _floors_moved(rows: Sequence[Pairs]) -> str | None:
    """What shows that the floor of a host row moved between the commits by more than the row may, which dividing by it would hide."""
    floors = [(row, Series(f"{row.key} floor", row.floor_d, 0.0, WALL_CLOCK_FLOOR)) for row in rows if row.floor_d is not None]
    rejected = noise.holm([series.p_value(series.side) for _, series in floors], ALPHA / 2)
    moved = [(row, series) for (row, series), sure in zip(floors, rejected, strict=True) if sure and series.reaches_floor(series.side)]
    if not moved:
        return None
    told = ", ".join(f"{row.key} ({percent(series.effect)})" for row, series in moved[:3])
    return (
        f"floors that host rows are held against moved between the commits: {told}; the host moved, or the change slows down what runs "
        "beside its call: look at other tenants and at threads that the change starts, and run again"
    )


def as_controls(rows: Sequence[Pairs], outcomes: Sequence[RowOutcome]) -> tuple[list[RowOutcome], str | None]:
    """Rows that launch exactly what the base does, judged as controls: one that moved shows the machine.

    Returns:
        The outcomes of all rows, and what makes the runner unfit.
    """
    made, moved = [], []
    for row, judged in zip(rows, outcomes, strict=True):
        if row.identical and judged.verdict in (RowVerdict.REGRESSED, RowVerdict.IMPROVED):
            reason = f"{judged.reason}; but launches and inputs are the same at both commits, so that the machine moved and not the code"
            judged = replace(judged, verdict=RowVerdict.UNCONFIRMED, reason=reason, flags=(*judged.flags, "MOVED"))
            if judged.effect is not None and abs(judged.effect) > UNFIT_DEVICE:
                moved.append(judged)
        made.append(judged)
    if not moved:
        return made, None
    return (
        made,
        f"rows whose launches did not change moved between the commits: {_sizes(moved)}; look at clocks, throttling and other tenants",
    )


def _sizes(moved: Sequence[RowOutcome]) -> str:
    return ", ".join(f"{row.key} ({percent(row.effect)} latency)" for row in moved[:3])


def compare_pairs(
    base: CommitResult,
    head: CommitResult,
    *,
    mode: Literal["ab", "aa"] = "ab",
    device: str | None = None,
    notices: Sequence[str] = (),
) -> GateResult:
    """Judges HEAD against its merge-base, measured alternately: sample i of both is pair i.

    The test needs no model of the noise, only that a pair of equal commits is as likely to differ one way as the other; rows of few
    pairs are told. Where the pairs are too few to reject anything at all, an ``ab`` comparison is INCOMPLETE rather than passed.

    Args:
        base: The merge-base, or in ``aa`` mode the first arm of one commit.
        head: The commit under test, or the second arm.
        device: What the result calls the device; as the records name it, else the machine, where None.
        mode: ``ab``, or ``aa`` for a commit against itself, which shows what the machine can see.
        notices: Further things for a reviewer.
    Returns:
        The verdict; `mde80` of each row is what these pairs can find. A row over 10 % carries the flag BLIND, and a notice says so:
        nobody has promised a band here, and no file could carry a waiver.
    """
    invalid, told = environments(base, head)
    pairs, outcomes = sort_out(base, head)
    told = [*notices, *base.notices, *head.notices, *told, *floor_notices(pairs)]
    rows, controls = [row for row in pairs if not row.control], [row for row in pairs if row.control]
    judged = _judge_rows(rows)
    judged_controls, unfit = judge_controls(controls, rows)
    if mode == "ab":
        judged, also_unfit = as_controls(rows, judged)
        unfit = unfit or also_unfit
    unfit = unfit and runner_state.explained(unfit, [head], [runner_state.of_process(process) for process in base.processes])
    outcomes.extend([*judged, *judged_controls])
    fewest = min((row.d.size for row in rows), default=0)
    cut = [row for row in pairs if row.truncated]
    if cut:
        told.append(f"{counted(len(cut), 'row')} with more samples on one side; the surplus, unpaired, is left out (first {cut[0].key})")
    if rows and fewest < ASKED_PAIRS:
        told.append(f"only {fewest} pairs where {ASKED_PAIRS} are asked for; small regressions stay unseen")
    blind = [row for row in judged if "BLIND" in row.flags]
    if blind:
        told.append(f"{blindness(blind)} would be found in {'it' if len(blind) == 1 else 'them'}")
    if pairs and not controls:
        told.append("no control rows: a shift of the machine between the arms of the pairs would go unnoticed")
    unnamed = [row for row in rows if row.head.record is None]
    if unnamed:
        told.append(f"{counted(len(unnamed), 'row')} without a named instrument: the wall-clock floor of {percent(WALL_CLOCK_FLOOR)} holds")
    unable = None
    if rows and ALPHA / len(rows) < noise.smallest_p(fewest):
        needed = pairs_needed(len(rows))
        unable = f"{fewest} pairs cannot show a regression over {len(rows)} rows at {ALPHA:g}; measure {needed} pairs"
        told.append(unable)
    if device is None and head.processes and invalid is None:
        device = device_of(head.processes[-1].environment).name
    result = blank_result(mode, device or head.machine, base.commit, head, told, 1)
    if base.processes:
        result = replace(result, base_environment=dict(base.processes[-1].environment))
    return assemble(outcomes, result, invalid=invalid, unfit=unfit, unable=unable if mode == "ab" else None)
