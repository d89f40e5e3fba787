"""The page in a real browser: no errors, nothing cut off, and loud as soon as what it shows is not the present."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from oomwatch.server import WebServer
from oomwatch.snapshot import Snapshot
from tests import snapshots
from tests.e2e.tools import find_chromium

WAIT_MS = 60_000
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
STATES = {
    "healthy": snapshots.healthy,
    "everything": snapshots.full,
    "troubled": snapshots.troubled,
    "alarming": snapshots.alarming,
    "empty": snapshots.bare,
}


class Node:
    """A served page whose snapshot and clock a test may change."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.now = snapshot.t + 2
        self.server = WebServer(
            listen=("127.0.0.1:0",),
            snapshot=lambda: self.snapshot,
            render=lambda _: (b"", "text/plain"),
            healthy=str,
            ready=str,
            reload=str,
            release=str,
            clock=lambda: self.now,
        )
        self.server.start()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(find_chromium()), args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures are left for people to look at."""
    folder = tmp_path_factory.getbasetemp() / "page"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[[Snapshot], Node]]:
    with contextlib.ExitStack() as running:

        def start(snapshot: Snapshot) -> Node:
            node = Node(snapshot)
            running.callback(node.server.stop, 1.0)
            return node

        yield start


@contextlib.contextmanager
def opened(browser: Browser, node: Node, width: int = 1280, scheme: str = "light") -> Iterator[tuple[Page, list[str]]]:
    """The page, and a list that fills with what the browser complains about."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
    )
    try:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(node.server.urls[0])
        yield page, complaints
    finally:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("state", STATES)
def test_the_page_fits_and_breaks_no_rule(
    browser: Browser,
    serve: Callable[[Snapshot], Node],
    screenshots: Path,
    state: str,
    width: int,
    scheme: str,
) -> None:
    node = serve(STATES[state]())
    with opened(browser, node, width, scheme) as (page, complaints):
        page.screenshot(path=screenshots / f"{state}-{width}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing has to be scrolled sideways"
        expect(page.locator("#banner")).to_be_hidden()
        assert not complaints


def test_the_page_follows_the_node_without_losing_the_readers_place(
    browser: Browser, serve: Callable[[Snapshot], Node]
) -> None:
    node = serve(snapshots.healthy())
    with opened(browser, node) as (page, complaints):
        expect(page).to_have_title(re.compile(r"^[^(].*oomwatch$"))
        expect(page.locator(".verdict")).to_contain_text("Nothing is wrong")
        page.locator("#sources summary").click()
        page.locator("#to-status").focus()
        page.mouse.wheel(0, 200)
        node.snapshot = snapshots.troubled()
        expect(page.locator(".verdict")).to_contain_text("4 critical", timeout=WAIT_MS)
        expect(page).to_have_title(re.compile(r"^\(13\) "))
        expect(page.locator("#sources")).to_have_attribute("open", "")
        expect(page.locator("#to-status")).to_be_focused()
        assert page.evaluate("window.scrollY") > 0
        assert not complaints


def test_a_dead_daemon_never_leaves_a_calm_picture(
    browser: Browser, serve: Callable[[Snapshot], Node], screenshots: Path
) -> None:
    node = serve(snapshots.healthy())
    with opened(browser, node) as (page, _):
        expect(page.locator("#banner")).to_be_hidden()
        node.server.stop()
        expect(page.locator("#banner")).to_be_visible(timeout=WAIT_MS)
        expect(page.locator("#banner")).to_contain_text("oomwatch does not answer")
        expect(page).to_have_title(re.compile(r"^✖ no answer"))
        assert float(page.locator("#main").evaluate("element => getComputedStyle(element).opacity")) < 0.5
        page.screenshot(path=screenshots / "dead.png")


def test_the_page_recovers_with_the_daemon(browser: Browser, serve: Callable[[Snapshot], Node]) -> None:
    node = serve(snapshots.healthy())
    with opened(browser, node) as (page, _):
        page.route("**/*", lambda route: route.abort())
        expect(page.locator("#banner")).to_be_visible(timeout=WAIT_MS)
        page.unroute("**/*")
        expect(page.locator("#banner")).to_be_hidden(timeout=WAIT_MS)
        expect(page.locator(".verdict")).to_be_visible()


def test_data_that_grows_old_gets_loud_before_the_next_answer(
    browser: Browser, serve: Callable[[Snapshot], Node]
) -> None:
    node = serve(snapshots.healthy())
    node.now = node.snapshot.t + 58.5
    with opened(browser, node) as (page, _):
        expect(page.locator("#age b")).to_be_visible(timeout=WAIT_MS)
        expect(page.locator("#age")).to_contain_text("NOT THE PRESENT")
        expect(page.locator("body")).to_have_class("old")


def test_a_daemon_that_no_longer_reads_says_so_itself(browser: Browser, serve: Callable[[Snapshot], Node]) -> None:
    node = serve(snapshots.healthy())
    node.now = node.snapshot.t + 3600
    with opened(browser, node) as (page, _):
        expect(page.locator(".problems li.critical")).to_contain_text("oomwatch has stopped reading")
        expect(page.locator("#age b")).to_be_visible()


def test_text_that_is_being_copied_stays(browser: Browser, serve: Callable[[Snapshot], Node]) -> None:
    node = serve(snapshots.healthy())
    with opened(browser, node) as (page, _):
        page.locator(".engine h3").first.select_text()
        node.snapshot = snapshots.troubled()
        with page.expect_response("**/"):
            pass
        expect(page.locator(".verdict")).to_contain_text("Nothing is wrong")
        page.evaluate("document.getSelection().removeAllRanges()")
        expect(page.locator(".verdict")).to_contain_text("4 critical", timeout=WAIT_MS)


def test_without_scripts_the_page_still_renews_itself(browser: Browser, serve: Callable[[Snapshot], Node]) -> None:
    node = serve(snapshots.healthy())
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(node.server.urls[0])
        expect(page.locator(".verdict")).to_contain_text("Nothing is wrong")
        assert 'http-equiv="refresh" content="15"' in page.content()
    finally:
        context.close()


def test_names_from_outside_are_text(browser: Browser, serve: Callable[[Snapshot], Node]) -> None:
    node = serve(snapshots.hostile())
    with opened(browser, node) as (page, complaints):
        expect(page.locator(".engine h3")).to_have_text('<img src=x onerror="window.owned=1">')
        assert page.evaluate("window.owned") is None
        assert page.locator("main img").count() == 0
        assert not complaints
