"""Every dashboard: its file's name and its text."""

from __future__ import annotations

from pathlib import Path

from grafana.build import daemon, engine, fleet, gpu
from grafana.build.board import Board

FOLDER = Path(__file__).resolve().parents[1] / "dashboards"
BOARDS: tuple[Board, ...] = (fleet.BOARD, engine.BOARD, gpu.BOARD, daemon.BOARD)


def made() -> dict[str, str]:
    """The text of every file, by its name."""
    return {f"{board.uid}.json": board.text() for board in BOARDS}
