"""The sockets of the HTTP server: whole requests in, whole responses out, in one thread that never blocks.

A client costs a thread only while its complete request is answered from memory. One that connects and says nothing,
sends a byte a second, stalls its TLS handshake or does not read its answer costs a file descriptor until its
deadline, and the oldest of these give way when there are too many.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import structlog

from oomwatch.errors import InputError
from oomwatch.logs import Defects, Repeats

_log = structlog.get_logger(__name__)

_CHUNK = 64 * 1024
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_SUCH_FAMILY = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})
_TLS_CLIENT_HELLO = 0x16
_LINGER_SECONDS = 1.0
_DRAIN_CHUNKS = 16  # in one turn, so that a client that never stops does not keep the others waiting


class CannotListen(InputError):
    """An address cannot be listened on; the text says why and what to do."""


@dataclass(frozen=True)
class Limits:
    """What one client may take. Times in seconds: for a whole request, for reading a whole response, between requests.

    ``waiting`` is how many complete requests may wait for a worker.
    """

    head_bytes: int = 32 * 1024
    body_bytes: int = 16 * 1024
    request_seconds: float = 10.0
    response_seconds: float = 30.0
    idle_seconds: float = 90.0
    connections: int = 512
    workers: int = 48
    waiting: int = 64


@dataclass(frozen=True)
class Request:
    """A complete request as it came: its bytes, the client's address, and whether it came through TLS."""

    raw: bytes
    peer: str
    peer_port: int
    secure: bool


@dataclass(frozen=True)
class Answer:
    """A complete response, and whether the connection may serve another request."""

    raw: bytes
    keep: bool


class _Phase(Enum):
    HANDSHAKE = 1
    READ = 2
    WORK = 3
    WRITE = 4
    DRAIN = 5  # answered and closed on our side; the client may still be sending


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    peer: str
    peer_port: int
    secure: bool
    phase: _Phase
    since: float
    deadline: float
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: memoryview = field(default_factory=lambda: memoryview(b""))
    keep: bool = False


class Connections:
    """Serves ``sockets`` (listening ones) until it is stopped; ``answer`` runs in worker threads.

    ``tls`` gives the context for each new connection, None for plain HTTP.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        answer: Callable[[Request], Answer],
        tls: Callable[[], ssl.SSLContext | None],
        limits: Limits,
        defects: Defects,
    ) -> None:
        self._defects = defects
        self._repeats = Repeats()
        self._listening = tuple(sockets)
        self._tls = tls
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._open: set[_Connection] = set()
        self._answered: deque[tuple[_Connection, Answer]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._workers = _Workers(answer, self._hand_back, limits.workers, limits.waiting, defects)
        self._accepting = False
        self._accept_again_at = 0.0
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        for sock in (*self._listening, self._woken, self._waker):
            sock.setblocking(False)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Accept nothing more, let requests in work end within ``timeout`` seconds, then close everything."""
        self._stop_at = time.monotonic() + timeout
        self._wake()
        self._thread.join(timeout + 1.0)
        self._waker.close()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # --- the loop --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listen(True)
        checked = time.monotonic()
        while not self._finished():
            for key, _ in self._selector.select(timeout=0.25):
                if isinstance(key.data, _Connection):
                    self._guarded(self._advance, key.data)
                elif key.fileobj is self._woken:
                    self._hush()
                else:
                    self._accept(key.fileobj)
            while self._answered:
                connection, answer = self._answered.popleft()
                self._guarded(partial(self._respond, answer=answer), connection)
            now = time.monotonic()
            if now - checked >= 0.25:
                checked = now
                self._expire(now)
                if not self._accepting and self._stop_at is None and now >= self._accept_again_at:
                    self._listen(True)
        for connection in tuple(self._open):
            self._close(connection)
        self._selector.close()
        self._woken.close()
        self._workers.stop()

    def _finished(self) -> bool:
        if self._stop_at is None:
            return False
        self._listen(False)
        for sock in self._listening:
            sock.close()
        for connection in tuple(self._open):
            if connection.phase not in (_Phase.WORK, _Phase.WRITE):
                self._close(connection)
        return not self._open or time.monotonic() >= self._stop_at

    def _guarded(self, step: Callable[[_Connection], None], connection: _Connection) -> None:
        """A step that fails costs its connection, never the loop."""
        try:
            step(connection)
        except OSError:  # the client is gone, or its TLS is not ours
            self._close(connection)
        except Exception as error:
            self._defects.met(_log, "could not serve a connection", error)
            self._close(connection)

    def _listen(self, on: bool) -> None:
        if on == self._accepting:
            return
        for sock in self._listening:
            if on:
                self._selector.register(sock, selectors.EVENT_READ)
            else:
                self._selector.unregister(sock)
        self._accepting = on

    def _wake(self) -> None:
        with suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._waker.send(b"x")

    def _hush(self) -> None:
        with suppress(BlockingIOError):
            while self._woken.recv(_CHUNK):
                pass

    def _hand_back(self, connection: _Connection, answer: Answer) -> None:
        self._answered.append((connection, answer))
        self._wake()

    def _expire(self, now: float) -> None:
        for connection in [c for c in self._open if now > c.deadline]:
            if connection.phase is _Phase.READ and connection.incoming:
                self._guarded(
                    lambda c: self._refuse(c, "408 Request Timeout", "The request took too long."), connection
                )
            else:
                self._cut(connection)

    # --- new connections -------------------------------------------------------------------------------------

    def _accept(self, listening: object) -> None:
        if not isinstance(listening, socket.socket):
            return
        try:
            sock, address = listening.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS and not self._make_room():
                reason = os.strerror(error.errno or 0)
                self._repeats.failed(_log, "accept", "no connection can be accepted for a second", reason)
                self._listen(False)
                self._accept_again_at = time.monotonic() + 1.0
            return
        if len(self._open) >= self._limits.connections and not self._make_room():
            sock.close()
            return
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        now = time.monotonic()
        try:
            context = self._tls()
            if context is not None:
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):  # reset before it began
            sock.close()
            return
        phase = _Phase.READ if context is None else _Phase.HANDSHAKE
        connection = _Connection(
            sock, str(address[0]), int(address[1]), context is not None, phase, now, now + self._limits.request_seconds
        )
        self._open.add(connection)
        self._guarded(self._advance, connection)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client, those between two requests first."""
        waiting = [c for c in self._open if c.phase not in (_Phase.WORK, _Phase.WRITE)]
        waiting = waiting or [c for c in self._open if c.phase is _Phase.WRITE]
        if not waiting:
            return False
        self._cut(min(waiting, key=lambda c: (bool(c.incoming) or c.phase is not _Phase.READ, c.since)))
        return True

    # --- one connection --------------------------------------------------------------------------------------

    def _advance(self, connection: _Connection) -> None:
        if connection.phase is _Phase.HANDSHAKE:
            self._shake_hands(connection)
        elif connection.phase is _Phase.READ:
            self._read(connection)
        elif connection.phase is _Phase.WRITE:
            self._write(connection)
        elif connection.phase is _Phase.DRAIN:
            self._drain(connection)

    def _shake_hands(self, connection: _Connection) -> None:
        sock = connection.socket
        assert isinstance(sock, ssl.SSLSocket)
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._watch(connection, selectors.EVENT_WRITE)
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                # The client speaks no TLS, so it is told in plain text, past the TLS object.
                socket.socket.send(sock, _plain("400 Bad Request", "This is an HTTPS server: use https://."))
            _log.debug("tls handshake failed", peer=connection.peer, error=str(error))
            self._close(connection)
        else:
            connection.phase = _Phase.READ
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        while True:
            verdict = _complete(connection.incoming, self._limits, secure=connection.secure)
            if isinstance(verdict, int):
                self._dispatch(connection, verdict)
                return
            if verdict:
                self._refuse(connection, *verdict)
                return
            if not self._receive(connection):
                return

    def _receive(self, connection: _Connection) -> bool:
        """Whether more of a request has come; else the connection waits, or is closed by the client."""
        try:
            data = connection.socket.recv(_CHUNK)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._watch(connection, selectors.EVENT_READ)
            return False
        except ssl.SSLWantWriteError:
            self._watch(connection, selectors.EVENT_WRITE)
            return False
        if not data:
            self._close(connection)
            return False
        if not connection.incoming:
            connection.since = time.monotonic()
            connection.deadline = min(connection.deadline, connection.since + self._limits.request_seconds)
        connection.incoming += data
        return True

    def _dispatch(self, connection: _Connection, length: int) -> None:
        raw = bytes(connection.incoming[:length])
        del connection.incoming[:length]
        self._watch(connection, 0)
        connection.phase = _Phase.WORK
        connection.deadline = float("inf")
        request = Request(raw, connection.peer, connection.peer_port, connection.secure)
        if not self._workers.submit(connection, request):
            self._refuse(
                connection, "503 Service Unavailable", "Too many requests at once. Try again.", "Retry-After: 1"
            )

    def _refuse(self, connection: _Connection, status: str, text: str, *headers: str) -> None:
        self._respond(connection, Answer(_plain(status, text, *headers), keep=False))

    def _respond(self, connection: _Connection, answer: Answer) -> None:
        if connection not in self._open:
            return
        connection.phase = _Phase.WRITE
        connection.deadline = time.monotonic() + self._limits.response_seconds
        connection.outgoing = memoryview(answer.raw)
        connection.keep = answer.keep and self._stop_at is None
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        while connection.outgoing:
            try:
                sent = connection.socket.send(connection.outgoing)
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._watch(connection, selectors.EVENT_WRITE)
                return
            except ssl.SSLWantReadError:
                self._watch(connection, selectors.EVENT_READ)
                return
            connection.outgoing = connection.outgoing[sent:]
        now = time.monotonic()
        connection.since = now
        if connection.keep:
            connection.phase = _Phase.READ
            patience = self._limits.request_seconds if connection.incoming else self._limits.idle_seconds
            connection.deadline = now + patience
            self._read(connection)
            return
        self._hang_up(connection)
        connection.phase = _Phase.DRAIN
        connection.deadline = now + _LINGER_SECONDS
        self._drain(connection)

    def _hang_up(self, connection: _Connection) -> None:
        if isinstance(connection.socket, ssl.SSLSocket):
            # Sends the close_notify; the client's own is not waited for.
            with suppress(OSError, ValueError):
                connection.socket.unwrap()
        connection.socket.shutdown(socket.SHUT_WR)

    def _drain(self, connection: _Connection) -> None:
        """Read until the client closes: closing with unread data would cost it the answer."""
        with suppress(BlockingIOError):
            for _ in range(_DRAIN_CHUNKS):
                if not socket.socket.recv(connection.socket, _CHUNK):
                    self._close(connection)
                    return
        self._watch(connection, selectors.EVENT_READ)

    def _watch(self, connection: _Connection, events: int) -> None:
        """Have the selector look for these events on the connection, for 0 for none."""
        watched = self._selector.get_map().get(connection.socket)
        if watched is None:
            if events:
                self._selector.register(connection.socket, events, connection)
        elif not events:
            self._selector.unregister(connection.socket)
        elif watched.events != events:
            self._selector.modify(connection.socket, events, connection)

    def _cut(self, connection: _Connection) -> None:
        """Close without another try to deliver what the client has not read, which would keep memory in the kernel."""
        if connection.phase is _Phase.WRITE:
            with suppress(OSError):
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        if connection not in self._open:
            return
        self._open.discard(connection)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        with suppress(OSError):
            connection.socket.close()


# --- workers ---------------------------------------------------------------------------------------------------


class _Workers:
    """Daemon threads, started as they are needed, up to a bound; their queue is bounded too."""

    def __init__(
        self,
        answer: Callable[[Request], Answer],
        hand_back: Callable[[_Connection, Answer], None],
        threads: int,
        waiting: int,
        defects: Defects,
    ) -> None:
        self._defects = defects
        self._answer = answer
        self._hand_back = hand_back
        self._most_threads = threads
        self._most_waiting = waiting
        self._waiting: deque[tuple[_Connection, Request]] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        self._idle = 0
        self._stopping = False

    def submit(self, connection: _Connection, request: Request) -> bool:
        """Whether the request is taken; False when too many wait already."""
        with self._changed:
            if len(self._waiting) >= self._most_waiting:
                return False
            self._waiting.append((connection, request))
            if self._idle < len(self._waiting) and self._threads < self._most_threads:
                self._threads += 1
                threading.Thread(target=self._run, name=f"http-{self._threads}", daemon=True).start()
            self._changed.notify()
            return True

    def stop(self) -> None:
        """Let idle threads end; one that is stuck in a request ends with the process."""
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                self._idle -= 1
                if self._stopping:
                    return
                connection, request = self._waiting.popleft()
            try:
                answer = self._answer(request)
            except Exception as error:
                self._defects.met(_log, "could not answer a request", error)
                answer = Answer(_plain("500 Internal Server Error", "oomwatch's log says why."), keep=False)
            self._hand_back(connection, answer)


# --- requests --------------------------------------------------------------------------------------------------

_LENGTH = re.compile(rb"^content-length[ \t]*:[ \t]*([^\r\n]*?)[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_TRANSFER = re.compile(rb"^transfer-encoding[ \t]*:", re.IGNORECASE | re.MULTILINE)


def _complete(incoming: bytearray, limits: Limits, *, secure: bool) -> int | tuple[str, str] | None:
    """The length of the first request in ``incoming``, a status and text to refuse it with, None while it goes on."""
    if not secure and incoming[:1] == bytes([_TLS_CLIENT_HELLO]):
        return "400 Bad Request", "This is an HTTP server: use http://, or switch TLS on in the web configuration."
    end = incoming.find(b"\r\n\r\n", 0, limits.head_bytes + 4)
    if end < 0:
        if len(incoming) > limits.head_bytes:
            return "431 Request Header Fields Too Large", f"More than {limits.head_bytes} bytes of headers."
        return None
    head = incoming[:end]
    if _TRANSFER.search(head):
        return "411 Length Required", "Transfer-Encoding is not accepted: send a Content-Length."
    lengths = {bytes(value) for value in _LENGTH.findall(head)}
    if not lengths:
        return end + 4
    text = lengths.pop()
    if lengths or not re.fullmatch(rb"\d{1,18}", text):
        return "400 Bad Request", "Content-Length is not one number."
    if int(text) > limits.body_bytes:
        return "413 Content Too Large", f"More than {limits.body_bytes} bytes of content."
    length = end + 4 + int(text)
    return length if len(incoming) >= length else None


def _plain(status: str, text: str, *headers: str) -> bytes:
    body = f"{text}\n".encode()
    lines = (
        f"HTTP/1.1 {status}",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode() + body


# --- listening -------------------------------------------------------------------------------------------------


def listen(addresses: Iterable[tuple[str, int]]) -> tuple[socket.socket, ...]:
    """Listening sockets for hosts (a name, an IP, "" for every interface) and ports; CannotListen with the reason."""
    opened: list[socket.socket] = []
    try:
        for host, port in addresses:
            opened += _listen_on(host, port)
    except CannotListen:
        for sock in opened:
            sock.close()
        raise
    return tuple(opened)


def shown(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_on(host: str, port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    refusals: list[OSError] = []
    for family, address in _candidates(host, port):
        # A name with several addresses gets the same free port on each.
        chosen = port or (sockets[0].getsockname()[1] if sockets else 0)
        bound = _bound(family, (address[0], chosen, *address[2:]))
        if isinstance(bound, OSError):
            refusals.append(bound)
            continue
        sockets.append(bound)
        if not host:
            break  # IPv6's answers IPv4 as well
    serious = [error for error in refusals if error.errno not in _NO_SUCH_FAMILY]
    if sockets and not serious:
        return sockets
    for sock in sockets:
        sock.close()
    raise CannotListen(_why_not(host, port, (serious or refusals)[0]))


Address = tuple[str | int, ...]


def _candidates(host: str, port: int) -> Iterator[tuple[int, Address]]:
    if not host:
        yield socket.AF_INET6, ("::", port, 0, 0)
        yield socket.AF_INET, ("0.0.0.0", port)
        return
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotListen(f"cannot listen on {shown(host, port)}: the name {host} is not known ({error}).") from error
    for family, _, _, _, address in found:
        yield family, tuple(part for part in address if isinstance(part, str | int))


def _bound(family: int, address: Address) -> socket.socket | OSError:
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        return error
    return sock


def _why_not(host: str, port: int, error: OSError) -> str:
    what = f"cannot listen on {shown(host, port)}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{what}: the port is taken. ss -ltnp 'sport = :{port}' shows by which program; "
            "stop that one, or choose another port with --web.listen-address."
        )
    if error.errno == errno.EACCES:
        return f"{what}: not allowed. Ports below 1024 need CAP_NET_BIND_SERVICE; choose one above."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}: this host has no such address. ip address lists those that it has."
    return f"{what}: {(error.strerror or str(error)).lower()}."
