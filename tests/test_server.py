"""The HTTP server over real sockets: what it answers, to whom, and that no client can take it from the others."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest
import requests
import structlog
import yaml

from oomwatch.connections import CannotListen, Limits
from oomwatch.exposition import render
from oomwatch.server import WebServer
from oomwatch.settings import ConfigError
from oomwatch.snapshot import HeldProcess, Holder, Snapshot
from tests import snapshots
from tests.certificates import Certificates, make_certificates
from tests.exposed import everything

TIMEOUT = 10.0
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"

StartServer = Callable[..., WebServer]


def nothing_wrong() -> str:
    return ""


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """A function that starts a server on a free port of 127.0.0.1; all are stopped after the test."""
    with contextlib.ExitStack() as running:

        def start(
            *,
            listen: tuple[str, ...] = ("127.0.0.1:0",),
            snapshot: Snapshot | None = None,
            render_page: Callable[[str], tuple[bytes, str]] | None = None,
            healthy: Callable[[], str] = nothing_wrong,
            ready: Callable[[], str] = nothing_wrong,
            reload: Callable[[], str] = nothing_wrong,
            release: Callable[[], str] = nothing_wrong,
            web_config: Path | None = None,
            enable_lifecycle: bool = False,
            max_requests: int = 40,
            limits: Limits | None = None,
        ) -> WebServer:
            shown = snapshot or snapshots.full()
            families = everything(shown)
            server = WebServer(
                listen=listen,
                snapshot=lambda: shown,
                render=render_page or (lambda accept: render(families, accept)),
                healthy=healthy,
                ready=ready,
                reload=reload,
                release=release,
                web_config=web_config,
                enable_lifecycle=enable_lifecycle,
                max_requests=max_requests,
                clock=lambda: snapshots.NOW + 2,
                limits=limits,
            )
            server.start()
            running.callback(server.stop, 1.0)
            return server

        yield start


def url(server: WebServer, path: str = "/") -> str:
    return server.urls[0].rstrip("/") + path


def get(server: WebServer, path: str = "/", **headers: str) -> requests.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.get(url(server, path), headers=named, timeout=TIMEOUT)


def connect(server: WebServer) -> socket.socket:
    host, _, port = server.addresses[0].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT)


def read_to_end(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def exchange(server: WebServer, sent: bytes) -> bytes:
    """What comes back for these bytes until the server closes."""
    with connect(server) as sock:
        sock.sendall(sent)
        return read_to_end(sock)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"after {TIMEOUT:g} s still not: {what}"
        time.sleep(0.02)


# --- what is served --------------------------------------------------------------------------------------------


def test_metrics_come_in_the_format_that_the_client_accepts(start_server: StartServer) -> None:
    server = start_server()
    plain, openmetrics = get(server, "/metrics"), get(server, "/metrics", Accept=OPENMETRICS)
    assert plain.status_code == openmetrics.status_code == 200
    assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert openmetrics.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.text.endswith("# EOF\n")
    assert 'oomwatch_gpu_memory_used_bytes{gpu="GPU-00000000' in plain.text


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate, gzip;q=0.5", "gzip"),
        ("*", "gzip"),
        ("identity", None),
        ("gzip;q=0", None),
        ("gzip;q=nonsense", None),
        ("", None),
    ],
)
def test_answers_are_compressed_for_clients_that_ask_for_it(
    start_server: StartServer, accepted: str, encoding: str | None
) -> None:
    server = start_server()
    whole = exchange(
        server, f"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept-Encoding: {accepted}\r\n\r\n".encode()
    )
    head, _, body = whole.partition(b"\r\n\r\n")
    assert (b"Content-Encoding: gzip" in head) == (encoding == "gzip")
    text = gzip.decompress(body) if encoding else body
    assert b"oomwatch_build_info" in text
    assert b"Vary: Accept, Accept-Encoding, Authorization" in head


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/v1/status", "/-/healthy", "/-/ready"])
def test_head_gives_the_headers_of_get_without_its_body(start_server: StartServer, path: str) -> None:
    server = start_server(render_page=lambda _: (b"same 1\n" * 500, "text/plain"))
    with requests.Session() as session:
        got = session.get(url(server, path), timeout=TIMEOUT)
        head = session.head(url(server, path), timeout=TIMEOUT)
        again = session.get(url(server, path), timeout=TIMEOUT)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == got.headers["Content-Length"]
    assert again.status_code == 200, "the connection is still in step"


def test_the_status_is_json_of_the_snapshot(start_server: StartServer) -> None:
    answer = get(start_server(), "/api/v1/status")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json()["api_version"] == 1
    assert [engine["name"] for engine in answer.json()["engines"]] == ["llama-8b", "sliced"]


def test_the_status_survives_names_that_are_no_utf8(start_server: StartServer) -> None:
    odd = HeldProcess(1, 1, Holder("unknown"), os.fsdecode(b"odd-\xff"))
    server = start_server(snapshot=Snapshot(t=snapshots.NOW, gpus=(snapshots.gpu(0, (odd,)),)))
    assert json.loads(get(server, "/api/v1/status").text)["gpus"][0]["processes"][0]["pid"] == 1
    assert get(server, "/").status_code == 200


@pytest.mark.parametrize("path", ["/-/healthy", "/-/ready"])
def test_health_is_a_status_with_a_sentence(start_server: StartServer, path: str) -> None:
    problem = ""
    server = start_server(healthy=lambda: problem, ready=lambda: problem)
    assert get(server, path).status_code == 200
    problem = "GPUs have not been read yet"
    assert (get(server, path).status_code, get(server, path).text) == (503, f"{problem}\n")


@pytest.mark.parametrize("path", ["/nope", "/metrics/", "/index.html", "//metrics", "/%2e%2e/etc/passwd", "/api/v1"])
def test_unknown_paths_get_a_page_with_the_known_ones(start_server: StartServer, path: str) -> None:
    server = start_server()
    answer = exchange(server, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
    assert answer.startswith(b"HTTP/1.1 400 ") or b'<a href="/metrics">/metrics</a>' in answer


def test_a_path_is_never_repeated_to_the_client(start_server: StartServer) -> None:
    assert "alert(1)" not in get(start_server(), "/<script>alert(1)</script>").text


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/metrics", "GET, HEAD"),
        ("DELETE", "/", "GET, HEAD"),
        ("OPTIONS", "/api/v1/status", "GET, HEAD"),
        ("GET", "/-/reload", "POST"),
        ("HEAD", "/-/release", "POST"),
    ],
)
def test_other_methods_are_refused_with_those_allowed(
    start_server: StartServer, method: str, path: str, allowed: str
) -> None:
    answer = requests.request(method, url(start_server(enable_lifecycle=True), path), timeout=TIMEOUT)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)


def test_a_failing_page_gives_no_traceback_to_the_client(start_server: StartServer) -> None:
    def fail(_accept: str) -> tuple[bytes, str]:
        raise RuntimeError("secret detail")

    server = start_server(render_page=fail)
    with structlog.testing.capture_logs() as lines:
        answer = get(server, "/metrics")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert [line["event"] for line in lines] == ["could not answer a request"]
    assert get(server, "/-/healthy").status_code == 200


def test_every_answer_has_the_security_headers(start_server: StartServer) -> None:
    server = start_server()
    for path in ("/", "/metrics", "/nope", "/-/reload"):
        headers = get(server, path).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


def noting(done: list[str], action: str) -> Callable[[], str]:
    def act() -> str:
        done.append(action)
        return ""

    return act


# --- actions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["reload", "release"])
class TestActions:
    def test_are_refused_unless_switched_on(self, start_server: StartServer, action: str) -> None:
        done: list[str] = []
        server = start_server(**{action: noting(done, action)})
        answer = requests.post(url(server, f"/-/{action}"), timeout=TIMEOUT)
        assert answer.status_code == 403
        assert "--web.enable-lifecycle" in answer.text
        assert not done

    def test_are_done_once_for_each_post(self, start_server: StartServer, action: str) -> None:
        done: list[str] = []
        server = start_server(enable_lifecycle=True, **{action: noting(done, action)})
        assert requests.post(url(server, f"/-/{action}"), timeout=TIMEOUT).status_code == 200
        assert requests.post(url(server, f"/-/{action}"), data="x" * 100, timeout=TIMEOUT).status_code == 200
        assert done == [action, action]

    def test_say_what_went_wrong(self, start_server: StartServer, action: str) -> None:
        server = start_server(enable_lifecycle=True, **{action: lambda: "line 3: unknown key"})
        answer = requests.post(url(server, f"/-/{action}"), timeout=TIMEOUT)
        assert (answer.status_code, answer.text) == (500, "line 3: unknown key\n")

    @pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}])
    def test_are_refused_to_pages_of_other_sites(
        self, start_server: StartServer, action: str, headers: dict[str, str]
    ) -> None:
        done: list[str] = []
        server = start_server(enable_lifecycle=True, **{action: noting(done, action)})
        answer = requests.post(url(server, f"/-/{action}"), headers=headers, timeout=TIMEOUT)
        assert answer.status_code == 403
        assert not done


# --- many and bad clients --------------------------------------------------------------------------------------


def test_parallel_scrapes_give_the_same_page(start_server: StartServer) -> None:
    server = start_server()
    ours = [
        line
        for line in get(server, "/metrics").text.splitlines()
        if line.startswith("oomwatch_") and "self" not in line
    ]

    def scrape(_: int) -> list[str]:
        return [line for line in get(server, "/metrics").text.splitlines() if line in expected]

    expected = set(ours)
    with ThreadPoolExecutor(8) as pool:
        for lines in pool.map(scrape, range(24)):
            assert lines == ours


def test_requests_over_the_limit_are_told_to_come_again(start_server: StartServer) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def slow(_accept: str) -> tuple[bytes, str]:
        begun.release()
        assert may_end.wait(TIMEOUT)
        return b"", "text/plain"

    server = start_server(render_page=slow, max_requests=2)
    with ThreadPoolExecutor(2) as pool:
        slow_ones = [pool.submit(get, server, "/metrics") for _ in range(2)]
        try:
            assert begun.acquire(timeout=TIMEOUT)
            assert begun.acquire(timeout=TIMEOUT)
            refused = get(server, "/metrics")
            health = get(server, "/-/healthy")
        finally:
            may_end.set()
        assert [answer.result(TIMEOUT).status_code for answer in slow_ones] == [200, 200]
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert health.status_code == 200, "a busy daemon is a healthy one"
    assert get(server, "/metrics").status_code == 200


def test_requests_that_no_thread_is_left_for_are_told_to_come_again(start_server: StartServer) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def slow() -> str:
        begun.release()
        assert may_end.wait(TIMEOUT)
        return ""

    server = start_server(healthy=slow, limits=Limits(workers=1, waiting=1))
    with ThreadPoolExecutor(2) as pool:
        slow_ones = [pool.submit(get, server, "/-/healthy")]
        try:
            assert begun.acquire(timeout=TIMEOUT)
            with connect(server) as second:
                second.sendall(b"GET /-/ready HTTP/1.0\r\n\r\n")
                eventually(lambda: get(server, "/").status_code == 503, "the queue is full")
                may_end.set()
                assert read_to_end(second).startswith(b"HTTP/1.1 200 OK")
        finally:
            may_end.set()
        assert slow_ones[0].result(TIMEOUT).status_code == 200


def test_clients_that_send_slowly_keep_nobody_waiting_and_are_closed(start_server: StartServer) -> None:
    server = start_server(limits=Limits(request_seconds=1.0, workers=2))
    with contextlib.ExitStack() as sockets:
        slow = [sockets.enter_context(connect(server)) for _ in range(60)]
        for sock in slow:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        start = time.monotonic()
        assert get(server, "/metrics").status_code == 200
        assert time.monotonic() - start < 1.0, "served while sixty others are half-way"
        # A byte now and then wins no time.
        while time.monotonic() - start < 1.5:
            with contextlib.suppress(OSError):
                slow[0].sendall(b"x")
            time.sleep(0.1)
        assert read_to_end(slow[1]).startswith(b"HTTP/1.1 408 Request Timeout")
        eventually(lambda: _is_closed(slow[0]), "the one that sent bytes all the time is closed too")


def test_a_client_that_does_not_read_its_answer_is_closed(start_server: StartServer) -> None:
    large = (b"x" * 64 * 1024 * 1024, "text/plain")
    server = start_server(render_page=lambda _: large, limits=Limits(response_seconds=0.5, workers=1))
    with connect(server) as lazy:
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert get(server, "/-/healthy").status_code == 200, "the only thread is free again"
        eventually(lambda: _is_closed(lazy), "the lazy client is closed")


def _is_closed(sock: socket.socket) -> bool:
    """Whether the peer has closed or reset; nothing is read from the socket."""
    established = 1  # the kernel's TCP_ESTABLISHED
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != established


def test_the_oldest_silent_client_gives_way_when_there_are_too_many(start_server: StartServer) -> None:
    server = start_server(limits=Limits(connections=5))
    with contextlib.ExitStack() as sockets:
        silent = [sockets.enter_context(connect(server)) for _ in range(20)]
        assert get(server, "/-/healthy").status_code == 200
        assert silent[0].recv(1) == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"a" * 40_000, 431),
        (b"POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", 413),
        (b"POST /-/reload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
def test_what_is_no_reasonable_request_is_refused(start_server: StartServer, sent: bytes, status: int) -> None:
    server = start_server()
    assert exchange(server, sent).split(b" ", 2)[1] == str(status).encode()
    assert get(server, "/-/healthy").status_code == 200


def test_requests_sent_in_one_go_are_answered_in_order(start_server: StartServer) -> None:
    answers = exchange(
        start_server(),
        b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
        b"POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        b"GET /-/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    )
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"403", b"200"]
    assert answers.endswith(b"oomwatch is ready.\n")


def test_a_client_that_leaves_half_way_costs_nothing(start_server: StartServer) -> None:
    server = start_server(render_page=lambda _: (b"x" * 10_000_000, "text/plain"))
    for _ in range(20):
        with connect(server) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert get(server, "/-/healthy").status_code == 200


# --- addresses, start and stop ---------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


def test_several_addresses_are_served_at_once(start_server: StartServer) -> None:
    server = start_server(listen=("127.0.0.1:0", "127.0.0.2:0", "localhost:0"))
    assert len(server.addresses) >= 3
    for address in server.urls:
        assert requests.get(f"{address}-/healthy", timeout=TIMEOUT).status_code == 200


@needs_ipv6
def test_a_port_alone_serves_both_families(start_server: StartServer) -> None:
    server = start_server(listen=(":0",))
    assert len(server.addresses) == 1
    port = server.addresses[0].rpartition(":")[2]
    for host in ("127.0.0.1", "[::1]"):
        assert requests.get(f"http://{host}:{port}/-/healthy", timeout=TIMEOUT).status_code == 200


@needs_ipv6
def test_an_ipv6_address_is_given_in_brackets(start_server: StartServer) -> None:
    server = start_server(listen=("[::1]:0",))
    assert server.addresses[0].startswith("[::1]:")
    assert get(server, "/-/healthy").status_code == 200


def test_a_taken_port_is_named_with_what_to_do(start_server: StartServer) -> None:
    taken = start_server().addresses[0]
    with pytest.raises(CannotListen) as raised:
        start_server(listen=("127.0.0.1:0", taken))
    assert taken in str(raised.value)
    assert f"sport = :{taken.rpartition(':')[2]}" in str(raised.value)
    assert "--web.listen-address" in str(raised.value)


def test_a_port_taken_by_one_family_alone_is_an_error_too(start_server: StartServer) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        with pytest.raises(CannotListen, match="taken"):
            start_server(listen=(f":{other.getsockname()[1]}",))


@pytest.mark.parametrize(
    ("address", "reason"),
    [("192.0.2.1:0", "no such address"), ("no-such-host.invalid:0", "not known"), ("9835", "write host:port")],
)
def test_addresses_that_cannot_be_had_say_why(start_server: StartServer, address: str, reason: str) -> None:
    with pytest.raises(CannotListen, match=reason):
        start_server(listen=(address,))


def test_stopping_closes_idle_connections_at_once(start_server: StartServer) -> None:
    server = start_server()
    with requests.Session() as session, connect(server) as silent, connect(server) as half:
        assert session.get(url(server, "/-/healthy"), timeout=TIMEOUT).status_code == 200
        half.sendall(b"GET / HT")
        start = time.monotonic()
        server.stop(timeout=5.0)
        assert time.monotonic() - start < 1.0
        assert silent.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def test_stopping_lets_a_request_in_work_end(start_server: StartServer) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(_accept: str) -> tuple[bytes, str]:
        begun.set()
        assert may_end.wait(TIMEOUT)
        return b"done 1\n", "text/plain"

    server = start_server(render_page=slow)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(get, server, "/metrics")
        assert begun.wait(TIMEOUT)
        stopped = pool.submit(server.stop, TIMEOUT)
        eventually(lambda: _refuses(server), "the server listens no more")
        may_end.set()
        assert answer.result(TIMEOUT).text == "done 1\n"
        stopped.result(TIMEOUT)


def _refuses(server: WebServer) -> bool:
    try:
        connect(server).close()
    except ConnectionRefusedError:
        return True
    return False


def test_stopping_does_not_wait_for_a_request_that_hangs(start_server: StartServer) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hang(_accept: str) -> tuple[bytes, str]:
        begun.set()
        may_end.wait(TIMEOUT)
        return b"", "text/plain"

    server = start_server(render_page=hang)
    try:
        with connect(server) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert begun.wait(TIMEOUT)
            start = time.monotonic()
            server.stop(timeout=0.3)
            assert time.monotonic() - start < 1.5
            assert sock.recv(1) == b""
    finally:
        may_end.set()


# --- TLS and passwords -----------------------------------------------------------------------------------------


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "certificates")


@pytest.fixture
def web_file(tmp_path: Path) -> Path:
    return tmp_path / "web.yml"


def tls_of(certificates: Certificates, **more: object) -> dict[str, object]:
    return {"cert_file": str(certificates.server), "key_file": str(certificates.server_key), **more}


def write(path: Path, content: object) -> None:
    """Replace the file as editors and Kubernetes do: by a new one under the same name."""
    new = path.with_suffix(".new")
    new.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    new.replace(path)


def hashed(password: str) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()


def shown_certificate(server: WebServer, certificates: Certificates) -> bytes:
    context = ssl.create_default_context(cafile=str(certificates.ca))
    with connect(server) as sock, context.wrap_socket(sock, server_hostname="localhost") as secure:
        return secure.getpeercert(binary_form=True) or b""


class TestTls:
    def test_the_page_is_served_through_it(
        self, start_server: StartServer, certificates: Certificates, web_file: Path
    ) -> None:
        write(web_file, {"tls_server_config": tls_of(certificates)})
        server = start_server(web_config=web_file)
        assert server.urls[0].startswith("https://")
        with requests.Session() as session:
            session.trust_env = False  # REQUESTS_CA_BUNDLE would win over the session's own authority
            session.verify = str(certificates.ca)
            for _ in range(3):
                answer = session.get(url(server, "/metrics"), timeout=TIMEOUT)
                assert answer.status_code == 200
                assert b"oomwatch_build_info" in answer.content

    def test_versions_before_1_2_are_refused(
        self, start_server: StartServer, certificates: Certificates, web_file: Path
    ) -> None:
        write(web_file, {"tls_server_config": tls_of(certificates)})
        server = start_server(web_config=web_file)
        context = ssl.create_default_context(cafile=str(certificates.ca))
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            context.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("DEFAULT@SECLEVEL=0")
        with connect(server) as sock, pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(sock, server_hostname="localhost")
        assert shown_certificate(server, certificates)

    def test_plain_http_is_told_to_use_https(
        self, start_server: StartServer, certificates: Certificates, web_file: Path
    ) -> None:
        write(web_file, {"tls_server_config": tls_of(certificates)})
        answer = exchange(start_server(web_config=web_file), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 Bad Request")
        assert b"https://" in answer

    def test_stalled_handshakes_keep_nobody_waiting_and_are_closed(
        self, start_server: StartServer, certificates: Certificates, web_file: Path
    ) -> None:
        write(web_file, {"tls_server_config": tls_of(certificates)})
        server = start_server(web_config=web_file, limits=Limits(request_seconds=1.0, workers=1))
        with contextlib.ExitStack() as sockets:
            stalled = [sockets.enter_context(connect(server)) for _ in range(30)]
            for sock in stalled:
                sock.sendall(b"\x16\x03\x01")
            start = time.monotonic()
            assert shown_certificate(server, certificates)
            assert time.monotonic() - start < 1.0
            assert read_to_end(stalled[-1]) == b""

    def test_a_large_answer_comes_whole(
        self, start_server: StartServer, certificates: Certificates, web_file: Path
    ) -> None:
        write(web_file, {"tls_server_config": tls_of(certificates)})
        large = os.urandom(5_000_000)
        server = start_server(web_config=web_file, render_page=lambda _: (large, "application/octet-stream"))
        answer = requests.get(url(server, "/metrics"), verify=str(certificates.ca), timeout=TIMEOUT)
        assert answer.content == large

    def test_clients_need_a_certificate_where_it_says_so(
        self, start_server: StartServer, certificates: Certificates, web_file: Path
    ) -> None:
        clients = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(certificates.ca)}
        write(web_file, {"tls_server_config": tls_of(certificates, **clients)})
        server = start_server(web_config=web_file)
        ca = str(certificates.ca)
        known = requests.get(url(server), verify=ca, cert=str(certificates.client), timeout=TIMEOUT)
        assert known.status_code == 200
        stranger = make_certificates(web_file.parent / "stranger").client
        with pytest.raises(requests.exceptions.ConnectionError):
            requests.get(url(server), verify=ca, cert=str(stranger), timeout=TIMEOUT)
        with pytest.raises(requests.exceptions.ConnectionError):
            requests.get(url(server), verify=ca, timeout=TIMEOUT)

    def test_a_new_certificate_is_shown_to_new_clients(
        self, start_server: StartServer, certificates: Certificates, web_file: Path
    ) -> None:
        write(web_file, {"tls_server_config": tls_of(certificates)})
        server = start_server(web_config=web_file)
        before = shown_certificate(server, certificates)
        renewed = certificates.authority.issue_cert("localhost", "127.0.0.1")
        # Both in one file, so that no moment shows one's certificate with the other's key.
        both = web_file.parent / "renewed.pem"
        renewed.private_key_and_cert_chain_pem.write_to_path(str(both))
        write(web_file, {"tls_server_config": {"cert_file": str(both), "key_file": str(both)}})
        assert shown_certificate(server, certificates) not in (before, b"")

    def test_a_broken_certificate_leaves_the_old_one(
        self, start_server: StartServer, certificates: Certificates, web_file: Path
    ) -> None:
        write(web_file, {"tls_server_config": tls_of(certificates)})
        server = start_server(web_config=web_file)
        before = shown_certificate(server, certificates)
        write(certificates.server, "no certificate")
        assert shown_certificate(server, certificates) == before

    def test_a_wrong_file_at_the_start_is_an_error(self, start_server: StartServer, web_file: Path) -> None:
        write(web_file, {"tls_server_config": {"cert_file": "missing.pem", "key_file": "missing.pem"}})
        with pytest.raises(ConfigError, match=r"tls_server_config\.cert_file"):
            start_server(web_config=web_file)


class TestPasswords:
    def test_are_asked_for_on_every_path(self, start_server: StartServer, web_file: Path) -> None:
        write(web_file, {"basic_auth_users": {"prometheus": hashed("right")}})
        server = start_server(web_config=web_file, enable_lifecycle=True)
        for path in ("/", "/metrics", "/api/v1/status", "/-/healthy", "/-/ready", "/nope"):
            refused = get(server, path)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"].startswith('Basic realm="oomwatch"')
            assert "GPU" not in refused.text
        assert requests.post(url(server, "/-/reload"), timeout=TIMEOUT).status_code == 401

    @pytest.mark.parametrize(
        ("user", "password", "status"),
        [("prometheus", "right", 200), ("prometheus", "wrong", 401), ("x", "right", 401)],
    )
    def test_are_checked(
        self, start_server: StartServer, web_file: Path, user: str, password: str, status: int
    ) -> None:
        write(web_file, {"basic_auth_users": {"prometheus": hashed("right")}})
        answer = requests.get(url(start_server(web_config=web_file)), auth=(user, password), timeout=TIMEOUT)
        assert answer.status_code == status

    def test_change_without_a_restart(self, start_server: StartServer, web_file: Path) -> None:
        write(web_file, {"basic_auth_users": {"prometheus": hashed("old")}})
        server = start_server(web_config=web_file)
        with requests.Session() as session:
            assert session.get(url(server), auth=("prometheus", "old"), timeout=TIMEOUT).status_code == 200
            write(web_file, {"basic_auth_users": {"prometheus": hashed("new")}})
            assert session.get(url(server), auth=("prometheus", "old"), timeout=TIMEOUT).status_code == 401
            assert session.get(url(server), auth=("prometheus", "new"), timeout=TIMEOUT).status_code == 200

    def test_stay_when_the_new_file_is_bad_which_is_logged_once(
        self, start_server: StartServer, web_file: Path
    ) -> None:
        write(web_file, {"basic_auth_users": {"prometheus": hashed("right")}})
        server = start_server(web_config=web_file)
        with structlog.testing.capture_logs() as lines:
            write(web_file, "basic_auth_users: [nobody]\n")
            for _ in range(3):
                assert get(server).status_code == 401
                answer = requests.get(url(server), auth=("prometheus", "right"), timeout=TIMEOUT)
                assert answer.status_code == 200
            write(web_file, {})
            assert get(server).status_code == 200
        assert [line["log_level"] for line in lines] == ["error", "info"]
        assert str(web_file) in lines[0]["error"]


def test_headers_of_the_web_configuration_are_sent(start_server: StartServer, web_file: Path) -> None:
    write(
        web_file,
        {
            "http_server_config": {
                "headers": {"X-Frame-Options": "sameorigin", "Strict-Transport-Security": "max-age=1"}
            }
        },
    )
    headers = get(start_server(web_config=web_file), "/metrics").headers
    assert headers["X-Frame-Options"] == "sameorigin"
    assert headers["Strict-Transport-Security"] == "max-age=1"


def test_requests_over_the_rate_limit_are_refused(start_server: StartServer, web_file: Path) -> None:
    write(web_file, {"rate_limit": {"interval": "1h", "burst": 2}})
    server = start_server(web_config=web_file)
    answers = [get(server, "/-/healthy") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[-1].headers["Retry-After"] == "1"
