"""A real Prometheus takes in a full page, in the format that it asks for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry

from oomwatch import textformat
from oomwatch.exposition import render
from oomwatch.families import FAMILIES
from tests.e2e.prometheus import PrometheusServer, scrape_config
from tests.exposed import everything, samples
from tests.snapshots import full, gpu_uuid


@contextmanager
def served(source: CollectorRegistry, answered: list[str]) -> Iterator[str]:
    """Serves pages on a free port, as host:port; notes the content type of each answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page, content_type = render(source, self.headers.get("Accept", ""))
            answered.append(content_type)
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the name that the base class gives it
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(5)


def test_every_series_is_stored_with_its_labels_and_its_meaning(tmp_path: Path) -> None:
    answered: list[str] = []
    source = everything(full())
    with (
        served(source, answered) as target,
        PrometheusServer(tmp_path, scrape_config({"oomwatch": [target]})) as prometheus,
    ):
        prometheus.wait_for('up{job="oomwatch"} == 1')
        (stored,) = prometheus.wait_for('count({job="oomwatch", __name__=~"oomwatch_.*"})')
        (used,) = prometheus.query(f'oomwatch_gpu_memory_used_bytes{{gpu="{gpu_uuid(0)}"}}')
        metadata = prometheus.api("metadata")
    assert answered[-1] == textformat.OPENMETRICS
    assert stored.value == len(samples(full()))
    assert used.value == 70 * 1024**3
    # A label of ours that Prometheus had one of its own for would have become exported_….
    assert not [label for label in used.labels if label.startswith("exported_")]
    for family in FAMILIES:
        (told,) = metadata.get(family.name) or metadata[family.base_name]
        assert (told["help"], told["type"]) == (family.help, family.kind)
