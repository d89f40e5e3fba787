"""What a PromQL expression reads and which labels its result can have, from the pages that are really served."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import (
    AggModifierType,
    AggregateExpr,
    BinaryExpr,
    Call,
    LabelModifierType,
    MatrixSelector,
    ParenExpr,
    StringLiteral,
    SubqueryExpr,
    UnaryExpr,
    VectorMatchCardinality,
    VectorSelector,
)

from tests.documents import REPOSITORY

RULES = REPOSITORY / "alerts" / "rules"
DATA = REPOSITORY / "tests" / "data"

TARGET = frozenset({"instance", "job", "cluster"})
"""Labels that Prometheus or its owner adds to everything that is scraped."""

SET_OPERATORS = ("and", "or", "unless")


@dataclass(frozen=True)
class Rule:
    """One rule of a file as Prometheus reads it."""

    file: str
    group: str
    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.data.get("alert") or self.data["record"])

    @property
    def is_alert(self) -> bool:
        return "alert" in self.data

    @property
    def expr(self) -> Any:
        return promql_parser.parse(self.data["expr"])

    def __str__(self) -> str:
        severity = self.data.get("labels", {}).get("severity", "")
        return f"{self.name}-{severity}" if severity else self.name


@cache
def loaded(path: Path) -> Any:
    """A YAML file, read once and by the fast parser where there is one."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def rules() -> tuple[Rule, ...]:
    return tuple(
        Rule(path.name, group["name"], rule)
        for path in sorted(RULES.glob("*.yml"))
        for group in loaded(path)["groups"]
        for rule in group["rules"]
    )


@cache
def series() -> Mapping[str, frozenset[str]]:
    """The labels of every series that is served, ours and vLLM's, and of every one that a rule records."""
    found: dict[str, set[str]] = {"up": set()}
    for path in sorted(served_pages()):
        for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
            for sample in family.samples:
                if sample.name.startswith(("oomwatch_", "vllm:")):
                    found.setdefault(sample.name, set()).update(sample.labels)
    known = {name: frozenset(labels) | TARGET for name, labels in found.items()}
    for rule in rules():
        if not rule.is_alert:
            known[rule.name] = labels_of(rule.expr, known)
    return known


def served_pages() -> Iterator[Path]:
    yield from (DATA / "golden" / "metrics").glob("*.prom")
    yield from (DATA / "captures").glob("*/*.prom")


def nodes(expr: Any) -> Iterator[Any]:
    """The expression and all in it."""
    yield expr
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        child = getattr(expr, name, None)
        if child is not None:
            yield from nodes(child)
    for child in getattr(expr, "args", ()):
        yield from nodes(child)


def selectors(expr: Any) -> Iterator[VectorSelector]:
    return (node for node in nodes(expr) if isinstance(node, VectorSelector))


def labels_of(expr: Any, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The labels that a result can have; the name is not counted."""
    if isinstance(expr, VectorSelector):
        return known[str(expr.name)]
    if isinstance(expr, MatrixSelector):
        return labels_of(expr.vector_selector, known)
    if isinstance(expr, (ParenExpr, SubqueryExpr, UnaryExpr)):
        return labels_of(expr.expr, known)
    if isinstance(expr, AggregateExpr):
        return _aggregated(expr, known)
    if isinstance(expr, Call):
        return _called(expr, known)
    if isinstance(expr, BinaryExpr):
        return _combined(expr, known)
    return frozenset()


def _aggregated(expr: AggregateExpr, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    labels = labels_of(expr.expr, known)
    if str(expr.op) in ("topk", "bottomk"):
        return labels
    if expr.modifier is None:
        return frozenset()
    named = frozenset(expr.modifier.labels)
    return labels - named if expr.modifier.type == AggModifierType.Without else labels & named


def _called(expr: Call, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    labels = frozenset().union(*(labels_of(part, known) for part in expr.args))
    if expr.func.name in ("label_replace", "label_join"):
        added = expr.args[1]
        assert isinstance(added, StringLiteral)
        return labels | {added.val}
    return labels


def _combined(expr: BinaryExpr, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    left, right = labels_of(expr.lhs, known), labels_of(expr.rhs, known)
    if str(expr.op) == "or":
        return left | right
    if not left or str(expr.op) in ("and", "unless") or not right:
        return left or right
    modifier = expr.modifier
    if modifier is None:
        return left
    if modifier.card == VectorMatchCardinality.ManyToOne:
        return left | frozenset(modifier.group_labels or ())
    if modifier.card == VectorMatchCardinality.OneToMany:
        return right | frozenset(modifier.group_labels or ())
    return left & matched(expr, left)


def matched(expr: BinaryExpr, labels: frozenset[str]) -> frozenset[str]:
    """Of the labels of one side, those by which its samples are matched with the other's."""
    if expr.modifier is None or expr.modifier.matching is None:
        return labels
    named = frozenset(expr.modifier.matching.labels)
    return labels - named if expr.modifier.matching.type == LabelModifierType.Exclude else labels & named


_FORMAT = re.compile(r"printf `([^`]*)`")


def queries(template: str) -> list[Any]:
    """The expressions that a template asks for, with what it fills in replaced by something of the kind."""
    texts = [text.replace("%q", '"x"') for text in _FORMAT.findall(template)]
    selected = next((text for text in texts if "%s" not in text), "up")
    return [promql_parser.parse(text.replace("%s", selected)) for text in texts]
