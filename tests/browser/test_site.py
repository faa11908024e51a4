"""The history site in a browser without a network: nothing fails, a drop is red, names are text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.history import site
from tests.browser.conftest import Visit
from tests.browser.pages import NASTY, write_tree

pytestmark = pytest.mark.slow

RED, GREEN = (
    re.compile(r"rgb\((1[4-9]\d|2\d\d), (\d|[0-7]\d), (\d|[0-7]\d)\)"),
    re.compile(r"rgb\((\d|[0-6]\d), (\d\d|1\d\d), (\d|[0-9]\d)\)"),
)
COMMIT_URL = "https://github.com/o/r/commit/"
STEP = f"{6:08x}" + "d" * 32


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_tree(folder / "results", "Device_0")
    write_tree(folder / "more", "Device_1")
    site.build([folder / "results", folder / "more"], folder / "html", project="toy </script>", commit_url=COMMIT_URL)
    return folder / "html"


@pytest.fixture(scope="session")
def origin(made: Path, serve: Callable[[Path], str]) -> str:
    return serve(made)


def open_page(visit: Visit, origin: str, address: str) -> None:
    visit.only(origin)
    visit.page.goto(f"{origin}/{address}", wait_until="networkidle")


def colour(visit: Visit, selector: str) -> str:
    return str(visit.page.locator(selector).first.evaluate("element => getComputedStyle(element).color"))


@pytest.mark.parametrize(
    "address",
    [
        "index.html",
        "graphs.html#/",
        "graphs.html#/summarylist",
        "graphs.html#/regressions",
        "graphs.html#regressions?grouped=true",
        "graphs.html#bench.Rate.track_falls",
        "graphs.html#bench.Time.track_rises?x-axis=x",
    ],
)
def test_every_page_renders_without_a_network(visit: Visit, origin: str, address: str) -> None:
    open_page(visit, origin, address)
    assert visit.faults == []
    assert len(visit.text()) > 200
    assert visit.page.locator("img[src=x]").count() == 0


def test_the_front_page_tells_each_change_with_its_sign_and_commit(visit: Visit, origin: str) -> None:
    open_page(visit, origin, "index.html")
    rows = visit.page.locator("section[aria-labelledby=changes] tbody tr")
    assert rows.count() == 2 * 4 * len(NASTY)
    for index in range(rows.count()):
        row = rows.nth(index)
        name, told = row.locator("th").inner_text(), row.locator("td").first.inner_text()
        worse = ("track_falls" in name) == ("Rate" in name)
        assert ("slower" in told) == worse, name
        chip = row.locator(".chip")
        assert (RED if worse else GREEN).match(str(chip.evaluate("element => getComputedStyle(element).color"))), (name, worse)
        assert row.locator("td a").get_attribute("href") == COMMIT_URL + STEP
    text = visit.text()
    for name in NASTY:
        assert name in text


def test_the_list_is_red_for_a_drop_and_green_for_a_rise(visit: Visit, origin: str) -> None:
    open_page(visit, origin, "graphs.html#/summarylist")
    rows = visit.page.locator("#summarylist-body tbody tr")
    assert rows.count() == 4 * len(NASTY)
    for index in range(rows.count()):
        row = rows.nth(index)
        name = row.locator("td").first.inner_text()
        worse = ("track_falls" in name) == ("Rate" in name)
        change = row.locator("td.change a")
        assert (RED if worse else GREEN).match(str(change.evaluate("element => getComputedStyle(element).color"))), name
    text = visit.text()
    for name in NASTY:
        assert name in text


@pytest.mark.parametrize("address", ["graphs.html#/regressions", "graphs.html#regressions?grouped=true"])
def test_the_regressions_page_lists_what_got_slower_and_nothing_else(visit: Visit, origin: str, address: str) -> None:
    open_page(visit, origin, address)
    rows = visit.page.locator("#regressions-body table").first.locator("tbody tr")
    assert rows.count() == 2 * 2 * len(NASTY)
    texts = rows.all_inner_texts()
    assert all("Rate.track_falls" in text or "Time.track_rises" in text for text in texts)
    assert all("1.4" in text and "slower" in text for text in texts)
    assert RED.match(colour(visit, "#regressions-body td.regressed"))
    assert all(any(name in text for text in texts) for name in NASTY)


def test_the_grid_says_which_way_is_better(visit: Visit, origin: str) -> None:
    open_page(visit, origin, "graphs.html#/")
    texts = visit.page.locator(".benchmark-text").all_inner_texts()
    assert len(texts) == 4
    assert all(("higher is better" if "Rate" in text else "lower is better") in text for text in texts if "." in text)
    assert sum("GB/s, higher is better" in text for text in texts) == 2
    assert visit.page.locator(".benchmark-plot canvas").count() >= 4


def test_a_link_of_the_front_page_leads_to_the_graph(visit: Visit, origin: str) -> None:
    open_page(visit, origin, "index.html")
    visit.page.locator("section[aria-labelledby=changes] tbody th a").first.click()
    visit.page.wait_for_selector("#main-graph canvas")
    visit.page.wait_for_load_state("networkidle")
    assert visit.faults == []
    assert "is better" in visit.page.evaluate("document.body.textContent") or visit.page.locator("#main-graph canvas").count() > 0


@pytest.mark.parametrize(("name", "colour"), [("Rate.track_falls", "#d00"), ("Rate.track_rises", "#1f8a46"), ("Time.track_rises", "#d00")])
def test_a_marked_commit_of_a_graph_has_the_colour_of_its_change(visit: Visit, origin: str, name: str, colour: str) -> None:
    open_page(visit, origin, f"graphs.html#bench.{name}?machine=Device_0&commits={STEP}")
    visit.page.wait_for_selector("#main-graph canvas")
    told = visit.page.evaluate(f"asv_colour('bench.{name}', [{{data: [[4, 100], [5, 100], [6, {70 if 'falls' in name else 140}]]}}], 6)")
    assert told == colour
    assert visit.page.evaluate(
        """wanted => {
            const canvas = document.querySelector('#main-graph canvas');
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            for (let at = 0; at < pixels.length; at += 4)
                if (Math.abs(pixels[at] - wanted[0]) + Math.abs(pixels[at + 1] - wanted[1]) + Math.abs(pixels[at + 2] - wanted[2]) < 8
                    && pixels[at + 3] > 200) return true;
            return false;
        }""",
        [0xDD, 0, 0] if colour == "#d00" else [0x1F, 0x8A, 0x46],
    ), "the line is drawn in it"
    assert visit.faults == []


def test_the_feed_tells_the_drops(made: Path) -> None:
    text = (made / "regressions.xml").read_text(encoding="utf-8")
    assert text.count("<entry>") == 2 * 2 * len(NASTY)
    assert "\N{MINUS SIGN}30.0 % speed" in text
    assert "&lt;img src=x" in text
    assert "<img" not in text
    assert "graphs.html#" in text


def test_tooltips_with_names_run_nothing(visit: Visit, origin: str) -> None:
    open_page(visit, origin, "graphs.html#/summarylist")
    visit.page.locator("#summarylist-navigation a").first.hover()
    visit.page.wait_for_selector(".tooltip")
    assert "<img src=x" in visit.page.locator(".tooltip").inner_text()
    open_page(visit, origin, "graphs.html#/")
    visit.page.locator(".benchmark-plot").first.hover()
    visit.page.wait_for_selector(".tooltip pre")
    assert visit.page.locator("img[src=x]").count() == 0
    assert visit.faults == []


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_front_page_fits_and_is_accessible(visit: Visit, origin: str, axe: str, screenshots: Path, width: int, scheme: str) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    visit.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    open_page(visit, origin, "index.html")
    visit.page.screenshot(path=screenshots / f"site-{width}-{scheme}.png", full_page=True)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    if (width, scheme) not in ((1280, "light"), (360, "dark")):
        return  # axe takes seconds: each width and each scheme once
    found = visit.page.evaluate(f"{axe}; axe.run(document, {{resultTypes: ['violations']}})")
    assert [(item["id"], item["nodes"][0]["html"]) for item in found["violations"] if item["impact"] in ("serious", "critical")] == []
