"""Draws the pictures of docs/images anew: ``python -m tests.grafana.pictures``. Look at them before you commit them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.documents import REPOSITORY
from tests.grafana import view_setup
from tests.grafana.boards import LAPTOP, board, show
from tests.grafana.seeded import END, TALES, seeded
from tests.grafana.viewer import Viewer, opened

FOLDER = REPOSITORY / "docs" / "images"


@dataclass(frozen=True)
class Picture:
    """A dashboard in a story, cut to some panels, named by their titles."""

    board: str
    story: str
    panels: Sequence[str]


_VERDICTS = ("Verdicts over time", "Evidence")
_POOL = ("KV pool in use, and what no request can own", "Running and waiting requests")
PICTURES: Mapping[str, Picture] = {
    "engine-leak": Picture("engine", "leak", (*_VERDICTS, *_POOL)),
    "engine-fragmentation": Picture(
        "engine", "fragmentation", ("By component and owner", "Headroom", "Beyond its budget")
    ),
    "engine-capacity": Picture("engine", "capacity", (*_POOL, "Preemptions", "Waste of last blocks")),
    "engine-healthy": Picture("engine", "healthy", ("State", "Requests", *_VERDICTS, *_POOL)),
    "gpu-memory-leak": Picture(
        "gpu", "memory-leak", ("Memory by holder", "Processes", "Headroom", "Engines on this GPU")
    ),
}


def draw(viewer: Viewer, folder: Path = FOLDER) -> None:
    for name, picture in PICTURES.items():
        show(viewer, picture.board, TALES[picture.story])
        viewer.picture(folder / f"{name}.png", picture.panels)
    viewer.show(board("fleet"), begin=TALES["leak"].begin, end=END, variables={}, width=LAPTOP)
    viewer.picture(
        folder / "fleet.png", ("Nodes", "Open incidents by killer", "Nodes, worst first", "What is wrong, worst first")
    )


def main() -> int:
    built = view_setup.build()
    with (
        tempfile.TemporaryDirectory() as folder,
        seeded(Path(folder)) as prometheus,
        opened(built, prometheus.url) as viewer,
    ):
        draw(viewer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
