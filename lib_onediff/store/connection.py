"""The connection to the store's file, and in our words what the system and SQLite say of it."""
from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from . import schema
from .private_folder import is_link
from .rows import Damaged

# What SQLite keeps beside a database, by the ends of the names.
BESIDE = ("-shm", "-wal", "-journal")
# What SQLite's messages say to a user. Python 3.10 knows its result codes by their text alone.
CAUSES = {
    "is locked": "another program has locked the store in {}", "locking protocol": "the store in {} cannot be locked",
    "is full": "the disk with {} is full", "readonly": "{} cannot be written", "unable to open": "{} cannot be written",
    "disk I/O": "the disk with {} reports an error",
}


class Unusable(Exception):
    """The store cannot be used now; the message is the cause, to follow a colon."""


@contextlib.contextmanager
def opened(path: Path, busy_timeout: float, writes: bool) -> Iterator[sqlite3.Connection]:
    """A connection to the store, made if need be; where writes, in one transaction. busy_timeout: in seconds.

    Raises Damaged, Unusable; also for what SQLite says to the statements inside.
    """
    with understood(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with connected(path, path, busy_timeout) as connection:
            schema.set_journal(connection)
            if writes or not schema.is_ours(connection):
                connection.execute("BEGIN IMMEDIATE")
                schema.make_tables(connection)
            with connection:
                yield connection


@contextlib.contextmanager
def opened_as_it_lies(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to what the file alone holds, for a disk on which SQLite cannot make its file of locks: it believes
    that nobody writes. Raises as opened()."""
    with understood(path.parent), connected(path, f"{path.absolute().as_uri()}?mode=ro&immutable=1") as connection:
        if not schema.is_ours(connection):
            raise Unusable(f"{path.parent} cannot be written")
        yield connection


@contextlib.contextmanager
def connected(path: Path, address: Path | str, busy_timeout: float = 0.0) -> Iterator[sqlite3.Connection]:
    for file in (path, *(Path(f"{path}{ending}") for ending in BESIDE)):
        if is_link(file):
            # SQLite would follow it, and write to somebody else's file.
            raise Unusable(f"{file} is a link, which OneDiff does not follow: delete it")
    with contextlib.closing(
        sqlite3.connect(address, timeout=busy_timeout, isolation_level=None, uri=isinstance(address, str))
    ) as connection:
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        yield connection


@contextlib.contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Turn what SQLite and the system raise inside into Damaged or Unusable."""
    try:
        yield
    except sqlite3.OperationalError as error:
        for text, cause in CAUSES.items():
            if text in str(error):
                raise Unusable(cause.format(folder)) from error
        # Our statements are right, so the tables are not ours.
        raise Damaged("damaged") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        # SQLite quotes damaged bytes in its messages; a subclass of DatabaseError is a fault of ours, not of the file.
        if type(error) not in (sqlite3.DatabaseError, UnicodeDecodeError):
            raise
        raise Damaged("damaged") from error
    except OSError as error:
        raise Unusable(f"{folder} cannot be written ({error.strerror})") from error
