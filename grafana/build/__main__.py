"""``python -m grafana.build`` writes the dashboards; ``--check`` tells which are out of date."""

from __future__ import annotations

from pathlib import Path

import click

from grafana.build.files import FOLDER, made
from oomwatch.docs import write


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 when a file is out of date.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, help="Where to write; this project's own.")
def main(check: bool, folder: Path) -> None:
    """Make grafana/dashboards/*.json."""
    texts = {folder / name: text for name, text in made().items()}
    write(texts, check=check, module="grafana.build")


if __name__ == "__main__":
    main()
