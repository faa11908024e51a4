"""Writes what people read of a verdict: ``index.html``, ``summary.md`` and ``junit.xml``.

Everything comes from one `GateResult`; nothing here decides anything. Whatever a benchmark, a device or a commit is
called is shown as text: never as markup, a mention or a control sequence. What only the page says is in ``templates/``.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from ci.compiled import ACCEPT, by_architecture, summary_lines
from ci.compiled_model import CompiledVerdict
from ci.model import GateResult, RowOutcome, RowVerdict, RunVerdict
from ci.templates.figures import (
    between,
    ceiling_items,
    change,
    difference,
    environment_changes,
    environment_items,
    latency,
    number,
    odds,
    percent,
    short_commit,
    throughput,
    visible,
)
from ci.templates.sections import (
    SECTIONS,
    band_picture,
    build_sections,
    counts,
    fails,
    has_number,
    latency_of,
    needing_a_look,
    tones,
)

NEXT_STEP: dict[RunVerdict, str] = {
    RunVerdict.PASS: "Nothing to mend; where rows are IMPROVED, record a fresh baseline so that the gain is kept.",
    RunVerdict.REGRESSION: (
        "Begin with the rows listed first: mend the kernel, or, where the slow-down buys something, put a waiver with "
        "a reason and an expiry date into this device's baseline; make gate ARGS='--select NAME' measures one row again."
    ),
    RunVerdict.INCOMPLETE: (
        "Mend what is missing, failed, invalid or blind in the list, then run the gate again: a row that was not measured never passes."
    ),
    RunVerdict.BASELINE_INVALID: (
        "Record this device's baseline again in the environment of this run, or run the gate where the stored one was recorded."
    ),
    RunVerdict.RUNNER_UNFIT: (
        "Run the gate again on a quiet machine: rows that this change cannot touch have moved, so that no row of this "
        "run says anything of the code."
    ),
    RunVerdict.WRONG_RESULTS: (
        "Mend the results before their speed: for an UNVERIFIED row compare with the reference; for a VIOLATION check "
        "unit factors, the FLOP and byte formula, skipped work, a working set left in L2, and a base that does another "
        "operation, in this order."
    ),
}
_NEXT_STEP_AA = (
    "Read the smallest detectable regression of each row, which is what this machine can see, and record a baseline if that is fine enough."
)

_FAILING_COMPILED = (CompiledVerdict.REGRESSED, CompiledVerdict.FAILED, CompiledVerdict.MISSING)
_MARKDOWN_SYNTAX = r"[^\w .,;:()/=+%-]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?! )"
"""What could be markup; an underscore inside a word and a colon before a space never are."""

SUMMARY_LIMIT_BYTES = 60_000
"""Of UTF-8, so of characters too: GitHub refuses a comment of more than 65,536."""


def mode_in_words(result: GateResult) -> str:
    """Says what was compared with what."""
    pairs = max((row.num_pairs or 0 for row in result.rows), default=0)
    pairs = pairs or max((len(row.samples) for row in result.rows), default=0) or result.processes
    runs = f"{result.runs} run{'' if result.runs == 1 else 's'}"
    return {
        "baseline": f"HEAD against this device's stored baseline, {runs}" + (f", {result.processes} processes" if result.processes else ""),
        "ab": f"merge-base and HEAD compared directly, {pairs} interleaved pairs of processes",
        "aa": f"a commit against itself: what this machine can see, in {pairs} interleaved pairs of processes",
        "history": "against the stored results of earlier commits: values only, without records",
    }[result.mode]


def next_step(result: GateResult) -> str:
    """Says in one sentence what to do now."""
    return _NEXT_STEP_AA if result.mode == "aa" and result.verdict is RunVerdict.PASS else NEXT_STEP[result.verdict]


def _unbroken(figure: Callable[..., str]) -> Callable[..., str]:
    """Makes a figure keep its unit on its line."""
    return lambda *values: figure(*values).replace(" ", "\N{NO-BREAK SPACE}")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    figures = (number, between, throughput, latency, percent, change, difference, odds)
    environment.filters.update({figure.__name__: _unbroken(figure) for figure in figures})
    environment.filters.update({function.__name__: function for function in (short_commit, has_number, latency_of, band_picture)})
    return environment


def render_html(result: GateResult) -> str:
    """Renders the page: one file, no script, no request to anywhere."""
    anchors = {id(row): f"row-{index + 1}" for index, row in enumerate(result.rows)}
    skipped = [row for row in result.rows if row.verdict is RowVerdict.SKIPPED]
    mde80 = [row.mde80 for row in result.rows if row.mde80 is not None and math.isfinite(row.mde80)]
    from ci.templates import pictures  # Altair is slow to import, and only the page needs it

    sections = build_sections(result)
    template = _environment().get_template("index.html.j2")
    page = template.render(
        result=result,
        mode=mode_in_words(result),
        next_step=next_step(result),
        counts=counts(result.rows),
        attention=[(anchors[id(row)], row) for row in needing_a_look(result.rows)],
        sections=sections,
        pictures=pictures.section_pictures(sections),
        roofline=pictures.roofline(result),
        environment_changes=environment_changes(result.base_environment, result.environment),
        skipped=skipped,
        skip_reasons=Counter(row.reason for row in skipped).most_common(),
        mde80=(statistics.median(mde80), max(mde80)) if mde80 else None,
        wall_clock=[row for row in result.rows if row.record and row.record.instrument == "wall-clock"],
        ceilings=ceiling_items(result.ceilings),
        environment=environment_items(result.environment),
        tones=tones(),
        accept=ACCEPT,
        architectures=by_architecture(result.compiled) if result.compiled else [],
    )
    return visible(page)


# The summary --------------------------------------------------------------------------------------------------------


def markdown_text(text: str, limit: int = 600) -> str:
    """Escapes prose for GitHub's markdown: entities for what could be syntax, mentions and references in ``<code>``.

    GitHub looks for mentions after it has read entities, but not in code: an entity alone would not keep ``@everyone``
    quiet.
    """
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    parts = re.split(r"((?:[@#](?=\w)[\w/-]*|:[\w+-]+:)+)", visible(text))
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
    skipped = sum(row.verdict is RowVerdict.SKIPPED for row in result.rows)
    lines = _summary_head(result)
    budget = SUMMARY_LIMIT_BYTES - _size(lines) - 1000
    table = _fit((_summary_line(row, markdown_text(row.reason, 300)) for row in attention), budget)
    budget -= _size(table)
    shown = len(table)
    if table:
        lines += ["### Rows that need a look", "", _summary_columns("why"), "|---|---|---|--:|--:|--:|---|", *table, ""]
    compiled = _fit(_compiled_lines(result), budget // 3)
    budget -= _size(compiled)
    lines += compiled
    body: list[str] = []
    for name, title in SECTIONS.items():
        rows = [row for row in others if (row.section if row.section in SECTIONS else "other") == name]
        budget -= 200
        lasts = (percent(row.mde80) if row.mde80 is not None else "" for row in rows)
        table = _fit((_summary_line(row, last) for row, last in zip(rows, lasts, strict=True)), budget)
        budget -= _size(table)
        shown += len(table)
        if table:
            body += [f"**{title}**", "", _summary_columns("MDE80"), "|---|---|---|--:|--:|--:|--:|", *table, ""]
    if body:
        lines += ["<details><summary>Other rows, by what bounds them</summary>", "", *body, "</details>", ""]
    if skipped:
        lines += [f"{skipped} rows skipped, their reasons are in the artifact.", ""]
    if hidden := len(attention) + len(others) - shown:
        lines += [f"{hidden} rows not shown, see the artifact.", ""]
    lines.append(
        "A positive change of latency is slower; MDE80 is the smallest regression that a row detects with probability "
        "0.8. fp8 and fp16 rows have different bounds: do not rank one's GB/s by the other's."
    )
    return "\n".join(lines) + "\n"


def _compiled_lines(result: GateResult) -> list[str]:
    """What the compiler made, a line a kernel and figure."""
    if result.compiled is None:
        return []
    lines = ["### What the compiler made of the kernels", "", markdown_text(result.compiled.reason), ""]
    for verdict in CompiledVerdict:
        told = summary_lines(finding for finding in result.compiled.findings if finding.verdict is verdict)
        lines += [f"- {verdict.value}: {markdown_text(line, 300)}" for line in told]
    return [*lines, *([markdown_text(ACCEPT)] if result.compiled.exit_code == 1 else []), ""]


def _summary_head(result: GateResult) -> list[str]:
    tally = ", ".join(f"{found} {verdict.value}" for verdict, found in counts(result.rows)) or "none"
    wall_clock = sum(row.record is not None and row.record.instrument == "wall-clock" for row in result.rows)
    lines = [
        f"## {result.verdict.value} (exit code {result.exit_code})",
        "",
        f"**Reason:** {markdown_text(result.reason)}",
        "",
        f"**Next:** {next_step(result)}",
        "",
        f"- Device: {markdown_name(result.device or 'unknown')}",
        f"- Commits: {markdown_name(short_commit(result.base))} → {markdown_name(short_commit(result.head))}",
        f"- Compared: {mode_in_words(result)}",
        f"- Rows: {tally}",
    ]
    lines += [f"- {wall_clock} rows: wall clock on a CPU: not a GPU figure"] if wall_clock else []
    lines.append("")
    notices = _fit((f"- {markdown_text(notice, 300)}" for notice in result.notices), SUMMARY_LIMIT_BYTES // 4)
    if result.notices:
        lines += ["### To review", "", *notices]
        left = len(result.notices) - len(notices)
        lines += [f"- {left} more notices, see the artifact", ""] if left else [""]
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


def _summary_columns(last: str) -> str:
    return f"| verdict | case | kernel | throughput | latency | change of latency | {last} |"


def _summary_line(row: RowOutcome, last: str) -> str:
    record = row.record
    impl = markdown_name(record.impl, 80) if record else ""
    rate = throughput(row.value, row.unit) if has_number(row) and row.value is not None else ""
    time = latency(latency_of(row)) if latency_of(row) is not None else ""
    effect = change(row.effect) if row.effect is not None else ""
    verdict = " ".join((row.verdict.value, *(markdown_name(flag, 40) for flag in row.flags)))
    cells = (verdict, markdown_name(str(row.key)), impl, markdown_text(rate, 60), time, effect, last)
    return f"| {' | '.join(cells)} |"


# JUnit, and the files -----------------------------------------------------------------------------------------------


def render_junit(result: GateResult) -> str:
    """Renders one testcase a row, and one for the run where it fails for none of its rows, lest red look green."""
    suite = TestSuite("performance gate")
    for name in ("verdict", "exit_code", "reason", "device", "base", "head"):
        value = getattr(result, name)
        suite.add_property(name, visible(value.value if isinstance(value, RunVerdict) else str(value)))
    for row in result.rows:
        case = TestCase(visible(str(row.key)), classname=visible(row.section))
        message = visible(f"{row.verdict.value}: {row.reason}")
        if row.verdict is RowVerdict.SKIPPED:
            case.result = [Skipped(message, row.verdict.value)]
        elif fails(row):
            kind = Failure if row.verdict is RowVerdict.REGRESSED else Error
            case.result = [kind(message, row.verdict.value)]
        elif row.reason:
            case.system_out = message
        suite.add_testcase(case)
    failing = [finding for finding in result.compiled.findings if finding.verdict in _FAILING_COMPILED] if result.compiled else []
    for finding in failing:
        case = TestCase(visible(f"{finding.kernel} {finding.architecture} {finding.rows[0]}"), classname="compiled")
        kind = Failure if finding.verdict is CompiledVerdict.REGRESSED else Error
        case.result = [kind(visible(f"{finding.verdict.value}: {'; '.join(summary_lines([finding]))}"), finding.verdict.value)]
        suite.add_testcase(case)
    if result.exit_code and not failing and not any(fails(row) for row in result.rows):
        case = TestCase("the run", classname="run")
        case.result = [Error(visible(f"{result.verdict.value}: {result.reason}"), result.verdict.value)]
        suite.add_testcase(case)
    xml = JUnitXml("performance gate")
    xml.add_testsuite(suite)
    buffer = BytesIO()
    xml.write(buffer)
    return buffer.getvalue().decode()


def write_report(result: GateResult, directory: Path) -> list[Path]:
    """Writes ``index.html``, ``summary.md`` and ``junit.xml`` into `directory`, each as a whole or not at all.

    Returns:
        The three paths.
    Raises:
        OSError: The directory cannot be made or written.
    """
    texts = {"index.html": render_html(result), "summary.md": render_summary(result), "junit.xml": render_junit(result)}
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, directory / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        paths.append(directory / name)
    return paths
