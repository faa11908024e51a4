"""Joins asv's samples with the records of the processes that measured them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ci.model import CommitResult, ProcessRecord, RowKey, RowRecord, RowResult

_NO_NUMBER: tuple[Literal["unverified", "violation", "failed", "invalid", "skipped"], ...] = (
    "unverified",
    "violation",
    "failed",
    "invalid",
    "skipped",
)
"""Record statuses that take a row's number away, the gravest first."""


def _spoken(record: RowRecord) -> str:
    return f"process {record.process}: {record.reason}"


def _over_peak(records: Sequence[RowRecord]) -> RowRecord | None:
    over = [record for record in records if record.peak_fraction is not None and record.peak_fraction > 1]
    return max(over, key=lambda record: record.peak_fraction or 0.0) if over else None


def _join_row(row: RowResult, records: Sequence[RowRecord]) -> tuple[RowResult, int]:
    """The row with its records, one a sample in the samples' order, and the number of records that belong to no sample."""
    if row.state == "invalid":
        return replace(row, records=tuple(records)), 0
    twice = [process for process, count in Counter(record.process for record in records).items() if count > 1]
    if twice:
        reason = f"process {twice[0]} wrote the RowRecord twice, so that a sample cannot be traced to its measurement"
        return replace(row, state="invalid", samples=(), reason=reason, records=tuple(records)), 0
    for status in _NO_NUMBER:
        found = [record for record in records if record.status == status]
        # A skip counts only where asv's row says so too: beside a value or a crash it is no reason for a missing number.
        if found and (status != "skipped" or row.state == "skipped"):
            spoken = found[-1].reason if status == "skipped" else _spoken(found[-1])
            return replace(row, state=status, samples=(), reason=spoken, records=tuple(records)), 0
    over = _over_peak(records)
    if over is not None and over.peak_fraction is not None:
        reason = f"process {over.process}: {over.peak_fraction:.4f} of the peak, which no device can reach"
        return replace(row, state="violation", samples=(), reason=reason, records=tuple(records)), 0
    if row.state != "measured":
        if any(record.status == "ok" for record in records):
            reason = f"a RowRecord says ok, but {row.reason}"
            return replace(row, state="failed" if row.state == "failed" else "invalid", reason=reason, records=tuple(records)), 0
        return replace(row, records=tuple(records)), 0
    unused = [record for record in records if record.status == "ok"]
    matched = []
    for index, sample in enumerate(row.samples):
        match = next((record for record in unused if record.value == sample), None)
        if match is None:
            reason = f"sample {index + 1} of {len(row.samples)} ({sample!r} {row.unit}) lacks a RowRecord of exactly that value"
            return replace(row, state="invalid", samples=(), reason=reason, records=tuple(records)), 0
        unused.remove(match)
        matched.append(match)
    strange = [record for record in matched if record.unit != row.unit or record.version != row.version]
    if strange:
        reason = (
            f"its RowRecord has unit {strange[0].unit!r} and version {strange[0].version!r}, asv's row {row.unit!r} and {row.version!r}"
        )
        return replace(row, state="invalid", samples=(), reason=reason, records=tuple(matched)), 0
    return replace(row, records=tuple(matched)), len(unused)


def join_records(result: CommitResult, processes: Sequence[ProcessRecord]) -> CommitResult:
    """Gives each row of an own results tree its records; a row that lacks either is INVALID, with the reason.

    Args:
        result: As read from asv's file.
        processes: The records of the same run. Those of another commit or environment are left aside.
    Returns:
        The commit with records joined; each record serves one sample. A row that only records know is added by its record's status.
    """
    own = [
        process
        for process in processes
        if process.commit == result.commit and (not result.env_name or not process.env_name or process.env_name == result.env_name)
    ]
    by_key: dict[RowKey, list[RowRecord]] = defaultdict(list)
    for process in own:
        for record in process.rows:
            by_key[record.key].append(record)
    rows: dict[RowKey, RowResult] = {}
    notices = []
    for key, row in result.rows.items():
        rows[key], surplus = _join_row(row, by_key.pop(key, []))
        if surplus:
            notices.append(f"{surplus} RowRecord(s) of {key} belong to no sample; an interrupted process may have left them")
    for key, records in by_key.items():
        last = records[-1]
        bare = RowResult(
            key=key,
            unit=last.unit,
            direction="higher",
            version=last.version,
            state="invalid",
            records=tuple(records),
            reason="has a RowRecord but no row in asv's results",
        )
        grave = next((record for status in _NO_NUMBER for record in records if record.status == status), None)
        over = _over_peak(records)
        if grave is not None and grave.status != "ok":
            bare = replace(bare, state=grave.status, reason=_spoken(grave))
        elif over is not None:
            bare = replace(
                bare,
                state="violation",
                reason=f"process {over.process}: {over.peak_fraction} of the peak, which no device can reach",
            )
        rows[key] = bare
    return replace(result, rows=rows, processes=tuple(own), foreign=False, notices=result.notices + tuple(notices))
