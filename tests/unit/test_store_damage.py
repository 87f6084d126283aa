"""The store on a damaged file: set aside under a new name, rebuilt, said."""
from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lib_onediff.store import schema as store_schema
from lib_onediff.store.machine import Fingerprint
from lib_onediff.store.rows import HistoryRow
from lib_onediff.store.store import Store

MACHINE = Fingerprint("a GPU", "580.1", "2.9.0", "3.5.0", "0.1.0")
NAME = "onediff-1.sqlite3"
Damage = Callable[[Path], None]


def row(resolution: str = "512x512") -> HistoryRow:
    return HistoryRow("sd1", "SD1", resolution, 2, 77, "float16", last_used=1000.0)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with two hundred rows and a choice."""
    folder = tmp_path_factory.mktemp("healthy")
    store = Store.open(folder, MACHINE)
    for number in range(200):
        store.record(row(f"{number}x8"))
    store.choose("sd1", "layout", "nhwc")
    store.close()
    assert store.trouble is None
    return folder / NAME


def run_in(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def replace_by_another_program(path: Path) -> None:
    path.unlink()
    run_in(path, "CREATE TABLE bookmarks (address TEXT)", "INSERT INTO bookmarks VALUES ('here')")


DAMAGES: dict[str, Damage] = {
    "random bytes": lambda path: path.write_bytes(random.Random(1).randbytes(20_000)),
    "a few random bytes": lambda path: path.write_bytes(b"?!"),
    "text": lambda path: path.write_text("hello\n" * 300),
    "cut in a page": lambda path: path.write_bytes(path.read_bytes()[:10_000]),
    "cut at a page": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "all but the header is zeros": lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(30_000)),
    "another program's": replace_by_another_program,
    "another program's marks": lambda path: run_in(path, "PRAGMA application_id = 77"),
    "a schema of the future": lambda path: run_in(path, "PRAGMA user_version = 2"),
    "without its marks": lambda path: run_in(path, "PRAGMA application_id = 0", "PRAGMA user_version = 0"),
    "without a table": lambda path: run_in(path, "DROP TABLE history"),
    "without a column": lambda path: run_in(path, "ALTER TABLE history DROP COLUMN host_ms"),
    "text for a number": lambda path: run_in(path, "UPDATE history SET step_ms = 'fast' WHERE resolution = '7x8'"),
    "bytes for a number": lambda path: run_in(path, "UPDATE history SET uses = x'ff00' WHERE resolution = '7x8'"),
    "a choice that is no JSON": lambda path: run_in(path, "UPDATE choice SET value = '{'"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_set_aside_and_rebuilt(tmp_path: Path, healthy: Path, kind: str) -> None:
    path = shutil.copy(healthy, tmp_path / NAME)
    DAMAGES[kind](path)
    damaged = path.read_bytes()
    store = Store.open(tmp_path, MACHINE)
    (aside,) = tmp_path.glob("*set-aside*.sqlite3")
    assert aside.read_bytes() == damaged
    assert store.trouble is not None and aside.name in store.trouble and "\n" not in store.trouble
    assert store.on_disk and store.history() == []
    store.record(row())
    assert store.flush()
    assert aside.name in (store.trouble or ""), "said for as long as this WebUI runs"
    store.close()
    again = Store.open(tmp_path, MACHINE)
    assert again.history() == [row()] and again.trouble is None
    assert again.size_bytes() > len(damaged)
    assert again.forget() == 1 and not aside.exists()
    again.close()


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind not in ("text for a number", "bytes for a number")])
def test_a_file_that_is_damaged_while_it_is_used(tmp_path: Path, healthy: Path, kind: str) -> None:
    path = shutil.copy(healthy, tmp_path / NAME)
    store = Store.open(tmp_path, MACHINE)
    assert len(store.history()) == 200
    DAMAGES[kind](path)
    store.record(row())
    store.choices("sd1")
    assert store.flush(), store.trouble
    assert row() in store.history()
    store.close()
    again = Store.open(tmp_path, MACHINE)
    again.record(row("1x1"))
    assert again.flush() and row("1x1") in again.history()
    again.close()


def test_a_damaged_file_keeps_its_name_while_another_has_it_open(
    tmp_path: Path, healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SQLite finds a log by the name of its database: closing the old one would delete the log of the new one.
    DAMAGES["text for a number"](Path(shutil.copy(healthy, tmp_path / NAME)))
    reading, read = threading.Event(), threading.Event()

    def read_slowly(connection: sqlite3.Connection, machine: Fingerprint) -> list[HistoryRow]:
        reading.set()
        assert read.wait(10)
        return []

    monkeypatch.setattr(store_schema, "read_history", read_slowly)
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(Store(tmp_path, MACHINE).history)
        assert reading.wait(10)
        opener = pool.submit(Store.open, tmp_path, MACHINE)
        time.sleep(0.3)
        assert not list(tmp_path.glob("*set-aside*"))
        read.set()
        assert reader.result() == []
        store = opener.result()
    (aside,) = tmp_path.glob("*set-aside*")
    assert store.on_disk and aside.name in (store.trouble or "")
    store.close()


@pytest.mark.parametrize("statement", range(3))
def test_a_store_that_another_process_is_just_making_is_no_other_programs(tmp_path: Path, statement: int) -> None:
    run_in(tmp_path / NAME, "PRAGMA journal_mode = WAL")
    looking = sqlite3.connect(tmp_path / NAME, isolation_level=None)
    maker = sqlite3.connect(tmp_path / NAME, isolation_level=None)
    begun: list[str] = []

    def make_in_between(text: str) -> None:
        begun.append(text)
        if len(begun) == statement + 1:
            store_schema.prepare(maker)

    looking.set_trace_callback(make_in_between)
    ours = store_schema.is_ours(looking)
    looking.set_trace_callback(None)
    assert len(begun) > statement and store_schema.is_ours(maker)
    assert ours is (statement == 0), "what it saw is the state of one moment"
    looking.close()
    maker.close()


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    store = Store.open(tmp_path, MACHINE)
    store.record(row())
    assert store.flush() and store.trouble is None
    store.close()


# The late ones are seeds at which an earlier version failed.
@pytest.mark.parametrize("seed", [*range(40), 151, 155, 318, 1431])
def test_bytes_changed_at_random(tmp_path: Path, healthy: Path, seed: int) -> None:
    chance = random.Random(seed)
    content = bytearray(healthy.read_bytes())
    for _ in range(chance.choice((1, 20, 500))):
        start = chance.randrange(len(content))
        patch = chance.randbytes(chance.choice((1, 4, 64)))
        content[start:start + len(patch)] = patch
    (tmp_path / NAME).write_bytes(content[:chance.choice((len(content), len(content) // 2))])
    for ending in ("-wal", "-shm", "-journal"):
        if chance.random() < 0.3:
            (tmp_path / f"{NAME}{ending}").write_bytes(chance.randbytes(5000))
    if chance.random() < 0.3:
        (tmp_path / "onediff-1.lock").write_bytes(chance.randbytes(5000))
    store = Store.open(tmp_path, MACHINE)
    store.history()
    store.choices("sd1")
    store.record(row())
    assert store.flush(), store.trouble
    store.close()
    again = Store.open(tmp_path, MACHINE)
    assert again.trouble is None and row() in again.history()
    again.forget(["512x512"])
    assert row() not in again.history()
    again.close()


def test_no_more_than_a_few_files_are_kept_aside(tmp_path: Path) -> None:
    for seed in range(5):
        (tmp_path / NAME).write_bytes(random.Random(seed).randbytes(3000))
        Store.open(tmp_path, MACHINE).close()
    kept = sorted(tmp_path.glob("*set-aside*"))
    assert [file.read_bytes() for file in kept] == [random.Random(seed).randbytes(3000) for seed in (3, 4)]


@pytest.mark.skipif(os.name != "posix", reason="SQLite's drivers have other names here")
def test_a_file_system_without_shared_memory_gets_a_rollback_journal(tmp_path: Path, healthy: Path) -> None:
    # SQLite's own driver for file systems without proper locks has no shared memory either.
    connection = sqlite3.connect(f"{(tmp_path / NAME).as_uri()}?vfs=unix-dotfile", uri=True, isolation_level=None)
    store_schema.prepare(connection)
    assert store_schema.set_journal(connection) == "delete"
    store_schema.merge(connection, MACHINE, [row()], {}, 1 << 20)
    assert store_schema.read_history(connection, MACHINE) == [row()]
    connection.close()

    # A log written elsewhere, with rows that are only in it, comes along when the folder is moved there.
    path = tmp_path / "elsewhere" / NAME
    path.parent.mkdir()
    shutil.copy(healthy, path)
    elsewhere = sqlite3.connect(path, isolation_level=None)
    store_schema.prepare(elsewhere)
    store_schema.merge(elsewhere, MACHINE, [row("1x1")], {}, 1 << 20)
    moved = tmp_path / "moved" / NAME
    shutil.copytree(path.parent, moved.parent)
    elsewhere.close()
    assert moved.with_name(f"{NAME}-wal").stat().st_size > 0
    connection = sqlite3.connect(f"{moved.as_uri()}?vfs=unix-dotfile", uri=True, isolation_level=None)
    store_schema.prepare(connection)
    assert len(store_schema.read_history(connection, MACHINE)) == 201
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()
