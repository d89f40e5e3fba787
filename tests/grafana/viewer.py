"""Dashboards drawn by Grafana's own panel components in a headless Chromium, from a real Prometheus.

There is no Grafana server here: what its panels make of options that they do not hand on to those components, its
migration of old dashboards and its provisioning are not seen. `view/` is the page; `view_setup` builds it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Request, sync_playwright
from playwright.sync_api import TimeoutError as NotInTime

from tests.e2e.tools import find_chromium

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--hide-scrollbars",
    # The same pixels each time.
    "--num-raster-threads=1",
    "--disable-partial-raster",
    "--disable-skia-runtime-opts",
)
DRAWN_WITHIN_MS = 90_000


@dataclass(frozen=True)
class Panel:
    """What became of a panel: the data it got, and what it shows as ``text``."""

    title: str
    state: str
    error: str
    points: int
    badge: bool
    text: str
    drawn: bool


class Viewer:
    """One page in which dashboard after dashboard is drawn. Times are unix times."""

    def __init__(self, page: Page, prometheus: str) -> None:
        self._page = page
        self._prometheus = prometheus
        self._height = 0
        self.complaints: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text} {message.location}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("requestfailed", self._failed)

    def show(
        self,
        dashboard: Mapping[str, Any],
        *,
        begin: float,
        end: float,
        variables: Mapping[str, str | Sequence[str]],
        scrape_interval: float = 15.0,
        width: int = 1280,
        theme: str = "dark",
    ) -> list[Panel]:
        """Draws the dashboard and returns its panels as soon as all have their data and stand still."""
        self._height = _height(dashboard)
        self._page.set_viewport_size({"width": width, "height": self._height})
        self._page.clock.set_fixed_time(end)
        options = {
            "from": begin,
            "to": end,
            "variables": variables,
            "scrapeInterval": scrape_interval,
            "theme": theme,
            "prometheus": self._prometheus,
        }
        self._page.evaluate("([dashboard, options]) => show(dashboard, options)", [dashboard, options])
        return self._panels()

    def resize(self, width: int) -> list[Panel]:
        """The same at another width."""
        self._page.set_viewport_size({"width": width, "height": self._height})
        return self._panels()

    def variable_errors(self) -> Mapping[str, str]:
        """What is wrong with variables of the dashboard, by name."""
        found: Mapping[str, str] = self._page.evaluate("variableErrors()")
        return found

    def _failed(self, request: Request) -> None:
        # What a dashboard still asked for when the next one took its place is not missed.
        if request.failure != "net::ERR_ABORTED":
            self.complaints.append(f"failed: {request.url} {request.failure}")

    def overflows(self) -> bool:
        """Whether the page is wider than its window."""
        return bool(self._page.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def picture(self, path: Path, panels: Sequence[str] = ()) -> None:
        """All of the dashboard as PNG, or the rectangle around the panels with these titles."""
        clip = self._page.evaluate("(titles) => rectangle(titles)", list(panels))
        self._page.screenshot(path=path, clip=clip)

    def _panels(self) -> list[Panel]:
        try:
            self._page.wait_for_function("settled()", timeout=DRAWN_WITHIN_MS)
        except NotInTime:
            left = [panel["title"] for panel in self._page.evaluate("panels()") if not panel["drawn"]]
            raise TimeoutError(f"not drawn after {DRAWN_WITHIN_MS / 1000:g} s: {left} {self.complaints}") from None
        return [Panel(**panel) for panel in self._page.evaluate("panels()")]


def _height(dashboard: Mapping[str, Any]) -> int:
    """Pixels for all of it: what is out of sight is not drawn in full."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    return int(rows) * 38 + 160


@contextlib.contextmanager
def opened(built: Path, prometheus: str) -> Iterator[Viewer]:
    """A viewer on the built page, in a Chromium of its own. ``prometheus`` is the URL of the data."""
    with _served(built) as url, _chromium() as browser:
        context = browser.new_context(locale="en-US", timezone_id="UTC", reduced_motion="reduce")
        page = context.new_page()
        viewer = Viewer(page, prometheus)
        page.goto(url)
        page.wait_for_function("window.ready", timeout=DRAWN_WITHIN_MS)
        yield viewer
        context.close()


@contextlib.contextmanager
def _chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(find_chromium()), args=list(FLAGS))
        yield browser
        browser.close()


class _Files(SimpleHTTPRequestHandler):
    def translate_path(self, path: str) -> str:
        file = Path(super().translate_path(path))
        # Some of the icons that a Grafana server has are not in the package of components.
        return str(file if file.exists() or file.suffix != ".svg" else file.with_name("question-circle.svg"))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it so
        """A test's output is no place for an access log."""


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, name="view", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
