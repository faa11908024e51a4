"""What the tests of the report share: a strict reader of its page, results to show, and the gold files.

``RAPID_LLM_UPDATE_GOLD=1 pytest tests/ci/test_report.py tests/ci/test_terminal.py`` writes the gold files anew; read
the difference before it is committed.
"""

from __future__ import annotations

import os
import re
import runpy
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from ci.model import GateResult, RowOutcome
from ci.report import render_html

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
