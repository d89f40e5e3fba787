"""The choices at the top of a dashboard, each within what the ones before it leave."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import dashboard

from grafana.build.board import SOURCE
from grafana.build.queries import Scope

ALL = ".+"
"""What "All" stands for: one short pattern, however many nodes there are."""


def data_source() -> dashboard.VariableModel:
    """Chosen when a dashboard is opened: it works provisioned and imported by hand, wherever the server is."""
    return builders.DatasourceVariable("datasource").label("Data source").type("prometheus").build()


def job() -> dashboard.VariableModel:
    """ "All" stands for the jobs that have oomwatch: ``up`` is asked by job, and every other target has it too."""
    return _several("job", "Job", "label_values(oomwatch_build_info, job)", "")


def nodes(scope: Scope) -> dashboard.VariableModel:
    return _several("instance", "Node", f"label_values({scope('oomwatch_build_info')}, instance)", ALL)


def node(scope: Scope) -> dashboard.VariableModel:
    return _one("instance", "Node", f"label_values({scope('oomwatch_build_info')}, instance)")


def engine(scope: Scope) -> dashboard.VariableModel:
    return _one("engine", "Engine", f"label_values({scope('oomwatch_engine_info')}, engine)")


def ranks(scope: Scope) -> dashboard.VariableModel:
    of_rank = scope("oomwatch_verdict_state_timestamp_seconds", 'verdict="kv-block-leak"')
    return _several("rank", "Rank", f"label_values({of_rank}, rank)", ALL)


def gpus_of_engine(scope: Scope) -> dashboard.VariableModel:
    """ "All" stands for the engine's own devices and not for every one of the node."""
    return _several("gpu", "GPU", f"label_values({scope('oomwatch_engine_device_memory_bytes')}, gpu)", "")


def gpu(scope: Scope) -> dashboard.VariableModel:
    """Shown by index and name; its value is the uuid, which alerts know it by."""
    named = f'label_join({scope("oomwatch_gpu_info")}, "shown", " ", "index", "name")'
    variable = _one("gpu", "GPU", f"query_result({named})")
    variable.regex = '/gpu="(?<value>[^"]+)".*shown="(?<text>[^"]+)"/'
    return variable


def _query(name: str, label: str, query: str) -> builders.QueryVariable:
    variable = builders.QueryVariable(name).label(label).query(query).definition(query).datasource(SOURCE)
    return variable.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(dashboard.VariableSort.NATURAL_ASC)


def _one(name: str, label: str, query: str) -> dashboard.VariableModel:
    return _query(name, label, query).multi(False).include_all(False).build()


def _several(name: str, label: str, query: str, all_value: str) -> dashboard.VariableModel:
    variable = _query(name, label, query).multi(True).include_all(True)
    if all_value:
        variable = variable.all_value(all_value)
    return variable.current(dashboard.VariableOption(selected=True, text="All", value="$__all")).build()
