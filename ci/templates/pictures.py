"""Which pictures a report has: bands and earlier runs of each section, and the device's roofline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ci import plots
from ci.model import GateResult, RowOutcome, RowVerdict
from ci.templates.figures import visible
from ci.templates.sections import SECTIONS, Section, changes_of, has_number, tones

MIN_TRACED = 3
"""Earlier values that make a line worth drawing."""


@dataclass(frozen=True)
class Pictures:
    """The pictures of one section; None where there is nothing to draw."""

    bands: Markup | None
    traces: Markup | None
    num_traced: int


def section_pictures(sections: Sequence[Section]) -> dict[str, Pictures]:
    """Section id to its pictures."""
    made = {}
    for section in sections:
        rows = [row for table in section.tables for _, row in table.lines]
        traced = [row for row in rows if len(row.history) >= MIN_TRACED and has_number(row) and _finite(row.value)]
        made[section.id] = Pictures(_bands(rows), _traces(section, traced), len(traced))
    return made


def _bands(rows: Sequence[RowOutcome]) -> Markup | None:
    looks = tones()
    lines = []
    for row in rows:
        found = changes_of(row)
        if found is None or not math.isfinite(found[0]) or any(math.isnan(edge) for edge in found[1]):
            continue
        point, (low, high) = found
        known = [value for value in row.history if value > 0 and math.isfinite(value)]
        middle = statistics.median(known) if known else 0.0
        earlier = tuple((middle / value if row.direction == "higher" else value / middle) - 1 for value in known)
        look = looks[row.verdict.value]
        lines.append(
            plots.BandLine(
                _name(row), point, low, high, earlier, look if look in ("bad", "good") and row.verdict is not RowVerdict.PASS else "plain"
            )
        )
    return plots.bands(lines) if lines else None


def _traces(section: Section, rows: Sequence[RowOutcome]) -> Markup | None:
    if not rows:
        return None
    found = []
    for row in rows:
        values = [*row.history, row.value or 0.0]
        moved = row.verdict in (RowVerdict.REGRESSED, RowVerdict.IMPROVED)
        changes = [(len(values) - 1.5, row.verdict is RowVerdict.REGRESSED)] if moved else []
        found.append(plots.Trace(_name(row), list(range(len(values))), values, changes))
    return plots.traces(found, f"{section.title}: {len(rows)} rows over the earlier runs, this run last; each row has a scale of its own.")


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _name(row: RowOutcome) -> str:
    return visible(", ".join(row.key.params) or row.key.benchmark)


def roofline(result: GateResult) -> Markup | None:
    """The device's roofs, and the rows that do arithmetic under them; None where nothing is known of either."""
    operations, peaks = [], []
    for row in result.rows:
        record = row.record
        if record is None or not has_number(row) or not record.latency_us or record.instrument == "wall-clock":
            continue
        if record.bottleneck == "compute" and record.tflop_per_s and record.peak_fraction:
            peaks.append(record.tflop_per_s / record.peak_fraction)
        if record.flops and record.moved_bytes:
            title = SECTIONS.get(row.section, SECTIONS["other"])
            operations.append(plots.Operation(_name(row), title, record.flops / record.moved_bytes, record.flops / record.latency_us / 1e6))
    memory, copy = result.ceilings.get("memory_peak_gb_per_s"), result.ceilings.get("copy_gb_per_s")
    roofs = [("theoretical memory and tensor peak", memory, max(peaks, default=None))] if memory else []
    roofs += [("measured copy rate", copy, None)] if copy else []
    return plots.roofline(operations, roofs) if operations and roofs else None
