"""One SQLite file in the cache folder. Processes share it, and each may be killed at any moment."""
from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]

APPLICATION_ID = 0x0D1FF001
# A new schema gets a new number and with it files of its own: two versions of OneDiff may share a folder.
VERSION = 2
NAME, ENDING, ALL_STORES = f"onediff-{VERSION}-", ".sqlite3", "onediff-[0-9]*"
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
# How many of which rows stay, the newest: images with ever other LoRAs, and updates of OneDiff, leave some behind.
LIMITS = (
    ("history", "last_used", "1", 3000), ("finding", "rowid", "kind = 'verdict'", 1000),
    ("finding", "rowid", "kind = 'tuned'", 5000),
)
# Parts of SQLite's messages where the disk refuses, not the file. Python 3.10 knows its result codes by text alone.
REFUSALS = ("is locked", "locking protocol", "is full", "readonly", "unable to open", "disk I/O")
# How many new files may be damaged too before we give up, and how much stays in memory while it cannot be written.
STORES_TRIED, PENDING = 3, 4096
# A lock that did not go away while we waited must not hold up every image.
BUSY_SECONDS, BUSY_SECONDS_IN_TROUBLE = 5.0, 0.05


class NotKept(Exception):
    """What a user asked for is not on the disk; the message is a sentence for the user."""


class Unusable(Exception):
    """The file cannot be used now; the message is the cause, to follow a colon."""


class Damaged(Exception):
    """The file is not a store, or no longer."""


class Store:
    """Writes wait in memory until commit(). Those that fail stay there, trouble says why, and the next access tries
    again. Any thread may use it.

    Every access opens the file anew: a user may delete it between two images. Files are numbered, and the highest is
    the store: where it is damaged, the next one is begun. To rename it would not be safe: SQLite finds a log by the
    name of its database, and another process that has the old one open would take the log of the new one.
    """

    def __init__(self, folder: Path) -> None:
        """folder: made if need be."""
        self.folder = folder
        self._pending: deque[Work[object]] = deque(maxlen=PENDING)
        self._pending_lock, self._disk_lock = threading.Lock(), threading.RLock()
        self._number, self._cause, self._damage = 1, "", ""
        with contextlib.suppress(NotKept):
            self.commit(check)

    @property
    def trouble(self) -> str | None:
        """What the user should know about this store, in one sentence; None if all is well."""
        if self._cause:
            return f"What OneDiff learns about resolutions is forgotten when this WebUI is closed: {self._cause}."
        return self._damage or None

    @property
    def path(self) -> Path:
        """The file in use."""
        names = (file.name[len(NAME):-len(ENDING)] for file in self._files(f"{NAME}*{ENDING}"))
        numbers = (int(name) for name in names if name.isascii() and name.isdecimal())
        return self.folder / f"{NAME}{max(self._number, *numbers, 0)}{ENDING}"

    def add(self, write: Work[object]) -> None:
        """Have something written. Never waits for the disk."""
        with self._pending_lock:
            self._pending.append(write)

    def commit(self, work: Work[object] | None = None) -> None:
        """Write all that was added before, and do this work, now or never: it survives a killed process. Takes some
        20 ms; five seconds the first time that another program has locked the file. Raises NotKept where it is not on
        the disk then."""
        self._transaction(work or (lambda connection: None), writes=work is not None)

    def read(self, statement: str, *values: Any) -> list[tuple]:
        """The rows of a SELECT, with all that was added; without it where it cannot be written."""

        def rows(connection: sqlite3.Connection) -> list[tuple]:
            return connection.execute(statement, values).fetchall()

        with contextlib.suppress(NotKept):
            return self._transaction(rows, writes=False)
        # On a disk on which SQLite cannot make its file of locks, it must believe that nobody writes.
        address = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.suppress(Unusable, Damaged), opened(self.path, address) as connection:
            return rows(connection) if is_ours(connection) else []
        return []

    def delete_others(self) -> None:
        """Delete the files that were set aside and those of earlier versions; what cannot be deleted stays."""
        # In this order: another process may begin a file meanwhile.
        files, current = self._files(ALL_STORES), self.path.name
        for file in files:
            if not file.name.startswith(current):
                with contextlib.suppress(OSError):
                    file.unlink()
        self._damage = ""

    def size_bytes(self) -> int:
        """What lies on the disk, with SQLite's log, the files set aside and those of earlier versions."""
        size = 0
        for file in self._files(ALL_STORES):
            # SQLite's log comes and goes.
            with contextlib.suppress(OSError):
                size += file.lstat().st_size
        return size

    def _transaction(self, work: Work[Result], writes: bool) -> Result:
        """work(connection), after all that waits to be written, in one transaction. A damaged file is set aside before.
        Raises NotKept."""
        with self._disk_lock:
            for _ in range(STORES_TRIED):
                path, busy_seconds = self.path, BUSY_SECONDS_IN_TROUBLE if self._cause else BUSY_SECONDS
                with self._pending_lock:
                    pending = list(self._pending)
                try:
                    with opened(path, path, busy_seconds) as connection:
                        set_journal(connection)
                        if writes or pending or self._cause or not is_ours(connection):
                            connection.execute("BEGIN IMMEDIATE")
                            write(connection, pending)
                        with connection:
                            result = work(connection)
                except Damaged:
                    self._set_aside(path)
                except Unusable as error:
                    self._cause = str(error)
                    break
                else:
                    self._cause = ""
                    with self._pending_lock:
                        written = set(pending)
                        self._pending = deque((work for work in self._pending if work not in written), PENDING)
                    return result
            else:
                self._cause = f"the store in {self.folder} is damaged"
            raise NotKept(f"This holds until the WebUI ends, because it cannot be written to the disk: {self._cause}.")

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
def opened(path: Path, address: Path | str, busy_seconds: float = 0.0) -> Iterator[sqlite3.Connection]:
    """A connection to a file of ours. Raises Damaged, Unusable, also for what SQLite says to the statements inside."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, *(Path(f"{path}{ending}") for ending in ("-shm", "-wal", "-journal"))):
            # Python 3.12 knows Windows' junctions.
            if file.is_symlink() or getattr(os.path, "isjunction", lambda _: False)(file):
                # SQLite would follow it, and write to somebody else's file.
                raise Unusable(f"{file} is a link, which OneDiff does not follow: delete it")
        with contextlib.closing(
            sqlite3.connect(address, timeout=busy_seconds, isolation_level=None, uri=isinstance(address, str))
        ) as connection:
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


def is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the database has our tables; False for an empty one. Raises Damaged for another program's."""
    # In one statement, which sees one state: another process may be making the tables just now.
    *marks, tables = connection.execute(
        "SELECT *, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if marks != [APPLICATION_ID, VERSION] and (any(marks) or tables):
        raise Damaged
    return bool(tables)


def set_journal(connection: sqlite3.Connection) -> None:
    """Keep a new database in a write-ahead log, or in a rollback journal where the file system has no shared memory."""
    try:
        if not is_ours(connection):
            # With it a purge gives the disk back; without effect once a table exists.
            connection.execute("PRAGMA auto_vacuum = FULL")
            connection.execute("PRAGMA journal_mode = WAL")
            is_ours(connection)
    except sqlite3.OperationalError as error:
        if "is locked" in str(error):
            raise
        try:
            # A connection that is alone needs no shared memory to put a log into its database and leave it. The file
            # may have been made elsewhere.
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = DELETE", "locking_mode = NORMAL"):
                connection.execute(f"PRAGMA {pragma}")
            is_ours(connection)
        except sqlite3.OperationalError:
            raise error from None


def check(connection: sqlite3.Connection) -> None:
    """Read everything. Raises Damaged."""
    if connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
        raise Damaged


def write(connection: sqlite3.Connection, pending: list[Work[object]]) -> None:
    """Make the tables where there are none, do what waits, and keep to the limits."""
    for statement in () if is_ours(connection) else SCHEMA:
        connection.execute(statement)
    for work in pending:
        work(connection)
    for table, age, which, most in LIMITS:
        old = f"SELECT rowid FROM {table} WHERE {which} ORDER BY {age} DESC LIMIT -1 OFFSET {most}"
        connection.execute(f"DELETE FROM {table} WHERE rowid IN ({old})")
