"""The captured pages of real engines: where they are, and how a test makes one of its own."""

from __future__ import annotations

from pathlib import Path

from oomwatch.observations import EngineFacts
from oomwatch.sources.vllm.meaning import PageReading, read_page
from oomwatch.sources.vllm.pages import read

DATA = Path(__file__).parents[2] / "data"
CAPTURES = DATA / "captures"
PAGES = sorted(CAPTURES.glob("*/*.prom"))


def name_of(page: Path) -> str:
    return f"{page.parent.name}/{page.stem}"


def version_of(page: Path) -> str:
    return page.parent.name.partition("-")[0]


def capture(name: str) -> bytes:
    """A captured page by the beginning of its name, such as ``0.32.0/31``."""
    (page,) = CAPTURES.glob(name + "*.prom")
    return page.read_bytes()


def reading_of(text: str, version: str | None = None, facts: EngineFacts | None = None) -> PageReading:
    """What a page means whose lines a test wrote; indentation is left out."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return read_page(read("".join(line + "\n" for line in lines).encode()), version, facts)
