"""What can be said of a row before numbers are compared, and what the rows together say of the run."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from ci.errors import ExitCode
from ci.model import CommitResult, GateResult, ProcessRecord, RowKey, RowOutcome, RowRecord, RowResult, RowVerdict, RunVerdict

RUN_ORDER: tuple[ExitCode, ...] = (
    ExitCode.BASELINE,
    ExitCode.WRONG,
    ExitCode.UNFIT,
    ExitCode.INCOMPLETE,
    ExitCode.REGRESSION,
    ExitCode.PASS,
)
"""Where several verdicts apply, the first of these is the run's."""

VERDICTS: dict[ExitCode, RunVerdict] = {
    ExitCode.BASELINE: RunVerdict.BASELINE_INVALID,
    ExitCode.WRONG: RunVerdict.WRONG_RESULTS,
    ExitCode.UNFIT: RunVerdict.RUNNER_UNFIT,
    ExitCode.INCOMPLETE: RunVerdict.INCOMPLETE,
    ExitCode.REGRESSION: RunVerdict.REGRESSION,
    ExitCode.PASS: RunVerdict.PASS,
}

WRONG_ROWS = (RowVerdict.UNVERIFIED, RowVerdict.VIOLATION)
INCOMPLETE_ROWS = (
    RowVerdict.MISSING,
    RowVerdict.FAILED,
    RowVerdict.INVALID,
    RowVerdict.BLIND,
    RowVerdict.NOT_COMPARABLE,
)
"""What is missing, failed or unknown never passes; a row that became incomparable is unknown until it is judged by pairs."""

COMPARED_ROWS = (
    RowVerdict.PASS,
    RowVerdict.IMPROVED,
    RowVerdict.REGRESSED,
    RowVerdict.CLEARED,
    RowVerdict.UNCONFIRMED,
    RowVerdict.BLIND,
)

SERVED_BY = {"dequant": ("dequant", "read-bandwidth")}
"""Controls of which classes serve a class, where not just its own."""

WAIVED = "WAIVED"
"""Flag of a row whose verdict a waiver of the baseline excuses."""

TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_EIGHT_BIT = frozenset({"fp8", "float8_e4m3fn", "fp8_e4m3", "e4m3", "int8"})
"""Dtypes of a cache that is quantised, whose sections end in ``-fp8``."""
_MAX_NAMED_ROWS = 3


def serving_classes(bottlenecks: Iterable[str]) -> set[str]:
    """Classes whose controls serve rows of the given classes."""
    return {name for bottleneck in bottlenecks for name in SERVED_BY.get(bottleneck, (bottleneck,))}


def section_of(record: RowRecord | None, key: RowKey) -> str:
    """The section of the report that a row belongs to, by what bounds it.

    Args:
        record: What the process said of the row; a foreign row has none and is in ``other``.
        key: The row, of which nothing is guessed.
    Returns:
        ``decode-read``, ``decode-read-fp8``, ``kv-write-prefill``, ``kv-write-prefill-fp8``, ``kv-write-decode``, ``allocator``,
        ``control`` or ``other``.
    """
    del key
    return "other" if record is None else section_for(record)


class _Described(Protocol):
    """What a section is told by: a RowRecord has it, and so has a row of a baseline."""

    @property
    def op(self) -> str: ...
    @property
    def control(self) -> bool: ...
    @property
    def bottleneck(self) -> str: ...
    @property
    def phase(self) -> str | None: ...
    @property
    def kv_dtype(self) -> str | None: ...


def section_for(row: _Described) -> str:
    """As `section_of`, for anything that says what a row is."""
    if row.control:
        return "control"
    op = row.op.lower()
    fp8 = "-fp8" if row.bottleneck == "dequant" or (row.kv_dtype or "").lower() in _EIGHT_BIT else ""
    reads, writes = "decode" in op or "attention" in op, "write" in op or "scatter" in op
    if "alloc" in op or row.bottleneck == "host":
        return "allocator"
    if writes and row.phase == "prefill":
        return f"kv-write-prefill{fp8}"
    if writes and row.phase == "decode":
        return "kv-write-decode"
    if reads and row.phase != "prefill":
        return f"decode-read{fp8}"
    return "other"


def is_control(row: RowResult) -> bool:
    """Whether the row is a vendor operation that a change cannot touch."""
    return row.record is not None and row.record.control


def describe(row: RowResult, verdict: RowVerdict, reason: str) -> RowOutcome:
    """An outcome with all that the row itself knows."""
    record = row.record
    return RowOutcome(
        key=row.key,
        verdict=verdict,
        reason=reason,
        section=section_of(record, row.key),
        control=is_control(row),
        flags=tuple(dict.fromkeys(flag for item in row.records for flag in item.flags)),
        unit=row.unit,
        direction=row.direction,
        samples=row.samples,
        record=record,
        latency_us=None if record is None else record.latency_us,
    )


def at_effect(row: RowOutcome, value: float, effect: float, edges: tuple[float, float] | None) -> RowOutcome:
    """The row with its figures, all of one estimator: whatever decided the change, `was` and band follow from it and from `value`.

    Args:
        row: With its record, which knows how much latency belongs to a throughput.
        value: Of the commit under test, in the row's unit.
        effect: Relative change of latency that the verdict rests on.
        edges: (fastest, slowest) relative change within which the row passes, -1 and inf where nothing bounds it; None without a band.
    """
    sign = 1 if row.direction == "higher" else -1
    before = value * (1 + effect) ** sign
    band = None
    if edges is not None:
        fastest, slowest = (before * (1 + edge) ** -sign if -1 < edge < math.inf else None for edge in edges)
        band = (slowest, fastest) if sign > 0 else (fastest, slowest)
    record, latency_us = row.record, None
    if record is not None and record.latency_us is not None and record.value:
        latency_us = record.latency_us * (record.value / value) ** sign
    return replace(
        row,
        value=value,
        baseline=before,
        effect=effect,
        band=band,
        latency_us=row.latency_us if latency_us is None else latency_us,
        baseline_latency_us=None if latency_us is None else latency_us / (1 + effect),
    )


_STATE_VERDICTS = {
    "violation": RowVerdict.VIOLATION,
    "unverified": RowVerdict.UNVERIFIED,
    "failed": RowVerdict.FAILED,
    "invalid": RowVerdict.INVALID,
    "skipped": RowVerdict.SKIPPED,
}


def stateful_outcome(row: RowResult, *, has_reference: bool) -> RowOutcome | None:
    """The outcome of a row that has no number to compare, or None where it has.

    Args:
        row: The row under test.
        has_reference: Whether the other side has a value, so that a new skip is a loss.
    """
    record = row.record
    peaks = [item.peak_fraction for item in row.records if item.peak_fraction is not None]
    if row.state == "measured" and max(peaks, default=0.0) > 1:
        return describe(row, RowVerdict.VIOLATION, f"{max(peaks):.4f} of the peak, which no device can reach")
    if row.state == "measured" and record is not None and record.status in ("violation", "unverified"):
        return describe(row, _STATE_VERDICTS[record.status], record.reason or record.status)
    if row.state == "measured" and not row.samples:
        return describe(row, RowVerdict.INVALID, "0 samples")
    if row.state == "measured":
        return None
    if row.state == "skipped" and has_reference:
        return describe(row, RowVerdict.FAILED, f"newly skipped: {row.reason}")
    return describe(row, _STATE_VERDICTS[row.state], row.reason or row.state)


def mismatch(row: RowResult, unit: str, version: str, control: bool, input_hash: str | None) -> str | None:
    """Why two sides of a row are different measurements, or None.

    Args:
        row: The row under test.
        unit, version, control, input_hash: Of the other side.
    """
    record = row.record
    if row.unit != unit:
        return f"the unit is {row.unit!r}, but the other side's {unit!r}; values of different units are not converted"
    if row.version != version:
        return f"the benchmark's version is {row.version[:12]!r}, but the other side's {version[:12]!r}"
    if is_control(row) != control:
        return "the row is a control row on one side only"
    if record is not None and record.input_hash is not None and input_hash not in (None, record.input_hash):
        return "the inputs differ (input_hash)"
    return None


def named(rows: Sequence[RowOutcome], tell: Callable[[RowOutcome], str]) -> str:
    """At most three rows, the rest counted."""
    shown = ", ".join(tell(row) for row in rows[:_MAX_NAMED_ROWS])
    rest = len(rows) - _MAX_NAMED_ROWS
    return f"{shown} and {rest} more" if rest > 0 else shown


def percent(effect: float | None) -> str:
    """A relative change for a person: ``+3.1 %``."""
    return "unknown" if effect is None else f"{100 * effect:+.1f} %"


def counted(count: int, noun: str) -> str:
    """A number and its noun: ``1 row``, ``9 rows``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


ONLY_NEW = "new rows alone have nothing to be held against"
"""Part of the reason of a run that compared nothing but met new rows."""


def conclude(
    rows: Sequence[RowOutcome], *, invalid: str | None = None, unfit: str | None = None, unable: str | None = None
) -> tuple[ExitCode, str]:
    """The run's verdict and its one-sentence reason.

    Args:
        rows: All outcomes; the flag WAIVED takes a row's failure away.
        invalid: Why the baseline or the environment does not allow a comparison.
        unfit: What shows that the machine, not the change, moved.
        unable: Why the comparison as made could not have found anything.
    Returns:
        The first of RUN_ORDER that applies, and the reason with the rows (at most three named) and sizes.
    """
    counting = [row for row in rows if WAIVED not in row.flags]
    wrong = [row for row in counting if row.verdict in WRONG_ROWS]
    incomplete = [row for row in counting if row.verdict in INCOMPLETE_ROWS]
    compared = [row for row in rows if row.verdict in COMPARED_ROWS and not row.control]
    regressed = sorted((row for row in counting if row.verdict is RowVerdict.REGRESSED), key=lambda row: -(row.effect or 0.0))
    reasons: dict[ExitCode, str] = {}
    if invalid is not None:
        reasons[ExitCode.BASELINE] = invalid
    if wrong:
        told = named(wrong, lambda row: f"{row.key} ({row.verdict.value}: {row.reason})")
        reasons[ExitCode.WRONG] = f"{counted(len(wrong), 'row')} with wrong results: {told}"
    if unfit is not None:
        reasons[ExitCode.UNFIT] = unfit
    if incomplete:
        told = named(incomplete, lambda row: f"{row.key} ({row.verdict.value}: {row.reason})")
        reasons[ExitCode.INCOMPLETE] = f"{counted(len(incomplete), 'row')} without a verdict: {told}"
    elif unable is not None:
        reasons[ExitCode.INCOMPLETE] = unable
    elif not compared:
        tally = ", ".join(
            f"{sum(row.verdict is verdict for row in rows)} {verdict.value}"
            for verdict in RowVerdict
            if any(row.verdict is verdict for row in rows)
        )
        reasons[ExitCode.INCOMPLETE] = f"no row could be compared ({tally or 'the run has no rows'})"
        if any(row.verdict is RowVerdict.NEW for row in rows):
            reasons[ExitCode.INCOMPLETE] += f": {ONLY_NEW}"
    if regressed:
        told = named(regressed, lambda row: f"{row.key} ({percent(row.effect)} latency)")
        reasons[ExitCode.REGRESSION] = f"{counted(len(regressed), 'row')} regressed: {told}"
        if ExitCode.INCOMPLETE in reasons:
            reasons[ExitCode.INCOMPLETE] += f"; and {reasons[ExitCode.REGRESSION]}"
    reasons[ExitCode.PASS] = _passing(compared)
    code = next(code for code in RUN_ORDER if code in reasons)
    return code, reasons[code]


def blindness(rows: Sequence[RowOutcome]) -> str:
    """What BLIND rows can find, by their own figures: ``5 rows are BLIND: only a regression of +12.1 % to +116.4 % or more``."""
    told = f"{counted(len(rows), 'row')} {'is' if len(rows) == 1 else 'are'} BLIND:"
    sizes = [row.mde80 for row in rows if row.mde80 is not None and math.isfinite(row.mde80)]
    if not sizes:
        return f"{told} no regression of any size"
    return f"{told} only a regression of {' to '.join(dict.fromkeys((percent(min(sizes)), percent(max(sizes)))))} or more"


def _passing(compared: Sequence[RowOutcome]) -> str:
    parts = [f"{counted(len(compared), 'row')} compared, none regressed"]
    improved = [row for row in compared if row.verdict is RowVerdict.IMPROVED]
    open_rows = [row for row in compared if row.verdict is RowVerdict.UNCONFIRMED]
    if improved:
        told = named(improved, lambda row: f"{row.key} ({percent(row.effect)} latency)")
        parts.append(f"{len(improved)} improved ({told}), refresh the baseline")
    if open_rows:
        told = named(open_rows, lambda row: f"{row.key} ({percent(row.effect)} latency)")
        parts.append(f"{len(open_rows)} unconfirmed ({told})")
    return "; ".join(parts)


def under_unfit_runner(rows: Sequence[RowOutcome]) -> list[RowOutcome]:
    """On an unfit machine no comparison stands: compared rows become INVALID and keep their effects for the reader."""
    return [
        replace(row, verdict=RowVerdict.INVALID, reason=f"the runner was unfit; it would have been {row.verdict.value}")
        if row.verdict in COMPARED_ROWS
        else row
        for row in rows
    ]


def assemble(
    rows: Sequence[RowOutcome],
    result: GateResult,
    *,
    invalid: str | None = None,
    unfit: str | None = None,
    unable: str | None = None,
) -> GateResult:
    """`result` with sorted rows, verdict, exit code and reason."""
    ordered = tuple(sorted(rows if unfit is None else under_unfit_runner(rows), key=lambda row: row.key))
    code, reason = conclude(ordered, invalid=invalid, unfit=unfit, unable=unable)
    return replace(result, rows=ordered, verdict=VERDICTS[code], exit_code=int(code), reason=reason)


def now_text() -> str:
    """The present, UTC, as verdicts and cases write it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime(TIME_FORMAT)


def _ceilings(processes: Sequence[ProcessRecord]) -> dict[str, float]:
    """Medians of what the processes measured of the device: a row's value is one of the same processes, so a share of both is one."""
    found: dict[str, list[float]] = {}
    for process in processes:
        for name, value in process.ceilings.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def blank_result(mode: str, device: str, base: str, head: CommitResult, notices: Sequence[str], runs: int) -> GateResult:
    """A result without rows and verdict, filled with what the head's processes say; `assemble` completes it.

    Raises:
        ValueError: An unknown mode.
    """
    if mode not in ("baseline", "ab", "aa", "history"):
        raise ValueError(f"expected the mode baseline, ab, aa or history, got {mode!r}")
    last = head.processes[-1] if head.processes else None
    return GateResult(
        verdict=RunVerdict.INCOMPLETE,
        exit_code=int(ExitCode.INCOMPLETE),
        reason="",
        mode=mode,  # type: ignore[arg-type]
        device=device,
        base=base,
        head=head.commit,
        rows=(),
        notices=tuple(dict.fromkeys(notices)),
        environment={} if last is None else dict(last.environment),
        ceilings=_ceilings(head.processes),
        runs=runs,
        processes=max((len(row.samples) for row in head.rows.values()), default=0),
        created_at=now_text(),
    )
