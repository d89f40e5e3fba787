"""docker-compose.yml: Docker's own plugin accepts it, its files fit one another, and what it starts is hardened."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import CliRunner

from oomwatch.cli import main
from oomwatch.config import DEFAULT_PORT
from tests.alerts.alertmanagers import Alertmanager
from tests.documents import REPOSITORY
from tests.e2e.debian_sid import CannotFetch, sid_compose
from tests.e2e.prometheus import PrometheusServer, scrape_config
from tests.e2e.tools import VERSIONS, cannot_run, program

FILE = REPOSITORY / "docker-compose.yml"
PROFILES = {
    "gpu": {"oomwatch", "prometheus"},
    "vllm": {"oomwatch", "prometheus", "vllm"},
    "demo": {"demo", "prometheus-demo"},
}
ALWAYS = {"alertmanager", "grafana"}
OURS = ("oomwatch", "demo")


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]
    return found


def yaml_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def mounts(service: str) -> dict[Path, Path]:
    """The project's files that a service sees, by where it sees them."""
    volumes = [volume.split(":") for volume in services()[service].get("volumes", [])]
    return {Path(parts[1]): REPOSITORY / parts[0] for parts in volumes if parts[0].startswith("./")}


def laid_out(service: str, top: str, folder: Path) -> Path:
    """A copy of what a service sees below the folder ``top``."""
    for inside, source in mounts(service).items():
        target = folder / inside.relative_to(top)
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return folder


@pytest.fixture(scope="module")
def compose() -> Path:
    try:
        return sid_compose()
    except CannotFetch as error:
        cannot_run(str(error))


class TestByDockersOwnPlugin:
    @staticmethod
    def config(compose: Path, *arguments: str) -> dict[str, Any]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("COMPOSE_")}
        answer = subprocess.run(
            [compose, "-f", FILE, *arguments, "config", "--format", "json"],
            check=False,
            capture_output=True,
            text=True,
            timeout=30,
            env=environment,
        )
        assert answer.returncode == 0, answer.stderr
        assert answer.stderr == "", "a warning"
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    @pytest.mark.parametrize("profile", PROFILES)
    def test_a_profile_starts_what_belongs_to_it_and_nothing_else(self, compose: Path, profile: str) -> None:
        assert set(self.config(compose, "--profile", profile)["services"]) == PROFILES[profile] | ALWAYS

    def test_without_a_profile_the_gpus_of_this_host_are_watched(self, compose: Path) -> None:
        assert set(self.config(compose)["services"]) == PROFILES["gpu"] | ALWAYS

    def test_the_daemon_asks_for_every_gpu_and_of_the_driver_only_what_it_needs(self, compose: Path) -> None:
        (device,) = self.config(compose)["services"]["oomwatch"]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"]) == ("nvidia", -1)
        assert set(device["capabilities"]) == {"gpu", "utility"}

    def test_the_demo_asks_for_no_gpu(self, compose: Path) -> None:
        for name, service in self.config(compose, "--profile", "demo")["services"].items():
            assert "devices" not in json.dumps(service.get("deploy", {})), name
            assert service.get("network_mode") != "host", name


class TestServices:
    @pytest.mark.parametrize("name", services())
    def test_its_image_is_pinned_to_a_release(self, name: str) -> None:
        service = services()[name]
        if "build" in service:
            assert service["image"] == "oomwatch"
        else:
            assert re.fullmatch(r"[a-z-]+/[a-z-]+:v?\d+\.\d+\.\d+", service["image"])

    @pytest.mark.parametrize("name", services())
    def test_it_listens_to_this_host_only(self, name: str) -> None:
        assert [port for port in services()[name].get("ports", []) if not port.startswith("127.0.0.1:")] == []

    @pytest.mark.parametrize("name", services())
    def test_what_it_mounts_is_there(self, name: str) -> None:
        assert [source for source in mounts(name).values() if not source.exists()] == []

    @pytest.mark.parametrize("name", sorted(set(services()) - set(OURS)))
    def test_it_has_a_health_check(self, name: str) -> None:
        assert services()[name]["healthcheck"]["test"][0] == "CMD"

    @pytest.mark.parametrize("name", OURS)
    def test_the_daemon_has_no_privileges_and_a_root_that_is_read_only(self, name: str) -> None:
        service = services()[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "user", "devices"} & set(service)

    def test_the_daemon_sees_the_hosts_processes_network_and_limits(self) -> None:
        service = services()["oomwatch"]
        assert [service[key] for key in ("pid", "network_mode", "cgroup")] == ["host", "host", "host"]

    @pytest.mark.parametrize("name", OURS)
    def test_its_command_is_one_the_daemon_knows(self, name: str) -> None:
        arguments = [*services()[name]["command"], "--help"]
        assert CliRunner().invoke(main, arguments).exit_code == 0

    def test_the_daemons_configuration_is_a_good_one(self) -> None:
        path = mounts("oomwatch")[Path("/etc/oomwatch")] / "oomwatch.yml"
        result = CliRunner().invoke(main, ["config", "check", "--config.file", str(path)])
        assert result.exit_code == 0, result.output


class TestPrometheus:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("name", ["prometheus", "prometheus-demo"])
    def test_it_accepts_its_configuration_and_finds_rules_and_targets(
        self, name: str, version: str, tmp_path: Path
    ) -> None:
        folder = laid_out(name, "/etc/prometheus", tmp_path)
        answer = run([program("promtool", version), "check", "config", folder / "prometheus.yml"])
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert len(re.findall(r"SUCCESS: \d+ rules found", answer.stdout)) == len(
            list((REPOSITORY / "alerts/rules").glob("oomwatch-*.yml"))
        )
        assert (folder / "targets.yml").is_file()

    @pytest.mark.parametrize("profile", ["gpu", "demo"])
    def test_it_scrapes_the_daemon_of_its_profile(self, profile: str) -> None:
        (entry,) = yaml_of(REPOSITORY / f"deploy/compose/targets-{profile}.yml")
        (target,) = entry["targets"]
        host, _, port = target.rpartition(":")
        assert int(port) == DEFAULT_PORT
        (ours,) = PROFILES[profile] & set(OURS)
        if services()[ours].get("network_mode") == "host":
            assert f"{host}:host-gateway" in services()["prometheus"]["extra_hosts"]
        else:
            assert host == ours
        assert entry["labels"]["instance"] == f"localhost:{DEFAULT_PORT}", "where a browser on this host finds the page"

    def test_its_alerts_go_to_the_alertmanager_beside_it(self) -> None:
        config = yaml_of(REPOSITORY / "deploy/compose/prometheus.yml")
        (alertmanager,) = config["alerting"]["alertmanagers"]
        assert alertmanager["static_configs"] == [{"targets": ["alertmanager:9093"]}]

    def test_its_health_check_tells_a_server_that_is_ready_from_none(self, tmp_path: Path) -> None:
        check = health_check("prometheus", {"promtool": program("promtool", "newest")})  # 2.42 has no such command
        with PrometheusServer(tmp_path, scrape_config({})) as server:
            assert run(at(check, server.url)).returncode == 0
        assert run(at(check, server.url)).returncode != 0


class TestAlertmanager:
    @pytest.mark.parametrize("version", VERSIONS)
    def test_it_accepts_its_configuration_with_the_templates(self, version: str, tmp_path: Path) -> None:
        folder = laid_out("alertmanager", "/etc/alertmanager", tmp_path)
        answer = run([program("amtool", version), "check-config", folder / "alertmanager.yml"])
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert "1 templates" in answer.stdout

    def test_the_secrets_that_it_names_are_looked_for_where_they_are_mounted(self) -> None:
        text = mounts("alertmanager")[Path("/etc/alertmanager/alertmanager.yml")].read_text(encoding="utf-8")
        folders = {str(Path(name).parent) for name in re.findall(r"_file: (\S+)", text)}
        assert folders == {"/etc/alertmanager/secrets"}
        assert Path("/etc/alertmanager/secrets") in mounts("alertmanager")

    @pytest.mark.parametrize("version", VERSIONS)
    def test_its_health_check_tells_a_server_that_is_ready_from_none(self, version: str, tmp_path: Path) -> None:
        check = health_check("alertmanager", {"amtool": program("amtool", version)})
        config = {"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]}
        with Alertmanager(tmp_path, config, version) as server:
            assert run(at(check, server.url)).returncode == 0
        assert run(at(check, server.url)).returncode != 0


class TestGrafana:
    def test_its_data_source_is_the_prometheus_of_either_profile(self) -> None:
        (source,) = yaml_of(REPOSITORY / "grafana/provisioning/datasources/oomwatch.yml")["datasources"]
        assert (source["type"], source["uid"], source["isDefault"]) == ("prometheus", "prometheus", True)
        url = urlsplit(source["url"])
        for name in ("prometheus", "prometheus-demo"):
            assert url.hostname in services()[name]["networks"]["default"]["aliases"]
            assert f"127.0.0.1:{url.port}:{url.port}" in services()[name]["ports"]

    def test_its_data_source_knows_the_interval_of_scrapes(self) -> None:
        (source,) = yaml_of(REPOSITORY / "grafana/provisioning/datasources/oomwatch.yml")["datasources"]
        config = yaml_of(REPOSITORY / "deploy/compose/prometheus.yml")
        assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), check=False, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )


def health_check(name: str, programs: Mapping[str, Path]) -> list[str]:
    """A service's check as a command here."""
    _, first, *rest = services()[name]["healthcheck"]["test"]
    return [str(programs[first]), *rest]


def at(command: Sequence[str], url: str) -> list[str]:
    return [re.sub(r"http://127\.0\.0\.1:\d+", url, word) for word in command]
