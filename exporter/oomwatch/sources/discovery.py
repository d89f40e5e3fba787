"""Finding the vLLM servers of this host by themselves: from command lines, process trees and listening sockets."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import structlog

from oomwatch.observations import EngineFacts
from oomwatch.sources.listeners import (
    Listener,
    listeners,
    network_addresses,
    reaches,
    same_network,
    socket_inodes,
)
from oomwatch.sources.proc import PROC, ProcessEntry, ProcessTable, ancestors, children_of, descendants, read_bytes
from oomwatch.sources.vllm_command import ServerCommand, parse_server, server_arguments

_log = structlog.get_logger(__name__)

_CONFIG_LIMIT = 256 * 1024
_PASSES_BETWEEN_CONNECTIONS = 20  # to a container that did not answer
_RANK_SERVER = re.compile(r"[\w.-]+::APIServer_DP(\d+)$")
_RAY_WORKER = "ray::RayWorker"
_ADVICE = "Add it to engines: in the configuration, with a name and the url at which oomwatch can reach it"


@dataclass(frozen=True)
class _Server:
    """One page of metrics to come: a server's process, its command line, and the processes that belong to it."""

    pid: int
    start_ticks: int
    command: ServerCommand
    pids: tuple[int, ...]

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_ticks

    @property
    def distinction(self) -> str:
        """What sets it apart from another server of the same model, and stays the same when it is restarted."""
        if self.command.headless:
            return "headless"
        return "uds" if self.command.uds else str(self.command.port)


@dataclass(frozen=True)
class _Address:
    """Where a server's page is. ``settled`` once there is nothing left to find out."""

    url: str | None
    problem: str = ""
    settled: bool = False


class Discovery:
    """Finds vLLM servers anew at each call. What was settled for a process is not looked at again.

    ``problems`` says, by engine, why one that was found has no address and what to do. Not for use by several threads
    at once.
    """

    def __init__(self, *, proc: Path = PROC, table: ProcessTable | None = None) -> None:
        self._proc = proc
        self._table = table or ProcessTable(proc)
        self._commands: dict[tuple[int, int, tuple[str, ...]], ServerCommand] = {}
        self._addresses: dict[tuple[int, int], _Address] = {}
        self._not_reached: dict[tuple[int, int], int] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._slots: dict[tuple[str, str], list[str]] = {}
        self.problems: Mapping[str, str] = {}

    def find(self) -> tuple[EngineFacts, ...]:
        """The servers of now, by name. Raises OSError when /proc cannot be listed."""
        entries = self._table.refresh()
        servers = self._servers(entries)
        self._forget_all_but({server.identity for server in servers})
        self._name(servers)
        published = _published_ports(entries.values())
        found: list[EngineFacts] = []
        problems: dict[str, str] = {}
        for server in servers:
            name = self._names[server.identity]
            address = self._address(server, published)
            if address.problem:
                problems[name] = address.problem
                if self.problems.get(name) != address.problem:
                    _log.warning("vllm server has no usable address", engine=name, pid=server.pid, why=address.problem)
            found.append(
                EngineFacts(
                    name=name,
                    target=address.url,
                    pids=server.pids,
                    gpu_memory_utilization=server.command.gpu_memory_utilization,
                    max_model_len=server.command.max_model_len,
                    max_num_seqs=server.command.max_num_seqs,
                    max_num_batched_tokens=server.command.max_num_batched_tokens,
                    kv_connector=server.command.kv_connector,
                    origin="discovery",
                )
            )
        self.problems = problems
        return tuple(sorted(found, key=lambda facts: facts.name))

    # --- processes -------------------------------------------------------------------------------------------

    def _servers(self, entries: Mapping[int, ProcessEntry]) -> list[_Server]:
        commands = {
            entry.pid: command
            for entry in entries.values()
            if entry.argv and (command := self._command(entry)) is not None
        }
        children = children_of(entries)
        servers: list[_Server] = []
        for pid, command in sorted(commands.items()):
            if any(parent in commands for parent in ancestors(entries, pid)):
                continue  # a child that has not set its title yet
            tree = descendants(entries, [pid], children)
            if command.multi_port:
                servers.extend(_rank_servers(entries, tree, command))
            else:
                servers.append(_Server(pid, entries[pid].start_ticks, command, tree))
        return _with_ray_workers(servers, entries)

    def _command(self, entry: ProcessEntry) -> ServerCommand | None:
        key = (entry.pid, entry.start_ticks, entry.argv)
        if key not in self._commands:
            arguments = server_arguments(entry.argv)
            if arguments is None:
                return None
            self._commands[key] = parse_server(arguments, lambda path: self._config_file(entry.pid, path))
        return self._commands[key]

    def _config_file(self, pid: int, path: str) -> bytes:
        """A file as the process sees it, in its container and its working directory."""
        base = f"{self._proc}/{pid}/root" if path.startswith("/") else f"{self._proc}/{pid}/cwd/"
        # The path is the server's choice: opening a pipe or a device must neither wait nor do anything.
        descriptor = os.open(base + path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path} is no file")
            return os.read(descriptor, _CONFIG_LIMIT)
        finally:
            os.close(descriptor)

    def _forget_all_but(self, alive: Collection[tuple[int, int]]) -> None:
        pids = {pid for pid, _ in alive}
        self._commands = {key: command for key, command in self._commands.items() if key[0] in pids}
        self._addresses = {key: address for key, address in self._addresses.items() if key in alive}
        self._not_reached = {key: count for key, count in self._not_reached.items() if key in alive}
        self._names = {key: name for key, name in self._names.items() if key in alive}

    # --- names -----------------------------------------------------------------------------------------------

    def _name(self, servers: Iterable[_Server]) -> None:
        """The model's name; for a second server of it, with the port behind; for a third at that port, with a number.

        A name stays with its model and port as long as this object lives, so that a restart changes no label.
        """
        unnamed = [server for server in servers if server.identity not in self._names]
        for server in sorted(unnamed, key=lambda s: (s.command.headless, s.command.port, s.start_ticks, s.pid)):
            model = server.command.name
            slots = self._slots.setdefault((model, server.distinction), [])
            in_use = set(self._names.values())
            free = [name for name in slots if name not in in_use]
            if not free:
                taken = {name for names in self._slots.values() for name in names} | in_use
                free = [next(name for name in _candidates(model, server.distinction) if name not in taken)]
                slots.extend(free)
            self._names[server.identity] = free[0]

    # --- addresses -------------------------------------------------------------------------------------------

    def _address(self, server: _Server, published: Mapping[tuple[str, int], int]) -> _Address:
        address = self._addresses.get(server.identity)
        if address is None or not address.settled:
            address = self._look_up(server, published)
            self._addresses[server.identity] = address
        return address

    def _look_up(self, server: _Server, published: Mapping[tuple[str, int], int]) -> _Address:
        command = server.command
        if command.headless:
            return _Address(None, settled=True)  # the ranks of a server elsewhere, whose page shows them
        if command.uds:
            return _Address(
                None, "it listens on a Unix socket (--uds) only, and has no port. Start it with --port instead", True
            )
        if command.grpc:
            return _Address(None, "it speaks gRPC (--grpc), and has no page of metrics", True)
        theirs = listeners(self._proc, server.pid)
        ours = {listener.inode for listener in listeners(self._proc, "self")}
        owned = self._owned(server, theirs)
        port = self._port(command, owned)
        if port is None:
            return _Address(None, f"its --config file cannot be read, and no socket of it tells the port. {_ADVICE}")
        at_port = [listener for listener in theirs if listener.port == port]
        mine = [listener for listener in at_port if listener in owned]
        if at_port and not mine:
            return _Address(None, f"another process listens on its port {port}")
        near = (mine[0].inode in ours) if mine else self._near(server.pid, theirs, ours)
        if near:
            host = mine[0].reachable_host if mine else _host_to_ask(command.host)
            return _Address(_url(command, host, port), settled=bool(mine))
        return self._far_address(server, port, listening=bool(mine), published=published)

    def _owned(self, server: _Server, theirs: Collection[Listener]) -> set[Listener]:
        """The listeners that are this server's; by user alone where its open files may not be looked at."""
        inodes = socket_inodes(self._proc, server.pids)
        if inodes is not None:
            return {listener for listener in theirs if listener.inode in inodes}
        uid = _effective_uid(self._proc, server.pid)
        return {listener for listener in theirs if uid is None or listener.uid == uid}

    @staticmethod
    def _port(command: ServerCommand, owned: Collection[Listener]) -> int | None:
        if command.port_known or any(listener.port == command.port for listener in owned):
            return command.port
        ports = {listener.port for listener in owned}
        return ports.pop() if len(ports) == 1 else None

    def _near(self, pid: int, theirs: Collection[Listener], ours: Collection[int]) -> bool:
        """Whether a server that does not listen yet will be reached as a local one."""
        same = same_network(self._proc, pid)
        if same is not None:
            return same
        return any(listener.inode in ours for listener in theirs) or (not theirs and not ours)

    def _far_address(
        self, server: _Server, port: int, *, listening: bool, published: Mapping[tuple[str, int], int]
    ) -> _Address:
        """The address of a server in a container's own network, where 127.0.0.1 would be somebody else."""
        problem = (
            f"it runs in another network namespace (a container's), and its port {port} cannot be reached from here. "
            f"{_ADVICE}"
        )
        addresses = network_addresses(self._proc, server.pid)
        ours = {listener.port for listener in listeners(self._proc, "self")}
        for address in addresses:
            host_port = published.get((address, port))
            if host_port is not None and host_port in ours:
                return _Address(_url(server.command, "127.0.0.1", host_port), settled=True)
        if not listening:
            return _Address(None)
        tried = self._not_reached.get(server.identity, 0)
        self._not_reached[server.identity] = tried + 1
        if tried % _PASSES_BETWEEN_CONNECTIONS == 0:
            for address in addresses:
                if reaches(self._proc, server.pid, address, port):
                    return _Address(_url(server.command, address, port), settled=True)
        return _Address(None, problem)


def _candidates(model: str, distinction: str) -> Iterator[str]:
    yield model
    yield f"{model}-{distinction}"
    number = 2
    while True:
        yield f"{model}-{distinction}-{number}"
        number += 1


def _rank_servers(
    entries: Mapping[int, ProcessEntry], tree: Collection[int], command: ServerCommand
) -> Iterator[_Server]:
    """The servers that a supervisor of --data-parallel-multi-port-external-lb starts, one port behind the other."""
    ranked = sorted(
        (int(match.group(1)), pid) for pid in tree if (match := _RANK_SERVER.match(entries[pid].title)) is not None
    )
    for offset, (_, pid) in enumerate(ranked):
        yield _Server(
            pid,
            entries[pid].start_ticks,
            replace(command, port=command.port + offset, multi_port=False),
            descendants(entries, [pid]),
        )


def _with_ray_workers(servers: list[_Server], entries: Mapping[int, ProcessEntry]) -> list[_Server]:
    """Ray's daemon starts the workers of a server with the Ray executor: they are in no tree of ours.

    They are given to the one server that uses Ray; with several, which worker is whose cannot be told.
    """
    users = [server for server in servers if server.command.ray]
    if len(users) != 1:
        return servers
    workers = descendants(entries, (e.pid for e in entries.values() if e.title.startswith(_RAY_WORKER)))
    return [replace(s, pids=tuple(dict.fromkeys((*s.pids, *workers)))) if s is users[0] else s for s in servers]


def _published_ports(entries: Iterable[ProcessEntry]) -> dict[tuple[str, int], int]:
    """Container address and port to the host's port, from the command lines of docker-proxy."""
    published: dict[tuple[str, int], int] = {}
    for entry in entries:
        if entry.argv and os.path.basename(entry.argv[0]) == "docker-proxy":
            options = dict(zip(entry.argv[1::2], entry.argv[2::2], strict=False))
            try:
                inside = options["-container-ip"], int(options["-container-port"])
                published[inside] = int(options["-host-port"])
            except (KeyError, ValueError):
                continue
    return published


def _effective_uid(proc: Path, pid: int) -> int | None:
    try:
        for line in read_bytes(f"{proc}/{pid}/status").splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[2])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _host_to_ask(host: str | None) -> str:
    """The host to ask for a server that is told to listen at ``host``."""
    if not host:
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    return Listener(address, 0, 0, 0).reachable_host


def _url(command: ServerCommand, host: str, port: int) -> str:
    # --root-path needs no mention: without the proxy that adds it, the page stays at /metrics.
    return f"{'https' if command.https else 'http'}://{host}:{port}/metrics"


# --- what others make of it ------------------------------------------------------------------------------------


def own_hosts() -> frozenset[str]:
    """Names and addresses under which this host knows itself, loopback ones left out."""
    addresses = {
        address.address.split("%", 1)[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    name = socket.gethostname()
    return frozenset({*addresses, name, name.split(".", 1)[0]})


def merge(
    configured: Sequence[EngineFacts], found: Sequence[EngineFacts], hosts: Collection[str] | None = None
) -> tuple[EngineFacts, ...]:
    """Configured engines with what was found of them, then the found ones that no configuration names.

    Two are the same when host and port are (every name of this host being one host, ``hosts`` or :func:`own_hosts`),
    or when a found server without an address has the configured name. The configuration's word goes before what was
    found. A local engine whose processes are not found has none: its ``pids`` are (). One that was found under the
    name of another, configured engine gets a name with its port.
    """
    own = {host.lower() for host in (own_hosts() if hosts is None else hosts)}
    left = list(found)
    merged: list[EngineFacts] = []
    for engine in configured:
        place = _place(engine.target, own)
        match = next((f for f in left if f.target is not None and _place(f.target, own) == place), None)
        match = match or next((f for f in left if f.target is None and f.name == engine.name), None)
        if match is not None:
            left.remove(match)
            merged.append(_over(engine, match))
        else:
            local = place is not None and place[0] == ""
            merged.append(replace(engine, pids=()) if local and engine.pids is None else engine)
    taken = {engine.name for engine in configured}
    for engine in left:
        name = engine.name
        if name in taken:
            place = _place(engine.target, own)
            stems = _candidates(name, str(place[1]) if place else "found")
            name = next(candidate for candidate in stems if candidate not in taken | {f.name for f in left})
        taken.add(name)
        merged.append(replace(engine, name=name))
    return tuple(merged)


def _over(engine: EngineFacts, found: EngineFacts) -> EngineFacts:
    given = {f.name: value for f in fields(engine) if (value := getattr(engine, f.name)) is not None}
    return replace(found, **given)


def _place(target: str | None, own: Collection[str]) -> tuple[str, int] | None:
    """Host and port of a URL; the host is empty for this one."""
    if target is None:
        return None
    parts = urlsplit(target)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return ("" if _is_here(host) or host in own else host), port


def _is_here(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
