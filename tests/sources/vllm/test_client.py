"""One scrape against real servers that behave well, badly, and worse."""

from __future__ import annotations

import gzip
import os
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from oomwatch.observations import NOT_KNOWN, NOT_READ, SCRAPE_STATES, EngineFacts, EngineScrape
from oomwatch.sources.vllm.client import EngineScraper, ScrapeOptions
from tests.sources.vllm.captures import capture
from tests.sources.vllm.servers import Answer, Engine, FakeVllm, Request

PAGE = capture("0.32.0/06")
IDLE = capture("0.32.0/07")
SECRET = "s3cr3t-t0k3n"

Scrape = Callable[..., EngineScrape]


@pytest.fixture
def make_scraper() -> Iterator[Callable[..., EngineScraper]]:
    made: list[EngineScraper] = []

    def make(target: str, **options: object) -> EngineScraper:
        made.append(EngineScraper("chat", target, ScrapeOptions(**options)))  # type: ignore[arg-type]  # tests know them
        return made[-1]

    yield make
    for scraper in made:
        scraper.close()


@pytest.fixture
def scrape_of(make_scraper: Callable[..., EngineScraper]) -> Scrape:
    """Scrape once a server that answers so."""

    def scrape(answer: Answer, path: str = "", **options: object) -> EngineScrape:
        with Engine(answer) as engine:
            result = make_scraper(engine.url + path, **options).scrape()
        assert result.state in SCRAPE_STATES
        assert SECRET not in repr(result)
        return result

    return scrape


# --- what a scrape holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_scrape_holds_the_page_its_meaning_the_version_and_the_health(
    make_scraper: Callable[..., EngineScraper], path: str
) -> None:
    before = time.time()
    with Engine(FakeVllm(PAGE)) as engine:
        result = make_scraper(engine.url + path).scrape()
    assert (result.engine, result.state, result.error, result.answered) == ("chat", "ok", "", True)
    assert (result.version, result.healthy, result.model_name) == ("0.32.0", True, "tiny")
    assert [(rank.usage, rank.running, rank.pool.used) for rank in result.ranks] == [(1, 4, 32)]
    assert result.samples['vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'] == 1
    assert before <= result.t <= time.time()
    assert 0 < result.seconds < 5


def test_a_path_before_metrics_belongs_to_the_other_documents_too(make_scraper: Callable[..., EngineScraper]) -> None:
    with Engine(lambda request: request.reply(PAGE)) as engine:
        make_scraper(engine.url + "/models/a/metrics?tenant=x").scrape()
        assert engine.paths == ["/models/a/metrics?tenant=x", "/models/a/version", "/models/a/health"]


def test_the_clock_is_the_callers() -> None:
    with Engine(FakeVllm(PAGE)) as engine:
        scraper = EngineScraper("chat", engine.url, clock=lambda: 1234.5)
        assert scraper.scrape().t == 1234.5
        scraper.close()


def test_facts_fill_in_what_the_page_lacks(make_scraper: Callable[..., EngineScraper]) -> None:
    with Engine(FakeVllm(PAGE)) as engine:
        result = make_scraper(engine.url).scrape(EngineFacts("chat", kv_pool_blocks=64, kv_connector=True))
    assert (result.ranks[0].pool.blocks, result.kv_connector) == (64, True)


def test_the_version_is_asked_once_and_again_after_each_kind_of_restart(
    make_scraper: Callable[..., EngineScraper],
) -> None:
    vllm = FakeVllm(IDLE, "0.31.0")
    with Engine(vllm) as engine:
        scraper = make_scraper(engine.url)
        versions = [scraper.scrape().version for _ in range(3)]
        assert (versions, engine.paths.count("/version")) == (["0.31.0"] * 3, 1)

        vllm.page, vllm.version = capture("0.32.0/05"), "0.32.0"  # another process, its counters at 0
        assert scraper.scrape().version == "0.32.0"
        assert engine.paths.count("/version") == 2
        scraper.scrape()
        assert engine.paths.count("/version") == 2

        vllm.page, vllm.version = capture("0.32.0/32"), "0.30.0"  # no process_start; counters rose for rank 0
        scraper.scrape()
        vllm.page = capture("0.32.0/30")
        assert scraper.scrape().version == "0.30.0"

    assert scraper.scrape().state == "unreachable"
    vllm.version = "0.33.0"
    with Engine(vllm, engine.port):
        assert scraper.scrape().version == "0.33.0"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"version": 5}', b'{"version": ""}', b'"0.32.0"', b"\xff"])
def test_a_version_that_cannot_be_had_is_unknown_and_no_error(scrape_of: Scrape, body: bytes) -> None:
    result = scrape_of(lambda request: request.reply(PAGE if request.path == "/metrics" else body))
    assert (result.state, result.version, result.error) == ("ok", NOT_KNOWN, "")


def test_a_version_that_could_not_be_had_is_asked_for_again_but_not_each_time(
    make_scraper: Callable[..., EngineScraper],
) -> None:
    vllm = FakeVllm(IDLE, version=None)
    with Engine(vllm) as engine:
        scraper = make_scraper(engine.url)
        for _ in range(8):
            assert scraper.scrape().version == NOT_KNOWN
        assert engine.paths.count("/version") == 1
        vllm.version = "0.32.0"
        assert scraper.scrape().version == "0.32.0"


def test_health_is_asked_every_fourth_time_and_whenever_work_stands_still(
    make_scraper: Callable[..., EngineScraper],
) -> None:
    vllm = FakeVllm(IDLE)
    with Engine(vllm) as engine:
        scraper = make_scraper(engine.url)
        assert [scraper.scrape().healthy for _ in range(6)] == [True, NOT_READ, NOT_READ, NOT_READ, True, NOT_READ]
        vllm.page, vllm.health = capture("0.32.0/60"), 503
        assert scraper.scrape().healthy == NOT_READ  # the first sight of these counters
        assert scraper.scrape().healthy is False


def test_statistics_off_behind_an_empty_page_are_known_by_the_version(scrape_of: Scrape) -> None:
    assert scrape_of(FakeVllm(b"")).state == "stats_disabled"
    assert scrape_of(FakeVllm(capture("0.32.0/52"))).state == "stats_disabled"


def test_another_exporter_is_called_by_its_name(scrape_of: Scrape) -> None:
    result = scrape_of(FakeVllm(b"# TYPE node_load1 gauge\nnode_load1 0.3\n", version=None))
    assert (result.state, result.healthy, result.answered) == ("not_vllm", NOT_READ, False)


def test_openmetrics_is_read_by_its_content_type(scrape_of: Scrape) -> None:
    openmetrics = {"Content-Type": "application/openmetrics-text; version=1.0.0; charset=utf-8"}
    page = b'vllm:kv_cache_usage_perc{engine="0"} 0.5\n# EOF\n'
    assert scrape_of(lambda request: request.reply(page, headers=openmetrics)).ranks[0].usage == 0.5
    assert scrape_of(lambda request: request.reply(page[:-6], headers=openmetrics)).state == "truncated"


# --- answers that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "state", "says"),
    [
        (401, "unauthorized", "bearer_token_file"),
        (403, "unauthorized", "HTTP 403"),
        (404, "http_error", "no page of metrics at this path"),
        (500, "http_error", "HTTP 500"),
        (503, "http_error", "dead"),
        (204, "http_error", "HTTP 204"),
    ],
)
def test_each_status_has_its_state_and_its_sentence(scrape_of: Scrape, status: int, state: str, says: str) -> None:
    result = scrape_of(lambda request: request.reply(b"", status))
    assert result.state == state
    assert says in result.error
    assert result.error.startswith("http://127.0.0.1:")
    assert (result.ranks, result.samples) == ((), {})


def test_a_redirect_is_not_followed_and_no_credentials_leave(scrape_of: Scrape, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(SECRET)
    with Engine(FakeVllm(PAGE)) as elsewhere:
        target = elsewhere.url.replace("://", f"://user:{SECRET}@") + f"/metrics?key={SECRET}"
        result = scrape_of(lambda request: request.reply(b"", 302, {"Location": target}), bearer_token_file=str(token))
        assert elsewhere.paths == []
    assert result.state == "redirected"
    assert elsewhere.url + "/metrics:" in result.error


def test_a_web_page_is_not_taken_for_metrics(scrape_of: Scrape) -> None:
    html = {"Content-Type": "text/html"}
    result = scrape_of(lambda request: request.reply(b"<html>login</html>\n", headers=html))
    assert result.state == "not_metrics"
    assert "HTML" in result.error


def test_a_duplicate_series_spoils_only_this_engine(scrape_of: Scrape) -> None:
    assert scrape_of(FakeVllm(PAGE + b'vllm:num_requests_running{model_name="tiny",engine="0"} 5\n')).state == (
        "duplicate_series"
    )


def test_what_speaks_no_http_is_said_so(scrape_of: Scrape) -> None:
    result = scrape_of(lambda request: (request.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n"), request.hang_up())[1])
    assert (result.state, "does not speak HTTP" in result.error) == ("not_metrics", True)


def test_a_server_that_hangs_up_is_unreachable(scrape_of: Scrape) -> None:
    assert scrape_of(lambda request: request.hang_up()).state == "unreachable"


def test_a_refused_connection_is_unreachable(make_scraper: Callable[..., EngineScraper]) -> None:
    with Engine(FakeVllm(PAGE)) as engine:
        pass
    result = make_scraper(engine.url).scrape()
    assert result.state == "unreachable"
    assert "connection refused" in result.error


def test_a_name_that_does_not_exist_is_unreachable(make_scraper: Callable[..., EngineScraper]) -> None:
    result = make_scraper("http://no-such-engine.invalid:8000", timeout=20).scrape()
    assert (result.state, "name" in result.error) == ("unreachable", True)


@pytest.mark.parametrize(
    "target", ["127.0.0.1:8000", "ftp://h/", "http://", "http://h:99999", "http://h:0", "", "http://[::1"]
)
def test_a_target_that_is_no_url_is_a_mistake_of_the_configuration(
    make_scraper: Callable[..., EngineScraper], target: str
) -> None:
    assert make_scraper(target).scrape().state == "bad_configuration"


@pytest.mark.parametrize("target", ["http://a b/", "http://" + "x" * 70 + ".y/", "http://*/"])
def test_a_target_that_cannot_be_asked_never_raises(make_scraper: Callable[..., EngineScraper], target: str) -> None:
    assert make_scraper(target).scrape().state in ("bad_configuration", "unreachable")


# --- too slow, too large, cut off ------------------------------------------------------------------------------------


def slow_headers(request: Request) -> None:
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    request.drip(b"x", 0.05)


def slow_body(request: Request) -> None:
    request.begin(200, {"Content-Type": "text/plain"})
    request.drip(b"x 1\n", 0.05)


def slow_body_of_known_length(request: Request) -> None:
    request.begin(200, {"Content-Type": "text/plain", "Content-Length": "100000"})
    request.drip(b"x 1\n", 0.05)


def slow_chunks(request: Request) -> None:
    request.begin(200, {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"})
    request.drip(b"4\r\nx 1\n\r\n", 0.05)


@pytest.mark.parametrize("answer", [Request.hang, slow_headers, slow_body, slow_body_of_known_length, slow_chunks])
def test_the_deadline_is_for_the_whole_scrape_however_the_server_drips(scrape_of: Scrape, answer: Answer) -> None:
    start = time.monotonic()
    result = scrape_of(answer, timeout=0.5)
    assert result.state == "timeout"
    assert "within 0.5 s" in result.error
    assert 0.4 < time.monotonic() - start < 3


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_never_takes_the_connection_up_is_a_timeout(
    make_scraper: Callable[..., EngineScraper], scheme: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        result = make_scraper(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}", timeout=0.5).scrape()
    assert (result.state, result.seconds < 3) == ("timeout", True)


def test_a_slow_version_costs_the_page_nothing(scrape_of: Scrape) -> None:
    result = scrape_of(
        lambda request: request.reply(PAGE) if request.path == "/metrics" else request.hang(), timeout=0.5
    )
    assert (result.state, result.version, result.healthy) == ("ok", NOT_KNOWN, NOT_KNOWN)
    assert result.seconds < 3


def test_a_page_that_says_it_is_too_large_is_not_begun(scrape_of: Scrape) -> None:
    def answer(request: Request) -> None:
        request.begin(200, {"Content-Type": "text/plain", "Content-Length": str(10**12)})
        request.hang()

    result = scrape_of(answer, max_page_bytes=100_000)
    assert result.state == "too_large"
    assert "100000" in result.error


def test_an_endless_page_is_left_at_the_limit(scrape_of: Scrape) -> None:
    sent = 0

    def endless(request: Request) -> None:
        nonlocal sent
        request.begin(200, {"Content-Type": "text/plain", "Connection": "close"})
        while sent < 200_000_000:
            sent += request.wfile.write(b"x 1\n" * 10_000)

    assert scrape_of(endless, max_page_bytes=100_000).state == "too_large"
    assert sent < 50_000_000


def test_a_small_answer_that_unpacks_to_gigabytes_is_left_at_the_limit(scrape_of: Scrape) -> None:
    bomb = gzip.compress(b"x 1\n" * 25_000_000, 9)  # 100 MB in 0.1 MB
    assert len(bomb) < 400_000
    tracemalloc.start()
    try:
        result = scrape_of(
            lambda request: request.reply(bomb, headers={"Content-Encoding": "gzip"}), max_page_bytes=2**20
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.state == "too_large"
    assert peak < 10_000_000


def test_a_compressed_page_is_understood_though_not_asked_for(scrape_of: Scrape) -> None:
    result = scrape_of(lambda request: request.reply(gzip.compress(PAGE), headers={"Content-Encoding": "gzip"}))
    assert (result.state, len(result.ranks)) == ("ok", 1)


@pytest.mark.parametrize(("body", "state"), [(gzip.compress(PAGE)[:-20], "truncated"), (PAGE, "not_metrics")])
def test_a_broken_compressed_page_is_refused(scrape_of: Scrape, body: bytes, state: str) -> None:
    assert scrape_of(lambda request: request.reply(body, headers={"Content-Encoding": "gzip"})).state == state


def test_a_compression_that_nobody_asked_for_is_refused(scrape_of: Scrape) -> None:
    assert scrape_of(lambda request: request.reply(PAGE, headers={"Content-Encoding": "br"})).state == "not_metrics"


def between_lines(page: bytes) -> bytes:
    return page[: page.index(b"\n", len(page) // 2) + 1]


def test_an_answer_shorter_than_it_said_is_truncated_even_between_two_lines(scrape_of: Scrape) -> None:
    def answer(request: Request) -> None:
        request.begin(200, {"Content-Type": "text/plain", "Content-Length": str(len(PAGE))})
        request.wfile.write(between_lines(PAGE))
        request.hang_up()

    result = scrape_of(answer)
    assert result.state == "truncated"
    assert str(len(PAGE)) in result.error


def test_a_chunked_answer_without_its_end_is_truncated_even_between_two_lines(scrape_of: Scrape) -> None:
    def answer(request: Request) -> None:
        request.begin(200, {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"})
        part = between_lines(PAGE)
        request.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        request.hang_up()

    assert scrape_of(answer).state == "truncated"


# --- credentials, proxies, connections -------------------------------------------------------------------------------


def authorization(engine: Engine) -> str | None:
    return engine.headers[-1].get("Authorization")


def test_a_bearer_token_is_read_anew_when_its_file_changes(
    make_scraper: Callable[..., EngineScraper], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with Engine(FakeVllm(IDLE)) as engine:
        scraper = make_scraper(engine.url, bearer_token_file=str(token))
        scraper.scrape()
        assert authorization(engine) == "Bearer first"
        replacement = tmp_path / "new"
        replacement.write_text("second")
        os.replace(replacement, token)
        scraper.scrape()
        assert authorization(engine) == "Bearer second"


def test_basic_authentication_takes_its_password_from_a_file(
    make_scraper: Callable[..., EngineScraper], tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text(" pässword \n")
    with Engine(FakeVllm(IDLE)) as engine:
        make_scraper(engine.url, username="sre", password_file=str(password)).scrape()
        assert authorization(engine) == "Basic c3JlOiBww6Rzc3dvcmQg"


def test_credentials_in_the_url_are_used_and_never_shown(make_scraper: Callable[..., EngineScraper]) -> None:
    with Engine(FakeVllm(IDLE)) as engine:
        target = engine.url.replace("://", f"://u:{SECRET}@")
        assert make_scraper(target).scrape().state == "ok"
        assert authorization(engine) == "Basic dTpzM2NyM3QtdDBrM24="
    result = make_scraper(target).scrape()
    assert result.state == "unreachable"
    assert SECRET not in repr(result)


@pytest.mark.parametrize("content", [None, "", f"{SECRET} {SECRET}", f"{SECRET}\nX-Evil: 1", f"{SECRET}é", b"\xff"])
def test_a_file_without_a_token_is_a_mistake_of_the_configuration(
    scrape_of: Scrape, tmp_path: Path, content: str | bytes | None
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = scrape_of(FakeVllm(PAGE), bearer_token_file=str(token))
    assert result.state == "bad_configuration"
    assert str(token) in result.error


def test_headers_of_the_configuration_are_sent(make_scraper: Callable[..., EngineScraper]) -> None:
    with Engine(FakeVllm(IDLE)) as engine:
        make_scraper(engine.url, headers={"X-Tenant": "a"}).scrape()
        assert engine.headers[0]["X-Tenant"] == "a"
        assert engine.headers[0]["User-Agent"].startswith("oomwatch/")
        assert engine.headers[0]["Accept-Encoding"] == "identity"


def test_proxies_of_the_environment_are_ignored_and_configured_ones_used(
    make_scraper: Callable[..., EngineScraper], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login u password {SECRET}\n")
    with Engine(FakeVllm(PAGE)) as proxy, Engine(FakeVllm(PAGE)) as engine:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("NETRC", str(netrc))
        assert make_scraper(engine.url).scrape().state == "ok"
        assert (proxy.paths, authorization(engine)) == ([], None)

        monkeypatch.setenv("no_proxy", "*")
        make_scraper(engine.url, proxy_url=proxy.url).scrape()
        assert proxy.paths[0] == f"{engine.url}/metrics"


def test_one_connection_serves_all_scrapes_and_a_restart_is_not_an_error(
    make_scraper: Callable[..., EngineScraper],
) -> None:
    with Engine(FakeVllm(IDLE)) as engine:
        scraper = make_scraper(engine.url)
        for _ in range(3):
            assert scraper.scrape().state == "ok"
        assert (engine.connections, len(engine.paths)) == (1, 5)
    with Engine(FakeVllm(IDLE), engine.port) as engine:
        assert scraper.scrape().state == "ok"


def test_a_kept_connection_that_the_server_closes_on_the_next_request_is_tried_once_more(
    make_scraper: Callable[..., EngineScraper],
) -> None:
    closing = False

    def answer(request: Request) -> None:
        nonlocal closing
        if closing:
            closing = False
            request.hang_up()
        else:
            request.reply(IDLE)

    with Engine(answer) as engine:
        scraper = make_scraper(engine.url)
        scraper.scrape()
        closing = True
        assert scraper.scrape().state == "ok"
        assert engine.connections == 2


def test_a_scrape_after_a_timeout_gets_a_fresh_connection(make_scraper: Callable[..., EngineScraper]) -> None:
    hanging = True
    with Engine(lambda request: request.hang() if hanging else request.reply(IDLE)) as engine:
        scraper = make_scraper(engine.url, timeout=0.5)
        assert scraper.scrape().state == "timeout"
        hanging = False
        assert scraper.scrape().state == "ok"


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return str(tmp_path / "ca.pem")


def server_context(authority: trustme.CA, clients: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    if clients:
        context.verify_mode = ssl.CERT_REQUIRED
        authority.configure_trust(context)
    return context


def test_a_certificate_of_the_configured_authority_is_trusted(
    make_scraper: Callable[..., EngineScraper], authority: trustme.CA, ca_file: str
) -> None:
    with Engine(FakeVllm(PAGE), tls=server_context(authority)) as engine:
        assert make_scraper(engine.url, ca_file=ca_file).scrape().state == "ok"


def test_the_environment_changes_no_trust(
    make_scraper: Callable[..., EngineScraper], authority: trustme.CA, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.setenv(name, ca_file)
    with Engine(FakeVllm(PAGE), tls=server_context(authority)) as engine:
        result = make_scraper(engine.url).scrape()
    assert result.state == "tls_error"
    assert "not trusted" in result.error
    assert "ca_file" in result.error


def test_a_certificate_of_another_authority_or_for_another_host_is_refused(
    make_scraper: Callable[..., EngineScraper], authority: trustme.CA, ca_file: str
) -> None:
    with Engine(FakeVllm(PAGE), tls=server_context(trustme.CA())) as engine:
        assert make_scraper(engine.url, ca_file=ca_file).scrape().state == "tls_error"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("another.example").configure_cert(context)
    with Engine(FakeVllm(PAGE), tls=context) as engine:
        result = make_scraper(engine.url, ca_file=ca_file).scrape()
        assert (result.state, "127.0.0.1" in result.error) == ("tls_error", True)
        assert make_scraper(engine.url, insecure_skip_verify=True).scrape().state == "ok"


def test_a_changed_authority_is_taken_up_without_a_restart(
    make_scraper: Callable[..., EngineScraper], authority: trustme.CA, ca_file: str
) -> None:
    other = trustme.CA()
    with Engine(FakeVllm(IDLE), tls=server_context(authority)) as engine:
        scraper = make_scraper(engine.url, ca_file=ca_file)
        assert scraper.scrape().state == "ok"
        other.cert_pem.write_to_path(ca_file)
        assert scraper.scrape().state == "tls_error"
        authority.cert_pem.write_to_path(ca_file)
        assert scraper.scrape().state == "ok"


def test_a_client_certificate_opens_what_asks_for_one(
    make_scraper: Callable[..., EngineScraper], authority: trustme.CA, ca_file: str, tmp_path: Path
) -> None:
    client = authority.issue_cert("oomwatch@example.org")
    both, cert, key = (str(tmp_path / name) for name in ("both.pem", "cert.pem", "key.pem"))
    client.private_key_and_cert_chain_pem.write_to_path(both)
    client.cert_chain_pems[0].write_to_path(cert)
    client.private_key_pem.write_to_path(key)
    with Engine(FakeVllm(PAGE), tls=server_context(authority, clients=True)) as engine:
        assert make_scraper(engine.url, ca_file=ca_file, cert_file=both).scrape().state == "ok"
        assert make_scraper(engine.url, ca_file=ca_file, cert_file=cert, key_file=key).scrape().state == "ok"

    context = server_context(authority, clients=True)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # later versions may refuse only after the handshake, by a reset
    with Engine(FakeVllm(PAGE), tls=context) as engine:
        result = make_scraper(engine.url, ca_file=ca_file).scrape()
    assert result.state == "tls_error"
    assert "client certificate" in result.error


def test_http_and_https_taken_for_each_other_are_said_so(
    make_scraper: Callable[..., EngineScraper], authority: trustme.CA
) -> None:
    with Engine(FakeVllm(PAGE)) as engine:
        result = make_scraper(engine.url.replace("http", "https")).scrape()
        assert (result.state, "http://" in result.error) == ("tls_error", True)
    with Engine(FakeVllm(PAGE), tls=server_context(authority)) as engine:
        assert make_scraper(engine.url.replace("https", "http")).scrape().state in ("unreachable", "not_metrics")


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_certificate_files_that_cannot_be_used_are_mistakes_of_the_configuration(
    make_scraper: Callable[..., EngineScraper], tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    for options in ({"ca_file": str(file)}, {"cert_file": str(file)}):
        result = make_scraper("https://127.0.0.1:1", **options).scrape()
        assert result.state == "bad_configuration"
        assert str(file) in result.error


@pytest.mark.parametrize("answer", [slow_body, slow_headers])
def test_the_deadline_holds_over_tls_too(
    make_scraper: Callable[..., EngineScraper], authority: trustme.CA, ca_file: str, answer: Answer
) -> None:
    with Engine(answer, tls=server_context(authority)) as engine:
        result = make_scraper(engine.url, ca_file=ca_file, timeout=0.7).scrape()
    assert (result.state, result.seconds < 3) == ("timeout", True)


def test_scrapes_leave_no_threads_and_no_connections_behind(make_scraper: Callable[..., EngineScraper]) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Engine(FakeVllm(IDLE)) as engine:
        scraper = make_scraper(engine.url)
        scraper.scrape()
        threads, open_files = threading.active_count(), descriptors()
        for _ in range(50):
            scraper.scrape()
        assert threading.active_count() <= threads + 1  # a cancelled timer may be on its way out
        assert descriptors() <= open_files
