"""Everything that is made: the path of each file below the project's root, and its text."""

from __future__ import annotations

from pathlib import Path

from alerts.build.alertmanager import alertmanager
from alerts.build.fleet import fleet_rules
from alerts.build.links import Links
from alerts.build.meta import meta_rules
from alerts.build.model import RuleFile, manifest
from alerts.build.verdicts import verdict_rules
from alerts.build.vllm import vllm_rules

FOLDER = Path(__file__).resolve().parents[2]


def rule_files(links: Links) -> tuple[RuleFile, ...]:
    return verdict_rules(links), fleet_rules(), meta_rules(links), vllm_rules(links)


def made(links: Links) -> dict[str, str]:
    """The text of every file, by its path."""
    files = rule_files(links)
    return {
        **{f"alerts/rules/{file.name}": file.text() for file in files},
        "alerts/alertmanager.yml": alertmanager(),
        "deploy/kubernetes/prometheusrule.yaml": manifest(
            files, "monitoring.coreos.com/v1", "PrometheusRule", "oomwatch"
        ),
    }
