"""The web configuration file: TLS by real handshakes, passwords, rate limit, and changes while the server runs."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import pytest

from oomwatch.settings import ConfigError
from oomwatch.webconfig import (
    CIPHER_SUITES,
    CURVES,
    Authenticator,
    RateLimitConfig,
    RateLimiter,
    WebConfig,
    WebConfigFile,
    check_web_config,
    load_web_config,
    ssl_context,
)
from tests.certificates import Certificates, make_certificates

TIMEOUT = 10.0


def hashed(password: str, cost: int = 4) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(cost)).decode()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def load_text(folder: Path, text: str) -> WebConfig:
    file = folder / "web.yml"
    file.write_text(text, encoding="utf-8")
    return load_web_config(file)


def refusal(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


# --- the file --------------------------------------------------------------------------------------------------


def test_an_empty_file_leaves_everything_open(tmp_path: Path) -> None:
    config = load_text(tmp_path, "")
    assert config == WebConfig()
    assert ssl_context(config) is None
    assert Authenticator(config.basic_auth_users).allows(None)


def test_every_key_of_the_exporter_toolkit_is_known(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        f"""
tls_server_config:
  cert_file: server.pem
  key_file: /etc/server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  client_allowed_sans: [prometheus.example.org, 10.0.0.1]
  min_version: TLS12
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: false
  curve_preferences: [CurveP256]
http_server_config:
  http2: true
  headers:
    Content-Security-Policy: default-src 'none'
    X-Frame-Options: deny
    X-Content-Type-Options: nosniff
    X-XSS-Protection: ""
    Strict-Transport-Security: max-age=60
basic_auth_users:
  alice: {hashed("a")}
rate_limit: {{interval: 1s, burst: 20}}
""",
    )
    assert config.tls_server_config.cert_file == tmp_path / "server.pem"
    assert config.tls_server_config.key_file == Path("/etc/server.key")
    assert "X-XSS-Protection" not in config.http_server_config.headers, "an empty value sets no header"
    assert config.rate_limit == RateLimitConfig(interval=1.0, burst=20)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tls_server_conf: {}", 'tls_server_conf: unknown key. Did you mean "tls_server_config"?'),
        ("tls_server_config: {cert_file: a}", "tls_server_config: key_file is missing: without it there is no TLS."),
        ("tls_server_config: {min_version: TLS13}", "cert_file is missing: without it there is no TLS."),
        ("tls_server_config: {cert_file: a, cert: b, key: c}", "cert: cert_file is set as well. Keep one of the two."),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}", '"TLS10" is not safe any more.'),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: SSL30}", "Allowed: TLS12, TLS13."),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}",
            "max_version: older than min_version.",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAnyClientCert}",
            "Use RequireAndVerifyClientCert with client_ca_file.",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequestClientCert}",
            "a client's certificate that is asked for is always verified.",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "client_auth_type: client_ca_file is missing: it says whose certificates are good.",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}",
            "client_ca_file: of no effect. Set client_auth_type: RequireAndVerifyClientCert.",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_allowed_sans: [x]}",
            "client_allowed_sans: of no effect. Set client_auth_type: RequireAndVerifyClientCert.",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]}",
            '"TLS_RSA_WITH_RC4_128_SHA" is not a cipher suite that can be used.',
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, cipher_suites: [TLS_AES_128_GCM_SHA256]}",
            "only suites of TLS 1.3. Set min_version: TLS13 as well.",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, curve_preferences: [X25519, CurveP256]}",
            "Python's TLS can keep to one curve or to OpenSSL's own choice: leave the key out.",
        ),
        ("tls_server_config: {cert_file: a, key_file: b, curve_preferences: [P256]}", '"P256" is not a known curve.'),
        ("http_server_config: {headers: {X-Powered-By: me}}", '"X-Powered-By" cannot be set.'),
        ("http_server_config: {headers: {X-Frame-Options: allow}}", "it can be deny or sameorigin."),
        ("basic_auth_users: {alice: hunter2}", 'the value of "alice" is not a bcrypt hash.'),
        ("basic_auth_users: [alice]", "basic_auth_users: keys and values are expected here."),
        ("rate_limit: {interval: 1s}", "with a burst of 0 no request would ever be served. Set 1 or more."),
        ("rate_limit: {interval: often, burst: 1}", '"often" is not a duration.'),
    ],
)
def test_what_cannot_be_honoured_is_an_error_never_ignored(tmp_path: Path, text: str, problem: str) -> None:
    found = refusal(tmp_path, text)
    assert any(problem in line for line in found), found
    assert all(line.startswith("web.yml:1:") for line in found)
    assert "hunter2" not in "".join(found)


def test_hashes_and_keys_do_not_show_in_a_representation(tmp_path: Path) -> None:
    config = load_text(tmp_path, f"tls_server_config: {{cert: c, key: k3y}}\nbasic_auth_users: {{a: {hashed('a')}}}")
    assert "k3y" not in repr(config)
    assert "$2b$" not in repr(config)


# --- TLS -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handshake:
    """What became of a connection, as the client saw it; ``error`` is empty when a byte came through."""

    version: str | None
    cipher: str
    error: str


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> Handshake:
    """One real connection over loopback, on which the server sends one byte after the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT)

        def serve() -> None:
            accepted, _ = listener.accept()
            accepted.settimeout(TIMEOUT)
            try:
                with server.wrap_socket(accepted, server_side=True) as connection:
                    connection.sendall(b"x")
            except OSError:
                accepted.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=TIMEOUT) as plain,
                client.wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                byte = connection.recv(1)
                name = (connection.cipher() or ("",))[0]
                return Handshake(connection.version(), name, "" if byte else "closed without a byte")
        except OSError as error:
            return Handshake(None, "", str(error))
        finally:
            thread.join(timeout=TIMEOUT)


def client_context(made: Certificates, *, certificate: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(made.ca))
    if certificate:
        context.load_cert_chain(certificate)
    return context


def server_context(folder: Path, made: Certificates, more: str = "") -> ssl.SSLContext:
    text = f"tls_server_config:\n  cert_file: {made.server}\n  key_file: {made.server_key}\n{more}"
    context = ssl_context(load_text(folder, text))
    assert context is not None
    return context


def test_a_client_that_trusts_the_ca_is_served(tmp_path: Path, certificates: Certificates) -> None:
    done = shake_hands(server_context(tmp_path, certificates), client_context(certificates))
    assert (done.version, done.error) == ("TLSv1.3", "")


def test_versions_before_1_2_are_refused(tmp_path: Path, certificates: Certificates) -> None:
    context = server_context(tmp_path, certificates)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_the_versions_that_are_set_hold(tmp_path: Path, certificates: Certificates) -> None:
    old_client = client_context(certificates)
    old_client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shake_hands(server_context(tmp_path, certificates), old_client).version == "TLSv1.2"
    assert shake_hands(server_context(tmp_path, certificates, "  min_version: TLS13\n"), old_client).error
    only_old = server_context(tmp_path, certificates, "  max_version: TLS12\n")
    assert shake_hands(only_old, client_context(certificates)).version == "TLSv1.2"


def test_the_cipher_suites_that_are_set_hold(tmp_path: Path, certificates: Certificates) -> None:
    go_names = [name for name in CIPHER_SUITES if "ECDSA" in name]
    more = "  max_version: TLS12\n  cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256]\n"
    done = shake_hands(server_context(tmp_path, certificates, more), client_context(certificates))
    assert done.cipher == "ECDHE-ECDSA-CHACHA20-POLY1305", "trustme's keys are elliptic"
    refused = server_context(tmp_path, certificates, more.replace("ECDSA", "RSA"))
    assert shake_hands(refused, client_context(certificates)).error
    assert len(go_names) == 5


@pytest.mark.parametrize("name", CIPHER_SUITES)
def test_every_cipher_suite_has_a_name_that_openssl_knows(name: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers(CIPHER_SUITES[name])
    assert CIPHER_SUITES[name] in [cipher["name"] for cipher in context.get_ciphers()]


@pytest.mark.parametrize("curve", CURVES)
def test_every_curve_can_be_kept_to(tmp_path: Path, certificates: Certificates, curve: str) -> None:
    more = f"  curve_preferences: [{curve}]\n"
    client = client_context(certificates)
    try:
        client.set_ecdh_curve(CURVES[curve])
    except ssl.SSLError:
        assert curve == "X25519", "Python 3.10 cannot choose this one, all others must work"
        with pytest.raises(ConfigError, match=r"curve_preferences: OpenSSL .* on this host refuses it"):
            server_context(tmp_path, certificates, more)
        return
    server = server_context(tmp_path, certificates, more)
    assert shake_hands(server, client).error == ""
    client.set_ecdh_curve("secp384r1" if curve != "CurveP384" else "prime256v1")
    assert shake_hands(server, client).error != ""


def test_the_order_of_suites_is_the_servers_unless_switched_off(tmp_path: Path, certificates: Certificates) -> None:
    assert server_context(tmp_path, certificates).options & ssl.OP_CIPHER_SERVER_PREFERENCE
    switched_off = server_context(tmp_path, certificates, "  prefer_server_cipher_suites: false\n")
    assert not switched_off.options & ssl.OP_CIPHER_SERVER_PREFERENCE


def test_certificates_inside_the_file_work(tmp_path: Path, certificates: Certificates) -> None:
    def block(key: str, file: Path) -> str:
        lines = "".join(f"    {line}\n" for line in file.read_text().splitlines())
        return f"  {key}: |\n{lines}"

    text = "tls_server_config:\n" + block("cert", certificates.server) + block("key", certificates.server_key)
    text += "  client_auth_type: RequireAndVerifyClientCert\n" + block("client_ca", certificates.ca)
    context = ssl_context(load_text(tmp_path, text))
    assert context is not None
    assert shake_hands(context, client_context(certificates, certificate=certificates.client)).error == ""
    assert shake_hands(context, client_context(certificates)).error


def test_clients_must_show_a_certificate_of_the_ca(tmp_path: Path, certificates: Certificates) -> None:
    more = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {certificates.ca}\n"
    server = server_context(tmp_path, certificates, more)
    stranger = make_certificates(tmp_path / "stranger")
    assert shake_hands(server, client_context(certificates, certificate=certificates.client)).error == ""
    assert shake_hands(server, client_context(certificates)).error
    assert shake_hands(server, client_context(certificates, certificate=stranger.client)).error


def test_clients_may_show_a_certificate_but_not_a_strangers(tmp_path: Path, certificates: Certificates) -> None:
    more = f"  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: {certificates.ca}\n"
    server = server_context(tmp_path, certificates, more)
    stranger = make_certificates(tmp_path / "stranger")
    assert shake_hands(server, client_context(certificates)).error == ""
    assert shake_hands(server, client_context(certificates, certificate=certificates.client)).error == ""
    assert shake_hands(server, client_context(certificates, certificate=stranger.client)).error


@pytest.mark.parametrize(
    ("names", "allowed", "served"),
    [
        (("prometheus.example.org",), "[prometheus.example.org]", True),
        (("a.example.org", "b.example.org"), "[b.example.org]", True),
        (("prometheus.example.org",), "[other.example.org]", False),
        (("*.example.org",), "[prometheus.example.org]", False),
        (("10.0.0.1",), "[10.0.0.1]", True),
        (("2001:db8::1",), '["2001:0db8::1"]', True),
        (("10.0.0.1",), "[10.0.0.2]", False),
    ],
)
def test_only_clients_with_an_allowed_name_are_served(
    tmp_path: Path, names: tuple[str, ...], allowed: str, served: bool
) -> None:
    made = make_certificates(tmp_path / "pki", client_names=names)
    more = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {made.ca}\n"
    server = server_context(tmp_path, made, f"{more}  client_allowed_sans: {allowed}\n")
    done = shake_hands(server, client_context(made, certificate=made.client))
    assert (done.error == "") is served


def test_a_certificate_that_is_not_usable_is_told(tmp_path: Path, certificates: Certificates) -> None:
    other = make_certificates(tmp_path / "other")
    file = tmp_path / "web.yml"
    pair = f"cert_file: {certificates.server}, key_file: {certificates.server_key}"
    asks = f"{pair}, client_auth_type: VerifyClientCertIfGiven"
    for text, problem in (
        (
            f"cert_file: nowhere.pem, key_file: {certificates.server_key}",
            "cert_file: certificate or key cannot be read",
        ),
        (f"cert_file: {certificates.server}, key_file: {other.server_key}", "do not belong together"),
        (f"cert_file: {certificates.ca}, key_file: {certificates.ca}", "holds no certificate with its key"),
        (
            f"{asks}, client_ca_file: {certificates.server_key}",
            "client_ca_file: cannot be used: no certificate in PEM form.",
        ),
        (f"{asks}, client_ca_file: nowhere.pem", "client_ca_file: cannot be used: no such file or directory."),
    ):
        file.write_text(f"tls_server_config: {{{text}}}", encoding="utf-8")
        assert [problem in str(found) for found in check_web_config(file)] == [True], text


# --- passwords -------------------------------------------------------------------------------------------------


def test_only_the_right_password_is_let_in() -> None:
    door = Authenticator({"alice": hashed("wonder"), "böb": hashed("p:a:ß")})
    assert door.required
    for _ in range(2):
        assert door.allows(basic("alice", "wonder"))
        assert door.allows(basic("böb", "p:a:ß"))
        assert not door.allows(basic("alice", "wonder2"))
        assert not door.allows(basic("alice", "p:a:ß"))
        assert not door.allows(basic("carol", "wonder"))
        assert not door.allows(basic("", ""))


@pytest.mark.parametrize("variant", ["$2a$", "$2b$", "$2y$"])
def test_hashes_of_every_tool_are_understood(variant: str, tmp_path: Path) -> None:
    users = load_text(tmp_path, f"basic_auth_users: {{alice: {hashed('x').replace('$2b$', variant)}}}").basic_auth_users
    assert Authenticator(users).allows(basic("alice", "x"))


@pytest.mark.parametrize(
    "header", [None, "", "Basic", "Basic ", "Basic !!!", "Bearer abc", "Basic YWxpY2U=", "Basic " + "A" * 10_000]
)
def test_a_header_that_is_no_basic_authentication_is_refused(header: str | None) -> None:
    assert not Authenticator({"alice": hashed("x")}).allows(header)


def test_the_scheme_is_read_in_any_case() -> None:
    assert Authenticator({"a": hashed("x")}).allows(basic("a", "x").replace("Basic", "bAsIc"))


def test_a_password_longer_than_bcrypt_reads_is_cut_as_go_does() -> None:
    long = "p" * 100
    door = Authenticator({"a": hashed(long[:72])})
    assert door.allows(basic("a", long))
    assert not door.allows(basic("a", "q" * 100))


def test_the_dummy_hash_lets_nobody_in() -> None:
    door = Authenticator({"alice": hashed("x")})
    for guess in ("", "x", "\0", "nobody"):
        assert not door.allows(basic("nobody", guess))


def _seconds(door: Authenticator, header: str) -> float:
    begun = time.process_time()
    door.allows(header)
    return time.process_time() - begun


def test_an_answer_is_remembered_so_that_scrapes_are_cheap() -> None:
    door = Authenticator({"alice": hashed("x", cost=10)})
    first = _seconds(door, basic("alice", "x"))
    again = min(_seconds(door, basic("alice", "x")) for _ in range(5))
    assert again < first / 20


def test_unknown_users_cost_what_known_ones_do() -> None:
    users = {"alice": hashed("x", cost=8), "bob": hashed("x", cost=4)}
    known = min(_seconds(Authenticator(users), basic("alice", f"wrong{n}")) for n in range(5))
    unknown = min(_seconds(Authenticator(users), basic("nobody", f"wrong{n}")) for n in range(5))
    assert unknown == pytest.approx(known, rel=0.5)


def test_guesses_do_not_push_out_good_answers_and_memory_is_bounded() -> None:
    door = Authenticator({"alice": hashed("x")})
    door.allows(basic("alice", "x"))
    for number in range(3 * Authenticator.REMEMBERED):
        door.allows(basic("alice", f"guess {number}"))
    assert sum(len(keys) for keys in door._answers.values()) == Authenticator.REMEMBERED + 1


def test_many_threads_get_right_answers() -> None:
    door = Authenticator({"alice": hashed("x")})
    answers: list[tuple[bool, bool]] = []

    def ask() -> None:
        answers.extend((door.allows(basic("alice", "x")), door.allows(basic("alice", "y"))) for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=TIMEOUT)
    assert answers == [(True, False)] * 160


# --- the rate limit --------------------------------------------------------------------------------------------


def test_a_burst_is_served_and_then_one_request_an_interval() -> None:
    now = [0.0]
    limiter = RateLimiter(RateLimitConfig(interval=0.5, burst=3), clock=lambda: now[0])
    assert [limiter.allows() for _ in range(4)] == [True, True, True, False]
    now[0] += 0.5
    assert [limiter.allows() for _ in range(2)] == [True, False]
    now[0] += 60
    assert [limiter.allows() for _ in range(4)] == [True, True, True, False]


def test_without_an_interval_there_is_no_limit() -> None:
    limiter = RateLimiter(RateLimitConfig())
    assert all(limiter.allows() for _ in range(1000))


# --- changes while the server runs -----------------------------------------------------------------------------


def replace(file: Path, text: str) -> None:
    """As editors and Kubernetes do: a new file in the old one's place."""
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, file)


def test_without_a_file_everything_is_open() -> None:
    state = WebConfigFile(None).current()
    assert state.context is None
    assert state.authenticator.allows(None)


def test_a_bad_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: no such file"):
        WebConfigFile(tmp_path / "web.yml")


def test_a_changed_file_holds_at_once(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{alice: {hashed('old')}}}", encoding="utf-8")
    watched = WebConfigFile(file)
    assert watched.current().authenticator.allows(basic("alice", "old"))
    replace(file, f"basic_auth_users: {{alice: {hashed('new')}}}")
    assert watched.current().authenticator.allows(basic("alice", "new"))
    assert not watched.current().authenticator.allows(basic("alice", "old"))


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    file.write_text("rate_limit: {interval: 1s, burst: 1}", encoding="utf-8")
    watched = WebConfigFile(file)
    assert watched.current() is watched.current()


def test_a_change_elsewhere_keeps_remembered_answers_and_spent_tokens(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    text = f"basic_auth_users: {{alice: {hashed('x')}}}\nrate_limit: {{interval: 1h, burst: 1}}\n"
    file.write_text(text, encoding="utf-8")
    watched = WebConfigFile(file)
    before = watched.current()
    replace(file, text + "http_server_config: {headers: {X-Frame-Options: deny}}\n")
    after = watched.current()
    assert after.config.http_server_config.headers == {"X-Frame-Options": "deny"}
    assert after.authenticator is before.authenticator
    assert after.limiter is before.limiter


def test_a_bad_change_keeps_what_was_good_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "web.yml"
    good = f"basic_auth_users: {{alice: {hashed('x')}}}"
    file.write_text(good, encoding="utf-8")
    watched = WebConfigFile(file)
    for bad, why in (("basic_auth_users: {alice: x}", "not a bcrypt hash"), ("a: [", "not valid YAML")):
        replace(file, bad)
        assert watched.current().authenticator.allows(basic("alice", "x"))
        assert not watched.current().authenticator.allows(None)
        assert why in str(watched.error)
    file.unlink()
    assert not watched.current().authenticator.allows(None)
    assert "no such file" in str(watched.error)
    replace(file, good)
    assert watched.current().authenticator.allows(basic("alice", "x"))
    assert watched.error is None


def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    first, second = make_certificates(tmp_path / "live"), make_certificates(tmp_path / "renewed")
    file = tmp_path / "web.yml"
    file.write_text(f"tls_server_config: {{cert_file: {first.server}, key_file: {first.server_key}}}", encoding="utf-8")
    watched = WebConfigFile(file)
    old_trust, new_trust = client_context(first), client_context(second)

    def served(client: ssl.SSLContext) -> bool:
        context = watched.current().context
        assert context is not None
        return shake_hands(context, client).error == ""

    assert served(old_trust)
    os.replace(second.server, first.server)
    assert served(old_trust), "the new certificate and the old key do not belong together"
    assert "do not belong together" in str(watched.error)
    os.replace(second.server_key, first.server_key)
    assert served(new_trust)
    assert not served(old_trust)
    assert watched.error is None


def test_tls_cannot_be_switched_while_the_server_runs(tmp_path: Path, certificates: Certificates) -> None:
    file = tmp_path / "web.yml"
    file.write_text("", encoding="utf-8")
    watched = WebConfigFile(file)
    replace(file, f"tls_server_config: {{cert_file: {certificates.server}, key_file: {certificates.server_key}}}")
    assert watched.current().context is None
    assert "Restart it" in str(watched.error)
