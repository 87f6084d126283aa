"""One SQLite file in the cache folder. Processes share it, and each may be killed at any moment."""
from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.refusal import NotKept

Statement = tuple[str, Sequence[Any]]

APPLICATION_ID = 0x0D1FF001
# A new schema gets a new number and with it files of its own: two versions of OneDiff may share a folder.
VERSION = 2
NAME = f"onediff-{VERSION}-"
ENDING = ".sqlite3"
ALL_STORES = "onediff-[0-9]*"
VERSION_OF = re.compile(r"onediff-(\d+)-")
# machine: a fingerprint's digest, "" for every machine. value: JSON.
SCHEMA = (
    """CREATE TABLE history (machine TEXT NOT NULL, architecture TEXT NOT NULL, model TEXT NOT NULL,
       resolution TEXT NOT NULL, batch INTEGER NOT NULL, tokens INTEGER NOT NULL, dtype TEXT NOT NULL,
       uses INTEGER NOT NULL, last_used REAL NOT NULL, step_ms REAL, host_ms REAL, relative_error REAL,
       PRIMARY KEY (machine, architecture, model, resolution, batch, tokens, dtype))""",
    """CREATE TABLE finding (machine TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
       PRIMARY KEY (machine, kind, name))""",
    f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {VERSION}",
)
# Our tables, and what belongs to them: triggers, indices and columns that somebody has added included.
TABLES = ("history", "finding")
MADE_OF = f"SELECT type, name, coalesce(sql, '') FROM sqlite_master WHERE tbl_name IN {TABLES}"
# How many of which rows stay, the newest: images with ever other LoRAs, and updates of OneDiff, leave some behind.
LIMITS = (
    ("history", "last_used", "1", 3000),
    *(("finding", "rowid", f"kind = '{kind}'", 5000) for kind in ("verdict", "tuned")),
)
# Parts of SQLite's messages where the disk refuses, not the file. Python 3.10 knows its result codes by text alone.
REFUSALS = ("is locked", "locking protocol", "is full", "readonly", "unable to open", "disk I/O")
# How many new files may be damaged too before we give up, and how much stays in memory while it cannot be written.
STORES_TRIED = 3
PENDING = 4096
# A lock that did not go away while we waited must not hold up every image.
BUSY_SECONDS = 5.0
BUSY_SECONDS_IN_TROUBLE = 0.05


class Unusable(Exception):
    """The file cannot be used now; the message is the cause, to follow a colon."""


class Damaged(Exception):
    """The file is not a store, or no longer."""


class Store:
    """Statements wait in memory until commit(). Those that fail stay there, trouble says why, and the next access tries
    again. Any thread may use it.

    Every access opens the file anew: a user may delete it between two images. Files are numbered, and the highest is
    the store: where it is damaged, the next one is begun. To rename it would not be safe: SQLite finds a journal by
    the name of its database, and another process that has the old one open would take the journal of the new one.
    """

    def __init__(self, folder: Path) -> None:
        """folder: made if need be."""
        self.folder = folder
        self._pending: deque[Statement] = deque(maxlen=PENDING)
        self._lock = threading.Lock()
        self._number = 1
        self._cause = ""
        self._damage = ""
        with contextlib.suppress(NotKept):
            self.commit(check)

    @property
    def trouble(self) -> str | None:
        """The problem of this store, in one sentence for the user; None if it has none."""
        if self._cause:
            return f"What OneDiff learns about resolutions is forgotten when this WebUI is closed: {self._cause}."
        return self._damage or None

    @property
    def path(self) -> Path:
        """The file in use."""
        names = (file.name[len(NAME):-len(ENDING)] for file in self._files(f"{NAME}*{ENDING}"))
        numbers = (int(name) for name in names if name.isascii() and name.isdecimal())
        return self.folder / f"{NAME}{max(self._number, *numbers, 0)}{ENDING}"

    def add(self, statement: str, *values: Any) -> None:
        """Have something written. Never waits for the disk."""
        self._pending.append((statement, values))

    def commit(self, work: Callable[[sqlite3.Connection], object] | None = None) -> None:
        """Write all that was added before, and do this work, in one transaction, which survives a killed process. Takes
        some 20 ms; five seconds the first time that another program has locked the file. Raises NotKept where it is not
        on the disk then."""
        with self._lock:
            for _ in range(STORES_TRIED):
                # At one stroke: another thread may add.
                path = self.path
                pending = self._pending.copy()
                if not (work or pending or self._cause):
                    return
                try:
                    with opened(path, "rwc", self._busy_seconds) as connection:
                        if not is_ours(connection):
                            # With it a purge gives the disk back; without effect once a table exists.
                            connection.execute("PRAGMA auto_vacuum = FULL")
                        # Not every file system has the shared memory of a write-ahead log, which OneDiff 0.2.0 kept.
                        connection.execute("PRAGMA journal_mode = DELETE")
                        connection.execute("BEGIN IMMEDIATE")
                        with connection:
                            write(connection, pending)
                            if work is not None:
                                work(connection)
                except Damaged:
                    self._set_aside(path)
                    continue
                except Unusable as error:
                    self._cause = str(error)
                    break
                self._cause = ""
                for written in pending:
                    # Where too many wait, the oldest are gone already.
                    with contextlib.suppress(ValueError):
                        self._pending.remove(written)
                return
            else:
                self._cause = f"the store in {self.folder} is damaged"
            raise NotKept(f"This holds until the WebUI ends, because it cannot be written to the disk: {self._cause}.")

    def read(self, statement: str, *values: Any) -> list[tuple]:
        """The rows of a SELECT, with all that was added; without it where it cannot be written."""
        with contextlib.suppress(NotKept):
            self.commit()
        path = self.path
        try:
            with opened(path, "rw", self._busy_seconds) as connection:
                return connection.execute(statement, values).fetchall() if is_ours(connection) else []
        except Damaged:
            self._set_aside(path)
        except Unusable:
            # trouble says why.
            pass
        return []

    def delete(self) -> None:
        """Delete the files that were set aside and those of earlier versions; what cannot be deleted stays."""
        # In this order: another process may begin a file meanwhile.
        files = self._files(ALL_STORES)
        current = self.path.name
        for file in files:
            if not (file.name.startswith(current) or is_newer(file)):
                with contextlib.suppress(OSError):
                    file.unlink()
        self._damage = ""

    def size_bytes(self) -> int:
        """What lies on the disk, the files set aside and those of earlier versions included, and not what a newer
        version keeps here."""
        size = 0
        for file in (one for one in self._files(ALL_STORES) if not is_newer(one)):
            # SQLite's journal comes and goes.
            with contextlib.suppress(OSError):
                size += file.lstat().st_size
        return size

    @property
    def is_shared_with_newer(self) -> bool:
        """Whether a newer version of OneDiff keeps files in this folder."""
        return any(map(is_newer, self._files(ALL_STORES)))

    @property
    def _busy_seconds(self) -> float:
        return BUSY_SECONDS_IN_TROUBLE if self._cause else BUSY_SECONDS

    def _set_aside(self, path: Path) -> None:
        """Leave a damaged file where it lies: all that notice it go on in the one with the next number."""
        self._number = int(path.name[len(NAME):-len(ENDING)]) + 1
        self._damage = (
            "OneDiff's store of resolutions was damaged, so a new one was begun; the old one is kept as "
            f"{path.name} in {self.folder}."
        )

    def _files(self, pattern: str) -> list[Path]:
        with contextlib.suppress(OSError):
            return list(self.folder.glob(pattern))
        return []


@contextlib.contextmanager
def opened(path: Path, mode: str, busy_seconds: float) -> Iterator[sqlite3.Connection]:
    """A connection to a file of ours. mode: "rwc" makes the file, "rw" does not.

    Raises Damaged, Unusable, also for what SQLite says to the statements inside.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, *(Path(f"{path}{ending}") for ending in ("-shm", "-wal", "-journal"))):
            # Python 3.12 knows Windows' junctions.
            if file.is_symlink() or getattr(os.path, "isjunction", lambda _: False)(file):
                # SQLite would follow it, and write to somebody else's file.
                raise Unusable(f"{file} is a link, which OneDiff does not follow: delete it")
            if file.exists() and not file.is_file():
                # SQLite would wait for a pipe.
                raise Unusable(f"{file} is no file: delete it")
        # A network share's server belongs to the path: SQLite knows no hosts.
        address = re.sub(r"^file://(?=[^/])", "file:////", path.absolute().as_uri()) + f"?mode={mode}"
        found = sqlite3.connect(address, timeout=busy_seconds, isolation_level=None, uri=True)
        with contextlib.closing(found) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            yield connection
    except OSError as error:
        raise Unusable(f"{path.parent} cannot be written ({error.strerror})") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if any(text in str(error) for text in REFUSALS):
            raise Unusable(f"{path.parent} cannot be written ({error})") from error
        # Our statements are right, so the tables are not ours. SQLite quotes damaged bytes in its messages.
        if type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError, UnicodeDecodeError):
            raise Damaged from error
        raise


def is_newer(file: Path) -> bool:
    """Whether a file in the folder is a newer version's."""
    version = VERSION_OF.match(file.name)
    return version is not None and int(version[1]) > VERSION


def is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the database has our tables; False for an empty one. Raises Damaged for another program's, and where
    somebody has changed ours: a trigger or a column more may refuse what we write."""
    # In one statement, which sees one state: another process may be making the tables just now.
    *marks, count = connection.execute(
        "SELECT *, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if marks != [APPLICATION_ID, VERSION] and (any(marks) or count):
        raise Damaged
    found = made_of(connection)
    if found and found != expected():
        raise Damaged
    return bool(found)


def made_of(connection: sqlite3.Connection) -> frozenset[tuple[str, str, str]]:
    """(type, name, statement) of all that belongs to our tables."""
    return frozenset((kind, name, " ".join(sql.split())) for kind, name, sql in connection.execute(MADE_OF))


@functools.cache
def expected() -> frozenset[tuple[str, str, str]]:
    """Our schema as SQLite stores it."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        return made_of(connection)


def check(connection: sqlite3.Connection) -> None:
    """Read everything. Raises Damaged."""
    if connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
        raise Damaged


def write(connection: sqlite3.Connection, pending: Iterable[Statement]) -> None:
    """Make the tables where there are none, write what waits, and keep to the limits."""
    for statement in () if is_ours(connection) else SCHEMA:
        connection.execute(statement)
    for waiting in pending:
        connection.execute(*waiting)
    for table, age, which, most in LIMITS:
        old = f"SELECT rowid FROM {table} WHERE {which} ORDER BY {age} DESC LIMIT -1 OFFSET {most}"
        connection.execute(f"DELETE FROM {table} WHERE rowid IN ({old})")
