"""Groups of Prometheus rules, and how they are written down."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

HEAD = "Made by python -m alerts.build: change what makes it, in alerts/build, and not this file."


@dataclass(frozen=True)
class Recording:
    """A recording rule; ``comment`` is written above it."""

    record: str
    expr: str
    comment: str = ""

    def plain(self) -> dict[str, Any]:
        return {"record": self.record, "expr": tidy(self.expr)}


@dataclass(frozen=True)
class Alert:
    """An alerting rule. ``wait`` and ``keep`` are its ``for`` and ``keep_firing_for``; empty for none."""

    alert: str
    expr: str
    severity: str
    annotations: Mapping[str, str]
    wait: str = ""
    keep: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    comment: str = ""

    def plain(self) -> dict[str, Any]:
        waits = {"for": self.wait, "keep_firing_for": self.keep}
        return {
            "alert": self.alert,
            "expr": tidy(self.expr),
            **{key: value for key, value in waits.items() if value},
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {name: text.strip() for name, text in self.annotations.items()},
        }


Rule = Recording | Alert


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated together, in this order, every ``interval``."""

    name: str
    interval: str
    rules: tuple[Rule, ...]

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "interval": self.interval, "rules": [rule.plain() for rule in self.rules]}


@dataclass(frozen=True)
class RuleFile:
    """One file of alerts/rules; ``comment`` says whom it is for and what it needs."""

    name: str
    comment: str
    groups: tuple[Group, ...]

    def text(self) -> str:
        lines = [*comment_lines(HEAD, 0), "#", *comment_lines(self.comment, 0), "groups:"]
        for group in self.groups:
            lines += ["", *group_lines(group, 2)]
        return "\n".join(lines) + "\n"


def manifest(files: Iterable[RuleFile], api: str, kind: str, name: str) -> str:
    """The same groups as a Kubernetes object for the Prometheus Operator."""
    lines = [
        *comment_lines(HEAD, 0),
        f"apiVersion: {api}",
        f"kind: {kind}",
        "metadata:",
        f"  name: {name}",
        "  labels:",
        "    app.kubernetes.io/name: oomwatch",
        "spec:",
        "  groups:",
    ]
    for file in files:
        for group in file.groups:
            lines += ["", *group_lines(group, 4)]
    return "\n".join(lines) + "\n"


def tidy(expr: str) -> str:
    return textwrap.dedent(expr).strip()


def group_lines(group: Group, indent: int) -> Iterator[str]:
    pad = " " * indent
    yield f"{pad}- name: {group.name}"
    yield f"{pad}  interval: {group.interval}"
    yield f"{pad}  rules:"
    for number, rule in enumerate(group.rules):
        if number:
            yield ""
        yield from comment_lines(rule.comment, indent + 4)
        lines = list(_mapping(rule.plain(), indent + 6))
        yield f"{pad}    - {lines[0].lstrip()}"
        yield from lines[1:]


def _mapping(data: Mapping[str, Any], indent: int) -> Iterator[str]:
    pad = " " * indent
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield f"{pad}{key}:"
            yield from _mapping(value, indent + 2)
        elif "\n" in value or not _is_plain(value):
            yield f"{pad}{key}: |-"
            yield from (f"{pad}  {line}" if line else "" for line in value.split("\n"))
        else:
            yield f"{pad}{key}: {value}"


def _is_plain(value: str) -> bool:
    """Whether YAML reads it as this text without quotes."""
    try:
        return bool(yaml.safe_load(f"key: {value}") == {"key": value})
    except yaml.YAMLError:
        return False


def comment_lines(text: str, indent: int) -> Iterator[str]:
    pad = " " * indent
    for paragraph in filter(None, text.split("\n")):
        yield from (f"{pad}# {line}" for line in textwrap.wrap(paragraph, 118 - indent))
