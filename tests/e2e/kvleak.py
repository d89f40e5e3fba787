"""An engine that loses KV cache: the plugin that makes it so, and how many blocks it has lost."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.engine import VllmEngine

PLUGIN = Path(__file__).parent / "plugins" / "kvleak.py"
ENVIRONMENT = {"KVLEAK_EVERY": "20"}  # of the blocks that are freed


def lost_blocks(engine: VllmEngine) -> int:
    """The plugin's own count."""
    counts = re.findall(r"kvleak: (\d+) blocks lost", engine.log())
    return int(counts[-1]) if counts else 0
