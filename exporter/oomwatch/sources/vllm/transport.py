"""Fetches a document of an engine within a deadline and a size, whatever the server does.

One fetcher keeps one connection alive. Redirects are not followed, so that credentials never reach another host, and
neither proxies nor netrc of the environment are used. Files with credentials are read for each request; those with
certificates when they have changed.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import re
import socket
import ssl
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

import oomwatch

_CHUNK = 64 * 1024
_TOKEN = re.compile(r"[\x21-\x7e]+")
_TIMEOUTS = (TimeoutError, requests.exceptions.Timeout, urllib3.exceptions.ReadTimeoutError)
# Text 0.0.4 is what vLLM's Python servers speak, OpenMetrics what its Rust front-end does.
_ACCEPT = "text/plain;version=0.0.4;q=1,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"


@dataclass(frozen=True)
class ScrapeOptions:
    """How an engine is asked. ``timeout`` is the wall time of a whole scrape in seconds, slow bodies included.

    ``max_page_bytes`` counts bytes after decompression. Without ``ca_file`` the system's certificates are trusted.
    ``proxy_url`` is the only proxy ever used.
    """

    timeout: float = 5.0
    max_page_bytes: int = 16 * 1024**2
    bearer_token_file: str | None = None
    username: str | None = None
    password_file: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure_skip_verify: bool = False
    proxy_url: str | None = None


class FetchError(Exception):
    """No document. ``state`` is one of observations.SCRAPE_STATES; the message names no secret."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


@dataclass(frozen=True)
class Document:
    """An answer. ``body`` is empty unless the status is 200; ``redirect`` is where another status points to."""

    status: int
    content_type: str = ""
    body: bytes = b""
    redirect: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Location:
    """Where an engine's documents are, and the credentials that its URL held."""

    origin: str
    path: str
    query: str
    credentials: tuple[str, str] | None

    @classmethod
    def of(cls, target: str) -> Location:
        """From a base URL (``http://host:8000``) or the URL of the page of metrics. Raises ValueError."""
        parts = urlsplit(target)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an engine's URL is http://host:port or https://host:port")
        if parts.port == 0:
            raise ValueError("port 0 is no port")
        credentials = (unquote(parts.username), unquote(parts.password or "")) if parts.username is not None else None
        path = "/metrics" if parts.path in ("", "/") else parts.path
        return cls(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", path, parts.query, credentials)

    @property
    def metrics(self) -> str:
        return f"{self.origin}{self.path}" + (f"?{self.query}" if self.query else "")

    @property
    def shown(self) -> str:
        """The URL of the page without what may be secret."""
        return f"{self.origin}{self.path}"

    def sibling(self, name: str) -> str:
        """Another document of the same server, such as ``version``."""
        return f"{self.origin}{self.path.removesuffix('/metrics') if self.path.endswith('/metrics') else ''}/{name}"


class Fetcher:
    """Fetches from one server. Not for use by several threads at once."""

    def __init__(self, location: Location, options: ScrapeOptions) -> None:
        self._location = location
        self._options = options
        self._line = _Line()
        self._session: requests.Session | None = None
        self._certificates: tuple[tuple[int, int, int], ...] | None = None

    def fetch(self, url: str, deadline: float, limit: int, body: bytes | None = None) -> Document:
        """GET ``url`` by ``deadline`` (time.monotonic) with at most ``limit`` bytes of answer. Raises FetchError.

        With ``body``, which is JSON, POST it.

        Looking a name up can outlast the deadline: the system's resolver cannot be interrupted.
        """
        session = self._current_session()
        headers = self._headers()
        try:
            return self._fetch(session, url, headers, deadline, limit, body)
        except _StaleConnection:
            return self._fetch(session, url, headers, deadline, limit, body)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _fetch(
        self,
        session: requests.Session,
        url: str,
        headers: Mapping[str, str],
        deadline: float,
        limit: int,
        body: bytes | None,
    ) -> Document:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise FetchError("timeout", self._timeout_message())
        with self._line.cut_at(remaining) as line:
            try:
                with session.request(
                    "GET" if body is None else "POST",
                    url,
                    data=body,
                    headers=headers if body is None else {**headers, "Content-Type": "application/json"},
                    timeout=(remaining, remaining),
                    stream=True,
                    allow_redirects=False,
                ) as response:
                    document = _receive(response, limit)
            except FetchError:
                if line.is_cut:
                    raise FetchError("timeout", self._timeout_message()) from None
                raise
            # UnicodeError: a host name that IDNA refuses; HTTPException: broken framing while a body is read.
            except (
                requests.RequestException,
                urllib3.exceptions.HTTPError,
                http.client.HTTPException,
                OSError,
                UnicodeError,
            ) as error:
                if line.is_cut or _first(error, *_TIMEOUTS):
                    raise FetchError("timeout", self._timeout_message()) from None
                if not line.is_new and _first(error, ConnectionError, http.client.RemoteDisconnected):
                    raise _StaleConnection from None
                raise _explain(error) from None
            if line.is_cut:
                raise FetchError("timeout", self._timeout_message())
        return document

    def _timeout_message(self) -> str:
        return f"no complete answer within {self._options.timeout:g} s: the server hangs, is overloaded or too far away"

    def _current_session(self) -> requests.Session:
        """The session, a new one where a certificate file has changed: a connection keeps what it was opened with."""
        options = self._options
        files = [name for name in (options.ca_file, options.cert_file, options.key_file) if name]
        certificates = tuple(_signature(name) for name in files)
        if self._session is None or certificates != self._certificates:
            self.close()
            _check_certificates(options)
            self._session = _new_session(options, self._line)
            self._certificates = certificates
        return self._session

    def _headers(self) -> dict[str, str]:
        options = self._options
        # Compression costs both ends more than the loopback interface; a server that compresses anyway is understood.
        headers = {
            "Accept": _ACCEPT,
            "Accept-Encoding": "identity",
            "User-Agent": f"oomwatch/{oomwatch.__version__}",
            **options.headers,
        }
        if options.bearer_token_file:
            token = _read_secret(options.bearer_token_file, "bearer token").strip()
            if not _TOKEN.fullmatch(token):
                raise FetchError(
                    "bad_configuration",
                    f"{options.bearer_token_file} holds no bearer token: one word of ASCII is wanted",
                )
            headers["Authorization"] = f"Bearer {token}"
        elif options.username is not None:
            password = ""
            if options.password_file:
                password = _read_secret(options.password_file, "password").rstrip("\r\n")
            headers["Authorization"] = _basic(options.username, password)
        elif self._location.credentials:
            headers["Authorization"] = _basic(*self._location.credentials)
        return headers


# --- the line: a connection that can be cut ----------------------------------------------------------------------


class _StaleConnection(Exception):
    """A kept connection turned out to be closed by the server: worth one more try."""


class _Line:
    """The connection in use, and a timer that cuts it.

    A socket's own timeout starts anew with each byte, so that a server which drips could hold a scrape for ever.
    """

    def __init__(self) -> None:
        self._connection: HTTPConnection | None = None
        # Kept apart: a connection lets go of its socket while the body of an answer without a length is being read.
        self._socket: socket.socket | None = None
        self._timer: threading.Timer | None = None
        self.is_new = False  # a connection was opened since the timer was set
        self.is_cut = False

    def cut_at(self, seconds: float) -> _Line:
        self.is_new = self.is_cut = False
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        return self

    def __enter__(self) -> _Line:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def opens(self, connection: HTTPConnection) -> None:
        self.is_new = True
        self._connection, self._socket = connection, None

    def opened(self, connection: HTTPConnection) -> None:
        self._socket = connection.sock
        if self.is_cut:
            connection.close()
            raise TimeoutError("the deadline passed while the connection was opened")

    def _cut(self) -> None:
        self.is_cut = True
        line = self._socket or (self._connection.sock if self._connection is not None else None)
        if line is not None:
            # Errors: it was closed in the meantime. The plain call, because the one of an SSL socket would take its
            # state from under the reading thread.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(line, socket.SHUT_RDWR)


def _pools(line: _Line) -> dict[str, Callable[..., Any]]:
    """urllib3's connection pools, whose connections report to ``line``."""

    class Plain(HTTPConnection):
        def connect(self) -> None:
            line.opens(self)
            super().connect()
            line.opened(self)

    class Encrypted(HTTPSConnection):
        def connect(self) -> None:
            line.opens(self)
            super().connect()
            line.opened(self)

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class EncryptedPool(HTTPSConnectionPool):
        ConnectionCls = Encrypted

    return {"http": PlainPool, "https": EncryptedPool}


class _Adapter(HTTPAdapter):
    def __init__(self, line: _Line) -> None:
        self._line_of_pools = line
        super().__init__(pool_connections=1, pool_maxsize=1)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _pools(self._line_of_pools)

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = _pools(self._line_of_pools)
        return manager


def _new_session(options: ScrapeOptions, line: _Line) -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    session.headers.clear()
    adapter = _Adapter(line)
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    if options.proxy_url:
        session.proxies = {"http": options.proxy_url, "https": options.proxy_url}
    if options.insecure_skip_verify:
        session.verify = False
        # The operator asked for it; urllib3 would repeat its warning with each request.
        warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
    else:
        session.verify = options.ca_file or _system_certificates()
    if options.cert_file:
        session.cert = (options.cert_file, options.key_file) if options.key_file else options.cert_file
    return session


def _system_certificates() -> str | bool:
    """The system's file or folder of certificates; True, for those that come with requests, where there is none."""
    paths = ssl.get_default_verify_paths()
    return paths.cafile or paths.capath or True


# --- files -------------------------------------------------------------------------------------------------------


def _read_secret(path: str, what: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_CHUNK)
    except OSError as error:
        raise FetchError("bad_configuration", f"cannot read the {what} file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FetchError("bad_configuration", f"the {what} file {path} is not UTF-8 text") from None


def _signature(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise FetchError("bad_configuration", f"cannot read the certificate file {path}: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _check_certificates(options: ScrapeOptions) -> None:
    """Load the files once for their errors, which would otherwise read as the server's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if options.ca_file:
        try:
            context.load_verify_locations(options.ca_file)
        except (ssl.SSLError, OSError) as error:
            raise _bad_file("ca_file", options.ca_file, error) from None
    if options.cert_file:
        try:
            context.load_cert_chain(options.cert_file, options.key_file, password=b"")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise _bad_file("cert_file", f"{options.cert_file} with its key", error) from None


def _bad_file(key: str, files: str, error: Exception) -> FetchError:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return FetchError("bad_configuration", f"cannot use {key} {files}: {reason} (unencrypted PEM is wanted)")


def _basic(username: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()


# --- answers -----------------------------------------------------------------------------------------------------


def _receive(response: requests.Response, limit: int) -> Document:
    declared = response.headers.get("Content-Length", "")
    length = int(declared) if declared.isascii() and declared.isdigit() else None
    if response.status_code != 200:
        return Document(response.status_code, redirect=response.headers.get("Location", ""))
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "x-gzip"):
        raise FetchError("not_metrics", f"the answer is compressed as {encoding[:40]!r}; only gzip is understood")
    if length is not None and length > limit:
        raise _too_large(limit, f"{length} bytes")
    body = _Gunzip(limit) if "gzip" in encoding else _Plain(limit)
    received = 0
    try:
        while chunk := response.raw.read(_CHUNK, decode_content=False):
            received += len(chunk)
            body.add(chunk)
    except (urllib3.exceptions.ProtocolError, http.client.HTTPException, ConnectionError) as error:
        if _first(error, *_TIMEOUTS):
            raise
        raise _broken(received, length) from None
    if length is not None and received < length:
        raise _broken(received, length)
    return Document(200, response.headers.get("Content-Type", ""), body.finish(), headers=response.headers)


class _Plain:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > self._limit:
            raise _too_large(self._limit, "more")
        self._parts.append(chunk)

    def finish(self) -> bytes:
        return b"".join(self._parts)


class _Gunzip(_Plain):
    """Unpacks as the bytes come and stops at the limit, so that a small answer cannot unpack to gigabytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._stream = zlib.decompressobj(wbits=31)

    def add(self, chunk: bytes) -> None:
        while chunk:
            if self._stream.eof:
                self._stream = zlib.decompressobj(wbits=31)
            try:
                super().add(self._stream.decompress(chunk, self._limit - self._size + 1))
            except zlib.error:
                raise FetchError("not_metrics", "the answer says that it is gzip and is not") from None
            chunk = self._stream.unconsumed_tail or self._stream.unused_data

    def finish(self) -> bytes:
        if not self._stream.eof:
            raise FetchError("truncated", f"the compressed answer ends early, after {self._size} unpacked bytes")
        return super().finish()


def _too_large(limit: int, size: str) -> FetchError:
    return FetchError(
        "too_large", f"the page is larger than max_page_bytes ({limit} bytes; it has {size}): raise it or drop series"
    )


def _broken(received: int, length: int | None) -> FetchError:
    of = f" of {length}" if length is not None else ""
    return FetchError("truncated", f"the connection ended after {received}{of} bytes of the page")


# --- errors ------------------------------------------------------------------------------------------------------


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised for; the libraries wrap by argument, by ``reason`` and by chain."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        nested = (*current.args, getattr(current, "reason", None), current.__cause__, current.__context__)
        pending.extend(cause for cause in nested if isinstance(cause, BaseException))


def _first(error: BaseException, *kinds: type[BaseException]) -> BaseException | None:
    return next((cause for cause in _causes(error) if isinstance(cause, kinds)), None)


def _explain(error: BaseException) -> FetchError:
    """The state and the sentence for an error before an answer came."""
    tls = _first(error, ssl.SSLError)
    if isinstance(tls, ssl.SSLError):
        return _explain_tls(tls)
    if _first(error, urllib3.exceptions.SSLError):
        return FetchError("tls_error", "the TLS handshake failed")
    if isinstance(error, requests.exceptions.ProxyError):
        return FetchError("unreachable", "the proxy does not let us through: check proxy_url")
    if isinstance(error, (requests.exceptions.InvalidHeader, UnicodeEncodeError)):
        return FetchError("bad_configuration", "a header holds characters that HTTP forbids")
    if isinstance(error, (ValueError, UnicodeError)):  # requests' errors for URLs are ValueErrors too
        return FetchError("bad_configuration", "this is no URL that can be asked")
    if name := _first(error, socket.gaierror):
        return FetchError("unreachable", f"the host's name is not known: {getattr(name, 'strerror', name)}")
    if _first(error, ConnectionRefusedError):
        return FetchError("unreachable", "connection refused: nothing listens there (vLLM is down or still loading)")
    if _first(error, http.client.RemoteDisconnected):
        return FetchError("unreachable", "the server closed the connection without an answer")
    if _first(error, http.client.BadStatusLine, http.client.LineTooLong):
        return FetchError("not_metrics", "what answers there does not speak HTTP: check the port, and http or https")
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno and cause.strerror:
            return FetchError("unreachable", f"no connection: {cause.strerror}")
    return FetchError("unreachable", f"no connection ({type(error).__name__})")


def _explain_tls(error: ssl.SSLError) -> FetchError:
    if isinstance(error, ssl.SSLCertVerificationError):
        message = f"the server's certificate is not trusted: {error.verify_message}; set tls.ca_file"
        return FetchError("tls_error", message)
    if isinstance(error, ssl.SSLEOFError):
        return FetchError("tls_error", "the server broke the TLS connection off: it may want a client certificate")
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "wrong version number" in reason or "record layer failure" in reason:
        return FetchError("tls_error", "the server does not speak TLS there: use http:// or another port")
    if "certificate required" in reason or "handshake failure" in reason or "bad certificate" in reason:
        return FetchError("tls_error", f"the server refuses our client certificate ({reason}): set tls.cert_file")
    return FetchError("tls_error", f"the TLS connection failed: {reason}")
