"""The web configuration file of Prometheus' exporters: TLS, client certificates, basic authentication, rate limit.

Keys and meanings are those of github.com/prometheus/exporter-toolkit (docs/web-configuration.md). What Python's TLS
cannot do is an error that says what to write instead, never ignored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import bcrypt
from pydantic import AfterValidator, BeforeValidator, Field

from oomwatch.settings import (
    ConfigError,
    Contradiction,
    Duration,
    File,
    Kind,
    Origin,
    Problem,
    Section,
    Texts,
    did_you_mean,
    in_order,
    load_certificate,
    named_files,
    read_text,
    read_yaml,
    resolve_files,
    validate,
)

# Go's names, which the file uses, to OpenSSL's. As in Go, TLS 1.3's three suites are always on and cannot be chosen.
CIPHER_SUITES: Mapping[str, str] = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
TLS13_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
CURVES: Mapping[str, str] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
_BCRYPT = re.compile(r"\$2[abxy]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")


def _checked_version(value: object) -> object:
    if value in ("TLS10", "TLS11"):
        raise ValueError("not safe any more")
    return value


def _checked_client_auth(value: object) -> object:
    if value in _UNVERIFIED:
        raise ValueError(
            "not possible here: a client's certificate that is asked for is always verified. "
            "Use RequireAndVerifyClientCert with client_ca_file"
        )
    return value or "NoClientCert"


def _checked_suites(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if name not in CIPHER_SUITES and name not in TLS13_SUITES:
            raise ValueError(f'"{name}" is not a cipher suite that can be used.{did_you_mean(name, CIPHER_SUITES)}')
    return value


def _checked_curves(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if name not in CURVES:
            raise ValueError(f'"{name}" is not a known curve')
    if len(value) > 1:
        raise ValueError(
            "more than one. Python's TLS can keep to one curve or to OpenSSL's own choice: leave the key out"
        )
    return value


def _checked_response_headers(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if name not in _HEADERS:
            raise ValueError(f'"{name}" cannot be set.{did_you_mean(name, _HEADERS)}')
        if text and _HEADERS[name] and text.lower() not in _HEADERS[name]:
            raise ValueError(f'{name} is "{text}"; it can be {" or ".join(_HEADERS[name])}')
        if re.search(r"[^\t\x20-\x7e]", text):
            raise ValueError(f"the value of {name} has characters that HTTP forbids in a header")
    return {name: text for name, text in value.items() if text}


def _checked_users(value: dict[str, str]) -> dict[str, str]:
    for name, hashed in value.items():
        if not name or ":" in name:
            raise ValueError(f'"{name}" cannot be a user\'s name: it is empty or holds a colon')
        if not _BCRYPT.fullmatch(hashed):
            raise ValueError(
                f'the value of "{name}" is not a bcrypt hash. htpasswd -nBC 10 "" makes one; it begins with $2y$10$'
            )
    return value


class TlsServerConfig(Section):
    """The server's certificate, and which clients it lets in."""

    cert_file: File | None = Field(default=None, description="The server's certificate with its chain (PEM).")
    key_file: File | None = Field(default=None, description="The certificate's key (PEM), without a password.")
    cert: str | None = Field(default=None, description="The certificate itself, instead of cert_file.")
    key: Annotated[str, Kind("text", secret=True)] | None = Field(
        default=None, repr=False, description="The key itself, instead of key_file."
    )
    client_auth_type: Annotated[
        Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"],
        BeforeValidator(_checked_client_auth),
    ] = Field(
        default="NoClientCert",
        description="Whether clients show a certificate. Asking without verifying is not possible.",
    )
    client_ca_file: File | None = Field(default=None, description="Certificates (PEM) that clients' are verified with.")
    client_ca: str | None = Field(default=None, description="These certificates themselves, instead of client_ca_file.")
    client_allowed_sans: Texts = Field(
        default=(),
        description="Only clients whose certificate has one of these names (DNS, IP, e-mail or URI) are let in.",
    )
    min_version: Annotated[Literal["TLS12", "TLS13"], BeforeValidator(_checked_version)] = Field(
        default="TLS12", description="The oldest version of TLS that is accepted."
    )
    max_version: Annotated[Literal["TLS12", "TLS13"], BeforeValidator(_checked_version)] = Field(
        default="TLS13", description="The newest version of TLS that is accepted."
    )
    cipher_suites: Annotated[Texts, AfterValidator(_checked_suites)] = Field(
        default=(),
        description="Suites of TLS 1.2, by Go's names; empty for OpenSSL's choice. Those of 1.3 are always on.",
    )
    prefer_server_cipher_suites: bool = Field(
        default=True, description="Whether the server's order of suites counts, not the client's."
    )
    curve_preferences: Annotated[Texts, AfterValidator(_checked_curves), Kind("list of texts", ", ".join(CURVES))] = (
        Field(
            default=(),
            description="One curve to keep to, or none for OpenSSL's choice. An order of several is not possible.",
        )
    )

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        for part in ("cert", "key", "client_ca"):
            if data.get(part) and data.get(f"{part}_file"):
                yield Contradiction((part,), f"{part}_file is set as well. Keep one of the two")
        for part in ("cert", "key"):
            if data and not data.get(part) and not data.get(f"{part}_file"):
                yield Contradiction((), f"{part}_file is missing: without it there is no TLS")
        verified = data.get("client_auth_type") in ("VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
        has_ca = bool(data.get("client_ca") or data.get("client_ca_file"))
        if has_ca and data.get("client_auth_type") in (None, "", "NoClientCert"):
            ca = "client_ca" if data.get("client_ca") else "client_ca_file"
            yield Contradiction((ca,), "of no effect. Set client_auth_type: RequireAndVerifyClientCert")
        if verified and not has_ca:
            yield Contradiction(("client_auth_type",), "client_ca_file is missing: it says whose certificates are good")
        if data.get("client_allowed_sans") and data.get("client_auth_type") != "RequireAndVerifyClientCert":
            yield Contradiction(
                ("client_allowed_sans",), "of no effect. Set client_auth_type: RequireAndVerifyClientCert"
            )
        if data.get("min_version") == "TLS13" and data.get("max_version") == "TLS12":
            yield Contradiction(("max_version",), "older than min_version")
        suites = data.get("cipher_suites")
        only_new = isinstance(suites, list) and bool(suites) and set(suites) <= set(TLS13_SUITES)
        if only_new and data.get("min_version") != "TLS13":
            yield Contradiction(("cipher_suites",), "only suites of TLS 1.3. Set min_version: TLS13 as well")

    @property
    def enabled(self) -> bool:
        return bool(self.cert or self.cert_file)


class HttpServerConfig(Section):
    """What is sent with every response."""

    http2: bool = Field(
        default=True,
        description="Accepted and of no effect: the server speaks HTTP/1.1, which every client understands.",
    )
    headers: Annotated[
        dict[str, str], AfterValidator(_checked_response_headers), Kind("headers", ", ".join(_HEADERS))
    ] = Field(default_factory=dict, description="Headers to add; an empty value adds none.")


class RateLimitConfig(Section):
    """A token bucket for all requests; what is over the limit is answered with 429."""

    interval: Duration = Field(default=0.0, ge=0, le=3600, description="Time between two requests; 0 for no limit.")
    burst: int = Field(default=0, ge=0, le=1_000_000, description="How many requests may come at once.")

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        if data.get("interval") not in (None, 0, "0", "0s") and not data.get("burst"):
            yield Contradiction(("burst",), "with a burst of 0 no request would ever be served. Set 1 or more")


Users = Annotated[dict[str, str], AfterValidator(_checked_users), Kind("users", "name: bcrypt hash", secret=True)]


class WebConfig(Section):
    """The whole file."""

    tls_server_config: TlsServerConfig = Field(default=TlsServerConfig())
    http_server_config: HttpServerConfig = Field(default_factory=HttpServerConfig)
    basic_auth_users: Users = Field(
        default_factory=dict,
        repr=False,
        description="Users and their passwords' bcrypt hashes; empty: no password asked.",
    )
    rate_limit: RateLimitConfig = Field(default=RateLimitConfig())


def load_web_config(path: Path) -> WebConfig:
    """The settings in a web configuration file; ConfigError with every problem."""
    layer, problems = read_yaml(read_text(path), str(path))
    resolve_files(WebConfig, layer.data, path.parent)
    config, invalid = validate(WebConfig, layer, Origin(str(path)))
    problems += invalid
    if problems or config is None:
        raise ConfigError(in_order(problems))
    return config


def check_web_config(path: Path) -> list[Problem]:
    """What is wrong with a web configuration file and with the files that it names."""
    try:
        ssl_context(load_web_config(path), str(path))
    except ConfigError as error:
        return list(error.problems)
    return []


# --- TLS -------------------------------------------------------------------------------------------------------


def ssl_context(config: WebConfig, source: str = "web configuration") -> ssl.SSLContext | None:
    """What a server needs for TLS, None where TLS is not asked for; ConfigError where a certificate is not usable."""
    tls = config.tls_server_config
    if not tls.enabled:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    context.maximum_version = _VERSIONS[tls.max_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if not tls.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    suites = [CIPHER_SUITES[name] for name in tls.cipher_suites if name in CIPHER_SUITES]
    if suites:
        with _refusal_of("cipher_suites", source):
            context.set_ciphers(":".join(suites))
    for curve in tls.curve_preferences:
        with _refusal_of("curve_preferences", source):
            context.set_ecdh_curve(CURVES[curve])
    with _as_file(tls.cert, tls.cert_file) as certificate, _as_file(tls.key, tls.key_file) as key:
        fault = load_certificate(context, certificate, key)
    if fault:
        where = "cert_file" if tls.cert_file else "cert"
        raise ConfigError([Problem(Origin(source), f"tls_server_config.{where}", f"{fault}.")])
    _let_clients_in(context, tls, source)
    return context


@contextmanager
def _refusal_of(key: str, source: str) -> Iterator[None]:
    try:
        yield
    except (ssl.SSLError, ValueError) as error:
        message = f"{ssl.OPENSSL_VERSION} on this host refuses it: {error}."
        raise ConfigError([Problem(Origin(source), f"tls_server_config.{key}", message)]) from error


@contextmanager
def _as_file(text: str | None, file: Path | None) -> Iterator[Path]:
    """A file's own path, or one in memory with the text, since OpenSSL reads keys from files only."""
    if file is not None:
        yield file
        return
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, (text or "").encode())
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _let_clients_in(context: ssl.SSLContext, tls: TlsServerConfig, source: str) -> None:
    if tls.client_auth_type == "NoClientCert":
        return
    required = tls.client_auth_type == "RequireAndVerifyClientCert"
    context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    try:
        context.load_verify_locations(cafile=tls.client_ca_file, cadata=tls.client_ca)
    except (OSError, ValueError) as error:
        key = "client_ca_file" if tls.client_ca_file else "client_ca"
        reason = "no certificate in PEM form"
        if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
            reason = str(error.strerror).lower()
        problem = Problem(Origin(source), f"tls_server_config.{key}", f"cannot be used: {reason}.")
        raise ConfigError([problem]) from error
    if tls.client_allowed_sans:
        context.sslsocket_class = _sans_checked(frozenset(_plain_san(name) for name in tls.client_allowed_sans))


def _plain_san(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def _sans_checked(allowed: frozenset[str]) -> type[ssl.SSLSocket]:
    """A socket that ends the connection where the client's certificate has none of the allowed names."""

    class SansChecked(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            certificate: Mapping[str, Any] = self.getpeercert() or {}
            names = {_plain_san(str(name)) for _, name in certificate.get("subjectAltName", ())}
            if not names & allowed:
                raise ssl.SSLCertVerificationError("the client's certificate has no name in client_allowed_sans")

    return SansChecked


# --- basic authentication --------------------------------------------------------------------------------------


class Authenticator:
    """Checks Authorization headers against users' bcrypt hashes.

    A hash takes 50 ms and more, so answers are remembered, under a key that tells nothing of the password. Unknown
    users cost what known ones do. One hash is computed at a time, so that guesses cannot take every core.
    """

    REMEMBERED = 100

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = {name.encode(): hashed.encode() for name, hashed in users.items()}
        costs = [hashed.split(b"$")[2] for hashed in self._users.values()]
        self._nobody = b"$2b$" + max(costs, default=b"10") + b"$" + b"." * 53
        self._secret = secrets.token_bytes(32)
        self._answers: dict[bool, OrderedDict[bytes, None]] = {True: OrderedDict(), False: OrderedDict()}
        self._remembering = threading.Lock()
        self._hashing = threading.Lock()

    @property
    def required(self) -> bool:
        """Whether a password is asked for at all."""
        return bool(self._users)

    def allows(self, header: str | None) -> bool:
        """Whether a request with this Authorization header (None: without one) may be served."""
        if not self._users:
            return True
        user, password = _basic_credentials(header or "")
        if user is None or password is None:
            return False
        hashed = self._users.get(user, self._nobody)
        key = hmac.new(self._secret, b"\0".join((hashed, user, password)), hashlib.sha256).digest()
        known = self._remembered(key)
        if known is None:
            with self._hashing:
                known = self._remembered(key)
                if known is None:
                    known = _matches(password, hashed) and user in self._users
                    self._remember(key, known)
        return known

    def _remembered(self, key: bytes) -> bool | None:
        with self._remembering:
            for answer, keys in self._answers.items():
                if key in keys:
                    keys.move_to_end(key)
                    return answer
        return None

    def _remember(self, key: bytes, answer: bool) -> None:
        with self._remembering:
            self._answers[answer][key] = None
            if len(self._answers[answer]) > self.REMEMBERED:
                self._answers[answer].popitem(last=False)


def _basic_credentials(header: str) -> tuple[bytes | None, bytes | None]:
    scheme, _, encoded = header.strip().partition(" ")
    if scheme.lower() != "basic":
        return None, None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None, None
    return (user, password) if colon else (None, None)


def _matches(password: bytes, hashed: bytes) -> bool:
    try:
        # bcrypt looks at 72 bytes; newer libraries refuse more instead of leaving the rest out, as Go's does.
        return bcrypt.checkpw(password[:72], hashed)
    except ValueError:
        return False


class RateLimiter:
    """The token bucket of ``rate_limit``; ``clock`` gives seconds that never go back."""

    def __init__(self, limit: RateLimitConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = limit.interval
        self._burst = limit.burst
        self._clock = clock
        self._tokens = float(limit.burst)
        self._last = clock()
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """Whether one more request may be served now."""
        if not self._interval:
            return True
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._last) / self._interval)
            self._last = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True


# --- the file, read anew when it changes -----------------------------------------------------------------------


@dataclass(frozen=True)
class WebState:
    """What the server needs of one reading of the file."""

    config: WebConfig
    context: ssl.SSLContext | None
    authenticator: Authenticator
    limiter: RateLimiter


Stamp = tuple[int, int, int, int]


def _stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class WebConfigFile:
    """A web configuration file and the certificates that it names, read anew when one of them changes.

    A bad change keeps what was good before, and shows in ``error``. Without a file everything is open. The first
    reading raises ConfigError where it fails.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: dict[Path, Stamp | None] = {}
        self._error: ConfigError | None = None
        self._state = self._read(path, None) if path else _state(WebConfig(), "", None)

    @property
    def error(self) -> ConfigError | None:
        """Why the file's present content is not in use; None when it is."""
        return self._error

    def current(self) -> WebState:
        """What holds now; looks at the files' times and sizes, and reads them only when those have changed."""
        with self._lock:
            if self._path and any(_stamp(path) != stamp for path, stamp in self._seen.items()):
                try:
                    self._state = self._read(self._path, self._state)
                    self._error = None
                except ConfigError as error:
                    self._error = error
            return self._state

    def _read(self, path: Path, before: WebState | None) -> WebState:
        self._seen[path] = _stamp(path)
        config = load_web_config(path)
        # Stamped before they are read: a change in between shows in the next look.
        self._seen = {path: self._seen[path]} | {file: _stamp(file) for _, file in named_files(config)}
        state = _state(config, str(path), before)
        if before is not None and (before.context is None) != (state.context is None):
            message = "TLS cannot be switched on or off while the server runs. Restart it."
            raise ConfigError([Problem(Origin(str(path)), "tls_server_config", message)])
        return state


def _state(config: WebConfig, source: str, before: WebState | None) -> WebState:
    """Built anew; what has not changed keeps its memory of answers and tokens."""
    same_users = before is not None and before.config.basic_auth_users == config.basic_auth_users
    same_limit = before is not None and before.config.rate_limit == config.rate_limit
    return WebState(
        config,
        ssl_context(config, source),
        before.authenticator if before and same_users else Authenticator(config.basic_auth_users),
        before.limiter if before and same_limit else RateLimiter(config.rate_limit),
    )
