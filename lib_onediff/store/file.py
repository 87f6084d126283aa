"""The store's file: open it, lock it, and say in our words what the system and SQLite say of it."""
from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from . import schema
from .private_folder import is_link
from .rows import Damaged

# What SQLite keeps beside a database, by the ends of the names.
BESIDE = ("-shm", "-wal", "-journal")


class Unusable(Exception):
    """The file cannot be used now; the message is the cause, to follow a colon."""


class InTheWay(Unusable):
    """Another process has the file; worth another attempt at once."""


@contextlib.contextmanager
def opened(path: Path, patience: float, writable: bool = True) -> Iterator[sqlite3.Connection]:
    """A connection to the store, with its tables made; where nothing can be written, to what the file alone holds.

    Raises Damaged, InTheWay, Unusable; also for what SQLite says to the statements inside.
    """
    with understood(path.parent):
        refuse_links(path, *(Path(f"{path}{ending}") for ending in BESIDE))
        writable = writable and os.access(path.parent, os.W_OK)
        # Where it cannot make its file of locks, SQLite reads only what it may believe that nobody writes.
        address = path if writable else f"{path.absolute().as_uri()}?immutable=1"
        with contextlib.closing(
            sqlite3.connect(address, timeout=patience, isolation_level=None, uri=not writable)
        ) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            if writable:
                schema.prepare(connection)
            elif not schema.is_ours(connection):
                raise Unusable(f"{path.parent} cannot be written")
            yield connection


@contextlib.contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Turn what SQLite and the system raise inside into Damaged, InTheWay or Unusable."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if schema.is_busy(error):
            raise InTheWay(f"another program has locked the store in {folder}") from error
        if "is full" in text:
            raise Unusable(f"the disk with {folder} is full") from error
        if "readonly" in text or "unable to open" in text:
            raise Unusable(f"{folder} cannot be written") from error
        if "disk I/O" in text:
            raise Unusable(f"the disk with {folder} reports an error") from error
        # Our statements are right, so the tables are not ours.
        raise Damaged("damaged") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        # SQLite quotes damaged bytes in its messages; a subclass of DatabaseError is a fault of ours, not of the file.
        if type(error) not in (sqlite3.DatabaseError, UnicodeDecodeError):
            raise
        raise Damaged("damaged") from error
    except OSError as error:
        raise Unusable(f"{folder} cannot be written ({error.strerror})") from error


@contextlib.contextmanager
def locked(path: Path, patience: float, alone: bool = False) -> Iterator[None]:
    """Hold a lock between processes, together with others or alone, which the system takes back from one that is
    killed. Raises Unusable.

    path: of a file that stays empty, in a folder that is made if need be.
    """
    with understood(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_links(path, *(Path(f"{path}{ending}") for ending in BESIDE))
        lock = sqlite3.connect(path, timeout=patience, isolation_level=None)
    with contextlib.closing(lock):
        try:
            with understood(path.parent):
                lock.execute("BEGIN EXCLUSIVE" if alone else "BEGIN")
                # Without alone, it is only now that it has the lock.
                lock.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except Damaged as error:
            # Nobody writes to it, so what is in it came from outside. Emptied, it stays the file that others lock.
            with contextlib.suppress(OSError):
                empty(path)
            raise InTheWay(f"{path} was damaged") from error
        yield


def refuse_links(*paths: Path) -> None:
    """Raise Unusable where one of our files is a link: SQLite would follow it, and write to somebody else's file."""
    for path in paths:
        if is_link(path):
            raise Unusable(f"{path} is a link, which OneDiff does not follow: delete it")


def empty(path: Path) -> None:
    """Empty a file that goes by this name alone. Raises OSError."""
    file = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        if os.fstat(file).st_nlink == 1:
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def identity(path: Path) -> tuple[int, int] | None:
    """Which file a name stands for now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
