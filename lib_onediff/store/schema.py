"""The store's tables, and the statements on them."""
from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable

from .rows import CHOSEN, VERDICTS, Damaged, Finding, HistoryRow, PurgeFilter

APPLICATION_ID = 0x0D1FF001
# A new schema gets a new number and with it files of its own: two versions of the extension may share a folder.
VERSION = 2
# machine: a fingerprint's digest, "" for every machine.
TABLES = (
    """CREATE TABLE history (machine TEXT NOT NULL, architecture TEXT NOT NULL, model TEXT NOT NULL,
       resolution TEXT NOT NULL, batch INTEGER NOT NULL, tokens INTEGER NOT NULL, dtype TEXT NOT NULL,
       uses INTEGER NOT NULL, last_used REAL NOT NULL, step_ms REAL, host_ms REAL, relative_error REAL,
       PRIMARY KEY (machine, architecture, model, resolution, batch, tokens, dtype))""",
    """CREATE TABLE finding (machine TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
       PRIMARY KEY (machine, kind, name))""",
)
COLUMNS = tuple(field.name for field in dataclasses.fields(HistoryRow))
ROW = ", ".join(COLUMNS)
TEXT, WHOLE, NUMBER, PERHAPS = (str,), (int,), (float,), (float, type(None))
TYPES: tuple[tuple[type, ...], ...] = (
    TEXT, TEXT, TEXT, WHOLE, WHOLE, TEXT, WHOLE, NUMBER, PERHAPS, PERHAPS, PERHAPS,
)
WRITE_ROW = f"""
    INSERT INTO history (machine, {ROW}) VALUES (?{", ?" * len(COLUMNS)})
    ON CONFLICT (machine, architecture, model, resolution, batch, tokens, dtype) DO UPDATE SET
    uses = uses + excluded.uses, last_used = excluded.last_used,
    step_ms = coalesce(excluded.step_ms, step_ms), host_ms = coalesce(excluded.host_ms, host_ms),
    relative_error = coalesce(excluded.relative_error, relative_error)"""
# The latest gets the highest rowid, whatever the clock says.
WRITE_FINDING = "REPLACE INTO finding (machine, kind, name, value) VALUES (?, ?, ?, ?)"
# No sum of uses and no time comes near it, and SQLite can hold what is below.
LIMIT = 2**53


def is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the database has our tables; False for an empty one. Raises Damaged for another program's."""
    # In one statement, which sees one state: another process may be making the tables just now.
    *marks, tables = connection.execute(
        "SELECT *, (SELECT count(*) FROM sqlite_master) FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if marks == [APPLICATION_ID, VERSION]:
        return True
    if any(marks) or tables:
        raise Damaged("another program's")
    return False


def set_journal(connection: sqlite3.Connection) -> None:
    """Keep a new database in a write-ahead log, or in a rollback journal where the file system has no shared memory.
    Raises Damaged if the database is not ours."""
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


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables where there are none."""
    if not is_ours(connection):
        for table in TABLES:
            connection.execute(table)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def check(connection: sqlite3.Connection) -> bool:
    """Read everything; True. Raises Damaged for what does not fit together, sqlite3.Error."""
    if connection.execute("PRAGMA integrity_check(1)").fetchone()[0] != "ok":
        raise Damaged("damaged")
    read_history(connection, None)
    read_findings(connection, None)
    return True


def read_history(connection: sqlite3.Connection, machine: str | None) -> list[HistoryRow]:
    """The rows of a machine; None: of all, so that a shape may have several. The last used last."""
    return [row_from(values) for values in connection.execute(
        f"SELECT {ROW} FROM history WHERE machine = ? OR ? IS NULL ORDER BY last_used", (machine, machine)
    )]


def row_from(values: tuple) -> HistoryRow:
    """A row of the table. Raises Damaged if a value cannot be ours."""
    row = HistoryRow(*values)
    typed = all(isinstance(value, kind) for value, kind in zip(values, TYPES, strict=True))
    if not typed or not (0 <= row.uses < LIMIT and 0 <= row.last_used < LIMIT):
        raise Damaged("damaged")
    return row


def read_findings(connection: sqlite3.Connection, machine: str | None) -> list[Finding]:
    """What was found on a machine, and what holds on every one; None: all."""
    statement = "SELECT kind, name, value FROM finding WHERE machine IN (?, '') OR ? IS NULL"
    found = [Finding(*map(str, values)) for values in connection.execute(statement, (machine, machine))]
    try:
        for finding in found:
            json.loads(finding.value)
    except (ValueError, RecursionError) as error:
        raise Damaged("damaged") from error
    return found


def write(
    connection: sqlite3.Connection, machine: str, items: Iterable[HistoryRow | Finding], size_limit: int
) -> bool:
    """Add to what is there, the latest last, and keep to the limit in bytes; True."""
    for item in items:
        if isinstance(item, HistoryRow):
            connection.execute(WRITE_ROW, (machine, *dataclasses.astuple(item)))
        else:
            connection.execute(WRITE_FINDING, ("" if item.kind == CHOSEN else machine, *dataclasses.astuple(item)))
    evict(connection, machine, size_limit)
    return True


def evict(connection: sqlite3.Connection, machine: str, size_limit: int) -> None:
    """Delete the history, the verdicts and what was found on other machines, the oldest first, until the database takes
    size_limit bytes, or none is left."""
    kinds = (
        ("history", "last_used", "FROM history"),
        ("finding", "rowid", f"FROM finding WHERE kind = '{VERDICTS}' OR machine NOT IN (:machine, '')"),
    )
    while used_bytes(connection) > size_limit:
        deleted = 0
        for table, age, rows in kinds:
            oldest = f"SELECT rowid {rows} ORDER BY {age} LIMIT (SELECT count(*) / 8 + 1 {rows})"
            statement = f"DELETE FROM {table} WHERE rowid IN ({oldest})"
            deleted += connection.execute(statement, {"machine": machine}).rowcount
        if not deleted:
            break


def used_bytes(connection: sqlite3.Connection) -> int:
    """What the database takes on the disk once the transaction is over and its log is gone."""
    size, pages, free = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count", "freelist_count")
    )
    return (pages - free) * size


def purge(connection: sqlite3.Connection, gone: PurgeFilter) -> bool:
    """Forget history and findings, on every machine; True."""
    connection.create_function("history_goes", 2, gone.history)
    connection.create_function("finding_goes", 2, gone.finding)
    connection.execute("DELETE FROM history WHERE history_goes(resolution, model)")
    connection.execute("DELETE FROM finding WHERE finding_goes(kind, name)")
    return True
