"""Writes what people read of a verdict: ``index.html``, ``summary.md`` and ``junit.xml``.

Everything comes from one `GateResult`; nothing here decides anything. Whatever a benchmark, a device or a commit is
called is shown as text: never as markup, a mention or a control sequence. What only the page says is in ``templates/``.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite
from markupsafe import Markup, escape

from ci.answer import all_by_wall_clock, compiled_against, headline, how_sure, meaning, mode_in_words, next_steps, parts_of
from ci.compiled import alike_architectures, over_architectures, summary_lines
from ci.compiled_model import CompiledVerdict
from ci.model import GateResult, RowVerdict, RunVerdict
from ci.summary import render_summary
from ci.templates.figures import (
    between,
    ceiling_items,
    change,
    difference,
    environment_changes,
    environment_items,
    latency,
    number,
    percent,
    short_commit,
    throughput,
    visible,
)
from ci.templates.sections import (
    band_picture,
    build_sections,
    chance,
    counts,
    fails,
    flag_texts,
    has_number,
    is_bystander,
    latency_before,
    latency_of,
    needing_a_look,
    shares_of,
    tones,
    why,
)
from ci.templates.words import words_of

_FAILING_COMPILED = (CompiledVerdict.REGRESSED, CompiledVerdict.FAILED, CompiledVerdict.MISSING)


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
    figures = (number, between, throughput, latency, percent, change, difference)
    environment.filters.update({figure.__name__: _unbroken(figure) for figure in figures})
    as_they_are = (
        short_commit,
        has_number,
        latency_of,
        latency_before,
        band_picture,
        chance,
        flag_texts,
        shares_of,
        is_bystander,
        why,
        with_commands,
    )
    environment.filters.update({function.__name__: function for function in as_they_are})
    return environment


def with_commands(text: str) -> Markup:
    """The text, escaped, with the gate's own commands set as code."""
    return Markup("").join(Markup("<code>{}</code>").format(part) if command else escape(part) for part, command in parts_of(text))


def render_html(result: GateResult) -> str:
    """Renders the page: one file, no script, no request to anywhere."""
    anchors = {id(row): f"row-{index + 1}" for index, row in enumerate(result.rows)}
    skipped = [row for row in result.rows if row.verdict is RowVerdict.SKIPPED]
    from ci.templates import pictures  # Altair is slow to import, and only the page needs it

    sections = build_sections(result)
    shown = {
        "result": result,
        "mode": mode_in_words(result),
        "compiled_against": compiled_against(result),
        "headline": headline(result),
        "meaning": meaning(result),
        "next_steps": next_steps(result),
        "how_sure": how_sure(result),
        "counts": counts(result.rows),
        "num_controls": sum(map(is_bystander, result.rows)),
        "attention": [(anchors[id(row)], row) for row in needing_a_look(result.rows)],
        "sections": sections,
        "pictures": pictures.section_pictures(sections),
        "roofline": pictures.roofline(result),
        "environment_changes": environment_changes(result.base_environment, result.environment),
        "skipped": skipped,
        "skip_reasons": Counter(row.reason for row in skipped).most_common(),
        "all_wall_clock": all_by_wall_clock(result),
        "ceilings": ceiling_items(result.ceilings),
        "environment": environment_items(result.environment),
        "tones": tones(),
        "architectures": alike_architectures(result.compiled) if result.compiled else [],
        "compiled_findings": over_architectures(result.compiled.findings) if result.compiled else [],
    }
    template = _environment().get_template("index.html.j2")
    return visible(template.render(**shown, words=words_of(template.render(**shown, words=[]))))


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
