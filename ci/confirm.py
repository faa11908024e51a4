"""Paired comparison of two commits measured alternately on one machine: sign-flip test, Holm, and a floor under every effect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ci import noise, runner_state
from ci.errors import BaselineError
from ci.identity import device_of
from ci.model import CommitResult, GateResult, RowKey, RowOutcome, RowResult, RowVerdict
from ci.rows import assemble, blank_result, describe, is_control, mismatch, percent, serving_classes, stateful_outcome

__all__ = ["ALPHA", "DELTA0", "DEVICE_FLOOR", "MIN_PAIRS", "WALL_CLOCK_FLOOR", "compare_pairs", "pairs_needed"]

ALPHA = 0.01
"""Chance that a comparison of two equal commits fails (Holm over the rows)."""
ASKED_PAIRS = 12
MIN_PAIRS = 6
DEVICE_FLOOR = 0.005
"""Effect under which nothing counts for a row timed on the device."""
WALL_CLOCK_FLOOR = 0.03
"""The same for a row timed by the host's clock, or by nothing that a record names."""
DELTA0 = 0.002
"""Margin in ln latency for the bias of a rebuild, until it is measured; none where both sides launch the same binaries."""
UNFIT_DEVICE = 0.02
UNFIT_WALL_CLOCK = 0.10
_CLEARED_SDS = 1.4
_WIDE_MDE = 0.05
_BLIND_MDE = 0.10


def pairs_needed(num_rows: int, alpha: float = ALPHA) -> int:
    """Pairs with which the sign-flip test can reject at the first step of Holm's test over `num_rows` rows: 2^-n <= alpha / rows.

    At least the 12 that are asked for.
    """
    return max(ASKED_PAIRS, math.ceil(math.log2(max(num_rows, 1) / alpha)))


@dataclass(frozen=True)
class _Pairs:
    """One row in pairs; `d` is ln head latency less ln base latency, [n]."""

    key: RowKey
    base: RowResult
    head: RowResult
    d: noise.Array
    truncated: bool

    @property
    def control(self) -> bool:
        return is_control(self.head)

    @property
    def bottleneck(self) -> str:
        return "" if self.head.record is None else self.head.record.bottleneck

    @property
    def on_device(self) -> bool:
        return self.head.record is not None and self.head.record.instrument == "device"

    @property
    def same_launches(self) -> bool:
        ours, theirs = self.head.record, self.base.record
        return ours is not None and theirs is not None and ours.launch_hash is not None and ours.launch_hash == theirs.launch_hash

    @property
    def identical(self) -> bool:
        """Whether the device is asked for exactly the same work on both sides: a control more, for the change cannot have moved it."""
        ours, theirs = self.head.record, self.base.record
        same_inputs = ours is not None and theirs is not None and ours.input_hash == theirs.input_hash
        return self.on_device and self.same_launches and same_inputs

    @property
    def delta0(self) -> float:
        return 0.0 if self.same_launches else DELTA0

    @property
    def floor(self) -> float:
        record = self.base.record
        ticks = 2 * record.tick_us / record.latency_us if record and record.tick_us and record.latency_us else 0.0
        return max(DEVICE_FLOOR if self.on_device else WALL_CLOCK_FLOOR, ticks)

    def margin(self, side: int) -> noise.Array:
        """Differences towards `side` (1 slower, -1 faster), less the margin, clipped."""
        return noise.clip_differences(side * self.d - self.delta0)

    def p_value(self, side: int) -> float:
        return noise.sign_flip_p(side * self.d - self.delta0, key=f"{self.key} {side:+d}")

    def size(self, side: int) -> float:
        """Change towards `side` in ln latency, the margin added back; negative where the row moved the other way."""
        return float(self.margin(side).mean()) + self.delta0

    def error(self, side: int) -> float:
        return float(self.margin(side).std(ddof=1)) / math.sqrt(self.d.size)

    @property
    def side(self) -> int:
        """Where the row went: 1 slower, -1 faster."""
        return 1 if float(noise.clip_differences(self.d).mean()) >= 0 else -1

    @property
    def effect(self) -> float:
        return math.expm1(self.side * self.size(self.side))


def _pairs(base: RowResult, head: RowResult) -> _Pairs:
    count = min(len(base.samples), len(head.samples))
    d = noise.log_latency(head.samples[:count], head.direction) - noise.log_latency(base.samples[:count], base.direction)
    return _Pairs(head.key, base, head, d, len(base.samples) != len(head.samples))


def _verdict(row: _Pairs, slow: bool, fast: bool, p_slow: float) -> tuple[RowVerdict, str]:
    told = f"{percent(row.effect)} latency over {row.d.size} pairs"
    if slow and math.expm1(row.size(1)) >= row.floor:
        return RowVerdict.REGRESSED, f"{told}, over the floor of {percent(row.floor)} and beyond chance"
    if fast and math.expm1(row.size(-1)) >= row.floor:
        return RowVerdict.IMPROVED, f"{told}, beyond chance"
    if p_slow >= noise.SCREEN_ALPHA:
        return RowVerdict.PASS, f"{told}, within chance"
    if math.expm1(row.size(1) + _CLEARED_SDS * row.error(1)) < row.floor:
        return RowVerdict.PASS, f"cleared: {told}, under the floor of {percent(row.floor)}"
    return RowVerdict.UNCONFIRMED, f"{told}, but chance is not excluded"


def _outcome(row: _Pairs, verdict: RowVerdict, reason: str, p_value: float, mde80: float | None) -> RowOutcome:
    before = float(np.median(row.base.samples[: row.d.size]))
    # The band of a paired row is about the base's value: its floor on either side.
    edges = (before * (1 + row.floor), before / (1 + row.floor))
    record = row.base.record
    return replace(
        describe(row.head, verdict, reason),
        value=float(np.median(row.head.samples[: row.d.size])),
        baseline=before,
        effect=row.effect,
        p_value=p_value,
        floor=row.floor,
        mde80=mde80,
        band=(min(edges), max(edges)),
        baseline_latency_us=None if record is None else record.latency_us,
        num_pairs=int(row.d.size),
    )


def _judge_rows(rows: Sequence[_Pairs]) -> list[RowOutcome]:
    """Verdicts of the comparable rows that are no controls."""
    slow_p, fast_p = [row.p_value(1) for row in rows], [row.p_value(-1) for row in rows]
    slow, fast = noise.holm(slow_p, ALPHA), noise.holm(fast_p, ALPHA)
    outcomes = []
    for i, row in enumerate(rows):
        verdict, reason = _verdict(row, bool(slow[i]), bool(fast[i]), slow_p[i])
        spread = float(noise.clip_differences(row.d).std(ddof=1))
        mde80 = noise.mde80_paired(spread, row.d.size, floor=row.floor, delta0=row.delta0, num_rows=len(rows), alpha=ALPHA)
        outcome = _outcome(row, verdict, reason, slow_p[i] if row.side > 0 else fast_p[i], mde80)
        if row.identical:
            outcome = replace(outcome, flags=(*outcome.flags, "IDENTICAL"))
        if mde80 > _WIDE_MDE:
            outcome = replace(outcome, flags=(*outcome.flags, "BLIND" if mde80 > _BLIND_MDE else "WIDE"))
        if abs(abs(row.effect) - row.floor) <= 0.1 * row.floor:
            outcome = replace(outcome, flags=(*outcome.flags, "NEAR LIMIT"))
        outcomes.append(outcome)
    return outcomes


def _judge_controls(controls: Sequence[_Pairs], rows: Sequence[_Pairs]) -> tuple[list[RowOutcome], str | None]:
    """Outcomes of the controls, and what shows that the machine moved between the two commits.

    Only controls that serve a compared row decide; the others show the machine to the reader.
    """
    used = serving_classes(row.bottleneck for row in rows)
    sides = [row.side for row in controls]
    p_values = [row.p_value(side) for row, side in zip(controls, sides, strict=True)]
    # Half the level a side, as a control counts whichever way it moves.
    rejected = noise.holm(p_values, ALPHA / 2)
    outcomes, moved = [], []
    for row, p_value, sure in zip(controls, p_values, rejected, strict=True):
        limit = UNFIT_DEVICE if row.on_device else UNFIT_WALL_CLOCK
        reason = f"{percent(row.effect)} latency: shows the machine, and is not judged itself"
        outcome = _outcome(row, RowVerdict.PASS, reason, p_value, None)
        if sure and abs(row.effect) > limit:
            if row.bottleneck in used:
                moved.append(row)
            outcome = replace(outcome, flags=(*outcome.flags, "MOVED"))
        outcomes.append(outcome)
    if not moved:
        return outcomes, None
    told = ", ".join(f"{row.key} ({percent(row.effect)} latency)" for row in moved[:3])
    return outcomes, (
        f"control rows that no change can touch moved between the commits: {told}; "
        "look at clocks, throttling and other tenants, and run again"
    )


def _as_controls(rows: Sequence[_Pairs], outcomes: Sequence[RowOutcome]) -> tuple[list[RowOutcome], str | None]:
    """Rows that launch exactly what the base does, judged as controls: one that moved shows the machine.

    Returns:
        The outcomes of all rows, and what makes the runner unfit.
    """
    made, moved = [], []
    for row, outcome in zip(rows, outcomes, strict=True):
        if row.identical and outcome.verdict in (RowVerdict.REGRESSED, RowVerdict.IMPROVED):
            reason = f"{outcome.reason}; but launches and inputs are the same at both commits, so that the machine moved and not the code"
            outcome = replace(outcome, verdict=RowVerdict.UNCONFIRMED, reason=reason, flags=(*outcome.flags, "MOVED"))
            if abs(row.effect) > UNFIT_DEVICE:
                moved.append(row)
        made.append(outcome)
    if not moved:
        return made, None
    told = ", ".join(f"{row.key} ({percent(row.effect)} latency)" for row in moved[:3])
    return made, f"rows whose launches did not change moved between the commits: {told}; look at clocks, throttling and other tenants"


def _sort_out(base: CommitResult, head: CommitResult) -> tuple[list[_Pairs], list[RowOutcome]]:
    """Pairs of what can be compared, and outcomes of what cannot."""
    pairs: list[_Pairs] = []
    outcomes: list[RowOutcome] = []
    for key in sorted({*base.rows, *head.rows}):
        before, after = base.rows.get(key), head.rows.get(key)
        valued = before is not None and stateful_outcome(before, has_reference=False) is None
        if after is None:
            if before is not None and valued:
                gone = describe(before, RowVerdict.MISSING, "the base commit has it, HEAD has not")
                outcomes.append(replace(gone, samples=()))
            continue
        fault = stateful_outcome(after, has_reference=valued)
        if fault is not None:
            outcomes.append(fault)
        elif before is None or not valued:
            why = "the base commit does not have it"
            if before is not None:
                why = f"the base commit has no value of it ({before.state}: {before.reason})"
            outcomes.append(describe(after, RowVerdict.NEW, why))
        else:
            outcomes.extend(_compare_forms(before, after, pairs))
    return pairs, outcomes


def _compare_forms(before: RowResult, after: RowResult, pairs: list[_Pairs]) -> list[RowOutcome]:
    """Appends the pair where both sides measure the same thing often enough, else gives the outcome that says why not."""
    hashed = before.record.input_hash if before.record is not None else None
    why = mismatch(after, before.unit, before.version, is_control(before), hashed)
    if why is None and before.direction != after.direction:
        why = f"better is {after.direction} here, but {before.direction} at the base commit"
    if why is not None:
        return [describe(after, RowVerdict.NOT_COMPARABLE, why)]
    pair = _pairs(before, after)
    if pair.d.size >= MIN_PAIRS:
        pairs.append(pair)
        return []
    reason = f"{pair.d.size} pairs of processes, but at least {MIN_PAIRS} are needed; measure more rounds"
    few = describe(after, RowVerdict.INVALID, reason)
    if pair.d.size > 1:
        few = replace(
            few,
            value=float(np.median(after.samples)),
            baseline=float(np.median(before.samples)),
            effect=pair.effect,
            num_pairs=int(pair.d.size),
        )
    return [few]


def _environments(base: CommitResult, head: CommitResult) -> tuple[str | None, list[str]]:
    """Why the two sides may not be compared at all, and what else differs between them."""
    if not base.processes or not head.processes:
        return None, ["no process records on at least one side: nothing says which device and software measured it"]
    ours, theirs = head.processes[-1], base.processes[-1]
    try:
        here, there = device_of(ours.environment), device_of(theirs.environment)
    except BaselineError as exc:
        return str(exc), []
    for name in ("name", "compute_capability", "multiprocessors", "memory_bytes", "mig"):
        if getattr(here, name) != getattr(there, name):
            text = f"the base commit was measured on device.{name} {getattr(there, name)!r}, HEAD on {getattr(here, name)!r}"
            return f"{text}; measure both on one device", []
    notices = [
        f"{name} differs: {theirs.environment.get(name)} at the base commit, {ours.environment.get(name)} at HEAD"
        for name in ("driver", "cuda", "torch", "triton", "python", "boot_id", "env_vars")
        if theirs.environment.get(name) != ours.environment.get(name)
    ]
    if ours.protocol != theirs.protocol:
        notices.append(f"the measuring protocol differs: {theirs.protocol!r} at the base commit, {ours.protocol!r} at HEAD")
    return None, notices


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
    invalid, told = _environments(base, head)
    told = [*notices, *base.notices, *head.notices, *told]
    pairs, outcomes = _sort_out(base, head)
    rows, controls = [row for row in pairs if not row.control], [row for row in pairs if row.control]
    judged = _judge_rows(rows)
    judged_controls, unfit = _judge_controls(controls, rows)
    if mode == "ab":
        judged, also_unfit = _as_controls(rows, judged)
        unfit = unfit or also_unfit
    unfit = unfit and runner_state.explained(unfit, [head], [runner_state.of_process(process) for process in base.processes])
    outcomes.extend([*judged, *judged_controls])
    fewest = min((row.d.size for row in rows), default=0)
    cut = [row for row in pairs if row.truncated]
    if cut:
        told.append(f"{len(cut)} row(s) have more samples on one side; the surplus, unpaired, is left out (first {cut[0].key})")
    if rows and fewest < ASKED_PAIRS:
        told.append(f"only {fewest} pairs where {ASKED_PAIRS} are asked for; small regressions stay unseen")
    blind = [row for row in judged if "BLIND" in row.flags]
    if blind:
        told.append(f"{len(blind)} row(s) are BLIND: these pairs find only a regression over {percent(_BLIND_MDE)} in them")
    if pairs and not controls:
        told.append("no control rows: a shift of the machine between the arms of the pairs would go unnoticed")
    unnamed = [row for row in rows if row.head.record is None]
    if unnamed:
        told.append(f"{len(unnamed)} row(s) name no instrument; the wall-clock floor of {percent(WALL_CLOCK_FLOOR)} holds for them")
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
