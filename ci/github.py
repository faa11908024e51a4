"""What GitHub shows of a verdict: annotations in the log and the summary of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ci.model import GateResult, RowOutcome, RowVerdict
from ci.summary import render_summary
from ci.templates.figures import change, visible
from ci.templates.sections import fails, needing_a_look

MAX_ANNOTATIONS = 10
"""Of each kind GitHub shows this many a step; the rest would be dropped unseen, so it is counted instead."""

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def _escaped(text: str, *, is_property: bool = False) -> str:
    """Escapes a workflow command's data, so that no text starts a command of its own."""
    text = visible(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if is_property else text


def _annotation(kind: str, title: str, message: str) -> str:
    return f"::{kind} title={_escaped(title, is_property=True)}::{_escaped(message)}"


def _line(row: RowOutcome) -> str:
    effect = f", latency {change(row.effect)}" if row.effect is not None else ""
    return f"{row.key}{effect}: {row.reason}"


def told(result: GateResult) -> list[str]:
    """Workflow commands: what fails as errors, what needs a look as warnings, the largest regressions first."""
    rows = needing_a_look(result.rows)
    lines = []
    for kind, chosen in (("error", [row for row in rows if fails(row)]), ("warning", [row for row in rows if not fails(row)])):
        shown = chosen if len(chosen) <= MAX_ANNOTATIONS else chosen[: MAX_ANNOTATIONS - 1]
        lines += [_annotation(kind, row.verdict.value, _line(row)) for row in shown]
        if len(shown) < len(chosen):
            lines.append(_annotation(kind, "more rows", f"{len(chosen) - len(shown)} more rows, see the report"))
    if result.exit_code and not any(fails(row) for row in result.rows):
        lines.insert(0, _annotation("error", result.verdict.value, result.reason))
    improved = sum(row.verdict is RowVerdict.IMPROVED for row in result.rows)
    if improved:
        lines.append(_annotation("notice", "IMPROVED", f"{improved} rows are faster than their band: record a fresh baseline to keep it"))
    return lines


def publish(result: GateResult, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Appends the summary to the job's page where there is one, and returns the annotations to print."""
    target = environment.get(SUMMARY_VARIABLE)
    if target:
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(render_summary(result))
    return told(result)
