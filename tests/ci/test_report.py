"""The report says what the verdict holds: gold files, the page as a page, its files and figures."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import junitparser
import pytest
from report_pages import Page, check_gold, outcome, page_of, read_markdown, result_of, sample_result

from ci.answer import headline, how_sure, meaning, mode_in_words, next_steps, plain
from ci.model import RowKey, RowVerdict, RunVerdict
from ci.report import render_html, render_junit, render_summary, write_report
from ci.templates import figures
from ci.templates.sections import ATTENTION, FAILING, band_picture, build_sections


def test_gold_html() -> None:
    check_gold("index.html", render_html(sample_result()))


def test_gold_summary() -> None:
    check_gold("summary.md", render_summary(sample_result()))


def test_page_is_one_offline_file_in_order() -> None:
    page = Page(render_html(sample_result()))
    assert len(page.ids) == len(set(page.ids))
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    names = [tag for tag, _ in page.tags]
    assert "script" not in names
    assert names.count("main") == 1
    assert ("html", {"lang": "en"}) in page.tags
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert {(link or "")[1:] for link in links} <= set(page.ids)
    assert "url(" not in page.source
    assert "@import" not in page.source
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in page.tags if tag == "th")
    assert names.count("table") == names.count("caption")


def test_answer_is_at_the_top() -> None:
    page = Page(render_html(sample_result()))
    head = page.text[: page.text.index("Decode read")]
    facts = ("INCOMPLETE", "exit code 3", sample_result().reason, "NVIDIA H200", "302f510388c1", "04ba6b59c23f")
    for fact in (*facts, "merge-base and HEAD compared directly, 12 interleaved pairs of processes", "16 PASS", "3 controls, not judged"):
        assert fact in head
    assert page.section("attention").index("REGRESSED") < page.section("attention").index("MISSING")
    assert "1x1024) was widened" in page.section("review")


def test_moved_controls_are_shown_where_they_make_the_runner_unfit() -> None:
    """A control is not judged, and is the first thing to see where it moved."""
    control = outcome("b.Control.t", "moved", section="control", control=True, flags=("MOVED",), effect=0.08)
    invalid = outcome("b.C.t", "victim", verdict=RowVerdict.INVALID, reason="the runner was unfit")
    text = page_of(invalid, control, verdict=RunVerdict.RUNNER_UNFIT, exit_code=5).section("attention")
    assert text.index("moved") < text.index("victim")
    assert "+8.0 %" in text


def test_waived_rows_are_shown_last_and_do_not_fail() -> None:
    waived = outcome("b.C.t", "excused", verdict=RowVerdict.REGRESSED, flags=("WAIVED",), effect=0.2)
    result = result_of(waived, outcome("b.C.t", "sick", verdict=RowVerdict.FAILED), verdict=RunVerdict.PASS, exit_code=0)
    text = Page(render_html(result)).section("attention")
    assert text.index("sick") < text.index("excused")
    assert "WAIVED" in text
    assert "WAIVED" in render_summary(result)
    suites = junitparser.JUnitXml.fromstring(render_junit(result).encode())
    assert (suites.failures, suites.errors) == (0, 1)


def test_pairs_are_those_behind_the_effect() -> None:
    result = result_of(outcome("b.C.t", "1", num_pairs=24, latency_us=512.0, baseline_latency_us=500.0))
    assert "24 interleaved pairs of processes" in render_summary(result)
    text = Page(render_html(result)).section("decode-read")
    assert "512 µs" in text
    assert "617 µs" not in text
    assert "Was 3,480 GB/s, 500 µs. 24 pairs of processes." in text


@pytest.mark.parametrize("verdict", RunVerdict)
@pytest.mark.parametrize("mode", ["baseline", "ab", "aa", "history"])
def test_every_run_verdict_says_what_to_do_next(verdict: RunVerdict, mode: Any) -> None:
    result = replace(sample_result(), verdict=verdict, mode=mode, exit_code=0 if verdict is RunVerdict.PASS else 4)
    page, summary = Page(render_html(result)), read_markdown(render_summary(result))
    assert ("h1", {}) in page.tags
    assert f"{verdict.value} exit code {result.exit_code}: {meaning(result)}" in " ".join(page.text.split())
    for told in (*headline(result), *map(plain, next_steps(result)), mode_in_words(result), *(text for _, text in how_sure(result))):
        assert told in page.text
        assert told in summary.text
    tone = next(attributes["class"] for tag, attributes in page.tags if tag == "header")
    assert tone == ("good" if verdict is RunVerdict.PASS else "bad")


@pytest.mark.parametrize("verdict", RowVerdict)
def test_every_row_verdict_is_shown_everywhere(verdict: RowVerdict) -> None:
    row = outcome("bench.Case.track_x", "only", verdict=verdict, reason=f"because of {verdict.name}")
    result = result_of(row)
    page, summary = Page(render_html(result)), render_summary(result)
    assert f"1 {verdict.value}" in " ".join(page.text.split())
    assert f"because of {verdict.name}" in page.text
    assert f"1 {verdict.value}" in summary
    assert ("only" in page.section("attention")) == (verdict in ATTENTION)
    assert ("3,480 GB/s" in page.text) == (verdict.value not in ("MISSING", "FAILED", "UNVERIFIED", "INVALID", "SKIPPED"))


def test_skipped_rows_are_one_line_with_reasons_and_count() -> None:
    page = Page(render_html(sample_result()))
    assert "3 rows skipped: flashinfer is not installed (3)" in page.section("rest")
    assert "64x32768" not in page.section("decode-read")


def test_regressions_come_first_and_the_largest_of_them_foremost() -> None:
    rows = [outcome("b.C.t", f"case{i}", verdict=RowVerdict.REGRESSED, effect=0.01 * i) for i in (1, 3, 2)]
    page = page_of(outcome("b.C.t", "failed", verdict=RowVerdict.FAILED), *rows)
    assert re.findall(r"case\d|failed", page.section("attention"))[:4] == ["case3", "case2", "case1", "failed"]


def test_junit_has_one_case_a_row() -> None:
    rows = [outcome("b.C.t", verdict.name, verdict=verdict, reason="why") for verdict in RowVerdict]
    suites = junitparser.JUnitXml.fromstring(render_junit(result_of(*rows)).encode())
    cases = [case for suite in suites for case in suite]
    assert len(cases) == len(rows)
    found = {row.verdict: case.result for row, case in zip(rows, cases, strict=True)}
    for verdict, result in found.items():
        kind = type(result[0]).__name__ if result else "passed"
        assert kind == {"SKIPPED": "Skipped", "REGRESSED": "Failure"}.get(verdict.value, "Error" if verdict in FAILING else "passed")
    assert suites.failures == 1
    assert suites.errors == len(FAILING) - 1


def test_junit_is_not_green_on_a_red_gate() -> None:
    """An unfit runner has no failing row, and fails all the same."""
    result = result_of(outcome("b.C.t"), verdict=RunVerdict.RUNNER_UNFIT, exit_code=5, reason="the controls moved")
    suites = junitparser.JUnitXml.fromstring(render_junit(result).encode())
    assert suites.errors == 1
    assert "the controls moved" in render_junit(result)
    assert junitparser.JUnitXml.fromstring(render_junit(replace(result, verdict=RunVerdict.PASS, exit_code=0)).encode()).errors == 0


def test_write_report_writes_three_files(tmp_path: Path) -> None:
    paths = write_report(sample_result(), tmp_path / "new" / "report")
    assert [path.name for path in paths] == ["index.html", "summary.md", "junit.xml"]
    assert paths[0].read_text(encoding="utf-8") == render_html(sample_result())
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["index.html", "junit.xml", "summary.md"]


def test_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("old")

    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(sample_result(), tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("index.html", "old")]


# Figures and the picture of the band


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (figures.number(3479.56), "3,480"),
        (figures.number(666169.2), "666,000"),
        (figures.number(53.24), "53.2"),
        (figures.number(0.1234), "0.123"),
        (figures.number(0.0), "0"),
        (figures.number(2.44e-7), "2.44e-07"),
        (figures.number(-2.5), "\N{MINUS SIGN}2.50"),
        (figures.number(math.inf), "unknown"),
        (figures.throughput(None, "GB/s"), "not recorded"),
        (figures.latency(617.24), "617 µs"),
        (figures.latency(12_500.0), "12.5 ms"),
        (figures.latency(math.nan), "unknown"),
        (figures.percent(0.7313), "73.1 %"),
        (figures.percent(0.0074), "0.74 %"),
        (figures.change(0.031), "+3.1 %"),
        (figures.change(-0.031), "\N{MINUS SIGN}3.1 %"),
        (figures.change(math.inf), "unknown"),
        (figures.difference(2.44e-4), "2.4e-04"),
        (figures.difference(0.0), "0"),
    ],
)
def test_figures(text: str, expected: str) -> None:
    assert text == expected


def test_unknown_numbers_are_unknown_and_not_unchanged() -> None:
    """Case 39: infinities and NaN from a foreign tree are told as unknown, never as 0 % or as a passing band."""
    row = outcome("b.C.t", "1", value=math.nan, baseline=math.inf, effect=math.inf, mde80=math.inf, band=(0.0, math.inf))
    page = page_of(replace(row, p_value=math.nan, samples=(math.nan, math.inf)))
    assert "unknown" in page.section("decode-read")
    assert not re.search(r"\b(nan|inf)\b", page.text)
    assert "<svg" not in page.source
    assert "unknown" in render_summary(page_result := result_of(row))
    assert not re.search(r"\b(nan|inf)\b", render_summary(page_result))


@pytest.mark.parametrize(
    ("changes", "right_of_band"),
    [
        ({"value": 90.0, "baseline": 100.0, "band": (95.0, 105.0)}, True),
        ({"value": 90.0, "baseline": 100.0, "band": (95.0, None)}, True),
        ({"value": 110.0, "baseline": 100.0, "band": (95.0, 105.0)}, False),
        ({"value": 110.0, "baseline": 100.0, "band": (95.0, 105.0), "direction": "lower"}, True),
        ({"value": 90.0, "baseline": 100.0, "band": (95.0, math.inf)}, True),
        ({"effect": 0.03, "band": None}, True),
        ({"effect": -0.03, "band": None}, False),
    ],
)
def test_band_picture_puts_slower_on_the_right(changes: dict[str, Any], right_of_band: bool) -> None:
    found = band_picture(outcome("b.C.t", "1", **changes))
    assert found is not None
    assert found.low < 50 < found.high
    assert (found.point > found.high) == right_of_band
    assert (found.point < found.low) == (not right_of_band)
    assert ("any" in found.label) == (changes["band"] in ((95.0, math.inf), (95.0, None)))
    assert min(found.low, found.point) >= 0
    assert max(found.high, found.point) <= 100


def test_sections_without_rows_are_left_out() -> None:
    assert [section.id for section in build_sections(result_of(outcome("b.C.t", "1")))] == ["decode-read"]
    assert "There are no rows" in page_of().text


def test_key_without_parameters_is_its_benchmark() -> None:
    row = replace(outcome("b.C.track_alone"), key=RowKey("b.C.track_alone"))
    assert "b.C.track_alone" in page_of(row).section("decode-read")
