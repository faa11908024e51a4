"""What the page shows of the rows: their classes, what needs a look, and what the run's records say of each bound."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.noise import smallest_p
from ci.rows import counted
from ci.screen import WIDE_MDE
from ci.templates.figures import change, odds, percent

SECTIONS: dict[str, str] = {
    "decode-read": "Decode read, fp16 and bf16",
    "decode-read-fp8": "Decode read, 8-bit (dequant)",
    "kv-write-prefill": "KV write, prefill",
    "kv-write-prefill-fp8": "KV write, prefill, 8-bit",
    "kv-write-decode": "KV write, decode (launch)",
    "allocator": "Allocator (host)",
    "control": "Controls",
    "other": "Other rows",
}
"""Section ids of `RowOutcome.section` in the order of the page; fp8 and int8 are a bottleneck of their own, never a column."""

ATTENTION: tuple[RowVerdict, ...] = (
    RowVerdict.REGRESSED,
    RowVerdict.UNVERIFIED,
    RowVerdict.VIOLATION,
    RowVerdict.MISSING,
    RowVerdict.FAILED,
    RowVerdict.INVALID,
    RowVerdict.BLIND,
    RowVerdict.UNCONFIRMED,
    RowVerdict.NOT_COMPARABLE,
)
"""Verdicts that somebody has to look at, the regressions first."""

FAILING = frozenset(ATTENTION) - {RowVerdict.UNCONFIRMED, RowVerdict.NOT_COMPARABLE}
"""Verdicts of which one is enough to keep a run from passing."""

WITHOUT_NUMBER = frozenset({"MISSING", "FAILED", "UNVERIFIED", "INVALID", "SKIPPED"})
"""Verdicts of rows that have no result: whatever value they carry is not shown."""


def counts(rows: Iterable[RowOutcome]) -> list[tuple[RowVerdict, int]]:
    """Counts the verdicts that occur, what needs a look first; controls that have a number are not judged and not counted."""
    found = Counter(row.verdict for row in rows if not is_bystander(row))
    order = (*ATTENTION, *(verdict for verdict in RowVerdict if verdict not in ATTENTION))
    return [(verdict, found[verdict]) for verdict in order if found[verdict]]


def is_bystander(row: RowOutcome) -> bool:
    """Whether the row is a control that was measured: it shows the machine, and `PASS` says nothing of it."""
    return row.control and row.verdict is RowVerdict.PASS


def verdict_text(row: RowOutcome) -> str:
    """The row's verdict as it is shown."""
    return "control" if is_bystander(row) else row.verdict.value


def tally(rows: Sequence[RowOutcome]) -> str:
    """The counts in one line: ``5 REGRESSED, 11 PASS, 34 SKIPPED; 6 controls, not judged``."""
    judged = ", ".join(f"{found} {verdict.value}" for verdict, found in counts(rows))
    controls = sum(map(is_bystander, rows))
    return "; ".join(filter(None, (judged, f"{counted(controls, 'control')}, not judged" if controls else "")))


def fails(row: RowOutcome) -> bool:
    """Whether the row keeps the run from passing: a waived one does not."""
    return row.verdict in FAILING and "WAIVED" not in row.flags


def needing_a_look(rows: Iterable[RowOutcome]) -> list[RowOutcome]:
    """Selects the rows of `ATTENTION` and controls that moved: the largest regressions first, waived rows last."""

    def rank(row: RowOutcome) -> tuple[bool, float, float]:
        place = ATTENTION.index(row.verdict) if row.verdict in ATTENTION else 0.5
        return "WAIVED" in row.flags, place, -(row.effect or 0.0)

    return sorted((row for row in rows if row.verdict in ATTENTION or "MOVED" in row.flags), key=rank)


def latency_of(row: RowOutcome) -> float | None:
    """The row's latency in µs, as the outcome or else its record tells it; None where there is no valid number."""
    if not has_number(row):
        return None
    return row.latency_us if row.latency_us is not None or row.record is None else row.record.latency_us


def latency_before(row: RowOutcome) -> float | None:
    """The base's latency beside it, where the base's is known."""
    return row.baseline_latency_us if has_number(row) else None


def chance(row: RowOutcome) -> str:
    """How often noise alone would show as much; and whether it is the least that so many pairs can show."""
    if row.p_value is None:
        return "not tested"
    least = row.num_pairs is not None and row.p_value <= smallest_p(row.num_pairs) * (1 + 1e-9)
    return f"{odds(row.p_value)}, the least of {row.num_pairs} pairs" if least else odds(row.p_value)


def why(row: RowOutcome) -> str:
    """The row's reason, for beside its change: without the same change once more."""
    return re.sub(r"^[+-][\d.]+ % latency(?: (?=over \d+ (?:pairs|runs))|, )", "", row.reason)


def flag_texts(row: RowOutcome) -> list[str]:
    """The row's flags for where its MDE80 has no column: one that is about what the row can find has the row's own figure."""
    finds = percent(row.mde80) if row.mde80 is not None and math.isfinite(row.mde80) else "unknown"
    return [f"{flag}: MDE80 {finds}" if flag in ("WIDE", "BLIND") else flag for flag in row.flags]


def shares_of(row: RowOutcome, ceilings: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Shares of the peak and of the copy rate that the value shown has; None where there is none.

    The copy rate is the one that the report shows; the record's own is of its process, which measured another value and another rate.
    """
    record = row.record
    if record is None or not has_number(row):
        return None, None
    scale = row.value / record.value if row.value and record.value and row.direction == "higher" else 1.0
    peak = None if record.peak_fraction is None else record.peak_fraction * scale
    if record.copy_fraction is None:
        return peak, None
    copy = ceilings.get("copy_gb_per_s")
    return peak, record.gb_per_s * scale / copy if copy and record.gb_per_s else record.copy_fraction * scale


def has_number(row: RowOutcome) -> bool:
    """Whether the row has a result that may be shown."""
    return row.verdict.value not in WITHOUT_NUMBER


@dataclass(frozen=True)
class Ratio:
    """How rows compare with their counterparts of the same case; `rate` and `time` are those of the largest case."""

    case: str
    rate: float
    time: float
    lowest_rate: float
    highest_rate: float
    highest_time: float
    num_cases: int
    resolved: bool
    """Whether no row of the cases is so noisy that it could hide 5 %."""


@dataclass(frozen=True)
class Table:
    """Rows that share columns; `scored` tables may have shares of peak and copy rate, the others never."""

    lines: tuple[tuple[str, RowOutcome], ...]
    scored: bool
    columns: frozenset[str]


@dataclass(frozen=True)
class Section:
    """One bottleneck class of the page: its tables, and what this run's records say of its bound."""

    id: str
    title: str
    tables: tuple[Table, ...]
    counts: list[tuple[RowVerdict, int]]
    to_fp16: Ratio | None
    paging: Ratio | None
    copy_span: tuple[float, float] | None
    latency_span_us: tuple[float, float] | None
    floor_us: float | None
    states: dict[str, float]
    wall_clock: bool
    """Whether all its rows were timed by the host's clock."""
    num_controls: int
    """Controls that were measured, which have no verdict."""


def _without_dtype(key: RowKey) -> RowKey:
    def strip(text: str) -> str:
        return re.sub(r"[-_. ]?(fp8|e4m3|int8|bfloat16|float16|fp16|bf16)", "", text, flags=re.IGNORECASE)

    return RowKey(strip(key.benchmark), tuple(strip(param) for param in key.params))


def _as_contiguous(key: RowKey) -> RowKey:
    return RowKey(key.benchmark, tuple(param.replace("fragmented", "contiguous") for param in key.params))


def compare_cases(rows: Sequence[RowOutcome], counterparts: Sequence[RowOutcome], case_of: Callable[[RowKey], RowKey]) -> Ratio | None:
    """Compares rows with the counterparts that have the same case under `case_of`; None where no case has both."""

    def figures(row: RowOutcome) -> tuple[float, float] | None:
        record = row.record if has_number(row) and row.verdict is not RowVerdict.VIOLATION else None
        time_us = latency_of(row)
        if not record or not record.gb_per_s or not record.latency_us or not time_us:
            return None
        return record.gb_per_s * record.latency_us / time_us, time_us

    others: dict[RowKey, tuple[tuple[float, float], bool]] = {}
    for row in counterparts:
        if found := figures(row):
            others.setdefault(case_of(row.key), (found, _resolves(row)))
    pairs, resolved = [], True
    for row in rows:
        found, known = figures(row), others.get(case_of(row.key))
        if found and known:
            other, resolves = known
            case = ", ".join(filter(None, case_of(row.key).params))
            pairs.append((other[0] * other[1], found[0] / other[0], found[1] / other[1], case))
            resolved = resolved and resolves and _resolves(row)
    if not pairs:
        return None
    _, rate, time, case = max(pairs)
    rates = [pair[1] for pair in pairs]
    return Ratio(case, rate, time, min(rates), max(rates), max(pair[2] for pair in pairs), len(pairs), resolved)


def _resolves(row: RowOutcome) -> bool:
    return row.mde80 is None or row.mde80 <= WIDE_MDE


def _span(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return (min(known), max(known)) if known else None


def _table(lines: Sequence[tuple[str, RowOutcome]], scored: bool) -> Table:
    rows = [row for _, row in lines]
    shown = [row.record for row in rows if row.record and has_number(row)]
    present = {
        "impl": any(row.record for row in rows),
        "latency": any(latency_of(row) is not None for row in rows),
        "peak": scored and any(record.peak_fraction is not None for record in shown),
        "copy": scored and any(record.copy_fraction is not None for record in shown),
        "floor": not scored and any(record.floor_us is not None for record in shown),
        "change": any(row.effect is not None for row in rows),
        "mde80": any(row.mde80 is not None for row in rows),
        "tolerated": all(row.verdict is not RowVerdict.UNVERIFIED for row in rows),
        "difference": any(row.record and row.record.max_abs_diff is not None for row in rows),
    }
    return Table(tuple(lines), scored, frozenset(name for name, there in present.items() if there))


def build_sections(result: GateResult) -> list[Section]:
    """Sorts the rows into the page's sections and collects what the records say of each bound."""
    lines: dict[str, list[tuple[str, RowOutcome]]] = {name: [] for name in SECTIONS}
    for index, row in enumerate(result.rows):
        if row.verdict is not RowVerdict.SKIPPED:
            lines[row.section if row.section in SECTIONS else "other"].append((f"row-{index + 1}", row))
    wide = {"decode-read-fp8": "decode-read", "kv-write-prefill-fp8": "kv-write-prefill"}
    sections = []
    for name, found in lines.items():
        unscored = [line for line in found if _is_unscored(line[1], name)]
        scored = [line for line in found if not _is_unscored(line[1], name)]
        rows = [row for _, row in found]
        records = [row.record for row in rows if row.record and has_number(row)]
        counterparts = [row for _, row in lines[wide.get(name, name)]]
        contiguous = [row for row in rows if any("contiguous" in param for param in row.key.params)]
        fragmented = [row for row in rows if any("fragmented" in param for param in row.key.params)]
        sections.append(
            Section(
                id=name,
                title=SECTIONS[name],
                tables=tuple(_table(part, part is scored) for part in (scored, unscored) if part),
                counts=counts(rows),
                to_fp16=compare_cases(rows, counterparts, _without_dtype) if name in wide else None,
                paging=compare_cases(fragmented, contiguous, _as_contiguous) if name.startswith("decode-read") else None,
                num_controls=sum(map(is_bystander, rows)),
                wall_clock=bool(records) and all(record.instrument == "wall-clock" for record in records),
                copy_span=_span(shares_of(row, result.ceilings)[1] for row in rows),
                latency_span_us=_span(latency_of(row) for row in rows),
                floor_us=max((record.floor_us for record in records if record.floor_us is not None), default=None),
                states={
                    state: time_us
                    for state in ("bump", "run_search", "fragmented")
                    for row in rows
                    if (time_us := latency_of(row)) and any(state in param for param in row.key.params)
                },
            )
        )
    return [section for section in sections if section.tables]


def _is_unscored(row: RowOutcome, section: str) -> bool:
    if section in ("kv-write-decode", "allocator"):
        return True
    return row.record is not None and row.record.bottleneck in ("launch", "host")


@dataclass(frozen=True)
class Picture:
    """A band and a point on a line of 100 units, slower on the right; `label` says the same in words."""

    low: float
    high: float
    centre: float
    point: float
    label: str


def changes_of(row: RowOutcome) -> tuple[float, tuple[float, float]] | None:
    """A row's change of latency and the edges (fastest, slowest) of its band, plus is slower; infinite where nothing bounds it.

    From the throughputs where there is a band, else from `effect` and `floor`: the same numbers that the tables show.
    """
    if not has_number(row):
        return None
    if row.band and row.baseline and row.value:
        base, lower = row.baseline, row.direction == "lower"

        def change(value: float | None, at_none: float) -> float:
            return at_none if not value or math.isinf(value) else (value / base if lower else base / value) - 1

        low, high = row.band
        edges = (change(low, -math.inf), change(high, math.inf)) if lower else (change(high, -math.inf), change(low, math.inf))
        return change(row.value, 0.0), edges
    if row.effect is not None and row.floor:
        return row.effect, (1 / (1 + row.floor) - 1, row.floor)
    return None


def band_picture(row: RowOutcome) -> Picture | None:
    """Places a row's band and change on a line."""
    found = changes_of(row)
    if found is None:
        return None
    point, edges = found
    reach = 1.15 * max((abs(part) for part in (point, *edges) if math.isfinite(part)), default=0.0)
    if not reach or not math.isfinite(point) or any(math.isnan(edge) for edge in edges):
        return None
    low, high, at = (round(50 + 50 * max(-1.0, min(1.0, part / reach)), 1) for part in (*edges, point))
    bounds = [change(edge) if math.isfinite(edge) else "any" for edge in edges]
    label = f"Change of latency: {change(point)}; the band reaches from {bounds[0]} to {bounds[1]}"
    return Picture(low, high, 50.0, at, label)


def tones() -> dict[str, str]:
    """Names the look of each verdict of rows and runs: ``bad``, ``warn``, ``good``, ``plain``; the word is by it."""
    looks = {verdict.value: "plain" for verdict in RowVerdict} | {verdict.value: "bad" for verdict in RunVerdict}
    looks |= {verdict.value: "bad" if verdict in FAILING else "warn" for verdict in ATTENTION}
    return looks | {"PASS": "good", "CLEARED": "good", "IMPROVED": "good"}
