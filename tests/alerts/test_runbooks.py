"""Each alert has a runbook that a stranger can act on: complete, and with nothing in it that does not exist."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import promql_parser
import pytest
import yaml

from oomwatch.advice import FLAGS
from oomwatch.config import Config, load
from oomwatch.families import FAMILIES
from oomwatch.sources.vllm.meaning import release
from oomwatch.sources.vllm.names import BY_FIELD, CACHE_CONFIG
from oomwatch.verdicts import CATALOGUE
from tests.documents import REPOSITORY, local_links, name_of

ALERTS = REPOSITORY / "alerts"
RUNBOOKS = ALERTS / "runbooks"
INDEX = RUNBOOKS / "README.md"
DOCUMENTS = (*sorted(RUNBOOKS.glob("*.md")), ALERTS / "README.md", REPOSITORY / "docs" / "operations.md")
PAGES = tuple(path for path in DOCUMENTS if path.parent == RUNBOOKS and path != INDEX)

SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation now", "Fix later", "False alarms we know of"]

_FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_METRIC = re.compile(r"(?<![\w:/.-])oomwatch_\w+(?![\w]*\()")
_OUR_GROUP = re.compile(r"(oomwatch_\w*)\(([\w|]+)\)(\w*)")
_VLLM_METRIC = re.compile(r"vllm:\w+")
_VLLM_GROUP = re.compile(r"\^vllm:\(([\w|]+)\)")
_SETTING_ROW = re.compile(r"^\| `(--[a-z-]+)` \| ([^|]+) \|", re.MULTILINE)
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


@cache
def rules() -> Mapping[str, frozenset[str]]:
    """The severities of every alert in the rule files, by its name."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ALERTS / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    found[rule["alert"]].add(rule["labels"]["severity"])
    return {name: frozenset(severities) for name, severities in found.items()}


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def sections(path: Path) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", text_of(path), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def prose(text: str) -> str:
    return _FENCED.sub("", text)


def blocks(path: Path, *languages: str) -> Iterator[str]:
    return (block for language, block in _FENCED.findall(text_of(path)) if language in languages)


def shell_lines(path: Path) -> Iterator[str]:
    for block in blocks(path, "sh"):
        yield from block.replace("\\\n", " ").splitlines()


def settings() -> dict[str, str]:
    """vLLM's settings that the table of the index explains, with the versions that have each."""
    return dict(_SETTING_ROW.findall(text_of(INDEX)))


pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


class TestWhatThereIs:
    def test_every_alert_has_a_runbook_and_every_runbook_an_alert(self) -> None:
        assert sorted(page.stem for page in PAGES) == sorted(rules())

    def test_every_verdict_that_can_alert_has_a_runbook(self) -> None:
        assert {entry.alert for entry in CATALOGUE.values() if entry.worst != "info"} <= {page.stem for page in PAGES}

    def test_the_index_lists_each_with_its_severities(self) -> None:
        listed = re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| ([a-z, ]+) \|", text_of(INDEX), re.MULTILINE)
        assert {name: frozenset(severities.split(", ")) for name, severities in listed} == dict(rules())

    @pages
    def test_it_has_exactly_these_sections_and_none_is_empty(self, page: Path) -> None:
        assert text_of(page).startswith(f"# {page.stem}\n")
        assert list(sections(page)) == SECTIONS
        assert [name for name, text in sections(page).items() if len(prose(text).split()) < 3] == []

    @pages
    def test_its_head_tells_the_severities_that_the_rules_have(self, page: Path) -> None:
        head = text_of(page).partition("## ")[0]
        assert frozenset(re.findall(r"`(critical|warning)`", head)) == rules()[page.stem]

    @pages
    def test_its_diagnosis_has_a_command_to_copy(self, page: Path) -> None:
        assert "```sh\n" in sections(page)["Diagnosis"]

    @pages
    def test_its_mitigation_is_in_steps_or_says_that_nothing_is_to_be_done(self, page: Path) -> None:
        steps = sections(page)["Mitigation now"]
        assert re.search(r"^1\. ", steps, re.MULTILINE) or steps.strip().startswith("Nothing now.")


class TestPlainRules:
    @pytest.mark.parametrize("name", sorted(name for name in rules() if name.startswith("Vllm")))
    def test_its_meaning_tells_over_how_long_and_from_which_share_on(self, name: str) -> None:
        meaning = sections(RUNBOOKS / f"{name}.md")["Meaning"]
        for rule in plain_rules(name):
            durations = re.findall(r"\[(\d+)m\]", rule["expr"]) or re.findall(r"(\d+)m", rule["for"])
            assert [f"{minutes} min" for minutes in durations if f"{minutes} min" not in meaning] == []
            shares = [
                f"{float(share):.0%}".replace("%", " %") for share in re.findall(r"[<>] (0\.\d+)$", rule["expr"], re.M)
            ]
            assert [share for share in shares if share not in meaning] == []


def plain_rules(name: str) -> list[dict[str, str]]:
    groups = yaml.safe_load(text_of(ALERTS / "rules" / "vllm-plain.yml"))["groups"]
    return [rule for group in groups for rule in group["rules"] if rule.get("alert") == name]


# Settings whose defaults the runbook of a verdict tells in words.
TOLD: Mapping[str, tuple[str, ...]] = {
    "startup-oom": ("climbs_to", "within", "tight_ratio"),
    "concurrency-low": ("ticket_below", "info_below"),
    "budget-overrun": ("ticket_above", "ticket_after"),
    "margin-thin": ("ticket_below", "info_below", "info_below_ratio"),
    "headroom-low": ("window", "ticket_below", "ticket_below_ratio", "page_below", "fall", "falling_for"),
    "kv-exhaustion": (
        *("full_usage", "rate_window", "preemption_window", "preemptions_per_finished"),
        *("after", "rate_down_to", "page_rate_down_to", "page_after", "baseline_minutes"),
    ),
    "preemption-pressure": ("window", "preemptions_per_finished", "after", "usage", "least_finished"),
    "admission-stall": ("after", "deferred_after", "usage"),
    "ranks-unbalanced": ("times_the_median", "after"),
    "engine-stuck": ("after", "slow_after", "first_token_after", "start_grace"),
    "orphan-memory": ("at_least", "lasting", "start_grace", "longest_start"),
    "crash-loop": ("within", "ticket_within"),
    "allocator-fragmentation": ("warm_up", "retry_window", "retry_windows", "least_transient", "shortage_time"),
    "kv-tail-waste": ("share", "after", "least_running"),
    "kv-block-leak": (
        *("ticket_share", "page_share", "page_growing_share", "page_within", "wedge_share"),
        *("connector_ticket_share", "connector_page_share", "hold_time"),
    ),
    "gpu-memory-leak": ("ticket_growth", "ticket_growth_share", "page_within", "sleep_growth"),
    "host-memory-leak": ("ticket_within", "page_within"),
    "metrics-missing": ("after",),
    "source-stale": ("ticket_after", "start_grace", "ended_after"),
    "nvml-stuck": ("ticket_after",),
}


def in_words(default: object) -> set[str]:
    """How a default may stand in a text: a share, a count, a duration or a size."""
    assert isinstance(default, (int, float))
    number = f"{default:g}"
    spans = (("s", 1), ("min", 60), ("h", 3600), ("days", 86400))
    sizes = (("MiB", 1024**2), ("GiB", 1024**3))
    return {number, f"{default * 100:g} %"} | {
        f"{default // size:g} {unit}" for unit, size in (*spans, *sizes) if default >= size and not default % size
    }


class TestVerdicts:
    @pytest.mark.parametrize(("verdict", "setting"), [(name, key) for name, keys in TOLD.items() for key in keys])
    def test_its_thresholds_are_those_of_the_configuration(self, verdict: str, setting: str) -> None:
        thresholds = getattr(Config().detection.thresholds, verdict.replace("-", "_"))
        text = re.sub(r"\s+", " ", text_of(RUNBOOKS / f"{CATALOGUE[verdict].alert}.md"))
        words = in_words(getattr(thresholds, setting))
        assert [word for word in words if re.search(rf"(?<![\d.]){re.escape(word)}(?![\d.]*\d)", text)], words

    @pytest.mark.parametrize("name", CATALOGUE)
    def test_the_first_command_asks_for_this_verdict(self, name: str) -> None:
        page = RUNBOOKS / f"{CATALOGUE[name].alert}.md"
        commands = [line for line in shell_lines(page) if "/api/v1/status" in line]
        assert f'select(.verdict == "{name}" and' in commands[0]

    @pytest.mark.parametrize("name", CATALOGUE)
    def test_every_evidence_that_it_explains_is_one_that_the_code_knows(self, name: str) -> None:
        keys = explained(RUNBOOKS / f"{CATALOGUE[name].alert}.md")
        assert keys
        assert [key for key in keys if key not in names_in_detectors()] == []

    def test_every_evidence_of_the_golden_pages_is_explained(self) -> None:
        shown: set[tuple[str, str]] = set()
        for path in sorted((REPOSITORY / "tests" / "data" / "golden" / "status").iterdir()):
            for verdict in json.loads(path.read_text(encoding="utf-8"))["verdicts"]:
                if verdict["state"] in ("info", "ticket", "page"):
                    shown |= {(verdict["verdict"], key) for key in verdict["evidence"]}
        assert shown
        missing = {(name, key) for name, key in shown if key not in explained(RUNBOOKS / f"{CATALOGUE[name].alert}.md")}
        assert missing == set()


def explained(page: Path) -> list[str]:
    table = re.search(r"^\| Evidence \|.*?(?=\n\n)", sections(page)["Diagnosis"], re.MULTILINE | re.DOTALL)
    assert table is not None
    return [key for row in table.group().splitlines()[2:] for key in _CODE.findall(row.split("|")[1])]


@cache
def names_in_detectors() -> frozenset[str]:
    """Every text in the code of the detectors and of the advice, where evidence gets its names."""
    package = REPOSITORY / "exporter" / "oomwatch"
    return frozenset(
        node.value
        for path in (*sorted((package / "detectors").glob("*.py")), package / "advice.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


class TestNamesThatExist:
    @documents
    def test_every_metric_of_ours_is_one_that_is_exported(self, document: Path) -> None:
        exported = {family.name for family in FAMILIES}
        assert set(_METRIC.findall(prose(text_of(document)))) - exported == set()
        for line in shell_lines(document):
            named = [f"{head}{part}{end}" for head, parts, end in _OUR_GROUP.findall(line) for part in parts.split("|")]
            named += _METRIC.findall(_OUR_GROUP.sub("", line))
            # A command may look for the beginning of several names.
            assert [name for name in named if not any(known.startswith(name) for known in exported)] == [], line

    @documents
    def test_every_series_of_vllm_is_one_that_a_supported_version_has(self, document: Path) -> None:
        text = text_of(document)
        named = {f"vllm:{name}" for names in _VLLM_GROUP.findall(text) for name in names.split("|")}
        named |= set(_VLLM_METRIC.findall(text))
        assert named - vllm_series() == set()

    @documents
    def test_every_setting_of_vllm_is_explained_with_its_versions(self, document: Path) -> None:
        named = {
            flag
            for code in _CODE.findall(prose(text_of(document)))
            for flag in re.findall(r"^--[a-z-]+", code)
            if document.parent == RUNBOOKS
        }
        assert named - set(settings()) == set()

    def test_the_settings_and_their_first_versions_are_those_of_the_advice(self) -> None:
        told = settings()
        assert set(FLAGS) <= set(told)
        assert [flag for flag, first in FLAGS.items() if first_release(told[flag]) != first] == []

    @pytest.mark.parametrize("versions", sorted(set(settings().values())))
    def test_versions_are_all_or_a_release_and_newer(self, versions: str) -> None:
        assert versions == "all" or re.fullmatch(r"\d+\.\d+(\.\d+)? and newer", versions)

    @documents
    def test_every_filter_for_jq_asks_for_fields_that_the_api_has(self, document: Path) -> None:
        known = api_fields()
        asked = {
            field
            for line in shell_lines(document)
            if "/api/v1/status" in line and "| jq" in line
            for field in re.findall(r"\.([a-z_]+)", line.partition("| jq")[2])
        }
        assert asked - known == set()

    @documents
    def test_every_query_for_promtool_is_promql(self, document: Path) -> None:
        for line in shell_lines(document):
            query = re.search(r"promtool query (?:instant|range) .*'([^']+)'\s*$", line)
            if line.startswith("promtool query"):
                assert query is not None, line
                promql_parser.parse(query.group(1))

    @documents
    def test_every_block_of_shell_is_shell(self, document: Path) -> None:
        bash = shutil.which("bash")
        assert bash is not None
        for block in blocks(document, "sh"):
            done = subprocess.run([bash, "-n"], input=block, text=True, capture_output=True, timeout=20, check=False)
            assert done.returncode == 0, done.stderr

    @documents
    def test_every_block_of_our_configuration_can_be_loaded(self, document: Path, tmp_path: Path) -> None:
        for block in blocks(document, "yaml"):
            if next(iter(yaml.safe_load(block))) in ("scrape_configs", "rule_files"):
                continue
            file = tmp_path / "oomwatch.yml"
            file.write_text(block, encoding="utf-8")
            load(file, {}, {})

    @documents
    def test_every_key_of_our_configuration_in_the_text_is_one(self, document: Path) -> None:
        text = text_of(REPOSITORY / "docs" / "configuration.md")
        named = {
            code
            for code in _CODE.findall(prose(text_of(document)))
            if re.fullmatch(r"(?:detection|history|web|exposition|intervals)\.[a-z_.]+", code)
        }
        assert [key for key in sorted(named) if not documented(key, text)] == []

    @documents
    def test_links_lead_to_files_and_headings_that_are_there(self, document: Path) -> None:
        targets = [(document.parent / target, "") for target in local_links(document) if target]
        for target, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text_of(document)):
            targets.append((document.parent / target if target else document, anchor))
        assert [
            f"{path.name}#{anchor}"
            for path, anchor in targets
            if not path.exists() or (anchor and anchor not in anchors(path.resolve()))
        ] == []


def first_release(versions: str) -> tuple[int, ...]:
    return () if versions == "all" else release(versions.partition(" ")[0]) or ()


@cache
def vllm_series() -> frozenset[str]:
    """Names as the pages expose them: what the code knows, and what real pages hold."""
    known = {exposed.name for found in BY_FIELD.values() for exposed in found.exposed} | {CACHE_CONFIG}
    captures = REPOSITORY / "tests" / "data" / "captures"
    for page in sorted(path for path in captures.rglob("*") if path.is_file()):
        known |= set(_VLLM_METRIC.findall(page.read_text(encoding="utf-8", errors="replace")))
    return frozenset(known)


@cache
def api_fields() -> frozenset[str]:
    def keys(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from keys(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from keys(inner)

    folder = REPOSITORY / "tests" / "data" / "golden" / "status"
    return frozenset(
        key for path in sorted(folder.iterdir()) for key in keys(json.loads(path.read_text(encoding="utf-8")))
    )


def documented(key: str, configuration: str) -> bool:
    """A section by its heading, or a key in the table of its section."""
    section, _, name = key.rpartition(".")
    heading = re.search(rf"^#+ {re.escape(key)}$", configuration, re.MULTILINE)
    table = re.search(rf"^#+ {re.escape(section)}$(.*?)(?=^#|\Z)", configuration, re.MULTILINE | re.DOTALL)
    return bool(heading or (table and f"| `{name}` |" in table.group(1)))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", text_of(path)), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
