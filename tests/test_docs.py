"""Documents that are made from the code say what the code does, and are up to date."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
from click.testing import CliRunner

from oomwatch.config import Config, load, settings
from oomwatch.detection import Thresholds
from oomwatch.docs import (
    DOCUMENTS,
    EXAMPLE,
    PARTS,
    WEB_EXAMPLE,
    configuration_markdown,
    filled,
    made,
    main,
    outdated,
)
from oomwatch.settings import Section, described, read_yaml
from oomwatch.verdicts import CATALOGUE
from oomwatch.webconfig import WebConfig, load_web_config
from tests.documents import REPOSITORY


@pytest.mark.parametrize("name", [*DOCUMENTS, *PARTS])
def test_the_document_is_up_to_date(name: str) -> None:
    folder = REPOSITORY / "docs"
    assert folder / name not in outdated(made(folder)), "python -m oomwatch.docs writes it anew"


@pytest.mark.parametrize("name", PARTS)
def test_a_document_that_people_write_has_all_its_made_parts(name: str) -> None:
    text = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- made: (\w+) -->", text)) == set(PARTS[name])


def test_only_what_stands_between_the_marks_is_made() -> None:
    text = "by hand\n<!-- made: incidents -->\nold\n<!-- end -->\nby hand too\n"
    made = filled("detection.md", text)
    assert made.startswith("by hand\n<!-- made: incidents -->\n\n| Cause |")
    assert made.endswith("<!-- end -->\nby hand too\n")
    assert "old" not in made
    assert filled("detection.md", made) == made


def test_every_verdict_is_in_the_document_of_the_detection_by_name() -> None:
    text = (REPOSITORY / "docs" / "detection.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `([a-z-]+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted(CATALOGUE)


def _keys(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key; an override's thresholds count as one, since its keys are those of all thresholds."""
    for name, found in described(section).items():
        inner = found.section or found.sections
        if inner and (path, name) != (("detection", "overrides"), "thresholds"):
            yield from _keys(inner, (*path, name))
        else:
            yield (*path, name)


def _used(data: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _used(value, (*path, str(key)))
    elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
        for item in data:
            yield from _used(item, path)
    else:
        yield path


def _same_as_for_alertmanagers() -> Iterator[str]:
    """Keys of a webhook, but for the one that every webhook needs."""
    for path in map(".".join, _keys(Config)):
        if path.startswith("alerting.webhooks.") and path != "alerting.webhooks.url_file":
            yield path


def test_the_example_is_valid_and_shows_nearly_every_key(tmp_path: Path) -> None:
    file = tmp_path / "oomwatch.yaml"
    file.write_text(EXAMPLE, encoding="utf-8")
    config = load(file, {}, {})
    assert [engine.name for engine in config.engines] == ["chat", "embeddings", "batch"]
    used = set(_used(read_yaml(EXAMPLE, "")[0].data))
    assert {path[:3] for path in used} >= {("detection", "overrides", "thresholds")}
    unused = {path for path in set(_keys(Config)) - used if "thresholds" not in path}
    assert {".".join(path) for path in unused} == {
        "engines.headers",  # its keys are header names
        "engines.pids",
        "engines.tls.insecure_skip_verify",
        "discovery.max_page_bytes",
        "discovery.tls.ca_file",
        "discovery.tls.cert_file",
        "discovery.tls.key_file",
        "discovery.tls.insecure_skip_verify",
        "neighbours.pod_uid",
        "history.log_text",
        "alerting.alertmanagers.bearer_token_file",
        "alerting.alertmanagers.headers",
        "alerting.alertmanagers.proxy_url",
        "alerting.alertmanagers.timeout",
        "alerting.alertmanagers.tls.cert_file",
        "alerting.alertmanagers.tls.insecure_skip_verify",
        "alerting.alertmanagers.tls.key_file",
        "alerting.grafana",
        "alerting.keep_firing_for",
        "alerting.labels",  # its keys are labels
        "alerting.resend",
        *_same_as_for_alertmanagers(),
        "history.prometheus.timeout",
        "history.prometheus.basic_auth.username",
        "history.prometheus.basic_auth.password_file",
        "history.prometheus.tls.ca_file",
        "history.prometheus.tls.cert_file",
        "history.prometheus.tls.key_file",
        "history.prometheus.tls.insecure_skip_verify",
        "history.prometheus.headers",
        "history.prometheus.proxy_url",
        "detection.off.gpu",
        "detection.windows.gpu",
    }


def test_the_web_example_is_valid_and_its_password_is_the_one_told(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text(WEB_EXAMPLE, encoding="utf-8")
    config = load_web_config(file)
    assert bcrypt.checkpw(b"correct horse", config.basic_auth_users["prometheus"].encode())


def _rows(text: str) -> Iterator[str]:
    """The keys that have a row, with the heading above their table before them."""
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| `"):
            yield f"{heading}.{line.split('|')[1].strip().strip('`')}"


def test_every_key_and_variable_has_its_row() -> None:
    text = configuration_markdown()
    rows = set(_rows(text))
    assert {".".join(path) for path in _keys(Config)} <= rows
    assert {f"Web configuration file.{'.'.join(path)}" for path in _keys(WebConfig)} <= rows
    for setting in settings():
        assert f"`{setting.variable}`" in text


def test_each_verdict_with_thresholds_has_a_table_of_its_own() -> None:
    text = configuration_markdown()
    for name, found in described(Thresholds).items():
        assert found.section is not None
        assert f"\n##### detection.thresholds.{name}\n\n{found.info.description}\n" in text
        for key in described(found.section):
            assert f"OOMWATCH_DETECTION__THRESHOLDS__{name.upper()}__{key.upper()}`" in text


def test_tables_have_as_many_cells_as_headings() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", configuration_markdown(), re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_check_names_what_is_old_and_writing_makes_it_new(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    stale = CliRunner().invoke(main, ["--check", "--folder", str(folder)])
    assert stale.exit_code == 1
    assert f"{folder / 'configuration.md'} is out of date" in stale.output
    assert not folder.exists()
    assert CliRunner().invoke(main, ["--folder", str(folder)]).exit_code == 0
    fresh = CliRunner().invoke(main, ["--check", "--folder", str(folder)])
    assert (fresh.exit_code, fresh.output) == (0, "")
    (folder / "configuration.md").write_text("edited by hand", encoding="utf-8")
    assert CliRunner().invoke(main, ["--check", "--folder", str(folder)]).exit_code == 1
