"""Names from files are text in the report and nothing else, and within GitHub's limits."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import junitparser
import pytest
from jinja2 import UndefinedError
from report_pages import INJECTIONS, Page, outcome, page_of, read_markdown, result_of

from ci import report
from ci.model import GateResult, RowVerdict
from ci.report import render_html, render_junit, render_summary


def _injected(name: str) -> GateResult:
    row = outcome(
        f"bench.{name}",
        name,
        verdict=RowVerdict.REGRESSED,
        reason=f"reason {name}",
        baseline=3400.0,
        record_explain=name,
    )
    row = replace(row, flags=(name,), record=replace(row.record, impl=name, timer=name, version=name))
    skipped = outcome(name, name, verdict=RowVerdict.SKIPPED, reason=name)
    return result_of(
        row,
        replace(row, section=name),
        skipped,
        reason=f"sentence {name}",
        device=name,
        base=name,
        head=name,
        notices=(name,),
        environment={name: {name: name}},
        ceilings={name: 1.0},
        created_at=name,
    )


@pytest.mark.parametrize("name", INJECTIONS)
def test_names_run_nothing_in_html(name: str) -> None:
    page, plain = Page(render_html(_injected(name))), Page(render_html(_injected("plainname")))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert [sorted(attributes) for _, attributes in page.tags] == [sorted(attributes) for _, attributes in plain.tags]
    assert page.text.replace("_", " ") == plain.text.replace("plainname", name).replace("_", " ")


@pytest.mark.parametrize("name", INJECTIONS)
def test_names_run_nothing_in_markdown_and_read_back(name: str) -> None:
    """Case 40: a table keeps its columns, mentions stand in code, and every name reads back as it is."""
    result = _injected(name)
    summary = render_summary(result)
    page, plain = read_markdown(summary), read_markdown(render_summary(_injected("plain")))
    without_code = [tag for tag, _ in page.tags if tag != "code"]
    assert without_code == [tag for tag, _ in plain.tags if tag != "code"]
    assert str(result.rows[0].key) in page.text
    assert f"sentence {name}" in page.text
    assert f"reason {name}" in page.text
    outside = re.sub(r"<code>.*?</code>", "", html.unescape(summary), flags=re.DOTALL)
    assert not re.search(r"@everyone|#12|:tada:", outside)


@pytest.mark.parametrize("name", INJECTIONS)
def test_names_run_nothing_in_junit(name: str) -> None:
    suites = junitparser.JUnitXml.fromstring(render_junit(_injected(name)).encode())
    cases = [case for suite in suites for case in suite]
    assert [case.name for case in cases][:1] == [f"bench.{name}({name})"]
    assert cases[0].result[0].message == f"REGRESSED: reason {name}"


def test_control_characters_are_spelled_out() -> None:
    """An escape sequence, a NUL, a lone surrogate or a text-direction override breaks no file and hides nothing."""
    result = _injected("a\x1b[2Jb\x00c\ud800d\u202ee")
    for text in (render_html(result), render_summary(result), render_junit(result)):
        assert not re.search("[\x00\x1b\u202e\ud800]", text)
        text.encode()
    assert "a\\x1b[2Jb\\x00c\\ud800d\\u202ee" in Page(render_html(result)).text
    junitparser.JUnitXml.fromstring(render_junit(result).encode())


def test_templates_escape_and_are_strict() -> None:
    environment = report._environment()
    assert environment.from_string("{{ x }}").render(x="<b>") == "&lt;b&gt;"
    with pytest.raises(UndefinedError):
        environment.from_string("{{ not_there }}").render()


# Limits


def test_summary_keeps_the_regression_at_the_end_of_5000_long_rows() -> None:
    """Case 40: 5,000 rows with names of 200 multi-byte characters, the only regression last."""
    names = [f"{i:04d}" + "測試核心𝛑é" * 28 for i in range(5000)]
    rows = [outcome("b.C.t", name) for name in names]
    rows[-1] = replace(rows[-1], verdict=RowVerdict.REGRESSED, reason="7 % slower")
    summary = render_summary(result_of(*rows))
    assert len(summary) < 65_536
    assert len(summary.encode()) < 65_536
    text = read_markdown(summary).text
    assert names[-1] in text
    assert "7 % slower" in text
    listed = sum(name in text for name in names)
    assert listed > 50
    assert f"{5000 - listed} rows not shown, see the artifact" in summary


@pytest.mark.parametrize("character", ["|", "<", "𝛑", "\n", "@"])
def test_summary_is_capped_whatever_is_long(character: str) -> None:
    """Case 40: 3,000 regressions with endless names, reasons and notices; what is left out is counted."""
    long = character * 5000
    rows = [outcome(long, f"{i}", verdict=RowVerdict.REGRESSED, reason=long) for i in range(3000)]
    result = result_of(*rows, reason=long, device=long, base=long, head=long, notices=(long,) * 50)
    summary = render_summary(result)
    assert len(summary.encode()) < 65_536
    assert re.search(r"2,?\d{3} rows not shown, see the artifact", summary)
    assert re.search(r"\d\d more notices, see the artifact", summary)
    read_markdown(summary)


def test_html_has_every_row() -> None:
    """Case 40: the page leaves nothing out."""
    page = page_of(*(outcome("b.C.t", f"case{i}") for i in range(500)))
    assert all(f"case{i}" in page.section("decode-read") for i in (0, 250, 499))
