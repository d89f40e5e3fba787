"""Engines that tests script: real HTTP servers on 127.0.0.1, each answering as a function says."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

Answer = Callable[["Request"], None]
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Request(BaseHTTPRequestHandler):
    """One request, with the ways to answer it."""

    protocol_version = "HTTP/1.1"
    server: Listener

    def do_GET(self) -> None:  # http.server's name
        self.server.requests.append((self.path, dict(self.headers.items())))
        self.server.answer(self)

    do_POST = do_GET

    def reply(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """A whole answer; a header given as an empty text is left out."""
        fields = {"Content-Type": TEXT, "Content-Length": str(len(body)), **(headers or {})}
        self.begin(status, fields)
        self.wfile.write(body)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()

    def drip(self, piece: bytes, pause: float) -> None:
        """Send a piece again and again until the client or the test ends."""
        while not self.server.ending.wait(pause):
            self.wfile.write(piece)
            self.wfile.flush()

    def hang(self) -> None:
        self.server.ending.wait(60)

    def hang_up(self) -> None:
        self.close_connection = True

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Say nothing on standard error."""

    def log_error(self, message: str, *args: object) -> None:
        """Nor about requests that a test breaks."""


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, answer: Answer, port: int, tls: ssl.SSLContext | None) -> None:
        self.answer = answer
        self.ending = threading.Event()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.connections = 0
        self._open: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), Request)
        self._tls = tls

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        self.connections += 1
        if self._tls is not None:
            connection.settimeout(10)
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        self._open.append(connection)
        return connection, address

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what several tests are about."""

    def drop_connections(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Engine:
    """A server that runs while the block does."""

    def __init__(self, answer: Answer, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._listener = Listener(answer, port, tls)
        self.port = self._listener.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Engine:
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.ending.set()
        self._listener.shutdown()
        self._listener.drop_connections()
        self._listener.server_close()
        self._thread.join(10)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self._listener.requests]

    @property
    def headers(self) -> list[dict[str, str]]:
        return [headers for _, headers in self._listener.requests]

    @property
    def connections(self) -> int:
        return self._listener.connections


class FakeVllm:
    """Answers as vLLM's server does; what a test changes shows in the next answer."""

    def __init__(self, page: bytes, version: str | None = "0.32.0", health: int = 200) -> None:
        self.page, self.version, self.health = page, version, health

    def __call__(self, request: Request) -> None:
        path = request.path.partition("?")[0]
        if path == "/version" and self.version is not None:
            request.reply(f'{{"version":"{self.version}"}}'.encode(), headers={"Content-Type": "application/json"})
        elif path == "/health":
            request.reply(b"", self.health)
        elif path == "/metrics":
            request.reply(self.page)
        else:
            request.reply(b"", 404)
