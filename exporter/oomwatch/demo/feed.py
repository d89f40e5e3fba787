"""The demo's node as a feed of the daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from oomwatch.config import Config
from oomwatch.demo.node import DemoNode
from oomwatch.feed import Job
from oomwatch.observations import Observation
from oomwatch.sources.nvml import CallStats

_log = structlog.get_logger(__name__)

SETTINGS: Mapping[str, Any] = {
    "neighbours": [{"name": "embedder", "process": "tritonserver"}],
    "detection": {
        "thresholds": {
            "kv_exhaustion": {
                "rate_window": "20s",
                "preemption_window": "40s",
                "after": "10s",
                "page_after": "20s",
                "baseline_minutes": 1,
            },
            "preemption_pressure": {"window": "40s", "after": "20s", "least_finished": 10, "hold": "0s"},
            "allocator_fragmentation": {"warm_up": "10s", "retry_window": "10s", "shortage_time": "20s"},
        }
    },
}
"""The demo's configuration, under the user's own: one of its processes is a known neighbour, and thresholds that wait
are shortened as its stories are. What they compare is as shipped, but for a number of requests in a shorter window."""


class DemoFeed:
    """Publishes the observations of a :class:`DemoNode` at the scrapes' interval, and logs each of its phases once."""

    def __init__(
        self,
        config: Config,
        publish: Callable[[Observation], None],
        clock: Callable[[], float] = time.time,
        story: str = "tour",
        seed: int = 1,
        speed: float = 1.0,
    ) -> None:
        self._config = config
        self._publish = publish
        self._clock = clock
        self._node = DemoNode(story, seed, speed)
        self._turn = threading.Lock()
        self._phase: tuple[str, str] | None = None

    def jobs(self) -> Mapping[str, Job]:
        return {"demo": Job(self._config.intervals.scrape, self.step)}

    def step(self) -> None:
        """Read the simulated node once."""
        with self._turn:
            t = self._clock()
            for observation in self._node.observations(t):
                self._publish(observation)
            phase = self._node.phase(t)
            if phase != self._phase:
                self._phase = phase
                _log.info("demo", now=self._node.describe(t))

    def ready(self) -> str:
        return "" if self._phase else "not read yet: the demo's node"

    def call_stats(self) -> CallStats:
        return {}

    def probe_files(self) -> Mapping[str, int]:
        return {}

    def release(self) -> str:
        return "the demo has no driver whose handles could be given back"

    @property
    def released(self) -> bool:
        return False

    def resume(self) -> None:
        """Nothing was given back."""

    def configure(self, config: Config) -> None:
        self._config = config

    def close(self) -> None:
        """There is nothing to let go."""
