"""``python -m alerts.build`` writes the rule files and the manifest; ``--check`` tells which are out of date."""

from __future__ import annotations

from pathlib import Path

import click

from alerts.build.files import FOLDER, made
from alerts.build.links import Links
from oomwatch.docs import write


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 when a file is out of date.")
@click.option("--runbooks", default=Links.runbooks, show_default=True, help="Where the runbooks are served.")
@click.option("--grafana", default=Links.grafana, show_default=True, help="Where Grafana answers.")
@click.option("--page", default=Links.page, show_default=True, help="Template of the address of the daemon's page.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, help="Where to write; this project's root.")
def main(check: bool, runbooks: str, grafana: str, page: str, folder: Path) -> None:
    """Make alerts/rules/*.yml, alerts/alertmanager.yml and deploy/kubernetes/prometheusrule.yaml."""
    texts = {folder / name: text for name, text in made(Links(runbooks, grafana, page)).items()}
    write(texts, check=check, module="alerts.build")


if __name__ == "__main__":
    main()
