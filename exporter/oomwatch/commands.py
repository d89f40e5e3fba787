"""What the commands share: where their configuration comes from, how they read a duration, how they refuse."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from oomwatch.config import Config, load
from oomwatch.errors import InputError
from oomwatch.settings import parse_duration

config_file_option = click.option(
    "--config.file",
    "config_file",
    type=click.Path(path_type=Path),
    envvar="OOMWATCH_CONFIG_FILE",
    metavar="FILE",
    help="Configuration in YAML. Without it every default holds and the engines of this host are found.",
)


class Commands(click.Group):
    """Commands that all refuse in one way what they cannot use."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an InputError is told and ends it with status 2."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            fail(str(error))


def configuration(config_file: Path | None, flags: Mapping[str, object] | None = None, **forced: str) -> Config:
    """The configuration of a command: a file, then the environment, then flags. Raises ConfigError.

    ``forced`` are variables that hold whatever the environment has.
    """
    return load(config_file, {**os.environ, **forced}, flags or {})


def tell(problem: str) -> None:
    """Say on standard error what is wrong: each line after the program's name, but those that are indented."""
    for line in problem.splitlines():
        click.echo(line if line.startswith(" ") else f"oomwatch: {line}", err=True)


def fail(problem: str) -> NoReturn:
    """Say what is wrong and end with status 2."""
    tell(problem)
    sys.exit(2)


def seconds(flag: str, given: str) -> float:
    """The duration that a flag was given."""
    try:
        return parse_duration(given)
    except ValueError:
        fail(f"{flag} {given} is no duration. Write one such as 2h or 30m")
