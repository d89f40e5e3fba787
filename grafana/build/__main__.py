"""``python -m grafana.build`` writes the dashboards; ``--check`` tells which are out of date."""

from __future__ import annotations

from pathlib import Path

import click

from grafana.build.files import FOLDER, made


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 when a file is out of date.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, help="Where to write; this project's own.")
def main(check: bool, folder: Path) -> None:
    """Make grafana/dashboards/*.json."""
    old = [
        (folder / name, text)
        for name, text in made().items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text
    ]
    for path, text in old:
        if check:
            click.echo(f"{path} is out of date: python -m grafana.build writes it anew.", err=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            click.echo(f"{path} written.")
    if check and old:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
