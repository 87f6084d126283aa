"""If the store's file is damaged, it is left as it is, another file is begun, and the user gets a message."""
from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from store_builders import FILE, NEXT_FILE, opened, row, uses

from lib_onediff.store.store import SCHEMA, Store

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store's file with two hundred rows and a tuned choice."""
    history = opened(tmp_path_factory.mktemp("healthy"))
    for number in range(200):
        history.record(row(f"{number}x8"))
    history.tune("layout", "nhwc")
    history.close()
    return next(tmp_path_factory.getbasetemp().glob(f"healthy*/{FILE}"))


def run_in(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def replace_by_another_program(path: Path) -> None:
    path.unlink()
    run_in(path, "PRAGMA journal_mode = WAL", "CREATE TABLE bookmarks (address TEXT)")


def remade(path: Path, old: str, new: str) -> None:
    """Replace the file's table of findings by an empty one, with `old` replaced by `new` in its definition."""
    assert old in SCHEMA[1]
    run_in(path, "DROP TABLE finding", SCHEMA[1].replace(old, new))


DAMAGES: dict[str, Damage] = {
    "random bytes": lambda path: path.write_bytes(random.Random(1).randbytes(20_000)),
    "a few random bytes": lambda path: path.write_bytes(b"?!"),
    "cut in a page": lambda path: path.write_bytes(path.read_bytes()[:10_000]),
    "cut at a page": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "all but the header is zeros": lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(30_000)),
    "another program's": replace_by_another_program,
    "another program's marks": lambda path: run_in(path, "PRAGMA application_id = 77"),
    "a schema of the future": lambda path: run_in(path, "PRAGMA user_version = 3"),
    "without its marks": lambda path: run_in(path, "PRAGMA application_id = 0", "PRAGMA user_version = 0"),
    "without a table": lambda path: run_in(path, "DROP TABLE history"),
    "a trigger": lambda path: run_in(
        path, "CREATE TRIGGER no BEFORE INSERT ON finding BEGIN SELECT RAISE(ABORT, 'no'); END"),
    "a trigger that deletes": lambda path: run_in(
        path, "CREATE TRIGGER gone AFTER INSERT ON history BEGIN DELETE FROM history; END"),
    "a column more": lambda path: run_in(path, "ALTER TABLE finding ADD COLUMN more TEXT NOT NULL DEFAULT ''"),
    "a column more in the history": lambda path: run_in(path, "ALTER TABLE history ADD COLUMN more"),
    "a column of another name": lambda path: run_in(path, "ALTER TABLE finding RENAME COLUMN value TO worth"),
    "a column of another type": lambda path: remade(path, "value TEXT NOT NULL", "value INTEGER NOT NULL"),
    "a check": lambda path: remade(path, "value TEXT NOT NULL", "value TEXT NOT NULL CHECK (value = '')"),
    "without a key": lambda path: remade(path, "PRIMARY KEY (machine, kind, name)", "CHECK (1)"),
    "an index that allows one": lambda path: run_in(
        path, "DELETE FROM history", "DELETE FROM finding", "CREATE UNIQUE INDEX one ON finding (machine)"),
    "a view for a table": lambda path: run_in(
        path, "ALTER TABLE finding RENAME TO other", "CREATE VIEW finding AS SELECT * FROM other"),
    "without a column": lambda path: run_in(path, "ALTER TABLE history DROP COLUMN host_ms"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_stays_and_another_one_is_begun_with_a_message(tmp_path: Path, healthy: Path, kind: str) -> None:
    """kind: the damage, done before the file is opened. The next process uses the new file without a message. A purge
    deletes the damaged file and the new rows."""
    path = Path(shutil.copy(healthy, tmp_path / FILE))
    DAMAGES[kind](path)
    damaged = path.read_bytes()
    history = opened(tmp_path)
    assert history.trouble is not None and path.name in history.trouble and "\n" not in history.trouble
    assert history.rows() == []
    history.record(row())
    history.commit()
    assert path.read_bytes() == damaged and (tmp_path / NEXT_FILE).exists()
    assert path.name in (history.trouble or ""), "the message stays for as long as this WebUI runs"
    again = opened(tmp_path)
    assert again.rows() == [row()] and again.trouble is None
    assert again.size_bytes() > len(damaged)
    again.forget()
    assert not path.exists() and again.rows() == []


@pytest.mark.parametrize("kind", DAMAGES)
def test_after_damage_of_the_file_in_use_all_data_recorded_later_is_kept(
    tmp_path: Path, healthy: Path, kind: str
) -> None:
    """kind: the damage, done by another program while this process uses the file. What is recorded afterwards is in a
    new file or in this one, for this process and the next."""
    path = Path(shutil.copy(healthy, tmp_path / FILE))
    history = opened(tmp_path)
    assert len(history.rows()) == 200
    DAMAGES[kind](path)
    history.record(row())
    history.pin("SD1", "8x8", True)
    history.tune("tile", 64)
    history.commit()
    again = opened(tmp_path)
    assert row() in history.rows() and row() in again.rows()
    assert ("SD1", "8x8") in again.pins() and again.tuned()["tile"] == 64


def test_a_foreign_table_in_the_file_is_left_alone(tmp_path: Path, healthy: Path) -> None:
    """It does not count as damage: the file is still used, without a message."""
    path = Path(shutil.copy(healthy, tmp_path / FILE))
    run_in(path, "CREATE TABLE notes (text)", "ANALYZE", "INSERT INTO notes VALUES ('mine')")
    history = opened(tmp_path)
    history.pin("SD1", "8x8", True)
    assert history.trouble is None and len(history.rows()) == 200
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT * FROM notes").fetchall() == [("mine",)]


# The last four are seeds at which an earlier version failed.
@pytest.mark.parametrize("seed", [*range(40), 151, 155, 318, 1431])
def test_a_store_with_random_bytes_changed_can_be_opened_and_written(tmp_path: Path, healthy: Path, seed: int) -> None:
    """The file is also cut in half for some seeds, or has journals of random bytes beside it. What is recorded then is
    read, and can be purged, by the next process."""
    chance = random.Random(seed)
    content = bytearray(healthy.read_bytes())
    for _ in range(chance.choice((1, 20, 500))):
        start = chance.randrange(len(content))
        patch = chance.randbytes(chance.choice((1, 4, 64)))
        content[start:start + len(patch)] = patch
    (tmp_path / FILE).write_bytes(content[:chance.choice((len(content), len(content) // 2))])
    for ending in ("-wal", "-shm", "-journal"):
        if chance.random() < 0.3:
            (tmp_path / f"{FILE}{ending}").write_bytes(chance.randbytes(5000))
    history = opened(tmp_path)
    history.record(row())
    history.commit()
    again = opened(tmp_path)
    assert again.trouble is None and row() in again.rows()
    again.forget(["512x512"])
    assert row() not in again.rows()


def test_another_program_that_rolls_back_in_the_damaged_file_does_not_harm_the_new_one(
    tmp_path: Path, healthy: Path
) -> None:
    """The other program has a transaction open in the damaged file while OneDiff begins a new file, and then rolls it
    back. A OneDiff process that used the damaged file goes on in the new one."""
    path = shutil.copy(healthy, tmp_path / FILE)
    other = opened(tmp_path)
    writing = sqlite3.connect(path, isolation_level=None)
    run_in(path, "PRAGMA user_version = 3")
    writing.execute("BEGIN IMMEDIATE")
    writing.execute("DELETE FROM history")
    history = opened(tmp_path)
    history.record(row())
    history.commit()
    writing.execute("ROLLBACK")
    writing.close()
    other.record(row())
    other.commit()
    assert uses(history) == {"512x512": 2}


def test_rows_in_the_write_ahead_log_of_version_0_2_0_are_kept(tmp_path: Path, healthy: Path) -> None:
    """Only version 0.2.0 used SQLite's write-ahead log, which needs shared memory. The rows are from a process that did
    not close the file. Once the file is opened, the log is gone."""
    here = tmp_path / "here"
    moved = tmp_path / "moved"
    here.mkdir()
    writer = sqlite3.connect(shutil.copy(healthy, here / FILE), isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("UPDATE history SET uses = 7 WHERE resolution = '7x8'")
    shutil.copytree(here, moved)
    writer.close()
    assert (moved / f"{FILE}-wal").stat().st_size > 0
    history = opened(moved)
    assert history.trouble is None and uses(history)["7x8"] == 7 and len(history.rows()) == 200
    assert [file.name for file in moved.iterdir()] == [FILE]


def test_a_transaction_that_fails_half_way_is_rolled_back_by_a_journal_on_disk(tmp_path: Path) -> None:
    """SQLite's journal must be a file: without it, a killed process or a full disk would leave half of an image's rows,
    or a damaged file."""
    store = Store(tmp_path)
    store.add("INSERT INTO finding VALUES (?, ?, ?, ?)", "here", "pin", "kept", "1")
    store.commit()
    seen: list[tuple[str, bool]] = []

    def half(connection: sqlite3.Connection) -> None:
        # Pages are written to the disk before the end, as in a large transaction.
        connection.execute("PRAGMA cache_size = 1")
        for number in range(300):
            connection.execute("INSERT INTO finding VALUES (?, ?, ?, ?)", ("here", "pin", f"{number}", "x" * 1000))
        [mode] = connection.execute("PRAGMA journal_mode").fetchone()
        seen.append((mode, store.path.with_name(f"{store.path.name}-journal").exists()))
        raise KeyError("interrupted")

    with pytest.raises(KeyError):
        store.commit(half)
    assert seen == [("delete", True)]
    connection = sqlite3.connect(store.path)
    assert connection.execute("SELECT name, value FROM finding").fetchall() == [("kept", "1")]
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
