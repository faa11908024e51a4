"""What the gate prints: a table on a terminal, aligned lines elsewhere, and nothing that a name could make it do.

``RAPID_LLM_UPDATE_GOLD=1`` renews the gold files, as report_pages.py says.
"""

from __future__ import annotations

import io
import os
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ci.answer import headline, how_sure, meaning, next_steps, plain
from ci.model import GateResult, RowVerdict, RunVerdict
from ci.terminal import MAX_OTHER_ROWS, render_terminal

GOLD = Path(__file__).parent / "gold"
_SAMPLE = runpy.run_path(str(GOLD / "sample.py"))
outcome, sample_result = _SAMPLE["outcome"], _SAMPLE["sample_result"]


def printed(result: GateResult, *, encoding: str = "utf-8", environ: dict[str, str] | None = None, **options: Any) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    render_terminal(result, Console(file=stream, _environ=environ or {}, **{"width": 160, **options}))
    stream.flush()
    return raw.getvalue().decode(encoding)


def check_gold(name: str, text: str) -> None:
    path = GOLD / name
    if os.environ.get("RAPID_LLM_UPDATE_GOLD") == "1":
        path.write_text(text, encoding="utf-8", newline="\n")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs; see report_pages.py for how to renew it"


def test_gold_plain() -> None:
    check_gold("terminal_plain.txt", printed(sample_result()))


def test_gold_table() -> None:
    check_gold("terminal_table.txt", printed(sample_result(), force_terminal=True, color_system=None))


def test_plain_lines_are_aligned_and_whole() -> None:
    """A log gets one line a row however long, wide characters included, and no escape sequences."""
    rows = (outcome("b.C.t", "測試" * 60, value=3400.0), outcome("b.C.t", "short", value=12.0))
    text = printed(replace(sample_result(), rows=rows), width=80)
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("PASS")]
    assert len(lines) == 2
    assert "測試" * 60 in lines[0]
    wide = [len(line[: line.index(" GB/s")]) + sum(ord(char) > 0x2E80 for char in line) for line in lines]
    assert wide[0] == wide[1]


@pytest.mark.parametrize("verdict", RunVerdict)
def test_every_run_verdict(verdict: RunVerdict) -> None:
    result = replace(sample_result(), verdict=verdict, exit_code=1)
    text = printed(result)
    assert text.startswith("\n".join([f"{verdict.value} (exit code 1): {meaning(result)}", *headline(result), ""]))
    assert text.rstrip().endswith("\n".join(f"next: {plain(step)}" for step in next_steps(result)))
    assert all(told in text for _, told in how_sure(result))


@pytest.mark.parametrize("verdict", RowVerdict)
@pytest.mark.parametrize("terminal", [True, False])
def test_every_row_verdict(verdict: RowVerdict, terminal: bool) -> None:
    row = outcome("b.C.t", "1", verdict=verdict, reason="the reason of it")
    text = printed(replace(sample_result(), rows=(row,)), force_terminal=terminal)
    assert f"1 {verdict.value}" in text
    has_number = verdict.value not in ("MISSING", "FAILED", "UNVERIFIED", "INVALID", "SKIPPED")
    assert ("3,480 GB/s" in text) == has_number


def test_colour_only_where_it_is_wanted() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert colour.search(printed(sample_result(), force_terminal=True, color_system="standard"))
    quiet = printed(sample_result(), force_terminal=True, color_system="standard", environ={"NO_COLOR": "1"})
    assert not colour.search(quiet)
    assert "REGRESSED" in quiet


@pytest.mark.parametrize("terminal", [True, False])
def test_names_control_nothing(terminal: bool) -> None:
    """Neither an escape sequence nor rich's own markup nor a newline in a name does anything."""
    name = "[red]a[/red]\x1b[2J\x07\r\nb"
    row = outcome("b.C.t", name, verdict=RowVerdict.REGRESSED, reason=name)
    text = printed(
        replace(sample_result(), rows=(row,), device=name, reason=name),
        force_terminal=terminal,
        color_system=None,
        width=300,
    )
    assert not re.search("[\x1b\x07\r]", text)
    assert text.count("[red]a[/red]\\x1b[2J\\x07\\x0d\\nb") == 6


def test_stream_that_knows_only_ascii() -> None:
    row = outcome("b.C.t", "測試")
    text = printed(replace(sample_result(), rows=(row,)), encoding="ascii")
    assert "617 us" in text
    assert "\\u6e2c" in text


def test_long_runs_show_all_that_needs_a_look() -> None:
    rows = [outcome("b.C.t", f"{i}") for i in range(500)]
    rows[400:480] = [replace(row, verdict=RowVerdict.REGRESSED, reason="slower") for row in rows[400:480]]
    text = printed(replace(sample_result(), rows=tuple(rows)))
    assert all(f"b.C.t({i})" in text for i in range(400, 480))
    assert f"{420 - MAX_OTHER_ROWS} rows not shown, see index.html." in text


def test_narrow_terminal_keeps_the_kernel_under_the_case() -> None:
    """R27: the KernelSpec's name is never dropped for want of room."""
    text = printed(sample_result(), force_terminal=True, color_system=None, width=100)
    assert "triton_paged_decode" in text
    assert all(len(line) <= 100 for line in text.split("verdict ", 1)[1].split("\n\n")[0].splitlines()[1:])


def test_wall_clock_rows_are_marked() -> None:
    text = printed(sample_result())
    assert "81,300 calls/s (w)" in text
    assert "(w) wall clock on a CPU: not a GPU figure" in text
