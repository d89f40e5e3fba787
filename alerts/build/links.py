"""Where the links of an alert lead. Each base can be set when the rules are made."""

from __future__ import annotations

from dataclasses import dataclass

# Of what may stand in a name: the signs that end or change a query string. Prometheus 2.42 cannot quote them all.
_QUOTED = (("%", "%25"), ("&", "%26"), ("#", "%23"), (r"\\+", "%2B"), (" ", "%20"))


@dataclass(frozen=True)
class Links:
    """``runbooks`` and ``grafana`` are bases to which names are added; ``page`` is a template of the daemon's page."""

    runbooks: str = "https://runbooks.example.org/oomwatch/"
    grafana: str = "https://grafana.example.org/"
    page: str = "http://{{ $labels.instance }}/"

    def runbook(self, alert: str) -> str:
        return f"{self.runbooks.rstrip('/')}/{alert}.md"

    def dashboard(self, uid: str, **variables: str) -> str:
        """A dashboard with its variables set from labels of the alert."""
        query = "&".join(f"var-{name}={quoted(label)}" for name, label in variables.items())
        return f"{self.grafana.rstrip('/')}/d/{uid}?{query}"


def quoted(label: str) -> str:
    """A template that gives a label's value for use in an address."""
    value = f"$labels.{label}"
    for sign, code in _QUOTED:
        value = f'(reReplaceAll "{sign}" "{code}" {value})'
    return f"{{{{ {value[1:-1]} }}}}"
