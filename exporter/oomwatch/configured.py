"""What the configuration makes of the judge: the same for the daemon, a check, a replay and a post-mortem."""

from __future__ import annotations

from oomwatch.attribution import Neighbour
from oomwatch.config import Config
from oomwatch.detection import ConfiguredPolicy
from oomwatch.judge import Judge
from oomwatch.node import Cadence, Node


def cadence_of(config: Config) -> Cadence:
    """How often, in seconds, each source is read under a configuration."""
    every = config.intervals
    return Cadence(
        gpu=every.gpu,
        process=every.gpu * every.processes_every,
        scrape=every.scrape,
        host=every.host,
        discovery=every.discovery,
        probe=max(
            (engine.probe.interval + engine.probe.timeout for engine in config.engines if engine.probe), default=360.0
        ),
        allocator=config.probe.interval,
        log=config.engine_logs.interval,
        intervals_to_stale=config.exposition.stale_after_intervals,
        forget_after=config.exposition.forget_after,
    )


def judge_of(config: Config, cadence: Cadence | None = None) -> Judge:
    """A judge that has seen nothing yet. ``cadence`` is that of what it will see, by default the configuration's."""
    node = Node(cadence or cadence_of(config), _neighbours_of(config))
    return Judge(node, ConfiguredPolicy(config.detection))


def configure(judge: Judge, config: Config) -> None:
    """Have a judge at work go on under another configuration."""
    judge.node.configure(cadence_of(config), _neighbours_of(config))
    judge.configure(ConfiguredPolicy(config.detection))


def _neighbours_of(config: Config) -> tuple[Neighbour, ...]:
    return tuple(Neighbour(n.name, n.process, n.container, n.pod_uid) for n in config.neighbours)
