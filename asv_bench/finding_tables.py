"""How the tables of docs/findings-h200.md are computed of kept demonstrations and ablations; `asv_bench.findings` reads and writes them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COMMANDS = {
    "demonstrations": "`python -m asv_bench.demonstrations --json FILE`",
    "ablations": "`python -m asv_bench.ablations --json FILE`",
}
AGREEMENT = 0.02
AGREEMENT_FROM_US = 50.0
"""The goal: device timers agree within 2 % on rows that take longer than 50 us."""

_SHAPES = ("B=1 S=32768", "B=8 S=8192", "B=64 S=8192", "B=128 S=1024")
_GEOMETRIES = (*_SHAPES, "B=64 S=8192 1x128", "B=64 S=8192 8x64")
_TOKENS = (4096, 16384, 32768)


@dataclass(frozen=True)
class Sheet:
    """One kept file: `stored` is its content."""

    stored: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the file, without its ending."""
        return str(self.stored["name"])

    @property
    def device(self) -> str:
        """Device and versions."""
        known = self.stored["environment"]
        return (
            f"{known['device']['name']}, driver {known['driver']}, CUDA {known['cuda']}, torch {known['torch']}, triton {known['triton']}"
        )

    @property
    def origin(self) -> str:
        """Day, commit and file."""
        return f"{self.stored['date']}, commit {str(self.stored['environment']['commit'])[:12]} ({self.name}.json)"

    def row(self, case: str) -> dict[str, Any]:
        """The ablation of a case.

        Raises:
            ValueError: There is none.
        """
        for row in self.stored["rows"]:
            if row["case"] == case:
                return dict(row)
        raise ValueError(f"{self.name}.json has no row of the case {case!r}; measure the ablations again")


class Sheets:
    """All kept files of one device: `demonstrations`, one a sitting, and `ablations`."""

    def __init__(self, demonstrations: Sequence[dict[str, Any]], ablations: dict[str, Any]) -> None:
        self.demonstrations = [Sheet(stored) for stored in demonstrations]
        self.ablations = Sheet(ablations)

    @property
    def all(self) -> list[Sheet]:
        """Every file."""
        return [*self.demonstrations, self.ablations]


def _table(sheets: Sequence[Sheet], kind: str, titles: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> str:
    """A table under a line that says device, versions, command, days and commits; the first `texts` columns are text."""
    said = f"{sheets[0].device}; {COMMANDS[kind]}; {'; '.join(sheet.origin for sheet in sheets)}."
    marks = ["---" if i < texts else "---:" for i in range(len(titles))]
    return "\n".join([said, "", *(f"| {' | '.join(cells)} |" for cells in (titles, marks, *rows))])


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def _reading(reading: dict[str, Any]) -> str:
    """Its microseconds, marked where the host was too slow to keep the device busy."""
    return _us(reading["us"]) + (" (host-limited)" if reading["host_limited"] else "")


def _change(value: float, base: float) -> str:
    return f"{value / base - 1:+.1%}".replace("%", " %")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}".replace("%", " %")


def _net_us(reading: dict[str, Any]) -> float:
    return float(reading["us"] - reading["floor_us"])


def synchronised(sheets: Sheets) -> str:
    """The copy of 2 MiB, cold, warm and synchronised, a sitting a column."""
    found = [sheet.stored["two_mib"] for sheet in sheets.demonstrations]
    lines = [
        ("cold, `bench`", [two["cold"]["us"] for two in found]),
        ("warm, replayed", [two["warm"]["us"] for two in found]),
        ("warm, synchronised in each iteration, events", [two["synchronised_events_us"] for two in found]),
        ("the same, host's clock", [two["synchronised_host_us"] for two in found]),
        ("an empty call, synchronised in each iteration, events", [two["floor_synchronised_events_us"] for two in found]),
        ("floor of `bench`", [two["cold"]["floor_us"] for two in found]),
    ]
    titles = ["2 MiB copied, as timed", *(f"{sheet.name}, µs" for sheet in sheets.demonstrations)]
    return _table(sheets.demonstrations, "demonstrations", titles, [[what, *map(_us, values)] for what, values in lines])


def stall(sheets: Sheets) -> str:
    """A host stall of 250 us under three timers, a sitting a column."""
    lines = {
        "events_behind_a_held_queue": "stall and kernel, events",
        "kernel_alone": "kernel alone, events",
        "bench_host": "stall and kernel, `bench_host`",
    }
    rows = [[title, *(_reading(sheet.stored["stall"][name]) for sheet in sheets.demonstrations)] for name, title in lines.items()]
    return _table(sheets.demonstrations, "demonstrations", ["as timed", *(f"{sheet.name}, µs" for sheet in sheets.demonstrations)], rows)


def known_waits(sheets: Sheets) -> str:
    """Readings over kernels of a known length, and the line through them."""
    rows = []
    for sheet in sheets.demonstrations:
        waits = sheet.stored["known_waits"]
        known = [wait["known_us"] for wait in waits]
        for timer in ("bench_graph", "bench"):
            read = [wait[timer]["us"] for wait in waits]
            line = statistics.linear_regression(known, read)
            worst = max(abs(y - line.intercept - line.slope * x) for x, y in zip(known, read, strict=True))
            span = f"{min(known):.0f} to {max(known):.0f}"
            rows.append(
                [sheet.name, f"`{timer}`", span, f"{line.slope:.4f}", _us(line.intercept), _us(worst), _us(waits[0][timer]["floor_us"])]
            )
    titles = ["file", "timer", "known, µs", "slope of read against known", "intercept, µs", "farthest from the line, µs", "floor, µs"]
    return _table(sheets.demonstrations, "demonstrations", titles, rows, texts=2)


def both_timers(sheets: Sheets) -> str:
    """Each construction of a cold call against `bench_graph`, floors subtracted, and whether they agree as the goal says."""
    pairs = [(sheet, row) for sheet in sheets.demonstrations for row in sheet.stored["both_timers"]]
    others = list(dict.fromkeys(name for _, row in pairs for name in row if name not in ("case", "bench_graph")))
    rows = []
    for sheet, row in pairs:
        graph_us = _net_us(row["bench_graph"])
        cells = [sheet.name, row["case"], _us(graph_us)]
        for name in others:
            if name not in row:
                cells += ["", ""]
                continue
            other_us = _net_us(row[name])
            within = "yes" if abs(other_us / graph_us - 1) <= AGREEMENT else "no"
            cells += [
                f"{other_us - graph_us:+.2f} ({_change(other_us, graph_us)})",
                within if row["bench_graph"]["us"] > AGREEMENT_FROM_US else "",
            ]
        rows.append(cells)
    titles = ["file", "case", "`bench_graph`, µs"]
    for name in others:
        titles += [f"`{name}` less that, µs", f"within {AGREEMENT:.0%}".replace("%", " %")]
    return _table(sheets.demonstrations, "demonstrations", titles, rows, texts=2)


def _decode(shape: str, *, kv_dtype: str = "float16", layout: str = "combined", order: str = "fragmented", more: str = "") -> str:
    """Label of a decode case; a geometry follows the shape: `B=64 S=8192 1x128`."""
    batch, context, *geometry = shape.split()
    return f"decode {' '.join([batch, context, kv_dtype, *geometry, layout, order])}{more} cold"


def _two(sheets: Sheets, titles: Sequence[str], cases: Sequence[tuple[str, str, str]]) -> str:
    """Two cases a line, the second against the first: times, change, and the shares of peak and of ceiling of both."""
    rows = []
    for what, base, other in cases:
        first, second = sheets.ablations.row(base), sheets.ablations.row(other)
        shares = [_share(row[name]) for name in ("peak_fraction", "ceiling_fraction") for row in (first, second)]
        rows.append(
            [what, _us(first["latency_us"]), _us(second["latency_us"]), _change(second["latency_us"], first["latency_us"]), *shares]
        )
    one, two = titles
    ends = [f"{name}, of {what}" for what in ("peak", "ceiling") for name in (one, two)]
    return _table([sheets.ablations], "ablations", ["case", f"{one}, µs", f"{two}, µs", "change", *ends], rows)


def order(sheets: Sheets) -> str:
    """Scattered rows against contiguous ones."""
    return _two(sheets, ("contiguous", "fragmented"), [(shape, _decode(shape, order="contiguous"), _decode(shape)) for shape in _SHAPES])


def layout(sheets: Sheets) -> str:
    """K and V apart against one buffer."""
    return _two(sheets, ("combined", "split"), [(shape, _decode(shape), _decode(shape, layout="split")) for shape in _GEOMETRIES])


def pool_size(sheets: Sheets) -> str:
    """One shape over pools of 1, 8 and 32 times the L2."""
    rows = []
    for factor in (1, 8, 32):
        row = sheets.ablations.row(_decode("B=8 S=1024", more=f" l2_factor={factor}"))
        rows.append([f"{factor}", _us(row["latency_us"]), *map(_us, row["quantiles_us"]), _share(row["peak_fraction"])])
    titles = ["pool, times the L2 at least (B=8 S=1024 float16)", "median, µs", "20 % quantile, µs", "80 % quantile, µs", "of peak"]
    return _table([sheets.ablations], "ablations", titles, rows)


def quantiser(sheets: Sheets) -> str:
    """A pool filled by the library's quantiser against one that was cast."""
    real, cast = (_decode("B=64 S=8192", kv_dtype="e4m3", more=f" quantiser={name}") for name in ("real", "cast"))
    return _two(sheets, ("real", "cast"), [("B=64 S=8192 e4m3", real, cast)])


def e4m3_read(sheets: Sheets) -> str:
    """Decode over an e4m3 pool against a float16 pool."""
    return _two(sheets, ("float16", "e4m3"), [(shape, _decode(shape), _decode(shape, kv_dtype="e4m3")) for shape in _SHAPES])


def prefill_write(sheets: Sheets) -> str:
    """The prefill write into an e4m3 pool against a float16 pool, beside the bytes of both."""
    rows = []
    for tokens in _TOKENS:
        half, byte = (sheets.ablations.row(f"prefill T={tokens} {kv_dtype} combined fragmented cold") for kv_dtype in ("float16", "e4m3"))
        cells = [f"T={tokens}", _us(half["latency_us"]), _us(byte["latency_us"]), f"{byte['latency_us'] / half['latency_us']:.3f}"]
        cells += [f"{byte['work']['moved_bytes'] / half['work']['moved_bytes']:.3f}"]
        cells += [_share(row[name]) for name in ("peak_fraction", "ceiling_fraction") for row in (half, byte)]
        rows.append(cells)
    titles = ["case", "float16, µs", "e4m3, µs", "e4m3 / float16, time", "e4m3 / float16, bytes"]
    titles += [f"{name}, of {what}" for what in ("peak", "ceiling") for name in ("float16", "e4m3")]
    return _table([sheets.ablations], "ablations", titles, rows)


def decode_write(sheets: Sheets) -> str:
    """The write of a decode step under both device timers, with their floors, and what it is of the first case's by replay."""
    rows = []
    for sheet in sheets.demonstrations:
        first_us = sheet.stored["decode_scatter"][0]["bench_graph"]["us"]
        for row in sheet.stored["decode_scatter"]:
            cells = [_us(row[timer][name]) for timer in ("bench_graph", "bench") for name in ("us", "floor_us")]
            times = f"{row['bench_graph']['us'] / first_us:.2f}"
            rows.append([sheet.name, row["case"], *cells[:2], times, *cells[2:], *map(_us, row["bench"]["quantiles_us"])])
    titles = ["file", "case", "`bench_graph`, µs", "its floor, µs", "times T=1", "`bench`, µs", "its floor, µs"]
    titles += ["`bench`, 20 % quantile, µs", "80 % quantile, µs"]
    return _table(sheets.demonstrations, "demonstrations", titles, rows, texts=2)


def allocators(sheets: Sheets) -> str:
    """Both allocators in three states: host time, what it is of the first state's, and where a call waits for the device."""
    rows = []
    for sheet in sheets.demonstrations:
        first: dict[str, float] = {}
        for row in sheet.stored["allocator_waits"]:
            us = row["bench_host"]["us"]
            ratio = us / first.setdefault(row["impl"], us)
            waits = ", ".join(row["waits"]) or "nowhere"
            rows.append(
                [
                    sheet.name,
                    row["impl"],
                    row["case"].partition("state=")[2],
                    waits,
                    _us(us),
                    _us(row["bench_host"]["floor_us"]),
                    f"{ratio:.1f}",
                ]
            )
    titles = ["file", "call", "state", "waits for the device in", "`bench_host`, µs", "its floor, µs", "times the bump state"]
    return _table(sheets.demonstrations, "demonstrations", titles, rows, texts=4)
