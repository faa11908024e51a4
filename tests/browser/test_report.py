"""The report in a browser without a network: nothing fails, names are text, it fits a phone, paper and a keyboard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ci import baseline as baselines
from ci.compare import compare_baseline
from ci.merge import load_kept
from ci.model import GateResult, RowVerdict, RunVerdict
from ci.report import write_report
from ci.templates.sections import SECTIONS
from tests.browser.conftest import Visit
from tests.browser.pages import NASTY, nasty_result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def accepted(root: Path) -> GateResult:
    """A run on an H200 against the baseline of this device."""
    baseline = baselines.load((root / "docs" / "data" / "baseline-t1" / "NVIDIA_H200.json").read_bytes())
    return compare_baseline(
        [load_kept(root / "docs" / "data" / "baseline-t1" / "runs" / name) for name in ("boot1-1", "boot3-1")], baseline
    )


@pytest.fixture(scope="session")
def regressed(accepted: GateResult) -> GateResult:
    """The same with a decode row 12 % slower and a write row faster, as the gate would tell it."""
    rows = []
    for row in accepted.rows:
        change = {"B=64 S=8192 float16 combined fragmented": 0.12, "T=16384 float16": -0.1}
        effect = next((size for text, size in change.items() if any(text in param for param in row.key.params)), None)
        if effect is None or row.value is None:
            rows.append(row)
            continue
        verdict = RowVerdict.REGRESSED if effect > 0 else RowVerdict.IMPROVED
        rows.append(
            replace(row, verdict=verdict, effect=effect, value=row.value / (1 + effect), p_value=1e-5, reason=f"{effect:+.0%} latency")
        )
    return replace(accepted, rows=tuple(rows), verdict=RunVerdict.REGRESSION, exit_code=1, reason="1 row regressed")


def show(visit: Visit, result: GateResult, folder: Path) -> None:
    write_report(result, folder)
    visit.only("file://")
    visit.page.goto((folder / "index.html").as_uri())


def colour(visit: Visit, text: str) -> tuple[int, ...]:
    found = str(visit.page.locator(f".chip:has-text('{text}')").first.evaluate("element => getComputedStyle(element).color"))
    return tuple(int(part) for part in found.removeprefix("rgb(").removesuffix(")").split(","))


def test_it_renders_without_script_and_network(visit: Visit, regressed: GateResult, tmp_path: Path) -> None:
    show(visit, regressed, tmp_path)
    assert visit.faults == []
    assert visit.page.locator("script").count() == 0
    assert visit.page.locator("h1").inner_text().startswith("REGRESSION")
    assert visit.page.locator("figure svg").count() >= 7, "a picture of bands for each section, and the roofline"
    assert visit.page.get_by_role("heading", name="Roofline").count() == 1


def test_a_drop_is_red_and_a_rise_green(visit: Visit, regressed: GateResult, tmp_path: Path) -> None:
    show(visit, regressed, tmp_path)
    red, green = colour(visit, "REGRESSED"), colour(visit, "IMPROVED")
    assert red[0] > 2 * red[1]
    assert green[1] > 2 * green[0]


def test_the_first_screen_says_which_row_by_how_much_how_sure_and_what_to_do(visit: Visit, regressed: GateResult, tmp_path: Path) -> None:
    show(visit, regressed, tmp_path)
    assert "What to do next" in visit.text()
    row = visit.page.locator("section[aria-labelledby=attention] tbody tr").first
    text = row.inner_text()
    assert "decode B=64 S=8192 float16 combined fragmented cold" in text
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    assert "+12.0 %" in text
    assert "1 in 100,000" in text
    assert "was 3," in text
    assert row.bounding_box()["y"] < 900  # type: ignore[index]


def test_names_are_text(visit: Visit, accepted: GateResult, tmp_path: Path) -> None:
    show(visit, nasty_result(accepted), tmp_path)
    assert visit.faults == []
    assert visit.page.locator("img").count() == 0
    shown = visit.page.evaluate("document.body.textContent")
    attributes = visit.page.evaluate("[...document.querySelectorAll('[title]')].map(element => element.title).join(' ')")
    for name in NASTY:
        assert name in shown
    assert NASTY[0] in attributes
    assert visit.page.title().count("</script>") == 2


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_is_accessible(
    visit: Visit, regressed: GateResult, tmp_path: Path, axe: str, screenshots: Path, width: int, scheme: str
) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    visit.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    show(visit, regressed, tmp_path)
    visit.page.screenshot(path=screenshots / f"report-{width}-{scheme}.png", full_page=True)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    outside = visit.page.evaluate(
        "width => [...document.querySelectorAll('.cards th, .cards td, h1, .reason, .next')].filter(element => element.checkVisibility()"
        " && element.getBoundingClientRect().right > width + 1).map(element => element.textContent)",
        width,
    )
    assert outside == [], "a figure lies off the screen"
    broken = visit.page.evaluate(
        "[...document.querySelectorAll('.chip')].filter(element => element.checkVisibility() && element.getClientRects().length > 1).length"
    )
    assert broken == 0, "a verdict breaks over lines"
    if (width, scheme) not in ((1280, "light"), (360, "dark")):
        return  # axe takes seconds: each width and each scheme once
    found = visit.page.evaluate(f"{axe}; axe.run(document, {{resultTypes: ['violations']}})")
    assert [(item["id"], item["nodes"][0]["html"]) for item in found["violations"] if item["impact"] in ("serious", "critical")] == []


def test_everything_is_reached_by_keyboard(visit: Visit, regressed: GateResult, tmp_path: Path) -> None:
    show(visit, regressed, tmp_path)
    reached = set()
    for _ in range(400):
        visit.page.keyboard.press("Tab")
        tag = visit.page.evaluate("document.activeElement.tagName")
        if tag == "BODY":
            break
        reached.add(visit.page.evaluate("document.activeElement.outerHTML.slice(0, 200)"))
    wanted = visit.page.evaluate(
        "[...document.querySelectorAll('a[href], summary, [tabindex]')]"
        ".filter(element => element.checkVisibility()).map(element => element.outerHTML.slice(0, 200))"
    )
    assert set(wanted) <= reached
    visit.page.locator("tr.row + tr.more summary").first.focus()
    visit.page.keyboard.press("Enter")
    assert visit.page.locator("tr.more details[open]").count() == 1


def test_it_prints_without_losing_a_section(visit: Visit, regressed: GateResult, tmp_path: Path) -> None:
    show(visit, regressed, tmp_path)
    pdf = visit.page.pdf(landscape=True, format="A4")
    assert len(pdf) > 50_000
    visit.page.emulate_media(media="print")
    text = visit.text()
    for name in {row.section for row in regressed.rows if row.verdict is not RowVerdict.SKIPPED}:
        assert SECTIONS[name] in text
