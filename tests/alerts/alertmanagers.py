"""Real Alertmanagers for tests, and a receiver that takes what they send."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.e2e.processes import ServerProcess, free_port, wait_for
from tests.e2e.tools import program

CONFIG = Path(__file__).resolve().parents[2] / "alerts" / "alertmanager.yml"


@dataclass
class Inbox:
    """What was posted to a receiver: paths and JSON bodies in order, and the unix time at which each came."""

    url: str
    received: list[tuple[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    status: int = 200

    def to(self, path: str) -> list[Any]:
        return [body for where, body in self.received if where == path]

    def wait_for(self, path: str, count: int, seconds: float = 30.0) -> list[Any]:
        return wait_for(lambda: self.to(path), lambda got: len(got) >= count, seconds, f"{count} posted to {path}")


@contextmanager
def inbox(port: int = 0) -> Iterator[Inbox]:
    """A receiver on a port of 127.0.0.1 that answers everything with ``status``."""
    box = Inbox("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            box.headers.append(dict(self.headers))
            if box.status < 300:
                box.received.append((self.path, json.loads(body)))
                box.times.append(time.time())
            # Slack's word for success; newer Alertmanagers take nothing else from it.
            answer = b'{"ok": true}'
            self.send_response(box.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    box.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield box
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def shipped_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    return config


def to_webhooks(config: Mapping[str, Any], url: str, *, wait: str = "1s") -> dict[str, Any]:
    """The configuration with each receiver replaced by a webhook at /NAME, and with short waits."""

    def quick(route: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in route.items() if key not in ("group_wait", "routes")}
        return {**kept, "routes": [quick(child) for child in route.get("routes", ())]}

    return {
        **config,
        "templates": [],
        "route": {**quick(config["route"]), "group_wait": wait, "group_interval": wait},
        "receivers": [
            {"name": one["name"], "webhook_configs": [{"url": f"{url}/{one['name']}", "send_resolved": True}]}
            for one in config["receivers"]
        ],
    }


class Alertmanager(ServerProcess):
    """One Alertmanager on its own port; it may be stopped and started again, and keeps what it knows."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        version: str = "installed",
        web: Path | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        path = folder / "alertmanager.yml"
        path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        super().__init__(
            [
                program("alertmanager", version),
                f"--config.file={path}",
                f"--storage.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--cluster.listen-address=",
                "--log.level=warn",
                *([f"--web.config.file={web}"] if web else []),
                *arguments,
            ],
            log_path=folder / "alertmanager.log",
            ready_url=f"{self.url}/-/ready",
            start_timeout_s=60.0,
        )

    def post(self, labels: Sequence[Mapping[str, str]], annotations: Mapping[str, str] | None = None) -> None:
        """Alerts with these labels, each with the same annotations."""
        notes = dict(annotations or {"summary": "a test"})
        body = [{"labels": dict(one), "annotations": notes} for one in labels]
        answer = requests.post(f"{self.url}/api/v2/alerts", json=body, timeout=10)
        answer.raise_for_status()

    def alerts(self) -> list[dict[str, Any]]:
        answer = requests.get(f"{self.url}/api/v2/alerts", timeout=10)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()
        return found
