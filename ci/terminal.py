"""Prints a verdict: a coloured table on a terminal, plain aligned lines into a file or a log."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ci.answer import NOT_A_GPU, headline, how_sure, meaning, mode_in_words, next_steps, plain
from ci.compiled import by_architecture, summary_lines
from ci.compiled_model import CompiledVerdict
from ci.model import GateResult, RowOutcome, RowVerdict
from ci.templates.figures import change, latency, percent, short_commit, throughput, visible
from ci.templates.sections import SECTIONS, has_number, latency_of, needing_a_look, tally, tones, verdict_text

MAX_OTHER_ROWS = 60
"""Rows that need no look are printed up to this number; those that do are all printed."""

MAX_COMPILED_LINES = 20
"""Of one verdict."""

MIN_WIDTH_FOR_KERNEL = 150
"""Columns of a terminal under which the kernel stands below the case instead of beside it."""

_HEADINGS = ("verdict", "case", "kernel", "throughput", "latency", "change", "MDE80")
_STYLES = {"bad": "bold red", "warn": "yellow", "good": "green", "plain": "none"}
_ASCII = str.maketrans({"µ": "u", "→": ">", "\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "x", "…": "."})


def render_terminal(result: GateResult, console: Console) -> None:
    """Prints the verdict, what needs a look, the other rows and what to do next.

    Args:
        result: The verdict.
        console: Where to print. Colour and a table are for terminals; ``NO_COLOR`` is read by the console itself.
    """
    attention = needing_a_look(result.rows)
    ids = {id(row) for row in attention}
    others = [row for row in _by_section(result.rows) if id(row) not in ids and row.verdict is not RowVerdict.SKIPPED]
    shown = others[:MAX_OTHER_ROWS]

    style = _STYLES[tones()[result.verdict.value]]
    _line(console, f"{result.verdict.value} (exit code {result.exit_code}): {meaning(result)}", style)
    for line in headline(result):
        _line(console, line)
    _line(console)
    _line(console, f"device    {result.device or 'unknown'}")
    _line(console, f"commits   {short_commit(result.base)} → {short_commit(result.head)}")
    _line(console, f"compared  {mode_in_words(result)}")
    _line(console, f"rows      {tally(result.rows) or 'none'}")
    for name, text in how_sure(result):
        _line(console, f"{name.lower():<9} {text}")
    for notice in result.notices:
        _line(console, f"review    {plain(notice)}")
    if attention or shown:
        _line(console)
        _rows(console, [*attention, *shown])
    if attention:
        _line(console)
        for row in attention:
            _line(console, f"{row.verdict.value}  {row.key}: {row.reason}", _STYLES[tones()[row.verdict.value]])
    _line(console)
    if len(others) > len(shown):
        _line(console, f"{len(others) - len(shown)} rows not shown, see index.html.")
    _compiled(console, result)
    if any(row.record and row.record.instrument == "wall-clock" for row in result.rows):
        _line(console, f"(w) {NOT_A_GPU}")
    for step in next_steps(result):
        _line(console, f"next: {plain(step)}")


def _compiled(console: Console, result: GateResult) -> None:
    """What the compiler made: one line a kernel and figure, and how many there are beyond the limit."""
    if result.compiled is None:
        return
    _line(console, f"compiled for {', '.join(name for name, _ in by_architecture(result.compiled))}: {result.compiled.reason}")
    looks = {
        CompiledVerdict.REGRESSED: "bad",
        CompiledVerdict.FAILED: "bad",
        CompiledVerdict.MISSING: "bad",
        CompiledVerdict.IMPROVED: "good",
    }
    for verdict in CompiledVerdict:
        told = summary_lines(finding for finding in result.compiled.findings if finding.verdict is verdict)
        for line in told[:MAX_COMPILED_LINES]:
            _line(console, f"{verdict.value}  {line}", _STYLES[looks.get(verdict, "plain")])
        if len(told) > MAX_COMPILED_LINES:
            _line(console, f"{verdict.value}  {len(told) - MAX_COMPILED_LINES} more, see index.html.")


def _by_section(rows: Sequence[RowOutcome]) -> list[RowOutcome]:
    order = list(SECTIONS)
    return sorted(rows, key=lambda row: order.index(row.section if row.section in SECTIONS else "other"))


def _cells(row: RowOutcome) -> tuple[str, ...]:
    record = row.record
    numbered = has_number(row)
    wall_clock = " (w)" if record and record.instrument == "wall-clock" else ""
    return (
        " ".join((verdict_text(row), *(f"[{flag}]" for flag in row.flags))),
        str(row.key),
        record.impl if record else "",
        throughput(row.value, row.unit) + wall_clock if numbered and row.value is not None else "",
        latency(latency_of(row)) if latency_of(row) is not None else "",
        change(row.effect) if row.effect is not None else "",
        percent(row.mde80) if row.mde80 is not None else "",
    )


def _rows(console: Console, rows: Sequence[RowOutcome]) -> None:
    cells = [tuple(_one_line(console, cell) for cell in _cells(row)) for row in rows]
    if console.is_terminal:
        narrow = console.width < MIN_WIDTH_FOR_KERNEL
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, heading in enumerate(_HEADINGS):
            if not (narrow and heading == "kernel"):
                table.add_column(heading, justify="right" if index > 2 else "left", overflow="fold")
        looks = tones()
        for row, texts in zip(rows, cells, strict=True):
            verdict = Text(texts[0], style=_STYLES[looks[row.verdict.value]])
            case, kernel, *figures = (Text(text) for text in texts[1:])
            left = [case.append(f"\n{kernel.plain}", style="dim")] if narrow else [case, kernel]
            table.add_row(verdict, *left, *figures)
        console.print(table)
        return
    widths = [max(cell_len(line[index]) for line in (_HEADINGS, *cells)) for index in range(len(_HEADINGS))]
    for line in (_HEADINGS, *cells):
        parts = []
        for index, text in enumerate(line):
            gap = " " * (widths[index] - cell_len(text))
            parts.append(gap + text if index > 2 else text + gap)
        _line(console, "  ".join(parts).rstrip())


def _one_line(console: Console, text: str) -> str:
    """Keeps a text on its line, and to what the console's encoding can write."""
    text = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(console.encoding, "backslashreplace").decode(console.encoding)
    return text


def _line(console: Console, text: str = "", style: str = "none") -> None:
    console.print(Text(_one_line(console, text), style=style), soft_wrap=True, highlight=False)
