"""Reads the project's own files: what git tracks, and the commands that the documents show."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

_FENCED = re.compile(r"^```(?:sh|bash|console|shell)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`((?:oomwatch|make) [^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SHELL_OPERATORS = frozenset("|&;<>()")


@dataclass(frozen=True)
class Command:
    """A command line that a document shows: `program` and its `arguments`, pipes and redirections cut off."""

    document: str
    program: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {shlex.join((self.program, *self.arguments))}"


@functools.cache
def tracked_files() -> tuple[Path, ...]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=30
    ).stdout
    paths = (REPOSITORY / name for name in listing.split("\0") if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Name and text of every tracked file that is text."""
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content:
            yield name_of(path), content.decode(errors="replace")


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def markdown_files() -> tuple[Path, ...]:
    return tuple(path for path in tracked_files() if path.suffix == ".md")


def shown_commands(document: Path, program: str) -> Iterator[Command]:
    """The commands of `program` in the fenced blocks and in the running text of a Markdown document."""
    text = document.read_text(encoding="utf-8")
    lines = [line for block in _FENCED.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += _INLINE.findall(_FENCED.sub("", text))
    for line in lines:
        words = _first_command(line.removeprefix("$ "))
        if words and Path(words[0]).name == program:
            yield Command(name_of(document), program, tuple(words[1:]))


def local_links(document: Path) -> Iterator[str]:
    """The targets of links to other files of the project, without the anchor."""
    for target in _LINK.findall(document.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            yield target.partition("#")[0]


def _first_command(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    words: list[str] = []
    for word in lexer:
        if set(word) <= _SHELL_OPERATORS:
            break
        words.append(word)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words
