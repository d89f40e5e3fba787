"""The file in which a daemon keeps its memory: SQLite in WAL mode, owned by one daemon at a time.

Tables: ``blocks`` (the flight recorder, one compressed piece of a recording each), ``facts`` (what was known of the
engines from a block on), ``state`` (what the detectors know), ``bins`` (floors and maxima of key series).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import structlog

_log = structlog.get_logger(__name__)

FILE = "history.db"
_LOCK = "history.lock"
_APPLICATION = 0x6F6F6D77  # "oomw"
_SCHEMA = 1
_BUSY_SECONDS = 2.0
_WAL_BYTES = 8 * 1024**2
_MOST_BIN_ROWS = 500_000
_FREED_PAGES = 256  # given back to the file system in one transaction

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, first REAL NOT NULL, last REAL NOT NULL, observations INTEGER NOT NULL,
    plain INTEGER NOT NULL, size INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX blocks_last ON blocks (last);
CREATE TABLE facts (block INTEGER PRIMARY KEY, document TEXT NOT NULL);
CREATE TABLE state (
    one INTEGER PRIMARY KEY CHECK (one = 1), t REAL NOT NULL, block INTEGER NOT NULL, fingerprint TEXT NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE bins (
    series INTEGER NOT NULL, start INTEGER NOT NULL, low REAL NOT NULL, high REAL NOT NULL, PRIMARY KEY (series, start)
) WITHOUT ROWID;
"""


class Unusable(Exception):
    """The database cannot be used now; the message says why and what to do."""


class Damaged(Unusable):
    """The file is torn or not ours: it has to be set aside."""


@dataclass(frozen=True)
class Block:
    """A piece of a recording: lines with unix times, compressed by zlib. ``plain`` is its size before."""

    first: float
    last: float
    observations: int
    plain: int
    data: bytes

    @classmethod
    def of(cls, lines: Iterable[str], first: float, last: float) -> Block:
        listed = list(lines)
        text = "".join(f"{line}\n" for line in listed).encode()
        return cls(first, last, len(listed), len(text), zlib.compress(text, 6))


@dataclass(frozen=True)
class State:
    """What the detectors knew at ``t``, once everything up to ``block`` was folded in."""

    t: float
    block: int
    fingerprint: str
    data: bytes


@dataclass(frozen=True)
class Limits:
    """What may be kept: blocks for ``keep`` seconds and ``max_bytes`` at most, bins for ``keep_bins`` seconds."""

    keep: float = 24 * 3600.0
    max_bytes: int = 256 * 1024**2
    keep_bins: float = 30 * 86400.0


Bins = Mapping[tuple[str, int], tuple[float, float]]
"""By name of the series and start of the bin (unix time): lowest and highest value."""


class Database:
    """An open database. Its methods raise Unusable, and Damaged where the file has to be set aside."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self.path = directory / FILE
        self._limits = limits
        self._pruned_bins = 0.0
        self._lock = _locked(directory)
        try:
            self._connection = _connected(self.path)
            with _explained(self.path):
                self._size: int = self._one("SELECT COALESCE(SUM(size), 0) FROM blocks")
        except BaseException:
            os.close(self._lock)
            raise

    def close(self, *, clean: bool = True) -> None:
        """Let go of the file. ``clean`` says that everything was written, so that the next start need not look."""
        with contextlib.suppress(sqlite3.Error):
            if clean:
                self._meta("clean", "1")
            self._connection.close()
        os.close(self._lock)

    def write(
        self,
        blocks: Iterable[Block],
        now: float,
        *,
        facts: str | None = None,
        state: tuple[float, str, bytes] | None = None,
        bins: Bins | None = None,
    ) -> None:
        """Everything in one transaction. ``facts`` hold from these blocks on; ``state`` is as of their end."""
        with _explained(self.path), self._transaction():
            last = self._one("SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'blocks'")
            if facts is not None:
                self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (last + 1, facts))
            size = 0
            for block in blocks:
                size += len(block.data)
                last = self._connection.execute(
                    "INSERT INTO blocks (first, last, observations, plain, size, data) VALUES (?, ?, ?, ?, ?, ?)",
                    (block.first, block.last, block.observations, block.plain, len(block.data), block.data),
                ).lastrowid
            if state is not None:
                t, fingerprint, data = state
                self._connection.execute(
                    "INSERT OR REPLACE INTO state VALUES (1, ?, ?, ?, ?)", (t, last, fingerprint, data)
                )
            if bins:
                self._write_bins(bins, now)
            freed = self._prune(now, size)
        self._size += size - freed

    def state(self) -> State | None:
        with _explained(self.path):
            row = self._connection.execute("SELECT t, block, fingerprint, data FROM state").fetchone()
        return State(*row) if row else None

    def drop_state(self) -> None:
        with _explained(self.path), self._transaction():
            self._connection.execute("DELETE FROM state")

    def set(self, key: str, value: str) -> None:
        with _explained(self.path):
            self._meta(key, value)

    def oldest(self) -> float | None:
        """Unix time of the oldest observation that is kept."""
        with _explained(self.path):
            found: float | None = self._one("SELECT first FROM blocks ORDER BY id LIMIT 1")
        return found

    def size(self) -> int:
        """Bytes on disk, the log of changes included."""
        return sum(path.stat().st_size for path in family(self.path) if path.exists())

    # --- the parts -------------------------------------------------------------------------------------------

    def _one(self, query: str) -> Any:
        row = self._connection.execute(query).fetchone()
        return row[0] if row else None

    def _meta(self, key: str, value: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _write_bins(self, bins: Bins, now: float) -> None:
        connection = self._connection
        names = sorted({name for name, _ in bins})
        connection.executemany("INSERT OR IGNORE INTO series (name) VALUES (?)", ((name,) for name in names))
        connection.executemany(
            "INSERT INTO bins SELECT id, ?, ?, ? FROM series WHERE name = ? "
            "ON CONFLICT DO UPDATE SET low = MIN(low, excluded.low), high = MAX(high, excluded.high)",
            ((start, low, high, name) for (name, start), (low, high) in bins.items()),
        )
        if now - self._pruned_bins >= 3600:
            self._pruned_bins = now
            connection.execute("DELETE FROM bins WHERE start < ?", (now - self._limits.keep_bins,))
            surplus = (self._one("SELECT COUNT(*) FROM bins") or 0) - _MOST_BIN_ROWS
            if surplus > 0:
                connection.execute(
                    "DELETE FROM bins WHERE start <= (SELECT start FROM bins ORDER BY start LIMIT 1 OFFSET ?)",
                    (surplus,),
                )
            connection.execute("DELETE FROM series WHERE id NOT IN (SELECT series FROM bins)")

    def _prune(self, now: float, added: int) -> int:
        """Delete what is too old or too much; the bytes that went."""
        connection = self._connection
        freed = 0
        last = 0
        for number, end, size in connection.execute("SELECT id, last, size FROM blocks ORDER BY id"):
            if end >= now - self._limits.keep and self._size + added - freed <= self._limits.max_bytes:
                break
            last, freed = number, freed + size
        if last:
            connection.execute("DELETE FROM blocks WHERE id <= ?", (last,))
            connection.execute(
                "DELETE FROM facts WHERE block < (SELECT MAX(block) FROM facts WHERE block <= ?)", (last + 1,)
            )
            connection.execute(f"PRAGMA incremental_vacuum({_FREED_PAGES})")
        return freed


# --- opening ---------------------------------------------------------------------------------------------------


def family(path: Path) -> tuple[Path, ...]:
    """The file and those that SQLite keeps beside it."""
    return (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))


def set_aside(path: Path, why: str) -> Path:
    """Rename the files of a database, so that a new one can begin and nothing is lost. Raises OSError."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    target = path.with_name(f"{path.name}.{why}-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{why}-{stamp}-{number}")
    for old, new in zip(family(path), family(target), strict=True):
        if old.exists():
            old.rename(new)
    return target


def opened(directory: Path, limits: Limits) -> Database:
    """The database in ``directory``, a new one where there is none. What is there and not usable is set aside."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o750)
    except OSError as error:
        raise Unusable(f"{directory} cannot be made: {_words(error)}") from None
    try:
        return Database(directory, limits)
    except Damaged as problem:
        try:
            kept = set_aside(directory / FILE, "set-aside")
        except OSError as error:
            raise Unusable(f"{problem}, and it cannot be renamed: {_words(error)}") from None
        _log.warning("history set aside, a new one begins", error=str(problem), kept=str(kept))
        return Database(directory, limits)


def _locked(directory: Path) -> int:
    path = directory / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise Unusable(f"{path} cannot be written: {_words(error)}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise Unusable(
            f"another oomwatch (pid {owner}) keeps its history in {directory}. Give each its own history.directory"
        ) from None
    except OSError as error:
        os.close(lock)
        raise Unusable(f"{path} cannot be locked or written: {_words(error)}") from None
    return lock


def _connected(path: Path) -> sqlite3.Connection:
    with _explained(path):
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _checked(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _checked(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if application != _APPLICATION and (tables or application):
        raise Damaged(f"{path} is a database of something else")
    if application == _APPLICATION and schema != _SCHEMA:
        raise Damaged(f"{path} has the schema {schema} of another version of oomwatch; this one writes {_SCHEMA}")
    if not tables:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL").fetchone()
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    if not tables:
        connection.executescript(
            f"BEGIN; {_TABLES} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_SCHEMA}; COMMIT;"
        )
        return
    clean = connection.execute("SELECT value FROM meta WHERE key = 'clean'").fetchone()
    if clean != ("1",):
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise Damaged(f"{path} is damaged: {verdict}")
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('clean', '0')")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """SQLite's errors as Unusable, or Damaged where the file itself is wrong."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise Unusable(f"{path}: {error}{_HINTS.get(str(error), '')}") from None
    except sqlite3.Error as error:
        raise Damaged(f"{path}: {error}") from None


_HINTS = {
    "database is locked": ". Another program holds it",
    "database or disk is full": ". Free some space, or lower history.max_bytes",
    "attempt to write a readonly database": ". Make the directory writable, or name another as history.directory",
    "unable to open database file": ". Make the directory writable, or name another as history.directory",
}


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


# --- reading beside the daemon ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A block as it is read: ``number`` orders them."""

    number: int
    first: float
    last: float
    text: bytes


class Archive:
    """A database opened for reading only, while a daemon writes or when none runs. Raises Unusable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            raise Unusable(f"{path} is not there: no oomwatch has kept a history in this directory")
        with _explained(path):
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_SECONDS, isolation_level=None
            )
            (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        if application != _APPLICATION:
            self._connection.close()
            raise Unusable(f"{path} is no history of oomwatch")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def pieces(self, since: float = 0.0, after: int = 0) -> Iterator[Piece]:
        """Blocks that hold something from ``since`` on and come behind ``after``; each is read by itself."""
        while True:
            with _explained(self._path):
                row = self._connection.execute(
                    "SELECT id, first, last, data FROM blocks WHERE id > ? AND last >= ? ORDER BY id LIMIT 1",
                    (after, since),
                ).fetchone()
            if row is None:
                return
            after, first, last, data = row
            try:
                text = zlib.decompress(data)
            except zlib.error as error:
                _log.warning("a block of the history is damaged and left out", block=after, error=str(error))
                continue
            yield Piece(after, first, last, text)

    def newest(self) -> int | None:
        """The number of the last block."""
        with _explained(self._path):
            row = self._connection.execute("SELECT MAX(id) FROM blocks").fetchone()
        return row[0] if row else None

    def facts(self, block: int) -> str | None:
        """What was known of the engines when a block was written, as JSON."""
        with _explained(self._path):
            row = self._connection.execute(
                "SELECT document FROM facts WHERE block <= ? ORDER BY block DESC LIMIT 1", (block,)
            ).fetchone()
        return row[0] if row else None

    def meta(self, key: str) -> str | None:
        with _explained(self._path):
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def newest_within(self, plain_bytes: int, after: int) -> int:
        """The number of the block behind which at most ``plain_bytes`` of text stand, ``after`` or later."""
        with _explained(self._path):
            total = 0
            for number, plain in self._connection.execute("SELECT id, plain FROM blocks ORDER BY id DESC"):
                total += plain
                if number <= after or total > plain_bytes:
                    return int(number)
        return after

    def bins(self, name: str, since: float = 0.0) -> tuple[tuple[int, float, float], ...]:
        """Start, floor and maximum of each bin of a series."""
        with _explained(self._path):
            rows = self._connection.execute(
                "SELECT start, low, high FROM bins JOIN series ON series.id = bins.series "
                "WHERE name = ? AND start >= ? ORDER BY start",
                (name, since),
            ).fetchall()
        return tuple(rows)

    def series(self) -> tuple[str, ...]:
        with _explained(self._path):
            return tuple(name for (name,) in self._connection.execute("SELECT name FROM series ORDER BY name"))
