"""What the commands share: how they end where they cannot go on, and how they read a duration."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from oomwatch.settings import parse_duration


def fail(problem: str) -> NoReturn:
    """Say what is wrong and end with status 2."""
    click.echo(f"oomwatch: {problem}", err=True)
    sys.exit(2)


def seconds(flag: str, given: str) -> float:
    """The duration that a flag was given."""
    try:
        return parse_duration(given)
    except ValueError:
        fail(f"{flag} {given} is no duration. Write one such as 2h or 30m")
