"""The page as text: what a reader, a screen reader and a browser's policy find in it."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from oomwatch.page import CONTENT_SECURITY_POLICY, not_found, render
from oomwatch.snapshot import Snapshot
from tests import snapshots

VOID = {"meta", "link", "br", "img", "rect", "path", "circle"}
STATES = ["full", "troubled", "alarming", "bare", "healthy", "hostile"]


class Outline(HTMLParser):
    """Checks that what is opened is closed, and collects elements with their attributes and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["script"], ["style"]):
            self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(name: str) -> str:
    snapshot: Snapshot = getattr(snapshots, name)()
    return render(snapshot, snapshots.NOW + 2, "gpu-node-7")


def title(page: str) -> str:
    found = re.search("<title>(.*)</title>", page)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", STATES)
def test_it_is_well_formed_and_says_its_language(name: str) -> None:
    outline = Outline(page_of(name))
    assert outline.of("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", STATES)
def test_tables_have_captions_and_headers(name: str) -> None:
    outline = Outline(page_of(name))
    assert len(outline.of("caption")) == len(outline.of("table"))
    assert all(header["scope"] in ("row", "col") for header in outline.of("th"))
    assert all(bar["aria-label"] for bar in outline.of("svg") if bar.get("role") == "img")


@pytest.mark.parametrize("name", STATES)
def test_nothing_comes_from_elsewhere_and_nothing_breaks_the_policy(name: str) -> None:
    page = page_of(name)
    outline = Outline(page)
    for element, content in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in CONTENT_SECURITY_POLICY
    for tag, attributes in outline.elements:
        assert "style" not in attributes
        assert not any(attribute.startswith("on") for attribute in attributes), tag
        assert not (attributes.get("href") or "").startswith(("http", "//"))
        assert "src" not in attributes


def test_names_from_outside_are_escaped() -> None:
    page = page_of("hostile")
    assert "<img" not in page
    assert "&lt;img src=x onerror=&quot;" in page


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("healthy", "gpu-node-7 · oomwatch"),
        ("troubled", "(13) gpu-node-7 · oomwatch"),
        ("bare", "gpu-node-7 · oomwatch"),
    ],
)
def test_the_title_counts_what_is_wrong(name: str, shown: str) -> None:
    assert title(page_of(name)) == shown


def test_what_is_wrong_comes_before_everything_else() -> None:
    text = Outline(page_of("troubled")).text
    assert text.index("4 critical and 9 warnings") < text.index("GPU 1 has fallen off the bus") < text.index("Held by")
    assert "Well until 2026-09-21 14:03:20 UTC, 10 min 2 s ago" in text


def test_an_incident_shows_its_cause_with_numbers_and_what_it_explains() -> None:
    text = Outline(page_of("alarming")).text
    shown = [
        "2 critical and 1 warning",
        "kv-block-leak",
        "Engine llama-8b, rank 0: 2,000 of 8,000 KV blocks (25%) belong to no request",
        "Since2026-09-21 11:13:20 UTC, 3 h ago",
        "Time leftabout 6 h, between 5 h and 8 h",
        "How surenearly certain (97%)",
        "Killerleak",
        "Incidentllama-8b/1",
        "What to do:Restart the engine at a quiet moment within 5 h.",
        "floor blocks2,000",
        "The same elsewhere:kv-block-leakEngine llama-8b, rank 1: 2,000 of",
        "What it explains:engine-stuckEngine llama-8b: No token for 4 min",
        "GPU 3 has fallen off the bus",
        "Engine qwen-32b, process 4713 on GPU 2: The process has grown by 1.5 GiB",
        "Held by",
    ]
    at = [text.index(words) for words in shown]
    assert at == sorted(at)
    assert text.count("has fallen off the bus") == 3, "in its incident and in its row, not as a problem of its own"
    assert "is frozen" not in text


def test_what_is_not_known_and_what_is_held_back_is_quiet_and_there() -> None:
    page = page_of("alarming")
    text = Outline(page).text
    assert "Verdicts: 7 concluded, 2 not known, 1 held back by a planned silence" in text
    assert "planned silence: weekly batchEngine qwen-32b, rank 0: 120 preemptions" in text
    assert "host-memory-leakwarming upEngine qwen-32b, process 4713, Engine llama-8b, process 4711" in text
    assert text.index("Held by") < text.index("Verdicts: 7 concluded")
    assert '<details id="verdicts">' in page, "closed"


def test_an_engine_that_works_with_an_incident_is_neither_calm_nor_broken() -> None:
    page = page_of("alarming")
    assert '<section class="engine warning">\n<div><h3>qwen-32b</h3><span class="state info">● ok</span>' in page
    assert (
        '<section class="engine critical">\n<div><h3>llama-8b</h3><span class="state critical">✖ frozen</span>' in page
    )


def test_devices_show_their_memory_and_who_holds_it() -> None:
    text = Outline(page_of("full")).text
    for words in (
        "70 GiB of 80 GiB used (87.5%)",
        "600 MiB reserved by the driver",
        "engine llama-8b: 66 GiB",
        "neighbour dcgm: 512 MiB",
        "Slice 7/0 of GPU 2",
        "9 GiB of 20 GiB used (45%)",
        "61 °C, 512 W, busy 93%",
        "Xid 31, 2 times, 1 min 2 s ago",
    ):
        assert words in text


def test_a_lost_device_shows_its_last_memory_with_its_time() -> None:
    text = Outline(page_of("troubled")).text
    assert "Not known: the GPU has fallen off the bus" in text
    assert "Last seen: 70 GiB of 80 GiB used, at 2026-09-21 14:03:20 UTC, 10 min 2 s ago" in text


def test_engines_show_their_ranks() -> None:
    text = Outline(page_of("full")).text
    for words in (
        "75% used 6,000 of 8,000 blocks, room for 128,000 tokens",
        "12 (10 for lack of blocks)",
        "Last progress3 s ago",
        "GPU memory66 GiB on GPU 0",
        "at least 18 GiB in 4 processes",
    ):
        assert words in text


def test_engines_show_what_the_probes_inside_them_tell() -> None:
    text = Outline(page_of("full")).text
    assert "DP0_TP0 on GPU 0: 60 GiB of 65 GiB in use, largest free piece 300 MiB" in text
    assert "rank 0: 800 of living requests, 150 of finished ones, 512 of nobody" in text


def test_last_values_of_an_engine_are_marked_as_the_past() -> None:
    page = page_of("troubled")
    assert "Not the present: last seen <time" in page
    assert page.count('<div class="past">') == 2


def test_an_empty_node_says_so_plainly_and_what_to_do() -> None:
    text = Outline(page_of("bare")).text
    assert "Nothing to watch: no GPU and no vLLM server here" in text
    assert "Install NVIDIA's driver" in text
    assert "Name one that cannot be found under engines:" in text
    assert "critical" not in text


def test_a_daemon_that_has_read_nothing_yet_claims_nothing() -> None:
    text = Outline(render(Snapshot(t=0.0), snapshots.NOW, "n")).text
    assert "Starting" in text
    assert "Nothing has been read yet" in text
    assert "Nothing is wrong" not in text


def test_old_data_is_marked_even_without_scripts() -> None:
    page = render(snapshots.healthy(), snapshots.NOW + 3600, "n")
    assert "<b>✖ NOT THE PRESENT: </b>" in page
    assert title(page).startswith("(1) ")
    assert "<b hidden>" in render(snapshots.healthy(), snapshots.NOW + 5, "n")


def test_unknown_pages_link_the_known_ones() -> None:
    outline = Outline(not_found(["/", "/metrics"]))
    assert [link["href"] for link in outline.of("a")] == ["/", "/metrics"]
    assert not outline.of("script")
