"""What the judge knows, as bytes that survive a restart, and back again.

The bytes are a pickle that is read by a loader which admits our own data and plain containers and nothing else: a
database that someone else could write must not be able to run anything.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import oomwatch
from oomwatch.judge import Judge, Saved

LARGEST_BYTES = 128 * 1024**2  # of a state before compression

_MODULES = (
    "oomwatch.attribution",
    "oomwatch.enginelog.events",
    "oomwatch.enginelog.story",
    "oomwatch.incidents",
    "oomwatch.judge",
    "oomwatch.node",
    "oomwatch.observations",
    "oomwatch.snapshot",
    "oomwatch.verdicts",
)
_DETECTORS = "oomwatch.detectors"
_CONTAINERS = {
    "builtins": frozenset({"bytearray", "complex", "dict", "frozenset", "list", "set", "tuple"}),
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
}


class CannotRestore(Exception):
    """A saved state that cannot be used, and why."""


class _Loader(pickle.Unpickler):
    """Finds classes of the allowed modules that were defined there, and no function at all."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CONTAINERS.get(module, ()):
            return super().find_class(module, name)
        if (module in _MODULES or module == _DETECTORS or module.startswith(f"{_DETECTORS}.")) and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise CannotRestore(f"it holds {module}.{name}, which is none of oomwatch's data")


def dump(judge: Judge) -> bytes:
    """Everything the judge has learnt. ValueError when that is more than LARGEST_BYTES."""
    data = pickle.dumps(judge.saved(), protocol=4)
    if len(data) > LARGEST_BYTES:
        raise ValueError(f"the detectors' state has {len(data)} bytes, more than the {LARGEST_BYTES} that are kept")
    return zlib.compress(data, 1)


def load(data: bytes) -> Saved:
    """The reverse of dump. Raises CannotRestore for whatever is wrong with the bytes."""
    try:
        unpacker = zlib.decompressobj()
        plain = unpacker.decompress(data, LARGEST_BYTES)
        if not unpacker.eof:
            raise CannotRestore("it breaks off or is too large")
        saved = _Loader(io.BytesIO(plain)).load()
    except CannotRestore:
        raise
    except Exception as error:  # damaged bytes make a loader raise nearly anything
        raise CannotRestore(f"it is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(saved, Saved):
        raise CannotRestore(f"it holds {type(saved).__name__} and not a state")
    return saved


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Equal only for versions of this program that understand each other's states: a hash of the code behind them."""
    digest = hashlib.sha256(f"{oomwatch.__version__} {sys.version_info[:2]}".encode())
    for path in _sources():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _sources() -> Iterator[Path]:
    package = Path(oomwatch.__file__).parent
    for module in _MODULES:
        yield package / f"{module.partition('.')[2].replace('.', '/')}.py"
    yield from sorted((package / "detectors").glob("*.py"))
