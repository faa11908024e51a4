"""Each row is in the right section of the report, which says of it what its class allows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from report_pages import Page, outcome, page_of, sample_result

from ci.model import RowKey, RowOutcome, RowVerdict, RunVerdict
from ci.report import render_html
from ci.templates.sections import SECTIONS


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


@pytest.mark.parametrize(
    ("section", "bottleneck", "said", "never"),
    [
        ("decode-read", "read-bandwidth", "says nothing of what bounds these rows on a GPU", "Bound by"),
        ("decode-read-fp8", "dequant", "another limit, not a loss", "dequant-bound"),
        ("kv-write-prefill", "write-bandwidth", "says nothing of what bounds these rows on a GPU", "Bound by"),
        ("kv-write-prefill-fp8", "write-bandwidth", "says nothing of what bounds these rows on a GPU", "bound like fp16"),
        ("kv-write-decode", "launch", "fewer launches, not fewer bytes", "starting a kernel"),
    ],
)
def test_cpu_run_claims_nothing_of_a_gpu(section: str, bottleneck: str, said: str, never: str) -> None:
    """R56, R102, R107: it is told once, on top, that nothing here is a GPU's figure; no class says what bounds it, or is withdrawn."""
    row = outcome("b.C.t", "1", "contiguous", section=section, record_bottleneck=bottleneck, record_instrument="wall-clock")
    page = page_of(row, replace(row, key=RowKey("b.C.t", ("1", "fragmented"))))
    assert "2 rows of triton_paged_decode (2): wall clock on a CPU: not a GPU figure" in page.section("sure")
    assert page.text.count("wall clock on a CPU: not a GPU figure") == 1
    text = page.section(section)
    assert said in text
    assert never not in text
    assert "Paging" not in text


def test_wall_clock_rows_beside_a_device_s_are_labelled_one_by_one() -> None:
    host = outcome("b.Host.t", "1", section="allocator", unit="calls/s", record_instrument="wall-clock", record_bottleneck="host")
    page = page_of(host, outcome("b.C.t", "1"))
    assert "wall clock on a CPU: not a GPU figure" in page.section("allocator")
    assert "wall clock" not in page.section("decode-read")
    assert "1 of them by the wall clock on a CPU: not a GPU figure" in page.section("sure")


@pytest.mark.parametrize(("mde80", "resolved"), [(0.049, True), (0.051, False), (1.1, False)])
def test_what_paging_costs_is_said_of_rows_that_can_tell(mde80: float, resolved: bool) -> None:
    """R101, where the two rows' difference is resolved: a row that could hide 5 % clears nothing."""
    contiguous = outcome("b.C.t", "8x8192", "contiguous", record_latency_us=100.0)
    text = page_of(contiguous, outcome("b.C.t", "8x8192", "fragmented", record_latency_us=98.0, mde80=mde80)).section("decode-read")
    assert ("clears paging of a decode regression" in text) == resolved
    assert ("too noisy to say" in text) != resolved


def test_a_share_is_that_of_the_figures_shown() -> None:
    """The record's own share is of one process, which measured another value and another rate."""
    row = outcome(
        "b.C.t", "1", value=1000.0, record_value=1200.0, record_gb_per_s=1200.0, record_peak_fraction=0.6, record_copy_fraction=0.9
    )
    text = page_of(row, ceilings={"copy_gb_per_s": 2000.0}).section("decode-read")
    assert "1,000 GB/s" in text
    assert "50.0 %" in text, "1,000 of 2,000"
    assert "here at 50.0 % of the copy rate" in text
    assert "90.0 %" not in text
    assert "60.0 %" not in text


def test_explain_and_samples_are_under_the_row() -> None:
    """R29: explain() stands with the row it chose."""
    text = Page(render_html(sample_result())).section("decode-read")
    assert "rejected flashinfer_paged_decode: module flashinfer is not installed" in text
    row = outcome("b.C.t", "1", value=3480.0, baseline=3500.0, band=(3400.0, 3600.0), samples=(3480.0, 3481.5))
    text = page_of(row).section("decode-read")
    assert "Was 3,500 GB/s. Passes between 3,400 GB/s and 3,600 GB/s." in text
    assert "3,480.0, 3,481.5 GB/s" in text


def test_foreign_results_have_values_only() -> None:
    """Rows without records keep value, change and verdict; no column is left empty for what nobody recorded."""
    page = page_of(outcome("gpu.Acoustic.track_gflopss", "so8", unit="gflopss", section="other", record=None), mode="history")
    text = page.section("other")
    assert "3,480 gflopss" in text
    assert "KernelSpec" not in text
    assert "Latency" not in text
