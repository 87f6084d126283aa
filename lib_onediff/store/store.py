"""One SQLite file in the cache folder. Several processes share it, and each may be killed at any moment."""
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

# An SQL statement and its parameters.
Statement = tuple[str, Sequence[Any]]

# SQLite's mark, in the file, of the program that a database belongs to.
APPLICATION_ID = 0x0D1FF001
# The schema's number, which is part of the file name: versions of OneDiff with different schemas can share a folder.
VERSION = 2
NAME = f"onediff-{VERSION}-"
ENDING = ".sqlite3"
ALL_STORES = "onediff-[0-9]*"
VERSION_OF = re.compile(r"onediff-(\d+)-")
# machine: the digest of a machine's fingerprint; "" for all machines. value: JSON.
SCHEMA = (
    """CREATE TABLE history (machine TEXT NOT NULL, architecture TEXT NOT NULL, model TEXT NOT NULL,
       resolution TEXT NOT NULL, batch INTEGER NOT NULL, tokens INTEGER NOT NULL, dtype TEXT NOT NULL,
       uses INTEGER NOT NULL, last_used REAL NOT NULL, step_ms REAL, host_ms REAL, relative_error REAL,
       PRIMARY KEY (machine, architecture, model, resolution, batch, tokens, dtype))""",
    """CREATE TABLE finding (machine TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
       PRIMARY KEY (machine, kind, name))""",
    f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {VERSION}",
)
# SCHEMA_OF selects everything that belongs to our tables, with triggers, indices and columns that others have added.
TABLES = ("history", "finding")
SCHEMA_OF = f"SELECT type, name, coalesce(sql, '') FROM sqlite_master WHERE tbl_name IN {TABLES}"
# (table, column for the age, condition, how many of the newest rows stay). Rows would pile up without a limit: each
# combination of LoRAs and each update of OneDiff has verdicts of its own.
LIMITS = (
    ("history", "last_used", "1", 3000),
    *(("finding", "rowid", f"kind = '{kind}'", 5000) for kind in ("verdict", "tuned")),
)
# Parts of SQLite's messages about the disk or a lock, where the file itself is fine. Python 3.10 has no result codes.
REFUSALS = ("is locked", "locking protocol", "is full", "readonly", "unable to open", "disk I/O")
# The number of files tried in a row if each is damaged.
STORES_TRIED = 3
# The largest number of statements that wait in memory while the disk cannot be written.
PENDING = 4096
# How long an access waits for another program's lock. After a failed one, later waits are short, so that images do not
# stall.
BUSY_SECONDS = 5.0
BUSY_SECONDS_IN_TROUBLE = 0.05


class Unusable(Exception):
    """The file cannot be used now, such as when it is locked or the disk is full. The message is the cause, worded to
    follow a colon. Store catches it."""


class Damaged(Exception):
    """The file is damaged, or another program's. Store catches it, and begins a new file."""


class Store:
    """A SQLite database in a folder, with the tables of SCHEMA. Added statements wait in memory until commit() writes
    them. If that fails, they stay in memory, `trouble` has the cause, and the next commit() or read() tries again. Safe
    in any thread.

    Every access opens the file anew, because a user may delete it between two images. Files are numbered, and the one
    with the highest number is used; after damage, a file with the next number is begun. The damaged file is not
    renamed: SQLite finds a journal by the name of its database, so another process that has the old file open would
    take the journal of the new one.
    """

    def __init__(self, folder: Path) -> None:
        """folder: created if it is missing. Checks the file's integrity, which reads all of it. A folder or file that
        cannot be used raises nothing: see `trouble`."""
        self.folder = folder
        self._pending: deque[Statement] = deque(maxlen=PENDING)
        self._lock = threading.Lock()
        self._number = 1
        self._cause = ""
        self._damage = ""
        with contextlib.suppress(NotKept):
            self.commit(check_integrity)

    @property
    def trouble(self) -> str | None:
        """Why the last commit() failed; if it succeeded, which file was damaged since the last delete(). A sentence for
        the user; None if all is well."""
        if self._cause:
            return (
                "Checks, measurements and pins of sizes cannot be saved, and are forgotten when this WebUI is closed: "
                f"{self._cause}."
            )
        return self._damage or None

    @property
    def saves(self) -> bool:
        """Whether the last commit() succeeded, or there was none. After damage it is True again: a new file is in use,
        although `trouble` still tells of the old one."""
        return not self._cause

    @property
    def path(self) -> Path:
        """The file in use: the one with the highest number in the folder, or with the number after a damaged one's. It
        may not exist yet."""
        names = (file.name[len(NAME):-len(ENDING)] for file in self._files(f"{NAME}*{ENDING}"))
        numbers = (int(name) for name in names if name.isascii() and name.isdecimal())
        return self.folder / f"{NAME}{max(self._number, *numbers, 0)}{ENDING}"

    def add(self, statement: str, *values: Any) -> None:
        """Add an SQL statement with its parameters for the next commit(). Never waits for the disk. Beyond PENDING
        statements, the oldest is dropped. The statement must be valid SQL for the tables of SCHEMA: SQLite's error for
        an invalid one is taken for damage of the file, and new files are begun in vain."""
        self._pending.append((statement, values))

    def commit(self, work: Callable[[sqlite3.Connection], object] | None = None) -> None:
        """Run all added statements, and then work(connection), in one transaction. Raises NotKept if that fails: the
        statements stay for the next commit(), which does not run this work() again. If the file is damaged, the
        statements and work() run again on a new file, up to STORES_TRIED files in all; so work() may run more than
        once.

        work: must not call commit() or read() of this store, which would wait for this commit for ever. If it raises an
            OSError, the disk counts as not writable; an invalid statement counts as damage. Other exceptions are passed
            on, and nothing is written then.

        Does nothing if there is nothing to run and the last commit() succeeded. Takes about 20 ms; up to BUSY_SECONDS
        if another program has locked the file, and up to BUSY_SECONDS_IN_TROUBLE if the last commit() failed.
        """
        with self._lock:
            for _ in range(STORES_TRIED):
                # One atomic copy, because another thread may add statements meanwhile.
                path = self.path
                pending = self._pending.copy()
                if not (work or pending or self._cause):
                    return
                try:
                    with opened(path, "rwc", self._busy_seconds) as connection:
                        if not is_ours(connection):
                            # A purge then shrinks the file. It has no effect once a table exists.
                            connection.execute("PRAGMA auto_vacuum = FULL")
                        # Not every file system supports the shared memory of a write-ahead log. OneDiff 0.2.0 used one.
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
                    # Beyond PENDING statements, the oldest have left the queue already.
                    with contextlib.suppress(ValueError):
                        self._pending.remove(written)
                return
            else:
                self._cause = f"the store in {self.folder} is damaged"
            raise NotKept(f"This is kept until the WebUI is closed, but cannot be written to the disk: {self._cause}.")

    def read(self, statement: str, *values: Any) -> list[tuple]:
        """The rows of a SELECT with these parameters, after a commit() of what is pending. [] if the file is missing,
        cannot be read or is damaged; nothing is raised. `trouble` tells of damage and of a failed commit(), but not
        why the file could not be read if nothing was pending."""
        with contextlib.suppress(NotKept):
            self.commit()
        path = self.path
        try:
            with opened(path, "rw", self._busy_seconds) as connection:
                return connection.execute(statement, values).fetchall() if is_ours(connection) else []
        except Damaged:
            self._set_aside(path)
        except Unusable:
            # A missing file has no rows. Any other cause is noted by the next commit() that has something to write.
            pass
        return []

    def delete(self) -> None:
        """Delete damaged files and those of earlier versions of OneDiff, and clear the message about damage. The file
        in use stays (History deletes its rows), as do files of newer versions and files that cannot be deleted."""
        # The list comes before the current name: a file that another process begins in between is not in the list.
        files = self._files(ALL_STORES)
        current = self.path.name
        for file in files:
            if not (file.name.startswith(current) or is_newer(file)):
                with contextlib.suppress(OSError):
                    file.unlink()
        self._damage = ""

    def size_bytes(self) -> int:
        """The bytes of all OneDiff's files in the folder, damaged ones and those of earlier versions included; files of
        newer versions do not count, because delete() keeps them. 0 if the folder cannot be read."""
        size = 0
        for file in (one for one in self._files(ALL_STORES) if not is_newer(one)):
            # A journal of SQLite may be gone by now.
            with contextlib.suppress(OSError):
                size += file.lstat().st_size
        return size

    @property
    def is_shared_with_newer(self) -> bool:
        """Whether a newer version of OneDiff has files in this folder. Looks at the disk at each use."""
        return any(map(is_newer, self._files(ALL_STORES)))

    @property
    def _busy_seconds(self) -> float:
        """How many seconds the next access waits for another program's lock; fewer after a commit() that failed."""
        return BUSY_SECONDS_IN_TROUBLE if self._cause else BUSY_SECONDS

    def _set_aside(self, path: Path) -> None:
        """Use the file with the number after this damaged file's from now on, and say so in `trouble`. The damaged file
        is neither moved nor deleted, so that every process finds the same number."""
        self._number = int(path.name[len(NAME):-len(ENDING)]) + 1
        self._damage = (
            "OneDiff's file of checked and pinned sizes was damaged, so a new one was begun: sizes are checked again, "
            f"and pins are gone. The old file is kept as {path.name} in {self.folder}."
        )

    def _files(self, pattern: str) -> list[Path]:
        """The files of the folder whose names match a glob pattern; none if the folder cannot be read."""
        with contextlib.suppress(OSError):
            return list(self.folder.glob(pattern))
        return []


@contextlib.contextmanager
def opened(path: Path, mode: str, busy_seconds: float) -> Iterator[sqlite3.Connection]:
    """A context with a connection to a SQLite file, which is closed at the end. The folder is created if it is missing.

    mode: "rwc" creates the file if it is missing; "rw" raises Unusable then. busy_seconds: how long each statement
    waits for another program's lock.
    Raises Damaged or Unusable, also for SQLite's and the disk's errors in the statements of the with block.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, *(Path(f"{path}{ending}") for ending in ("-shm", "-wal", "-journal"))):
            # os.path.isjunction is new in Python 3.12.
            if file.is_symlink() or getattr(os.path, "isjunction", lambda _: False)(file):
                # SQLite would follow the link and write to another program's file.
                raise Unusable(f"{file} is a link, which OneDiff does not follow: delete it")
            if file.exists() and not file.is_file():
                # SQLite would hang on a named pipe.
                raise Unusable(f"{file} is not a regular file: delete it")
        # SQLite refuses a URI with a host, so the server of a network share becomes part of the path.
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
        # Our statements are valid, so these errors mean that the file is not ours or damaged. UnicodeDecodeError comes
        # from damaged bytes that SQLite quotes in its message.
        if type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError, UnicodeDecodeError):
            raise Damaged from error
        raise


def is_newer(file: Path) -> bool:
    """Whether a file belongs to a newer version of OneDiff, by the schema's number in its name."""
    version = VERSION_OF.match(file.name)
    return version is not None and int(version[1]) > VERSION


def is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the database has the tables of SCHEMA; False for an empty database, in which they are to be created.

    Raises Damaged for another program's database, and if our tables were changed: an added trigger or column could
    reject our rows.
    """
    # One statement sees one state of the file. Between two, another process could create the tables.
    *marks, count = connection.execute(
        "SELECT *, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if marks != [APPLICATION_ID, VERSION] and (any(marks) or count):
        raise Damaged
    found = schema_of(connection)
    if found and found != our_schema():
        raise Damaged
    return bool(found)


def schema_of(connection: sqlite3.Connection) -> frozenset[tuple[str, str, str]]:
    """(type, name, SQL text) of our tables in a database, and of all indices and triggers on them; empty if the
    database has none of these."""
    return frozenset((kind, name, " ".join(sql.split())) for kind, name, sql in connection.execute(SCHEMA_OF))


@functools.cache
def our_schema() -> frozenset[tuple[str, str, str]]:
    """The result of schema_of() for a database that was made by SCHEMA. Computed once."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in SCHEMA:
            connection.execute(statement)
        return schema_of(connection)


def check_integrity(connection: sqlite3.Connection) -> None:
    """Raise Damaged if SQLite's integrity check, which reads the whole file, finds a fault."""
    if connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
        raise Damaged


def write(connection: sqlite3.Connection, pending: Iterable[Statement]) -> None:
    """Create the tables if the file is empty, run the pending statements in order, and delete the oldest rows beyond
    LIMITS. Must run in a transaction. Raises Damaged as is_ours() does, and SQLite's errors."""
    for statement in () if is_ours(connection) else SCHEMA:
        connection.execute(statement)
    for waiting in pending:
        connection.execute(*waiting)
    for table, age, which, most in LIMITS:
        old = f"SELECT rowid FROM {table} WHERE {which} ORDER BY {age} DESC LIMIT -1 OFFSET {most}"
        connection.execute(f"DELETE FROM {table} WHERE rowid IN ({old})")
