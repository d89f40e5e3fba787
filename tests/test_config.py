"""The configuration: what is read from where, what is refused and how the refusal reads, what never shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from oomwatch import settings as shared
from oomwatch.config import (
    DEFAULT_PORT,
    FLAGS,
    Config,
    EngineConfig,
    IntervalsConfig,
    NeighbourConfig,
    check_files,
    config_hash,
    effective,
    load,
    load_with_places,
    settings,
    split_address,
)
from oomwatch.observations import EngineFacts
from oomwatch.settings import ConfigError, Described, Section, described
from tests.certificates import make_certificates
from tests.golden import assert_golden

DATA = Path(__file__).parent / "data" / "config"


def load_text(folder: Path, text: str, env: Mapping[str, str] | None = None, **flags: object) -> Config:
    file = folder / "oomwatch.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, env or {}, flags)


def refusal(folder: Path, text: str, env: Mapping[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, env, **flags)
    return str(caught.value).replace(str(folder / "oomwatch.yaml"), "oomwatch.yaml")


# --- where settings come from ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n", "{}\n", "engines:\nweb:\nintervals:\n  gpu:\n"])
def test_an_empty_file_means_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, text) == load(None, {}, {}) == Config()


def test_the_defaults_need_no_configuration() -> None:
    config = Config()
    assert config.engines == ()
    assert config.discovery.enabled
    assert config.web.listen_address == (f":{DEFAULT_PORT}",)
    assert (config.intervals.gpu, config.intervals.processes, config.intervals.scrape) == (15.0, 60.0, 15.0)


def test_the_default_port_is_outside_what_prometheus_gives_to_exporters() -> None:
    assert not 9090 <= DEFAULT_PORT <= 9999
    assert 1024 < DEFAULT_PORT < 32768, "below the ports that clients are given"


def test_environment_wins_over_file_and_flags_win_over_both(tmp_path: Path) -> None:
    text = "log: {level: error, format: json}\nintervals: {scrape: 30s, gpu: 30s}\n"
    env = {"OOMWATCH_LOG__LEVEL": "warn", "OOMWATCH_INTERVALS__SCRAPE": "5s", "HOME": "/"}
    config = load_text(tmp_path, text, env, **{"log.level": "debug"})
    assert (config.log.level, config.log.format) == ("debug", "json")
    assert (config.intervals.scrape, config.intervals.gpu) == (5.0, 30.0)


def test_flags_that_are_not_given_change_nothing(tmp_path: Path) -> None:
    flags: dict[str, object] = dict.fromkeys(FLAGS)
    flags["web.listen-address"] = ()
    assert load_text(tmp_path, "web: {enable_lifecycle: true}", {}, **flags).web.enable_lifecycle


def test_every_flag_sets_its_key() -> None:
    values: dict[str, Any] = {
        "web.listen-address": (":1", "[::1]:2"),
        "web.config.file": "web.yml",
        "web.enable-lifecycle": True,
        "web.max-requests": 3,
        "log.level": "error",
        "log.format": "json",
    }
    assert set(values) == set(FLAGS)
    config = load(None, {}, values)
    assert config.web.listen_address == (":1", "[::1]:2")
    assert config.web.config_file == Path("web.yml")
    assert (config.web.enable_lifecycle, config.web.max_requests) == (True, 3)
    assert (config.log.level, config.log.format) == ("error", "json")


def test_every_key_outside_lists_has_a_variable_that_sets_it() -> None:
    values = {"text": "x", "file": "x", "integer": "7", "duration": "1m", "size": "1MiB", "boolean": "false"}
    values |= {"list of sections": "[]", "list of addresses": ":7", "folder": "x", "list of folders": "/x"}
    values |= {"URL": "http://h:1", "headers": "{X-Scope-OrgID: x}", "labels": "{cluster: x}"}
    for setting in settings():
        value = values.get(setting.field.type_name, setting.field.limits.split(", ")[-1])
        if "thresholds" in setting.path or setting.path[-1].startswith("keep"):
            value = setting.field.shown(setting.field.info.get_default())  # each has its own limits
        # A key file is refused without its certificate, and a user's name without its password.
        others = {"KEY_FILE": "CERT_FILE", "__USERNAME": "__PASSWORD_FILE", "__PASSWORD_FILE": "__USERNAME"}
        beside = {setting.variable.replace(one, other): "x" for one, other in others.items()}
        config: Any = load(None, {**beside, setting.variable: value}, {})
        for part in setting.path:
            assert part in config.model_fields_set, setting.variable
            config = getattr(config, part)
        assert config is not None, setting.variable
        shown = setting.field.shown(config)
        assert shown == value or config in ((), (":7",), ("/x",), {"X-Scope-OrgID": "x"}, {"cluster": "x"}), (
            setting.variable
        )


def test_lists_of_sections_are_given_as_yaml_in_a_variable() -> None:
    config = load(None, {"OOMWATCH_ENGINES": "[{name: a, url: 'http://h:1'}]"}, {})
    assert [engine.name for engine in config.engines] == ["a"]


@pytest.mark.parametrize(
    "written", ["127.0.0.1:1, [::1]:2", '["127.0.0.1:1", "[::1]:2"]', "- 127.0.0.1:1\n- '[::1]:2'"]
)
def test_lists_of_texts_are_given_with_commas_or_as_yaml(written: str) -> None:
    assert load(None, {"OOMWATCH_WEB__LISTEN_ADDRESS": written}, {}).web.listen_address == ("127.0.0.1:1", "[::1]:2")


def test_folders_of_the_probe_are_one_or_several_and_absolute() -> None:
    def folders(given: object) -> tuple[str, ...]:
        return Config.model_validate({"probe": {"directory": given}}).probe.directory

    assert Config().probe.directory == ("/run/oomwatch",)
    assert folders("/srv/probe") == ("/srv/probe",)
    assert folders(["/srv/probe", "/run/oomwatch"]) == ("/srv/probe", "/run/oomwatch")
    with pytest.raises(ValueError, match=r'"probe" is not absolute\. Write the whole path'):
        folders(["probe"])


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert load_text(tmp_path, "log: {level: error}", {"OOMWATCH_LOG__LEVEL": " "}).log.level == "error"


def test_what_kubernetes_adds_for_a_service_called_oomwatch_is_left_alone() -> None:
    env = {
        "OOMWATCH_SERVICE_HOST": "10.0.0.7",
        "OOMWATCH_SERVICE_PORT": "18666",
        "OOMWATCH_SERVICE_PORT_METRICS": "18666",
        "OOMWATCH_PORT": "tcp://10.0.0.7:18666",
        "OOMWATCH_PORT_18666_TCP": "tcp://10.0.0.7:18666",
        "OOMWATCH_PORT_18666_TCP_ADDR": "10.0.0.7",
        "OOMWATCH_EU_SERVICE_HOST": "10.0.0.8",
    }
    assert load(None, env, {}) == Config()


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("OOMWATCH_INTERVAL__SCRAPE", 'unknown variable. Did you mean "OOMWATCH_INTERVALS__SCRAPE"?'),
        ("OOMWATCH_INTERVALS_SCRAPE", 'unknown variable. Did you mean "OOMWATCH_INTERVALS__SCRAPE"?'),
        ("OOMWATCH_XYZZY", "unknown variable. docs/configuration.md lists all of them."),
        (
            "OOMWATCH_LOG",
            "a section cannot be set as a whole. Its keys can: OOMWATCH_LOG__LEVEL, OOMWATCH_LOG__FORMAT.",
        ),
        (
            "OOMWATCH_ENGINES__0__URL",
            "items of a list cannot be set alone. Put the whole list into OOMWATCH_ENGINES, as YAML.",
        ),
    ],
)
def test_an_unknown_variable_is_an_error_that_helps(variable: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {variable: "s3cret"}, {})
    assert str(caught.value) == f"{variable}: {sentence}"


def test_files_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    text = """
engines: [{name: a, url: "https://h", bearer_token_file: secrets/token, tls: {ca_file: /etc/ca.pem}}]
web: {config_file: web.yml}
"""
    config = load_text(tmp_path, text)
    assert config.engines[0].bearer_token_file == tmp_path / "secrets" / "token"
    assert config.engines[0].tls.ca_file == Path("/etc/ca.pem")
    assert config.web.config_file == tmp_path / "web.yml"
    assert load_text(tmp_path, text, {"OOMWATCH_WEB__CONFIG_FILE": "other.yml"}).web.config_file == Path("other.yml")


# --- what is refused -------------------------------------------------------------------------------------------


def test_everything_wrong_is_reported_at_once(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(DATA / "many-mistakes.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    env = {"OOMWATCH_NVML__DEADLNE": "5s", "OOMWATCH_NVML__DEADLINE": "forever"}
    with pytest.raises(ConfigError) as caught:
        load(Path("many-mistakes.yaml"), env, {"web.max-requests": 0})
    assert_golden(DATA / "many-mistakes.txt", f"{caught.value}\n", request)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_no_yaml_does_not_hide_what_else_is_wrong(tmp_path: Path) -> None:
    lines = refusal(tmp_path, "engines: [\n", {"OOMWATCH_LOG__LEVEL": "loud"}).splitlines()
    assert lines[0].startswith("oomwatch.yaml:2:1: not valid YAML: the text ends in the middle of a value.")
    assert lines[1].startswith('OOMWATCH_LOG__LEVEL: log.level: "loud" is not allowed.')


@pytest.mark.parametrize("text", ["engines: {name: a}", "engines: a", "web: [1]", "intervals: 5", "neighbours: [1]"])
def test_a_wrong_shape_is_one_problem_and_no_crash(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text).endswith("expected here.")


def test_a_broken_list_in_a_variable_is_told_with_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"OOMWATCH_ENGINES": "- name: a\n  url: b: c\n"}, {})
    assert str(caught.value).startswith("OOMWATCH_ENGINES:2:9: engines: not valid YAML: a second colon in one line")


def test_a_problem_in_a_variables_list_names_the_item(tmp_path: Path) -> None:
    assert refusal(tmp_path, "", {"OOMWATCH_ENGINES": "[{name: a}]"}) == (
        "OOMWATCH_ENGINES:1:2: engines[0].url: this key is required."
    )


SECRET = "s3cr3t-v4lue"


@pytest.mark.parametrize(
    "text",
    [
        f"engines: [{{name: a, url: 'http://u:{SECRET}@h'}}]",
        f"engines: [{{name: a, url: 'ftp://{SECRET}@h'}}]",
        f"engines: [{{name: a, url: 'http://h', basic_auth: '{SECRET}'}}]",
        f"engines: [{{name: a, url: 'http://h', basic_auth: {{username: a, password: {SECRET}}}}}]",
        f"engines: [{{name: a, url: 'http://h', headers: ['{SECRET}']}}]",
        f"engines: [{{name: a, url: 'http://h', headers: {{'X Y': {SECRET}}}}}]",
        f'engines: [{{name: a, url: "http://h", headers: {{X: "{SECRET}\\n"}}}}]',
        f"engines: [{{name: a, url: 'http://h', headers: {{X: [{SECRET}]}}}}]",
        f"engines: [{{name: a, url: 'http://h', proxy_url: 'http://u:{SECRET}@h/path'}}]",
        f"engines: [{{name: a, url: 'http://h', token: {SECRET}}}]",
        f"token: {SECRET}",
    ],
)
def test_no_error_holds_a_secret(tmp_path: Path, text: str) -> None:
    assert SECRET not in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://u@h", "basic_auth with a password_file"),
        ("http://:p@h", "basic_auth with a password_file"),
        ("h:8000", "not a URL of a server"),
        ("//h:8000", "not a URL of a server"),
        ("http://", "not a URL of a server"),
        ("http://h:99999", "not a URL of a server"),
        ("http://h:0", "not a URL of a server"),
        ("http://h h", "not a URL of a server"),
        ("http://[::1", "not a URL of a server"),
        ("unix:///run/vllm.sock", "not a URL of a server"),
        ("http://h/metrics?x=1", "a query or a fragment"),
        ("http://h/#top", "a query or a fragment"),
    ],
)
def test_a_url_that_cannot_be_scraped_is_refused(tmp_path: Path, url: str, why: str) -> None:
    assert why in refusal(tmp_path, f"engines: [{{name: a, url: '{url}'}}]")


def test_an_engine_of_another_name_at_the_same_place_is_refused(tmp_path: Path) -> None:
    text = "engines: [{name: a, url: 'http://h:1'}, {name: b, url: 'http://h:1/metrics'}]"
    assert refusal(tmp_path, text) == (
        "oomwatch.yaml:1:51: engines[1].url: the same url as engines[0]. Each needs its own."
    )


def test_models_made_in_code_are_held_to_the_same_rules() -> None:
    one = EngineConfig(name="a", url="http://h:1")
    with pytest.raises(ValueError, match="the same name as"):
        Config(engines=(one, EngineConfig(name="a", url="http://h:2")))
    with pytest.raises(ValueError, match="pod_uid"):
        NeighbourConfig(name="n")
    with pytest.raises(ValueError, match="frozen"):
        setattr(one, "name", "b")  # noqa: B010 - an assignment that type checkers refuse as well


# --- what it says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/metrics", "http://h:8000"),
        ("https://h/team/metrics/", "https://h/team"),
        ("https://h/team", "https://h/team"),
        ("http://[::1]:8000/my-metrics", "http://[::1]:8000/my-metrics"),
    ],
)
def test_an_engine_is_named_by_its_base_or_its_page(url: str, base: str) -> None:
    engine = EngineConfig(name="a", url=url)
    assert engine.base_url == base
    assert engine.metrics_url == f"{base}/metrics"


def test_an_engine_states_facts(tmp_path: Path) -> None:
    text = """
engines:
  - name: a
    url: http://h:1
    pids: [7]
    gpus: [GPU-5a3f0c1e-93b1-4d6e-8f0a-2b7c9d1e4f60]
    gpu_memory_utilization: 0.9
    max_model_len: 4096
    kv_connector: yes
    kv_pool_blocks: 100
    kv_pool_bytes: 1GiB
    weights_bytes: 2GiB
"""
    assert load_text(tmp_path, text).engines[0].facts() == EngineFacts(
        name="a",
        target="http://h:1/metrics",
        pids=(7,),
        gpus=("GPU-5a3f0c1e-93b1-4d6e-8f0a-2b7c9d1e4f60",),
        gpu_memory_utilization=0.9,
        max_model_len=4096,
        kv_connector=True,
        kv_pool_blocks=100,
        kv_pool_bytes=1024**3,
        weights_bytes=2 * 1024**3,
    )


@pytest.mark.parametrize(
    ("gpu", "processes", "every"), [(15, 60, 4), (15, 15, 1), (15, 1, 1), (10, 25, 2), (20, 50, 2)]
)
def test_process_lists_are_read_in_whole_gpu_cycles(gpu: float, processes: float, every: int) -> None:
    assert IntervalsConfig(gpu=gpu, processes=processes).processes_every == every


def test_a_request_never_takes_longer_than_the_interval() -> None:
    engine = EngineConfig(name="a", url="http://h", timeout=10)
    config = Config(engines=(engine,), intervals=IntervalsConfig(scrape=3))
    assert config.timeout(engine) == 3.0
    assert config.timeout(None) == 3.0
    assert Config(engines=(engine,)).timeout(engine) == 10.0


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        (":18666", ("", 18666)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:80", ("localhost", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("::1:80", None),
        ("18666", None),
        ("h:65536", None),
        ("http://h:80", None),
    ],
)
def test_addresses(address: str, parts: tuple[str, int] | None) -> None:
    assert split_address(address) == parts


def test_show_masks_secrets_and_names_files(tmp_path: Path) -> None:
    text = f"""
engines:
  - name: a
    url: http://h:1
    bearer_token_file: token
    headers: {{X-Key: {SECRET}}}
    proxy_url: http://u:{SECRET}@proxy:1
"""
    config = load_text(tmp_path, text)
    shown = effective(config)
    assert SECRET not in shown
    assert SECRET not in repr(config)
    assert "X-Key: <secret>" in shown
    assert "proxy_url: http://<secret>@proxy:1" in shown
    assert f"bearer_token_file: {tmp_path / 'token'}" in shown
    assert "scrape: 15s" in shown
    assert "max_page_bytes: 16MiB" in shown


_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,8}", fullmatch=True)
_configs = st.builds(
    lambda engines, scrape, size, neighbours: {
        "engines": [
            {"name": name, "url": f"http://h:{n + 1}", "weights_bytes": size} for n, name in enumerate(engines)
        ],
        "intervals": {"scrape": scrape},
        "neighbours": [{"name": name, "process": name} for name in neighbours],
    },
    st.lists(_names, unique=True, max_size=3),
    st.floats(min_value=1, max_value=300),
    st.integers(min_value=1, max_value=2**45),
    st.lists(_names, unique=True, max_size=3),
)


@given(_configs)
def test_what_show_prints_is_the_same_configuration(data: dict[str, Any]) -> None:
    config = Config.model_validate(data)
    layer, problems = shared.read_yaml(effective(config), "shown")
    assert problems == []
    assert Config.model_validate(layer.data) == config


def test_the_hash_tells_configurations_apart(tmp_path: Path) -> None:
    assert config_hash(Config()) == config_hash(load_text(tmp_path, "log: {level: info}"))
    assert config_hash(Config()) != config_hash(load_text(tmp_path, "log: {level: warn}"))
    assert len(config_hash(Config())) == 16


# --- files that it names ---------------------------------------------------------------------------------------


def file_problems(folder: Path, text: str) -> list[str]:
    (folder / "oomwatch.yaml").write_text(text, encoding="utf-8")
    loaded = load_with_places(folder / "oomwatch.yaml", {}, {})
    return [str(problem).replace(f"{folder}/", "") for problem in check_files(loaded.config, loaded.places)]


def test_good_files_are_no_problem(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    (tmp_path / "token").write_text("t0ken\n", encoding="utf-8")
    text = f"""
engines:
  - name: a
    url: https://h:1
    bearer_token_file: token
    tls: {{ca_file: {made.ca.name}, cert_file: {made.server.name}, key_file: {made.server_key.name}}}
discovery: {{tls: {{cert_file: {made.client.name}}}}}
"""
    assert file_problems(tmp_path, text) == []


def test_every_bad_file_is_told_with_its_line(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    other = make_certificates(tmp_path / "other")
    (tmp_path / "empty").touch()
    (tmp_path / "lines").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "locked.key").write_bytes(_locked(made.server_key.read_bytes()))
    text = f"""
engines:
  - {{name: a, url: "https://h:1", bearer_token_file: nowhere, tls: {{ca_file: lines}}}}
  - {{name: b, url: "https://h:2", bearer_token_file: empty, tls: {{ca_file: nowhere.pem}}}}
  - {{name: c, url: "https://h:3", basic_auth: {{username: u, password_file: lines}}}}
  - {{name: d, url: "https://h:4", tls: {{cert_file: server.pem, key_file: other/{other.server_key.name}}}}}
  - {{name: e, url: "https://h:5", tls: {{cert_file: server.pem, key_file: locked.key}}}}
  - {{name: f, url: "https://h:6", tls: {{cert_file: server.pem}}}}
web: {{config_file: nowhere.yml}}
"""
    assert_golden(DATA / "bad-files.txt", "\n".join([*file_problems(tmp_path, text), ""]), request)


def _locked(key: bytes) -> bytes:
    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


def test_a_bad_web_configuration_shows_with_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("basic_auth_user: {}\n", encoding="utf-8")
    assert file_problems(tmp_path, "web: {config_file: web.yml}") == [
        'web.yml:1:1: basic_auth_user: unknown key. Did you mean "basic_auth_users"?'
    ]


# --- the models ------------------------------------------------------------------------------------------------


def _all_fields(section: type[Section] = Config) -> Iterator[tuple[type[Section], Described]]:
    for found in described(section).values():
        inner = found.section or found.sections
        yield section, found
        if inner:
            yield from _all_fields(inner)


def test_every_key_is_described_and_every_number_has_limits() -> None:
    for section, found in _all_fields():
        where = f"{section.__name__}.{found.name}"
        if not found.section:
            assert found.info.description, where
            assert found.info.description.endswith((".", " …")), where  # some go on in the next key's
        if found.type in (int, float):
            assert found.limits, where
