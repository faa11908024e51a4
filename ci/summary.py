"""The verdict as GitHub markdown: ``summary.md``, the summary of a job, and the comment on a pull request.

It says what the page says, in the same order. Whatever a benchmark, a device or a commit is called is shown as text: never as markup or a
mention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ci.answer import headline, how_sure, meaning, mode_in_words, next_steps, parts_of, worse_compiled
from ci.compiled import summary_lines
from ci.compiled_model import CompiledVerdict
from ci.model import GateResult, RowOutcome, RowVerdict
from ci.rows import counted
from ci.templates.figures import change, latency, percent, short_commit, throughput, visible
from ci.templates.sections import SECTIONS, has_number, latency_of, needing_a_look, tally, verdict_text, why

_MARKDOWN_SYNTAX = r"[^\w .,;:()/=+%-]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?! )"
"""What could be markup; an underscore inside a word and a colon before a space never are."""

SUMMARY_LIMIT_BYTES = 60_000
"""Of UTF-8, so of characters too: GitHub refuses a comment of more than 65,536."""


def markdown_text(text: str, limit: int = 600) -> str:
    """Escapes prose for GitHub's markdown: entities for what could be syntax, mentions and references in ``<code>``.

    GitHub looks for mentions after it has read entities, but not in code: an entity alone would not keep ``@everyone``
    quiet. The gate's own commands are set as code.
    """
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(f"<code>{_entities(part)}</code>" if command else _prose(part) for part, command in parts_of(visible(text)))


def _prose(text: str) -> str:
    parts = re.split(r"((?:[@#](?=\w)[\w/-]*|:[\w+-]+:)+)", text)
    return "".join(f"<code>{_entities(part)}</code>" if index % 2 else _entities(part) for index, part in enumerate(parts))


def markdown_name(text: str, limit: int = 300) -> str:
    """Escapes a name for a GitHub table; it reads back unchanged, cut at `limit` characters by an ellipsis."""
    return f"<code>{_entities(visible(text if len(text) <= limit else text[: limit - 1] + '…'))}</code>"


def _entities(text: str) -> str:
    return re.sub(_MARKDOWN_SYNTAX, lambda hit: f"&#{ord(hit[0])};" if hit[0].isascii() else hit[0], text)


def render_summary(result: GateResult) -> str:
    """Renders GitHub markdown within `SUMMARY_LIMIT_BYTES`: the verdict, what needs a look, then what else fits."""
    attention = needing_a_look(result.rows)
    ids = {id(row) for row in attention}
    others = [row for row in result.rows if id(row) not in ids and row.verdict is not RowVerdict.SKIPPED]
    lines = _head(result)
    budget = SUMMARY_LIMIT_BYTES - _size(lines) - 1000
    table = _fit((_line(row, markdown_text(why(row), 300)) for row in attention), budget)
    budget -= _size(table)
    shown = len(table)
    if table:
        lines += ["### Rows that need a look", "", _columns("why"), "|---|---|---|--:|--:|--:|---|", *table, ""]
    compiled = _fit(_compiled_lines(result), budget // 3)
    budget -= _size(compiled)
    lines += compiled
    body: list[str] = []
    for name, title in SECTIONS.items():
        rows = [row for row in others if (row.section if row.section in SECTIONS else "other") == name]
        budget -= 200
        lasts = (percent(row.mde80) if row.mde80 is not None else "" for row in rows)
        table = _fit((_line(row, last) for row, last in zip(rows, lasts, strict=True)), budget)
        budget -= _size(table)
        shown += len(table)
        if table:
            body += [f"**{title}**", "", _columns("MDE80"), "|---|---|---|--:|--:|--:|--:|", *table, ""]
    if body:
        lines += ["<details><summary>Other rows, by what bounds them</summary>", "", *body, "</details>", ""]
    if hidden := len(attention) + len(others) - shown:
        lines += [f"{hidden} rows not shown, see the artifact.", ""]
    lines.append(
        "A positive change of latency is slower; MDE80 is the smallest regression that a row detects with probability "
        "0.8. 8-bit and 16-bit rows have different bounds: do not rank one's GB/s by the other's. The words are explained in index.html of "
        "the artifact."
    )
    return "\n".join(lines) + "\n"


def _compiled_lines(result: GateResult) -> list[str]:
    """What the compiler made, a line a kernel and figure; what the headline told already is not told again."""
    if result.compiled is None:
        return []
    told = set(headline(result))
    lines = []
    for verdict in CompiledVerdict:
        found = summary_lines(finding for finding in result.compiled.findings if finding.verdict is verdict)
        lines += [f"- {verdict.value}: {markdown_text(line, 300)}" for line in found if not any(line in said for said in told)]
    if not lines and worse_compiled(result):
        return []
    return ["### What the compiler made of the kernels", "", *(lines or [markdown_text(result.compiled.reason)]), ""]


def _head(result: GateResult) -> list[str]:
    lines = [f"## {result.verdict.value} (exit code {result.exit_code}): {meaning(result)}", ""]
    lines += [f"- {markdown_text(line)}" for line in headline(result)]
    steps = [markdown_text(step) for step in next_steps(result)]
    lines += ["", f"**What to do next.** {' '.join(steps)}", "", "**How sure, and what was not seen**", ""]
    lines += [
        f"- Device: {markdown_name(result.device or 'unknown')}",
        f"- Commits: {markdown_name(short_commit(result.base))} → {markdown_name(short_commit(result.head))}",
        f"- Compared: {mode_in_words(result)}",
        f"- Rows: {tally(result.rows) or 'none'}",
        *(f"- {name}: {markdown_text(text)}" for name, text in how_sure(result)),
        "",
    ]
    notices = _fit((f"- {markdown_text(notice, 300)}" for notice in result.notices), SUMMARY_LIMIT_BYTES // 4)
    if result.notices:
        lines += ["### To review", "", *notices]
        left = len(result.notices) - len(notices)
        lines += [f"- {counted(left, 'more notice')}, see the artifact", ""] if left else [""]
    return lines


def _size(lines: Iterable[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _fit(lines: Iterable[str], budget_bytes: int) -> list[str]:
    """Takes lines from the start as long as all of them fit."""
    taken = []
    for line in lines:
        budget_bytes -= _size((line,))
        if budget_bytes < 0:
            break
        taken.append(line)
    return taken


def _columns(last: str) -> str:
    return f"| verdict | case | kernel | throughput | latency | change of latency | {last} |"


def _line(row: RowOutcome, last: str) -> str:
    record = row.record
    impl = markdown_name(record.impl, 80) if record else ""
    rate = throughput(row.value, row.unit) if has_number(row) and row.value is not None else ""
    time = latency(latency_of(row)) if latency_of(row) is not None else ""
    effect = change(row.effect) if row.effect is not None else ""
    verdict = " ".join((verdict_text(row), *(markdown_name(flag, 40) for flag in row.flags)))
    cells = (verdict, markdown_name(str(row.key)), impl, markdown_text(rate, 60), time, effect, last)
    return f"| {' | '.join(cells)} |"
