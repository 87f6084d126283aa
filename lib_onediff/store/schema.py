"""The store's tables, and the statements on them."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator

from .machine import Fingerprint
from .rows import VERDICTS, Choice, ChoiceName, Damaged, HistoryRow, PurgeFilter

APPLICATION_ID = 0x0D1FF001
# A new schema gets a new number and with it a file of its own: two versions of the extension may share a folder.
SCHEMA_VERSION = 1
TABLES = (
    """CREATE TABLE machine (id INTEGER PRIMARY KEY, gpu TEXT NOT NULL, driver TEXT NOT NULL, torch TEXT NOT NULL,
       triton TEXT NOT NULL, onediff TEXT NOT NULL, UNIQUE (gpu, driver, torch, triton, onediff))""",
    """CREATE TABLE history (machine INTEGER NOT NULL, architecture TEXT NOT NULL, model TEXT NOT NULL,
       resolution TEXT NOT NULL, batch INTEGER NOT NULL, tokens INTEGER NOT NULL, dtype TEXT NOT NULL,
       uses INTEGER NOT NULL, last_used REAL NOT NULL, step_ms REAL, host_ms REAL, relative_error REAL,
       PRIMARY KEY (machine, architecture, model, resolution, batch, tokens, dtype))""",
    """CREATE TABLE choice (machine INTEGER NOT NULL, architecture TEXT NOT NULL, name TEXT NOT NULL,
       value TEXT NOT NULL, changed REAL NOT NULL, PRIMARY KEY (machine, architecture, name))""",
)
SHAPE = "architecture, model, resolution, batch, tokens, dtype"
ROW = f"{SHAPE}, uses, last_used, step_ms, host_ms, relative_error"
# No sum of uses and no time comes near it, and SQLite can hold what is below.
LIMIT = 2**53
CHOICE = "architecture, name, value, changed"


def prepare(connection: sqlite3.Connection) -> None:
    """Set the journal, and make the tables where there are none. Raises Damaged if the database is not ours."""
    try:
        ours = is_ours(connection)
    except sqlite3.OperationalError as error:
        if is_busy(error):
            raise
        leave_log(connection)
        ours = is_ours(connection)
    if not ours:
        # Has no effect once a table exists. With it a purge gives the disk back.
        connection.execute("PRAGMA auto_vacuum = FULL")
    set_journal(connection)
    if ours:
        return
    connection.execute("BEGIN IMMEDIATE")
    # Another process may have made them while we waited for the lock.
    if not is_ours(connection):
        for table in TABLES:
            connection.execute(table)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the database has our tables; False for an empty one. Raises Damaged for another program's."""
    # In one statement, which sees one state: another process may be making the tables just now.
    *marks, tables = connection.execute(
        "SELECT *, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if marks == [APPLICATION_ID, SCHEMA_VERSION]:
        return True
    if any(marks) or tables:
        raise Damaged("another program's")
    return False


def set_journal(connection: sqlite3.Connection) -> str:
    """Keep a write-ahead log, or a rollback journal where the file system has no shared memory; says which it is."""
    try:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        if is_busy(error):
            raise
        mode = leave_log(connection)
    # A commit to the log survives the process either way; a rollback journal must also reach the disk before the data.
    connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
    return mode


def leave_log(connection: sqlite3.Connection) -> str:
    """Put what a write-ahead log holds into the database and go back to a rollback journal, without shared memory."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    mode = connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    connection.execute("PRAGMA locking_mode = NORMAL")
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return mode


def is_busy(error: sqlite3.OperationalError) -> bool:
    """Whether another process is in the way. Python 3.10 knows SQLite's result codes by their text alone."""
    return any(text in str(error) for text in ("is locked", "locking protocol"))


def check(connection: sqlite3.Connection) -> bool:
    """Read everything and try to write; True. Raises Damaged for what does not fit together, sqlite3.Error."""
    if connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
        raise Damaged("damaged")
    for values in connection.execute(f"SELECT {ROW} FROM history"):
        row_from(values)
    for values in connection.execute(f"SELECT {CHOICE} FROM choice"):
        choice_from(values)
    connection.execute("SELECT id, gpu, driver, torch, triton, onediff FROM machine").fetchall()
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("ROLLBACK")
    return True


def row_from(values: tuple) -> HistoryRow:
    """A row of the table. Raises Damaged if a value cannot be ours."""
    architecture, model, resolution, batch, tokens, dtype, uses, last_used, *measured = values
    try:
        row = HistoryRow(
            str(architecture), str(model), str(resolution), int(batch), int(tokens), str(dtype), int(uses),
            float(last_used), *(None if value is None else float(value) for value in measured),
        )
    except (TypeError, ValueError) as error:
        raise Damaged("damaged") from error
    if not (0 <= row.uses < LIMIT and 0 <= row.last_used < LIMIT):
        raise Damaged("damaged")
    return row


def choice_from(values: tuple) -> tuple[ChoiceName, Choice]:
    """A row of the table. Raises Damaged if a value is of another type than ours."""
    architecture, name, value, changed = values
    try:
        json.loads(value)
        return (str(architecture), str(name)), Choice(value, float(changed))
    except (TypeError, ValueError, RecursionError) as error:
        raise Damaged("damaged") from error


def machine_id(connection: sqlite3.Connection, machine: Fingerprint, make: bool = False) -> int | None:
    """The number under which a machine's rows are kept; None if there are none yet."""
    values = dataclasses.astuple(machine)
    if make:
        connection.execute("INSERT OR IGNORE INTO machine (gpu, driver, torch, triton, onediff) VALUES (?, ?, ?, ?, ?)",
                           values)
    found = connection.execute(
        "SELECT id FROM machine WHERE (gpu, driver, torch, triton, onediff) = (?, ?, ?, ?, ?)", values
    ).fetchone()
    return found[0] if found else None


def read_history(connection: sqlite3.Connection, machine: Fingerprint | None) -> list[HistoryRow]:
    """The rows of a machine; None: of all, so that a shape may have several."""
    return [row_from(values) for values in read_of(connection, f"SELECT {ROW} FROM history", machine)]


def read_choices(connection: sqlite3.Connection, machine: Fingerprint | None) -> dict[ChoiceName, Choice]:
    """The choices of a machine; None: of all, of each the latest."""
    found = map(choice_from, read_of(connection, f"SELECT {CHOICE} FROM choice", machine))
    return dict(sorted(found, key=lambda item: item[1].changed))


def read_of(connection: sqlite3.Connection, statement: str, machine: Fingerprint | None) -> sqlite3.Cursor:
    if machine is None:
        return connection.execute(statement)
    return connection.execute(f"{statement} WHERE machine = ?", (machine_id(connection, machine),))


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing: without its COMMIT, closing the connection undoes it."""
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("COMMIT")


def merge(
    connection: sqlite3.Connection, machine: Fingerprint, rows: Iterable[HistoryRow],
    choices: dict[ChoiceName, Choice], size_limit: int,
) -> bool:
    """Add to what is there in one transaction, and keep to the limit in bytes; True."""
    with transaction(connection):
        number = machine_id(connection, machine, make=True)
        for row in rows:
            add_row(connection, number, row)
        for (architecture, name), choice in choices.items():
            # What is of the future was chosen before somebody set the clock back.
            connection.execute(
                "UPDATE choice SET changed = ? WHERE (architecture, name) = (?, ?) AND changed > ?",
                (choice.changed - 1, architecture, name, max(time.time(), choice.changed)),
            )
            connection.execute(
                """INSERT INTO choice (machine, architecture, name, value, changed) VALUES (?, ?, ?, ?, ?)
                   ON CONFLICT DO UPDATE SET value = excluded.value, changed = excluded.changed
                   WHERE excluded.changed >= changed""",
                (number, architecture, name, choice.value, choice.changed),
            )
        evict(connection, size_limit)
    return True


def add_row(connection: sqlite3.Connection, number: int | None, row: HistoryRow) -> None:
    found = connection.execute(
        f"SELECT {ROW} FROM history WHERE (machine, {SHAPE}) = (?, ?, ?, ?, ?, ?, ?)", (number, *row.shape)
    ).fetchone()
    total = row.with_other(row_from(found) if found else None)
    connection.execute(
        f"REPLACE INTO history (machine, {ROW}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (number, *(getattr(total, name) for name in ROW.split(", "))),
    )


def evict(connection: sqlite3.Connection, size_limit: int) -> None:
    """Delete the history, the verdicts and the choices that a later one has taken the place of, the oldest first, until
    the database takes size_limit bytes, or none is left."""
    replaced = "changed < (SELECT max(changed) FROM choice other WHERE (other.architecture, other.name) = " \
        "(choice.architecture, choice.name))"
    kinds = (("history", "last_used", "1"), ("choice", "changed", f"architecture = '{VERDICTS}' OR {replaced}"))
    while used_bytes(connection) > size_limit:
        deleted = 0
        for table, age, which in kinds:
            count = connection.execute(f"SELECT count(*) FROM {table} WHERE {which}").fetchone()[0]
            oldest = f"SELECT rowid FROM {table} WHERE {which} ORDER BY {age} LIMIT {count // 8 + 1}"
            deleted += connection.execute(f"DELETE FROM {table} WHERE rowid IN ({oldest})").rowcount
        if not deleted:
            break


def used_bytes(connection: sqlite3.Connection) -> int:
    """What the database takes on the disk once the transaction is over and its log is gone."""
    size, pages, free = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
    )
    return (pages - free) * size


def delete(connection: sqlite3.Connection, doomed: PurgeFilter) -> int:
    """Forget history and verdicts on every machine, or all that there is; the number of history rows."""
    with transaction(connection):
        if doomed.everything:
            deleted = connection.execute("DELETE FROM history").rowcount
            connection.execute("DELETE FROM choice")
            connection.execute("DELETE FROM machine")
            return deleted
        verdicts = connection.execute("SELECT rowid, name FROM choice WHERE architecture = ?", (VERDICTS,)).fetchall()
        gone = [(number,) for number, name in verdicts if doomed.verdict_named(str(name))]
        connection.executemany("DELETE FROM choice WHERE rowid = ?", gone)
        rows = connection.execute(f"SELECT rowid, {ROW} FROM history").fetchall()
        gone = [(number,) for number, *values in rows if doomed.row(row_from(tuple(values)))]
        connection.executemany("DELETE FROM history WHERE rowid = ?", gone)
        return len(gone)
