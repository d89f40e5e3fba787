"""Builds the page that draws dashboards with Grafana's own panel components: ``python -m tests.grafana.view_setup``.

Its sources are in `view/`. What comes out lies in .cache, named by a hash of them, so that it is built once; what is
only needed to build it (npm's packages, half a gigabyte) does not stay. Needs Node.js 20.19 or newer with npm.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.commands import CommandError, run_until
from tests.documents import REPOSITORY

SOURCES = Path(__file__).with_name("view")
CACHE = REPOSITORY / ".cache"
TIMEOUT_S = 900.0
NODE = (20, 19)
_NPM = ("npm", "install", "--ignore-scripts", "--legacy-peer-deps", "--no-audit", "--no-fund", "--loglevel=error")


class ViewSetupError(RuntimeError):
    """The page cannot be built here; the message says why and what to do."""


def built(sources: Path = SOURCES, cache: Path = CACHE) -> Path | None:
    """The folder of the finished page of these sources, None when it was not built yet."""
    path = _place(sources, cache)
    return path if path.is_dir() else None


def build(sources: Path = SOURCES, cache: Path = CACHE, timeout_s: float = TIMEOUT_S) -> Path:
    """The folder of the finished page; builds it first when it is not there, which takes a minute or two.

    Raises ViewSetupError when that cannot be done here, CommandError when npm fails, and TimeoutError after
    ``timeout_s`` seconds.
    """
    existing = built(sources, cache)
    if existing is not None:
        return existing
    _check_node()
    deadline = time.monotonic() + timeout_s
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=cache) as folder:
        work = Path(folder) / "view"
        shutil.copytree(sources, work, ignore=shutil.ignore_patterns("node_modules", "dist"))
        run_until(deadline, _NPM, folder=work)
        run_until(deadline, ("npm", "run", "--silent", "build", "--", "--logLevel=error"), folder=work)
        place = _place(sources, cache)
        # Whoever built the same at the same time may have been first.
        with contextlib.suppress(OSError):
            (work / "dist").rename(place)
    if not place.is_dir():
        raise ViewSetupError(f"{place} could not be written.")
    for old in cache.glob("grafana-view-*"):
        if old != place:
            shutil.rmtree(old, ignore_errors=True)
    return place


def _place(sources: Path, cache: Path) -> Path:
    sha = hashlib.sha256()
    for file in _files(sources):
        body = file.read_bytes()
        sha.update(f"{file.relative_to(sources)} {len(body)}\n".encode() + body)
    return cache / f"grafana-view-{sha.hexdigest()[:16]}"


def _files(sources: Path) -> Iterator[Path]:
    for path in sorted(sources.rglob("*")):
        if path.is_file() and not {"node_modules", "dist"} & set(path.relative_to(sources).parts):
            yield path


def _check_node() -> None:
    wanted = ".".join(map(str, NODE))
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise ViewSetupError(f"{program} is not on PATH: install Node.js {wanted} or newer with npm.")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if found < NODE:
        raise ViewSetupError(f"Node.js is {version.strip()}, and building the page needs {wanted} or newer.")


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m tests.grafana.view_setup",
        description="Build the page that draws dashboards in the tests, in .cache. Does nothing when it is there.",
    ).parse_args()
    started = time.monotonic()
    try:
        path = build()
    except (OSError, CommandError, ViewSetupError) as error:
        print(f"dashboard view: {error}", file=sys.stderr)
        return 1
    print(f"dashboard view ready in {path} ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
