"""A simulated node, for `oomwatch demo`, dashboards and tests: GPUs and engines with traffic, and each killer's story.

Nothing in here touches a driver, a network or /proc; what it makes are the same observations as the real sources make.
"""

from oomwatch.demo.feed import SETTINGS, DemoFeed
from oomwatch.demo.node import DemoNode
from oomwatch.demo.stories import STORIES, TOUR

__all__ = ["SETTINGS", "STORIES", "TOUR", "DemoFeed", "DemoNode"]
