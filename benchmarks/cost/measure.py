"""What the kernel and the simulated driver say of a watcher."""

from __future__ import annotations

import gzip
import http.client
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.cost.node import GPUS
from benchmarks.cost.watchers import Watcher
from tests.nvml_sim import Family

# What Prometheus 3 sends by default.
PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/3.0.0",
}
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads since the start, from /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


@dataclass(frozen=True)
class Resident:
    """Bytes: what is resident now, the part of it that is the process's own, and the most that ever was resident."""

    rss: int
    anon: int
    peak: int


def resident(pid: int) -> Resident:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kilobytes = {words[0]: int(words[1]) for words in lines if words[-1] == "kB"}
    return Resident(*(kilobytes[name] * 1024 for name in ("VmRSS:", "RssAnon:", "VmHWM:")))


class Client:
    """Scrapes one page as Prometheus does: over one connection, with gzip."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._path = parts.path
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)

    def scrape(self) -> bytes:
        """The page as it came over the line."""
        self._connection.request("GET", self._path, headers=PROMETHEUS)
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200 or response.getheader("Content-Encoding") != "gzip":
            raise RuntimeError(f"{self._path}: status {response.status}, headers {response.getheaders()}")
        return body

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class Page:
    """Size of a page of metrics: samples, bytes, and bytes as sent; and how many engines it tells of."""

    samples: int
    size: int
    sent: int
    engines: int

    @classmethod
    def of(cls, sent: bytes) -> Page:
        text = gzip.decompress(sent)
        lines = text.splitlines()
        return cls(
            samples=sum(not line.startswith(b"#") for line in lines),
            size=len(text),
            sent=len(sent),
            engines=sum(line.startswith(b"oomwatch_engine_info{") for line in lines),
        )


@dataclass(frozen=True)
class Stretch:
    """What a watcher took in ``seconds``. ``calls`` of the driver library by family, ``device_calls`` for each GPU."""

    seconds: float
    cpu: float
    memory: Resident
    calls: dict[str, int]
    device_calls: tuple[int, ...]
    page: Page | None

    @property
    def share(self) -> float:
        """Of one core."""
        return self.cpu / self.seconds

    def calls_per_device(self, interval: float) -> float:
        """Calls in each interval, those that ask the driver as a whole divided among the devices too."""
        return sum(self.calls.values()) / GPUS * interval / self.seconds


def watch(watchers: Sequence[Watcher], seconds: float, interval: float) -> list[Stretch]:
    """All of them during the same stretch of time, each scraped once an interval."""
    with_page = [watcher for watcher in watchers if watcher.url is not None]
    clients = {watcher.name: Client(watcher.url) for watcher in with_page if watcher.url is not None}
    begin = time.monotonic()
    marks = [watcher.sim.mark() for watcher in watchers]
    before = [cpu_seconds(watcher.pid) for watcher in watchers]
    pages: dict[str, bytes] = {}
    pause = threading.Event()
    for scrape in range(1, round(seconds / interval) + 1):
        for name, client in clients.items():
            pages[name] = client.scrape()
        pause.wait(max(0.0, begin + scrape * interval - time.monotonic()))
    stretches = []
    for watcher, mark, spent in zip(watchers, marks, before, strict=True):
        sim = watcher.sim
        stretches.append(
            Stretch(
                seconds=time.monotonic() - begin,
                cpu=cpu_seconds(watcher.pid) - spent,
                memory=resident(watcher.pid),
                calls={family.name: count for family, count in sim.calls_by_family(since=mark).items()},
                device_calls=tuple(sim.calls(device=gpu, since=mark) for gpu in range(GPUS)),
                page=Page.of(pages[watcher.name]) if watcher.name in pages else None,
            )
        )
    for client in clients.values():
        client.close()
    return stretches


@dataclass(frozen=True)
class Burst:
    """``count`` scrapes in a row: CPU seconds of one, and calls that reached the driver meanwhile by family."""

    count: int
    cpu_per_scrape: float
    driver_calls: dict[str, int]


def burst(watcher: Watcher, count: int) -> Burst:
    """For a watcher that polls so seldom that it does nothing else meanwhile."""
    if watcher.url is None:
        raise ValueError(f"{watcher.name} has no page")
    client = Client(watcher.url)
    for _ in range(10):
        client.scrape()
    mark, before = watcher.sim.mark(), cpu_seconds(watcher.pid)
    for _ in range(count):
        client.scrape()
    spent = cpu_seconds(watcher.pid) - before
    client.close()
    families = watcher.sim.calls_by_family(since=mark)
    calls = {family.name: number for family, number in families.items() if family is not Family.EVENT_WAIT}
    return Burst(count, spent / count, calls)
