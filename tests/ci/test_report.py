"""The report says what the verdict holds: in the right section, as text only, and within GitHub's limits.

``RAPID_LLM_UPDATE_GOLD=1 pytest tests/ci/test_report.py tests/ci/test_terminal.py`` writes the gold files anew; read
the difference before it is committed.
"""

from __future__ import annotations

import html
import math
import os
import re
import runpy
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import junitparser
import pytest
from jinja2 import UndefinedError
from markdown_it import MarkdownIt

from ci import report
from ci.model import GateResult, RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.report import render_html, render_junit, render_summary, write_report
from ci.templates import figures
from ci.templates.sections import ATTENTION, FAILING, SECTIONS, band_picture, build_sections

GOLD = Path(__file__).parent / "gold"
_SAMPLE = runpy.run_path(str(GOLD / "sample.py"))
outcome, sample_result = _SAMPLE["outcome"], _SAMPLE["sample_result"]

VOID = {"meta", "link", "br", "img", "input", "hr"}
INJECTIONS = (
    "<img src=x onerror=alert(1)>",
    "a|b",
    "@everyone",
    "</script><script>alert(1)</script>",
    "{{7*7}}",
    "`tick` **bold** _it_ [l](http://x.test) #12 :tada:",
    "two\nlines",
    '" onmouseover="alert(1)',
)


@dataclass
class Page(HTMLParser):
    """Reads the page strictly: refuses unbalanced tags, keeps ids, tags, headings and the text of each section."""

    source: str
    stack: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    headings: list[int] = field(default_factory=list)
    text: str = ""
    sections: dict[str, str] = field(default_factory=dict)
    markup: dict[str, str] = field(default_factory=dict)
    _section: str = ""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.source)
        self.close()
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "section":
            self._section = dict(attrs)["aria-labelledby"] or ""
        if tag not in VOID:
            self.stack.append(tag)
        self.markup[self._section] = self.markup.get(self._section, "") + (self.get_starttag_text() or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1:] == [tag], f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if "style" in self.stack:
            return
        data = data.replace("\N{NO-BREAK SPACE}", " ")
        self.text += data
        self.sections[self._section] = self.sections.get(self._section, "") + data

    def section(self, name: str) -> str:
        """The text of a section with its white space squeezed."""
        return " ".join(self.sections[name].split())


def page_of(*rows: RowOutcome, **changes: Any) -> Page:
    return Page(render_html(result_of(*rows, **changes)))


def result_of(*rows: RowOutcome, **changes: Any) -> GateResult:
    result: GateResult = replace(sample_result(), **{"rows": rows, "notices": (), **changes})
    return result


def check_gold(name: str, text: str) -> None:
    path = GOLD / name
    if os.environ.get("RAPID_LLM_UPDATE_GOLD") == "1":
        path.write_text(text, encoding="utf-8", newline="\n")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs; see the head of this file for how to renew it"


def read_markdown(text: str) -> Page:
    return Page(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))


# Gold files, and the page as a page


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
    for fact in (*facts, "merge-base and HEAD compared directly, 12 interleaved pairs of processes", "19 PASS"):
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
    assert "500 µs. 24 pairs of processes." in text


@pytest.mark.parametrize("verdict", RunVerdict)
@pytest.mark.parametrize("mode", ["baseline", "ab", "aa", "history"])
def test_every_run_verdict_says_what_to_do_next(verdict: RunVerdict, mode: Any) -> None:
    result = replace(sample_result(), verdict=verdict, mode=mode, exit_code=0 if verdict is RunVerdict.PASS else 4)
    page, step = Page(render_html(result)), report.next_step(result)
    assert ("h1", {}) in page.tags
    assert f"{verdict.value} exit code {result.exit_code}" in " ".join(page.text.split())
    assert step in page.text
    assert step in render_summary(result)
    assert report.mode_in_words(result) in page.text
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


# Sections and what they say


def test_sections_apart_and_in_order() -> None:
    """R51, R52, R54, R95: fp8 read, fp8 write, prefill and decode are sections of their own; no column is a dtype."""
    page = Page(render_html(sample_result()))
    at = [page.ids.index(name) for name in SECTIONS]
    assert at == sorted(at)
    assert "DecodeFp8" in page.section("decode-read-fp8")
    assert "DecodeFp8" not in page.section("decode-read")
    assert "PrefillFp8" in page.section("kv-write-prefill-fp8")
    assert "PrefillFp8" not in page.section("kv-write-prefill")
    assert "Prefill" not in page.section("kv-write-decode")
    assert "bench_kv_write.Decode" not in page.section("kv-write-prefill")
    columns = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', page.source)
    assert "KernelSpec" in columns
    assert not any(re.search("dtype|fp8|fp16", column) for column in columns)


def test_row_of_an_unknown_section_is_under_other() -> None:
    assert "stray" in page_of(outcome("b.C.t", "stray", section="new-class")).section("other")


@pytest.mark.parametrize("section", ["kv-write-decode", "allocator", "control", "other", "decode-read"])
@pytest.mark.parametrize("bottleneck", ["launch", "host"])
def test_no_share_of_peak_on_launch_and_host_rows(section: str, bottleneck: str) -> None:
    """R55: neither a percentage nor a column nor a dash for it, even where a record carries one."""
    row = outcome("b.C.t", "1", section=section, record_bottleneck=bottleneck, record_peak_fraction=0.3137)
    page = page_of(row)
    assert "31.4 %" not in page.text
    assert "Share of" not in page.section(section)
    beside = page_of(row, outcome("b.C.t", "2", section="control")).section("control" if section == "control" else section)
    assert ("Share of" in beside) == (section == "control")
    assert "31.4 %" not in beside


@pytest.mark.parametrize("section", ["kv-write-decode", "allocator"])
def test_launch_and_host_sections_never_have_a_share_column(section: str) -> None:
    """R55: whatever bottleneck a record of such a section claims."""
    row = outcome("b.C.t", "1", section=section, record_bottleneck="write-bandwidth", record_peak_fraction=0.3137)
    page = page_of(row)
    assert "Share of" not in page.section(section)
    assert "31.4 %" not in page.text


def test_no_share_of_peak_where_none_is_known() -> None:
    """R25: a device without a known peak has no percentage, and no column that asks for one."""
    page = page_of(outcome("b.C.t", "1", record_peak_fraction=None))
    assert "Share of peak" not in page.section("decode-read")
    assert "Share of copy rate" in page.section("decode-read")


def test_launch_rows_say_fewer_launches() -> None:
    """R56, R99: the remedy, the span of this run, and the instrument's floor beside."""
    text = Page(render_html(sample_result())).section("kv-write-decode")
    assert "Fewer launches, not fewer bytes" in text
    assert "1.50 µs to 1.98 µs" in text
    assert "Instrument's floor" in text


def test_host_rows_say_what_is_in_the_time() -> None:
    """R100: bench_host includes its own synchronise; the states stand beside each other, as this run measured them."""
    text = Page(render_html(sample_result())).section("allocator")
    assert "bench_host includes its own synchronise: an empty call takes 4.10 µs here" in text
    assert "bump 12.3 µs, fragmented 22.0 µs" in text
    assert "wall clock on a CPU: not a GPU figure" in text


@pytest.mark.parametrize(("fragmented_us", "said"), [(104.0, "at most 4.0 % more time"), (98.0, "no more time")])
def test_fragmented_row_bounds_what_paging_can_cost(fragmented_us: float, said: str) -> None:
    """R101: the bound comes from the run's own two rows; without both of them nothing is said."""
    contiguous = outcome("b.C.t", "8x8192", "contiguous", record_latency_us=100.0)
    fragmented = outcome("b.C.t", "8x8192", "fragmented", record_latency_us=fragmented_us)
    text = page_of(contiguous, fragmented).section("decode-read")
    assert said in text
    assert "clears paging of a decode regression" in text
    assert "Paging" not in page_of(fragmented).section("decode-read")
    other_case = outcome("b.C.t", "1x1024", "contiguous", record_latency_us=50.0)
    assert "Paging" not in page_of(fragmented, other_case).section("decode-read")


def _read_rows(fp8_gb_per_s: float, fp8_us: float) -> tuple[RowOutcome, RowOutcome]:
    fp8 = outcome(
        "b.DecodeFp8.t",
        "fp8",
        "64x8192",
        section="decode-read-fp8",
        value=fp8_gb_per_s,
        record_latency_us=fp8_us,
        record_bottleneck="dequant",
    )
    return outcome("b.Decode.t", "fp16", "64x8192", value=3500.0, record_latency_us=600.0), fp8


def test_lower_fp8_rate_is_no_fault() -> None:
    """R102: half the rate of fp16 is a sentence in a section of its own: no warning look, nothing to attend to."""
    page = page_of(*_read_rows(1750.0, 600.0), verdict=RunVerdict.PASS, exit_code=0)
    assert not re.search(r'class="[^"]*\b(bad|warn)\b', page.markup["decode-read-fp8"])
    assert "another limit, not a loss" in page.section("decode-read-fp8")
    assert "None" in page.section("attention")
    assert "1,750 GB/s" in page.section("decode-read-fp8")


def test_fp8_sentence_follows_this_runs_evidence() -> None:
    """R103: the wording turns with the rows measured here, and claims nothing where nothing was measured."""
    slower = page_of(*_read_rows(2170.0, 484.0)).section("decode-read-fp8")
    assert "Reads at 62.0 % of the fp16 rows' rate: dequant-bound" in slower
    assert "takes 0.81 of its time" in slower
    faster = page_of(*_read_rows(3535.0, 297.0)).section("decode-read-fp8")
    assert "No slower than fp16 here: bandwidth-bound" in faster
    assert "dequant-bound" not in faster
    alone = page_of(_read_rows(3535.0, 297.0)[1]).section("decode-read-fp8")
    assert "nothing says whether" in alone
    assert "-bound" not in alone


def test_fp8_evidence_is_the_largest_case() -> None:
    """R103: a small case, where neither dtype fills the device, does not decide; its ratio is told beside."""
    small = (
        outcome("b.Decode.t", "fp16", "1x1024", value=3600.0, record_latency_us=10.0),
        outcome("b.DecodeFp8.t", "fp8", "1x1024", section="decode-read-fp8", value=1800.0, record_latency_us=10.0),
    )
    text = page_of(*small, *_read_rows(3535.0, 297.0)).section("decode-read-fp8")
    assert "bandwidth-bound" in text
    assert "over 2 cases it moves 0.50 to 1.0 times as many" in text


@pytest.mark.parametrize("verdict", ["UNVERIFIED", "VIOLATION", "FAILED"])
def test_rows_without_a_valid_number_are_no_evidence(verdict: str) -> None:
    """R103: an unverified fp8 row says nothing of what bounds fp8."""
    fp16, fp8 = _read_rows(3535.0, 297.0)
    text = page_of(fp16, replace(fp8, verdict=RowVerdict(verdict))).section("decode-read-fp8")
    assert "nothing says whether" in text


@pytest.mark.parametrize(("rate", "said"), [(3600.0, "Write-bound like fp16"), (1800.0, "cheaper conversion")])
def test_fp8_write_sentence_follows_its_own_rows(rate: float, said: str) -> None:
    """R52, R103: the fp8 write is judged by the fp16 write, never by the fp8 read."""
    fp16 = outcome("b.Prefill.t", "fp16", "4096", section="kv-write-prefill", value=3600.0, record_latency_us=40.0)
    fp8 = outcome("b.PrefillFp8.t", "fp8", "4096", section="kv-write-prefill-fp8", value=rate, record_latency_us=20.0)
    assert said in page_of(fp16, fp8, *_read_rows(2170.0, 484.0)).section("kv-write-prefill-fp8")


def test_cpu_run_claims_nothing_of_a_gpu() -> None:
    """R107: rows of the wall-clock instrument are labelled, one by one and as a class."""
    page = page_of(outcome("b.C.t", "1", record_instrument="wall-clock"))
    assert "1 of 1 rows: wall clock on a CPU: not a GPU figure" in page.section("overview")
    assert "no evidence of what bounds the class on a GPU" in page.section("decode-read")
    assert page.section("decode-read").count("wall clock on a CPU: not a GPU figure") == 2


def test_explain_and_samples_are_under_the_row() -> None:
    """R29: explain() stands with the row it chose."""
    text = Page(render_html(sample_result())).section("decode-read")
    assert "rejected flashinfer_paged_decode: module flashinfer is not installed" in text
    row = outcome("b.C.t", "1", value=3480.0, baseline=3500.0, band=(3400.0, 3600.0), samples=(3480.0, 3481.5))
    text = page_of(row).section("decode-read")
    assert "Base 3,500 GB/s. Passes between 3,400 GB/s and 3,600 GB/s." in text
    assert "3,480.0, 3,481.5 GB/s" in text


def test_foreign_results_have_values_only() -> None:
    """Rows without records keep value, change and verdict; no column is left empty for what nobody recorded."""
    page = page_of(outcome("gpu.Acoustic.track_gflopss", "so8", unit="gflopss", section="other", record=None), mode="history")
    text = page.section("other")
    assert "3,480 gflopss" in text
    assert "KernelSpec" not in text
    assert "Latency" not in text


# Text stays text


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


# Files


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
    ("changes", "left_of_band"),
    [
        ({"value": 90.0, "baseline": 100.0, "band": (95.0, 105.0)}, True),
        ({"value": 110.0, "baseline": 100.0, "band": (95.0, 105.0)}, False),
        ({"value": 110.0, "baseline": 100.0, "band": (95.0, 105.0), "direction": "lower"}, True),
        ({"value": 90.0, "baseline": 100.0, "band": (95.0, math.inf)}, True),
        ({"effect": 0.03, "band": None}, True),
        ({"effect": -0.03, "band": None}, False),
    ],
)
def test_band_picture_puts_slower_on_the_left(changes: dict[str, Any], left_of_band: bool) -> None:
    found = band_picture(outcome("b.C.t", "1", **changes))
    assert found is not None
    assert found.low < 50 < found.high
    assert (found.point < found.low) == left_of_band
    assert (found.point > found.high) == (not left_of_band)
    assert min(found.low, found.point) >= 0
    assert max(found.high, found.point) <= 100


def test_sections_without_rows_are_left_out() -> None:
    assert [section.id for section in build_sections(result_of(outcome("b.C.t", "1")))] == ["decode-read"]
    assert "There are no rows" in page_of().text


def test_key_without_parameters_is_its_benchmark() -> None:
    row = replace(outcome("b.C.track_alone"), key=RowKey("b.C.track_alone"))
    assert "b.C.track_alone" in page_of(row).section("decode-read")
