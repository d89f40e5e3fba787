"""The daemon's HTTP server: /metrics, the page, the API, health. Everything is answered from memory.

Requests are parsed and answered by cheroot's HTTP and WSGI parts; the sockets are those of oomwatch.connections.
"""

from __future__ import annotations

import gzip
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import structlog
from cheroot import server as cheroot_server
from cheroot import wsgi

from oomwatch import page, record
from oomwatch.config import split_address
from oomwatch.connections import Answer, CannotListen, Connections, Limits, Request, listen, shown
from oomwatch.database import Unusable
from oomwatch.logs import Defects
from oomwatch.snapshot import Snapshot
from oomwatch.status import status
from oomwatch.webconfig import WebConfigFile, WebState

_log = structlog.get_logger(__name__)

_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
_JSON = "application/json"
_JSON_LINES = "application/jsonl"

# Below this gzip costs more than it saves.
_WORTH_GZIP = 1024

_SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": page.CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

PATHS: Mapping[str, str] = {
    "/": "GET",
    "/metrics": "GET",
    "/api/v1/status": "GET",
    "/api/v1/recording": "GET",
    "/-/healthy": "GET",
    "/-/ready": "GET",
    "/-/reload": "POST",
    "/-/release": "POST",
}


@dataclass(frozen=True)
class _Response:
    status: str
    body: bytes
    content_type: str = _TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


def _text(status_line: str, text: str, **headers: str) -> _Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return _Response(status_line, f"{text.strip()}\n".encode(), headers=named)


Environ = Mapping[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], object]


class _Application:
    """The WSGI application: answers in full, from memory, and never with a traceback."""

    def __init__(
        self,
        web: _WebConfiguration,
        actions: Mapping[str, Callable[[Environ], _Response]],
        max_requests: int,
        defects: Defects,
    ) -> None:
        self._defects = defects
        self._web = web
        self._actions = actions
        self._slots = threading.BoundedSemaphore(max_requests)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        web = self._web.current()
        try:
            response = self._limited(environ, web)
        except Exception as error:
            self._defects.met(_log, "could not answer a request", error)
            response = _text("500 Internal Server Error", "Something went wrong here. oomwatch's log says what.")
        body, encoding = _encoded(response, environ.get("HTTP_ACCEPT_ENCODING", ""))
        headers = {
            **_SECURITY_HEADERS,
            **web.config.http_server_config.headers,
            "Content-Type": response.content_type,
            "Content-Length": str(len(body)),
            "Vary": "Accept, Accept-Encoding, Authorization",
            **encoding,
            **response.headers,
        }
        start_response(response.status, list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _limited(self, environ: Environ, web: WebState) -> _Response:
        if not web.limiter.allows():
            return _text("429 Too Many Requests", "More requests than rate_limit allows.", Retry_After="1")
        if environ["PATH_INFO"] in ("/-/healthy", "/-/ready"):
            # Many scrapes at once are no reason for a supervisor to restart us.
            return self._authorized(environ, web)
        if not self._slots.acquire(blocking=False):
            return _text(
                "503 Service Unavailable",
                "As many requests as --web.max-requests allows are being served. Try again.",
                Retry_After="1",
            )
        try:
            return self._authorized(environ, web)
        finally:
            self._slots.release()

    def _authorized(self, environ: Environ, web: WebState) -> _Response:
        if not web.authenticator.allows(environ.get("HTTP_AUTHORIZATION")):
            return _text(
                "401 Unauthorized",
                "A user's name and password are needed.",
                WWW_Authenticate='Basic realm="oomwatch", charset="UTF-8"',
            )
        return self._routed(environ)

    def _routed(self, environ: Environ) -> _Response:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path not in PATHS:
            return _Response("404 Not Found", page.not_found(PATHS).encode(), _HTML)
        allowed = ("GET", "HEAD") if PATHS[path] == "GET" else (PATHS[path],)
        if method not in allowed:
            return _text(
                "405 Method Not Allowed", f"{path} answers to {' and '.join(allowed)}.", Allow=", ".join(allowed)
            )
        return self._actions[path](environ)


def _encoded(response: _Response, accept_encoding: str) -> tuple[bytes, Mapping[str, str]]:
    if len(response.body) < _WORTH_GZIP or not _accepts_gzip(accept_encoding):
        return response.body, {}
    return gzip.compress(response.body, compresslevel=1, mtime=0), {"Content-Encoding": "gzip"}


def _accepts_gzip(header: str) -> bool:
    for offer in header.lower().split(","):
        coding, _, parameter = offer.partition(";")
        if coding.strip() not in ("gzip", "x-gzip", "*"):
            continue
        weight = parameter.strip().removeprefix("q=")
        try:
            return not parameter.strip() or float(weight) > 0
        except ValueError:
            return False
    return False


def _comes_from_elsewhere(environ: Environ) -> bool:
    """Whether a browser sends this for another site's page, which may make it POST but not read."""
    if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") not in ("same-origin", "none"):
        return True
    origin = environ.get("HTTP_ORIGIN")
    return origin is not None and origin.partition("://")[2] != environ.get("HTTP_HOST")


# --- the web configuration file, read anew as it changes -------------------------------------------------------


class _WebConfiguration:
    """The file's present state; what is wrong with a new content is logged once for each change."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = WebConfigFile(path)
        self._logged = ""
        self._lock = threading.Lock()

    def current(self) -> WebState:
        state = self._file.current()
        error = str(self._file.error or "")
        if error != self._logged:
            with self._lock:
                said, self._logged = self._logged, error
            if error and said != error:
                _log.error("web configuration not taken over, the one in use stays", error=error)
            elif said != error:
                _log.info("web configuration taken over", file=str(self._path))
        return state


# --- cheroot's part --------------------------------------------------------------------------------------------


class _Cheroot(wsgi.Server):
    """Holds what cheroot's parser and gateway ask their server for; its own sockets and threads are never started."""

    def __init__(self, application: _Application, limits: Limits) -> None:
        super().__init__(("127.0.0.1", 0), application, server_name="oomwatch")
        self.software = "oomwatch"
        self.timeout = int(limits.idle_seconds)
        self.max_request_header_size = limits.head_bytes
        self.max_request_body_size = limits.body_bytes

    @property
    def can_add_keepalive_connection(self) -> bool:
        return True

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        _log.log(level, "http", detail=str(msg), exc_info=traceback)

    def answer(self, request: Request) -> Answer:
        """What the application answers to a complete request."""
        written = io.BytesIO()

        def makefile(_socket: None, mode: str, _size: int) -> io.BytesIO:
            return written if "w" in mode else io.BytesIO(request.raw)

        connection: Any = cheroot_server.HTTPConnection(self, None, makefile)
        connection.remote_addr = request.peer
        connection.remote_port = request.peer_port
        connection.ssl_env = {"wsgi.url_scheme": "https", "HTTPS": "on"} if request.secure else {}
        keep = connection.communicate()
        return Answer(written.getvalue(), bool(keep))


# --- the server ------------------------------------------------------------------------------------------------


class WebServer:
    """Serves on every address of ``listen`` (``host:port``, ``:port``, ``[IPv6]:port``; port 0 takes a free one).

    ``web_config`` is a web configuration file, read anew when it changes; ConfigError when it is wrong at first.
    ``render`` gives the page of metrics and its content type for an Accept header. ``healthy`` and ``ready`` give an
    empty text or what is missing, ``reload`` and ``release`` an empty text or what went wrong. ``history`` is the
    database that recordings are taken from.
    """

    def __init__(
        self,
        *,
        listen: Sequence[str],
        snapshot: Callable[[], Snapshot],
        render: Callable[[str], tuple[bytes, str]],
        healthy: Callable[[], str],
        ready: Callable[[], str],
        reload: Callable[[], str],
        release: Callable[[], str],
        history: Path | None = None,
        web_config: Path | None = None,
        enable_lifecycle: bool = False,
        max_requests: int = 40,
        clock: Callable[[], float] = time.time,
        limits: Limits | None = None,
        defects: Defects | None = None,
    ) -> None:
        self._defects = defects or Defects()
        self._listen = tuple(listen)
        self._snapshot = snapshot
        self._render = render
        self._healthy = healthy
        self._ready = ready
        self._history = history
        self._enable_lifecycle = enable_lifecycle
        self._clock = clock
        self._node = socket.gethostname()
        self._web = _WebConfiguration(web_config)
        # A few threads beside those for pages, so that health and refusals never wait for a page.
        self._limits = limits or Limits(workers=max_requests + 8)
        actions: Mapping[str, Callable[[Environ], _Response]] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/api/v1/status": self._status,
            "/api/v1/recording": self._recording,
            "/-/healthy": lambda _: _health(self._healthy(), "oomwatch is healthy."),
            "/-/ready": lambda _: _health(self._ready(), "oomwatch is ready."),
            "/-/reload": lambda environ: self._act(environ, reload, "Reloaded."),
            "/-/release": lambda environ: self._act(environ, release, "Released."),
        }
        self._cheroot = _Cheroot(_Application(self._web, actions, max_requests, self._defects), self._limits)
        self._connections: Connections | None = None
        self.addresses: tuple[str, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """Where a browser on this host finds the page, by address."""
        scheme = "http" if self._web.current().context is None else "https"
        return tuple(_url(scheme, address) for address in self.addresses)

    def start(self) -> None:
        """Listen and serve; CannotListen when an address cannot be had."""
        sockets = listen(_addresses(self._listen))
        self.addresses = tuple(shown(*sock.getsockname()[:2]) for sock in sockets)
        self._connections = Connections(
            sockets, self._cheroot.answer, lambda: self._web.current().context, self._limits, self._defects
        )
        self._connections.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Close idle connections, give requests in work ``timeout`` seconds to end, then close these too."""
        if self._connections is not None:
            self._connections.stop(timeout)
            self._connections = None

    # --- what is served --------------------------------------------------------------------------------------

    def _metrics(self, environ: Environ) -> _Response:
        body, content_type = self._render(environ.get("HTTP_ACCEPT", ""))
        return _Response("200 OK", body, content_type)

    def _page(self, _environ: Environ) -> _Response:
        return _Response("200 OK", page.render(self._snapshot(), self._clock(), self._node).encode(), _HTML)

    def _status(self, _environ: Environ) -> _Response:
        plain = status(self._snapshot(), self._clock())
        text = json.dumps(plain, allow_nan=False, ensure_ascii=True)
        return _Response("200 OK", f"{text}\n".encode(), _JSON)

    def _recording(self, environ: Environ) -> _Response:
        if self._history is None:
            return _text("503 Service Unavailable", "No history is kept on disk (history.enabled).")
        query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
        try:
            part = record.answer(self._history, query, self._clock())
        except ValueError as error:
            return _text("400 Bad Request", str(error))
        except Unusable as error:
            return _text("503 Service Unavailable", str(error))
        headers = {record.NEXT: str(part.next), record.START: repr(part.start)}
        return _Response("200 OK", part.lines, _JSON_LINES, headers)

    def _act(self, environ: Environ, action: Callable[[], str], done: str) -> _Response:
        if not self._enable_lifecycle:
            return _text(
                "403 Forbidden", "Switched off. Start oomwatch with --web.enable-lifecycle to allow this by HTTP."
            )
        if _comes_from_elsewhere(environ):
            return _text("403 Forbidden", "Pages of other sites may not do this.")
        problem = action()
        return _text("500 Internal Server Error", problem) if problem else _text("200 OK", done)


def _health(problem: str, fine: str) -> _Response:
    return _text("503 Service Unavailable", problem) if problem else _text("200 OK", fine)


def _addresses(listen_on: Iterable[str]) -> Iterator[tuple[str, int]]:
    for address in listen_on:
        parts = split_address(address)
        if parts is None:
            raise CannotListen(f'cannot listen on "{address}": write host:port, :port or [IPv6]:port.')
        yield parts


def _url(scheme: str, address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{scheme}://{'localhost' if host in ('[::]', '0.0.0.0') else host}:{port}/"
