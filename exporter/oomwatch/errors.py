"""What every command tells in one way."""

from __future__ import annotations


class InputError(Exception):
    """Something that a command was given cannot be used: a configuration, a file, an address, a server.

    The text says what is wrong, where, and what to do: a line for each problem, and indented ones that go on with it.
    """
