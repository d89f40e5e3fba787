"""oomwatch: tells which of three OOM killers is at work on a GPU node that runs vLLM, before the crash."""

__version__ = "0.1.0"
