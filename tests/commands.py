"""Runs a command that may take long, with all that it starts. Needs the standard library alone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandError(RuntimeError):
    """The command failed; the message has its exit status and the end of what it said."""


def run_until(
    deadline: float,
    command: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs to the end and returns the output, or to the deadline, when the command and its children are killed.

    `deadline` is by `time.monotonic`. Raises CommandError, or TimeoutError where it was not finished in time.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"Not finished in time, stopped: {' '.join(command)}.") from None
            raise
    if process.returncode != 0:
        last_lines = "\n".join(output.splitlines()[-15:])
        raise CommandError(f"Exit status {process.returncode} of: {' '.join(command)}\n{last_lines}")
    return output
