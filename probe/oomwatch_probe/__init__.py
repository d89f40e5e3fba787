"""A general plugin for vLLM: each process of an engine tells oomwatch's daemon, by a small file, about its memory.

vLLM calls ``register`` in each of its processes, without a flag. ``OOMWATCH_PROBE=0`` turns it off;
``OOMWATCH_PROBE_DIR`` names the folder of the files (default ``/run/oomwatch``).
"""

from __future__ import annotations

import logging
import os

__version__ = "0.1.0"

logger = logging.getLogger(__name__)


def register() -> None:
    """Prepares this process and those that it forks; may be called again. Never raises."""
    if os.environ.get("OOMWATCH_PROBE") == "0":
        return
    try:
        from oomwatch_probe import probe  # noqa: PLC0415 - turned off, nothing is read

        probe.prepare()
    except Exception as error:
        logger.warning("oomwatch-probe is off in process %d: %s: %s", os.getpid(), type(error).__name__, error)
