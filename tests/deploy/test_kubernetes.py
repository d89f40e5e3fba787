"""The manifests are ones that Kubernetes takes, and agree with one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from oomwatch.cli import main
from oomwatch.config import DEFAULT_PORT, Config, load
from tests.documents import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "kubernetes"
LABELS = {"app.kubernetes.io/name": "oomwatch"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents("daemonset.yaml") if document["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifest("DaemonSet")["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    assert isinstance(found, dict)
    return found


class TestSchema:
    @pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
    @pytest.mark.parametrize("kind", ["ConfigMap", "DaemonSet", "Service"])
    def test_a_version_of_kubernetes_knows_every_field(self, kind: str, version: str) -> None:
        kubernetes_validate.validate(manifest(kind), version, strict=True)

    def test_a_field_that_is_mistyped_would_be_seen(self) -> None:
        wrong = manifest("DaemonSet")
        wrong["spec"]["template"]["spec"]["hostPid"] = True
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, "1.37", strict=True)

    def test_nothing_else_is_in_the_file(self) -> None:
        kinds = [document["kind"] for document in documents("daemonset.yaml")]
        assert sorted(kinds) == ["ConfigMap", "DaemonSet", "Service"], "no Role, no ServiceAccount"


@pytest.mark.parametrize("name", ["daemonset.yaml", "podmonitor.yaml"])
def test_everything_is_named_and_labelled_alike(name: str) -> None:
    for document in documents(name):
        metadata = document["metadata"]
        assert (metadata["name"], metadata["namespace"], metadata["labels"]) == ("oomwatch", "monitoring", LABELS)


def test_selectors_find_the_pods() -> None:
    template = manifest("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    (monitor,) = documents("podmonitor.yaml")
    assert template == LABELS
    assert manifest("DaemonSet")["spec"]["selector"]["matchLabels"] == LABELS
    assert manifest("Service")["spec"]["selector"] == LABELS
    assert monitor["spec"]["selector"]["matchLabels"] == LABELS


def test_ports_are_the_daemons_by_one_name() -> None:
    (port,) = container()["ports"]
    (endpoint,) = documents("podmonitor.yaml")[0]["spec"]["podMetricsEndpoints"]
    (service_port,) = manifest("Service")["spec"]["ports"]
    probes = [container()[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")]
    assert (port["containerPort"], service_port["port"]) == (DEFAULT_PORT, DEFAULT_PORT)
    assert {port["name"], endpoint["port"], service_port["targetPort"], *(probe["port"] for probe in probes)} == {
        "http"
    }
    assert [probe["path"] for probe in probes] == ["/-/healthy", "/-/ready"]


class TestPod:
    def test_it_claims_no_gpu(self) -> None:
        assert set(container()["resources"]["requests"]) == {"cpu", "memory"}
        assert set(container()["resources"]["limits"]) == {"memory"}, "a CPU limit would hold it back when it counts"

    def test_it_sees_every_gpu_and_the_processes_and_network_of_the_node(self) -> None:
        variables = {entry["name"]: entry["value"] for entry in container()["env"]}
        assert variables == {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"}
        assert (pod()["hostPID"], pod()["hostNetwork"]) == (True, True)

    def test_the_daemon_has_no_privileges(self) -> None:
        context = {**pod()["securityContext"], **container()["securityContext"]}
        assert context["runAsNonRoot"] is True
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert pod()["automountServiceAccountToken"] is False

    def test_its_volumes_are_the_ones_that_it_mounts(self) -> None:
        names = {mount["name"] for entry in (container(), *pod()["initContainers"]) for mount in entry["volumeMounts"]}
        assert names == {volume["name"] for volume in pod()["volumes"]}

    def test_the_folder_of_the_probes_is_the_one_that_the_daemon_looks_into(self) -> None:
        mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
        (host,) = (volume["hostPath"]["path"] for volume in pod()["volumes"] if volume["name"] == "probes")
        assert (mounts["probes"], host) == (*Config().probe.directory, *Config().probe.directory)

    def test_its_command_is_one_the_daemon_knows(self) -> None:
        assert CliRunner().invoke(main, [*container()["args"], "--help"]).exit_code == 0

    def test_the_file_that_it_names_is_in_the_config_map_and_good(self, tmp_path: Path) -> None:
        mount = {entry["name"]: entry["mountPath"] for entry in container()["volumeMounts"]}["config"]
        ((name, text),) = manifest("ConfigMap")["data"].items()
        assert f"{mount}/{name}" in container()["args"]
        (tmp_path / name).write_text(text, encoding="utf-8")
        load(tmp_path / name, {}, {})
