"""``oomwatch diagnose``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import click

from oomwatch import logs
from oomwatch.commands import config_file_option, configuration, fail, seconds, tell
from oomwatch.config import Config
from oomwatch.diagnose import report
from oomwatch.diagnose.postmortem import NothingToRead, PostMortem, of_recording, of_stream
from oomwatch.errors import InputError
from oomwatch.record import parts, tap
from oomwatch.recording import Recording


@click.command("diagnose")
@click.argument("files", metavar="[LOG]...", nargs=-1)
@click.option("--last", metavar="DURATION", help="In place of logs: what the daemon here observed, such as 2h.")
@config_file_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(files: tuple[str, ...], last: str | None, config_file: Path | None, form: str) -> None:
    """Say what happened to an engine's memory: what was promised, what was there, what was asked for, which killer
    it was and how sure that is, and what to change.

    LOG is an engine's log, plain or gzip, also as Docker writes it; - reads standard input. A recording of oomwatch
    record does too. Each is one engine. It needs no GPU, no daemon and no network. No text of a log is printed, only
    its numbers.

    \b
    Exit status: 0 nothing is wrong with memory
                 1 something is, or an engine ended and its log does not say why
                 2 a source could not be read, or says nothing of memory; the others are printed
    """
    if bool(files) == (last is not None):
        fail("give either logs, - for standard input, or --last 2h for what the daemon observed")
    logs.configure("error", "console")
    config = configuration(config_file)
    found: list[PostMortem] = []
    problems: list[str] = []
    for source in files or (None,):
        got = _looked_at(source, last or "", config)
        if isinstance(got, str):
            problems.append(got)
        else:
            found += got
    if found:
        click.echo(json.dumps(report.plain(found), indent=2) if form == "json" else report.text(found))
    for problem in problems:
        tell(problem)
    sys.exit(2 if problems else 1 if any(one.found for one in found) else 0)


def _looked_at(source: str | None, last: str, config: Config) -> list[PostMortem] | str:
    """Post-mortems from a file, or from what the daemon observed; a text where that cannot be."""
    try:
        return _of_daemon(last, config) if source is None else _of_file(source, config)
    except InputError as error:
        return str(error)


def _of_file(source: str, config: Config) -> list[PostMortem]:
    if source == "-":
        return of_stream("standard input", sys.stdin.buffer, time.time(), config)
    try:
        with Path(source).open("rb") as stream:
            stream.peek(1)
            return of_stream(source, stream, os.fstat(stream.fileno()).st_mtime, config)
    except OSError as error:
        raise NothingToRead(f"{source}: cannot be read: {(error.strerror or str(error)).lower()}") from None


def _of_daemon(last: str, config: Config) -> list[PostMortem]:
    source, first = tap(config, seconds("--last", last))
    with tempfile.TemporaryFile() as recording:
        for part in parts(source, first, 0.0):
            recording.write(part.lines)
        recording.seek(0)
        return of_recording(Recording(recording, f"the last {last}"), config)
