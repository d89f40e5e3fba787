"""Listening TCP sockets of processes, from /proc: whose they are, in which network namespace, and at what address."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
_CONNECT_SECONDS = 0.3
_LOCAL_ADDRESS = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Listener:
    """``inode`` names the socket on the whole machine, whatever the namespace; ``uid`` is its owner's."""

    address: Address
    port: int
    uid: int
    inode: int

    @property
    def reachable_host(self) -> str:
        """The host part of a URL for a client in the same network namespace."""
        if self.address.is_unspecified:
            return "127.0.0.1" if self.address.version == 4 else "[::1]"
        return str(self.address) if self.address.version == 4 else f"[{self.address}]"


def listeners(proc: Path, pid: int | str) -> tuple[Listener, ...]:
    """Listening sockets of the network namespace of a process (not only its own). Empty where it cannot be read."""
    found: list[Listener] = []
    for name in ("tcp", "tcp6"):
        for fields in _rows(proc / str(pid) / "net" / name):
            if fields[3] != _LISTEN:
                break  # the kernel lists those that listen first; connections may be many
            address, port = _end(fields[1])
            found.append(Listener(address, port, int(fields[7]), int(fields[9])))
    return tuple(found)


def socket_inodes(proc: Path, pids: Collection[int]) -> frozenset[int] | None:
    """Sockets that the processes hold open; None where not one of them may be looked into."""
    by_process = [inodes for pid in pids if (inodes := _sockets_of(proc, pid)) is not None]
    return frozenset().union(*by_process) if by_process else None


def _sockets_of(proc: Path, pid: int) -> frozenset[int] | None:
    try:
        with os.scandir(proc / str(pid) / "fd") as descriptors:
            inodes = [_socket_inode(descriptor.path) for descriptor in descriptors]
    except OSError:
        return None
    return frozenset(inode for inode in inodes if inode is not None)


def _socket_inode(path: str) -> int | None:
    try:
        kind, _, inode = os.readlink(path).partition(":[")
    except OSError:
        return None
    return int(inode[:-1]) if kind == "socket" else None


def same_network(proc: Path, pid: int) -> bool | None:
    """Whether a process is in this process's network namespace; None where the links cannot be read."""
    try:
        return os.readlink(proc / str(pid) / "ns/net") == os.readlink(proc / "self/ns/net")
    except OSError:
        return None


def network_addresses(proc: Path, pid: int) -> tuple[str, ...]:
    """IPv4 addresses of a process's network namespace, without loopback ones."""
    try:
        text = (proc / str(pid) / "net/fib_trie").read_text()
    except OSError:
        return ()
    return tuple(a for a in dict.fromkeys(_LOCAL_ADDRESS.findall(text)) if not a.startswith("127."))


def reaches(proc: Path, pid: int, address: str, port: int) -> bool:
    """Whether a connection to ``address`` arrives in the network namespace of ``pid``.

    Containers on different networks may share an address, so that an answer proves nothing: the connection has to
    show up in the namespace's own table.
    """
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
            local: tuple[str, int] = connection.getsockname()[:2]
            return any(
                _plain(peer) == local
                for name in ("tcp", "tcp6")
                for fields in _rows(proc / str(pid) / "net" / name)
                if _end(fields[1])[1] == port
                for peer in (_end(fields[2]),)
            )
    except OSError:
        return False


def _plain(end: tuple[Address, int]) -> tuple[str, int]:
    address, port = end
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), port


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        with path.open() as table:
            next(table, None)
            for line in table:
                fields = line.split()
                if len(fields) >= 10:
                    yield fields
    except OSError:
        return


def _end(text: str) -> tuple[Address, int]:
    """An address as the kernel prints it: 32-bit words in the machine's byte order."""
    digits, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(digits[i : i + 8], 16)) for i in range(0, len(digits), 8))
    return ipaddress.ip_address(raw), int(port, 16)
