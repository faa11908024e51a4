"""The pictures of a report: what is drawn of which row, and that names stay text in them."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from ci import baseline as baselines
from ci import plots
from ci.compare import compare_baseline
from ci.merge import load_kept
from ci.model import GateResult
from ci.report import render_html
from ci.templates.figures import environment_changes, odds
from ci.templates.pictures import roofline, section_pictures
from ci.templates.sections import build_sections

NASTY = ("<img src=x onerror=alert(1)>", "a|b", "</script>", "{{7*7}}", '" onload="alert(1)', "$low")


@pytest.fixture(scope="module")
def accepted(root: Path) -> GateResult:
    baseline = baselines.load((root / "docs" / "data" / "baseline-t1" / "NVIDIA_H200.json").read_bytes())
    return compare_baseline([load_kept(root / "docs" / "data" / "baseline-t1" / "runs" / "boot2-1")], baseline)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_names_are_text_in_a_picture() -> None:
    svg = plots.bands([plots.BandLine(name, 0.01, -0.02, 0.02, (0.0,), "plain") for name in NASTY])
    assert [text for text in texts(svg) if text in NASTY] == list(NASTY)
    assert "<img" not in svg
    traced = plots.traces([plots.Trace(name, [0, 1, 2], [1.0, 2.0, 3.0], []) for name in NASTY], NASTY[4])
    assert [text for text in texts(traced) if text in NASTY] == list(NASTY)
    assert ET.fromstring(traced).get("aria-label") == NASTY[4]
    assert ET.fromstring(traced).get("onload") is None


def test_a_picture_has_the_colour_of_the_page_and_no_script() -> None:
    svg = plots.bands([plots.BandLine("row", -0.1, -0.02, 0.02, (), "bad"), plots.BandLine("other", 0.0, -math.inf, math.inf, (), "good")])
    assert "currentColor" in svg
    assert plots.WORSE in svg
    assert plots.BETTER in svg
    assert "<script" not in svg
    assert 'role="img"' in svg


def test_long_names_stay_apart() -> None:
    names = [f"{'x' * 100}{index}{'y' * 100}" for index in range(3)]
    svg = plots.bands([plots.BandLine(name, 0.0, -0.01, 0.01, (), "plain") for name in names])
    shown = [text for text in texts(svg) if "…" in text]
    assert len(set(shown)) == 3
    assert all(len(text) <= 64 for text in shown)


def test_every_compared_row_is_drawn_with_its_earlier_runs(accepted: GateResult) -> None:
    sections = build_sections(accepted)
    pictures = section_pictures(sections)
    for section in sections:
        compared = [row for table in section.tables for _, row in table.lines if row.effect is not None]
        found = pictures[section.id]
        assert (found.bands is not None) == bool(compared)
        assert found.num_traced == len(compared)
        for row in compared:
            assert len(row.history) == 5
            assert ", ".join(row.key.params)[:20] in str(found.bands)


def test_the_roofline_has_the_device_s_own_roofs(accepted: GateResult) -> None:
    svg = str(roofline(accepted))
    shown = texts(svg)
    assert "measured copy rate" in shown
    assert "Decode read, fp16 and bf16" in shown
    assert "Decode read, 8-bit (dequant)" in shown
    assert "KV write, prefill" not in shown, "a write does no arithmetic"
    assert roofline(replace(accepted, ceilings={})) is None
    assert roofline(replace(accepted, rows=())) is None


def test_a_report_of_200_rows_stays_under_2_mb(accepted: GateResult) -> None:
    rows = [row for row in accepted.rows if row.effect is not None]
    many = [replace(row, key=replace(row.key, params=(f"{row.key.params[0]} copy {index}",))) for index in range(10) for row in rows][:200]
    assert len(many) == 200
    assert len(render_html(replace(accepted, rows=tuple(many))).encode()) < 2_000_000


@pytest.mark.parametrize(
    ("p_value", "text"),
    [
        (None, "unknown"),
        (math.nan, "unknown"),
        (1e-10, "under 1 in a million"),
        (1e-5, "1 in 100,000"),
        (0.04, "1 in 25"),
        (0.7, "as often as not"),
    ],
)
def test_how_sure_is_said_in_words(p_value: float | None, text: str) -> None:
    assert odds(p_value) == text


def test_only_what_differs_from_the_base_is_told(accepted: GateResult) -> None:
    assert environment_changes(accepted.base_environment, accepted.environment) == []
    other = {**accepted.environment, "driver": "570.1", "boot_id": "another"}
    assert environment_changes(accepted.base_environment, other) == [("driver", "580.159.04", "570.1")]
