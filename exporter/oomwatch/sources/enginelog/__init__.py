"""Reading engines' logs where they are written: files, containers' log files, the journal."""

from oomwatch.sources.enginelog.places import ContainerFile, File, Journal, Place, Places
from oomwatch.sources.enginelog.source import EngineLogSource

__all__ = ["ContainerFile", "EngineLogSource", "File", "Journal", "Place", "Places"]
