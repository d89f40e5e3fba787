"""The image: its Dockerfile is sound, what it copies is enough to build from, and its health check tells the truth."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from oomwatch.config import DEFAULT_PORT
from tests.certificates import make_certificates
from tests.documents import REPOSITORY, name_of, tracked_files
from tests.e2e.daemon import OomwatchDaemon
from tests.e2e.processes import free_port, wait_until

DOCKERFILE = REPOSITORY / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile and the rest of its line, continued lines put together."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word
    ]


def last_stage() -> dict[str, str]:
    """The last of each instruction of the stage that is shipped."""
    every = instructions()
    begin = max(index for index, (word, _) in enumerate(every) if word == "FROM")
    return dict(every[begin:])


def copied() -> list[str]:
    """What the Dockerfile takes from the project's folder."""
    sources = [rest.split()[:-1] for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    return [name for names in sources for name in names]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    answer = subprocess.run(
        [hadolint, DOCKERFILE], check=False, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_it_runs_as_nobody_in_particular_and_by_number() -> None:
    assert re.fullmatch(r"[1-9]\d{4,}:[1-9]\d{4,}", last_stage()["USER"])


def test_the_user_of_the_image_is_the_one_that_kubernetes_runs_it_as() -> None:
    documents = yaml.safe_load_all((REPOSITORY / "deploy/kubernetes/daemonset.yaml").read_text(encoding="utf-8"))
    (pod,) = [document["spec"]["template"]["spec"] for document in documents if document["kind"] == "DaemonSet"]
    user, _, group = last_stage()["USER"].partition(":")
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))
    script = pod["initContainers"][0]["command"][-1]
    assert re.findall(r"-o (\S+) -g (\S+)", script) == [(user, group)] * script.count("install -d")


def test_its_port_is_the_daemons() -> None:
    assert last_stage()["EXPOSE"] == str(DEFAULT_PORT)
    assert f":{DEFAULT_PORT}/-/healthy" in last_stage()["ENV"]


def test_it_is_built_for_a_python_that_the_project_names() -> None:
    (version,) = [rest for word, rest in instructions() if word == "ARG"]
    found = re.fullmatch(r"PYTHON=(3\.\d+)\.\d+-slim-[a-z]+", version)
    assert found, "not pinned to a release"
    assert f'"Programming Language :: Python :: {found[1]}"' in (REPOSITORY / "pyproject.toml").read_text("utf-8")


def test_what_it_copies_is_let_through_and_nothing_else() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split()
    assert "*" in lines
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(copied())


def test_what_it_copies_is_enough_to_build_from(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"
    for path in tracked_files():
        if any(name_of(path) == name or name_of(path).startswith(f"{name}/") for name in copied()):
            copy = source / path.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    assert (source / "constraints.txt").is_file(), "pip is told to keep to it"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-index", "--no-build-isolation"),
            *("--wheel-dir", str(built), str(source)),
        ],
        check=True,
        timeout=100,
    )
    assert len(list(built.glob("oomwatch-*.whl"))) == 1


def is_healthy(url: str) -> bool:
    """The exit status of the image's own health check."""
    _, _, command = last_stage()["HEALTHCHECK"].partition("CMD ")
    _, *arguments = json.loads(command)
    # A proxy that does not exist: the check must not ask one.
    environment = {
        **os.environ,
        "HEALTH_URL": url,
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    answer = subprocess.run(
        [sys.executable, *arguments], check=False, capture_output=True, text=True, timeout=30, env=environment
    )
    assert answer.returncode in (0, 1), answer.stderr
    return answer.returncode == 0


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OomwatchDaemon]:
    with OomwatchDaemon(tmp_path_factory.mktemp("demo"), command=("demo",)) as daemon:
        yield daemon


class TestHealthCheck:
    def test_a_running_daemon_is_healthy(self, demo: OomwatchDaemon) -> None:
        assert is_healthy(f"{demo.url}/-/healthy")

    def test_an_answer_that_is_no_success_is_not(self, demo: OomwatchDaemon) -> None:
        assert not is_healthy(f"{demo.url}/no-such-page")

    def test_a_port_that_nobody_listens_on_is_not(self) -> None:
        assert not is_healthy(f"http://127.0.0.1:{free_port()}/-/healthy")

    def test_a_certificate_need_not_be_known(self, tmp_path: Path) -> None:
        certificates = make_certificates(tmp_path / "tls")
        web = tmp_path / "web.yml"
        files = {"cert_file": str(certificates.server), "key_file": str(certificates.server_key)}
        web.write_text(yaml.safe_dump({"tls_server_config": files}), encoding="utf-8")
        log = tmp_path / "log"
        with log.open("wb") as output:
            port = free_port()
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "oomwatch.cli", "demo"),
                    *("--web.listen-address", f"127.0.0.1:{port}", "--web.config.file", str(web)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(lambda: is_healthy(f"https://127.0.0.1:{port}/-/healthy"), 30, "the daemon answers by TLS")
        finally:
            process.terminate()
            process.wait(timeout=20)
