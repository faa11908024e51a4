"""Debian's Chromium without a network, and pages that it is shown."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _missing(what: str) -> None:
    """Skips without a tool, but not where CI has to have it."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing: run `make tools`")
    pytest.skip(f"{what} is missing: run `make tools`")


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    found = next((path for name in _CHROMIUMS if (path := shutil.which(name))), None)
    if found is None:
        _missing("Chromium")
    made = playwright.chromium.launch(executable_path=found, args=_FLAGS)
    yield made
    made.close()


@dataclass
class Visit:
    """A page, and everything that went wrong on it."""

    page: Page
    faults: list[str] = field(default_factory=list)

    def watch(self) -> None:
        page = self.page
        page.on("console", lambda said: self.faults.append(f"console: {said.text}") if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("requestfailed", lambda request: self.faults.append(f"failed: {request.url} {request.failure}"))
        page.on("response", lambda answer: self.faults.append(f"{answer.status}: {answer.url}") if answer.status >= 400 else None)

    def only(self, *origins: str) -> None:
        """Refuses every request to elsewhere, as a machine without a network does."""
        self.page.route(
            "**/*",
            lambda route: (
                route.continue_() if route.request.url.startswith((*origins, "data:", "blob:")) else route.abort("internetdisconnected")
            ),
        )

    def text(self) -> str:
        return self.page.locator("body").inner_text()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    made = Visit(context.new_page())
    made.watch()
    yield made
    context.close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def serve() -> Iterator[object]:
    """Serves folders on this host until the tests end."""
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(folder: Path) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.05), daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="session")
def axe(root: Path) -> str:
    """The source of axe-core."""
    path = root / ".ci" / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        _missing("axe-core")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def screenshots(root: Path) -> Path:
    """Where pictures of the pages are kept; CI uploads them."""
    folder = root / ".ci" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
