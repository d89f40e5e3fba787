"""Ways from one dashboard to another, with the variables filled."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard

from grafana.build.panels import Link

_ALWAYS = ("datasource", "job")
_TIMES = "${__url_time_range}"


def to_board(title: str, uid: str, *variables: str) -> dashboard.DashboardLink:
    """A link above the panels; ``variables`` keep their values there."""
    return dashboard.DashboardLink(
        title=title,
        type_val=dashboard.DashboardLinkType.LINK,
        icon="dashboard",
        tooltip=f"The dashboard {title}",
        url=f"/d/{uid}?{_queryparams(*_ALWAYS, *variables)}",
        keep_time=True,
    )


def from_cell(title: str, uid: str, *, kept: tuple[str, ...] = (), **columns: str) -> Link:
    """A link of a table's cell. ``columns`` are variables and the columns of the same row that fill them; ``kept``
    are variables that stay as they are."""
    filled = [f"var-{name}=${{__data.fields.{column}:percentencode}}" for name, column in columns.items()]
    return Link(title, f"/d/{uid}?{'&'.join((_queryparams(*_ALWAYS, *kept), *filled, _TIMES))}")


def _queryparams(*variables: str) -> str:
    return "&".join(f"${{{name}:queryparam}}" for name in variables)
