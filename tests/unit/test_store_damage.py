"""The store on a damaged file: set aside under a new name, rebuilt, said."""
from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from lib_onediff.store.machine import Fingerprint
from lib_onediff.store.rows import TUNED, HistoryRow, PurgeFilter
from lib_onediff.store.store import Store

MACHINE = Fingerprint("a GPU", "580.1", "2.9.0", "3.5.0", "0.1.0")
NAME, NEXT = "onediff-2-1.sqlite3", "onediff-2-2.sqlite3"
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
    store.save(TUNED, "layout", "nhwc")
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
    "a schema of the future": lambda path: run_in(path, "PRAGMA user_version = 3"),
    "without its marks": lambda path: run_in(path, "PRAGMA application_id = 0", "PRAGMA user_version = 0"),
    "without a table": lambda path: run_in(path, "DROP TABLE history"),
    "without a column": lambda path: run_in(path, "ALTER TABLE history DROP COLUMN host_ms"),
    "text for a number": lambda path: run_in(path, "UPDATE history SET step_ms = 'fast' WHERE resolution = '7x8'"),
    "bytes for a number": lambda path: run_in(path, "UPDATE history SET uses = x'ff00' WHERE resolution = '7x8'"),
    "a finding that is no JSON": lambda path: run_in(path, "UPDATE finding SET value = '{'"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_set_aside_and_rebuilt(tmp_path: Path, healthy: Path, kind: str) -> None:
    path = shutil.copy(healthy, tmp_path / NAME)
    DAMAGES[kind](path)
    damaged = path.read_bytes()
    store = Store.open(tmp_path, MACHINE)
    assert path.read_bytes() == damaged and store.path.name == NEXT
    assert store.trouble is not None and path.name in store.trouble and "\n" not in store.trouble
    assert store.on_disk and store.history() == []
    store.record(row())
    assert store.flush()
    assert path.name in (store.trouble or ""), "said for as long as this WebUI runs"
    store.close()
    again = Store.open(tmp_path, MACHINE)
    assert again.history() == [row()] and again.trouble is None
    assert again.size_bytes() > len(damaged)
    again.forget(PurgeFilter())
    assert not path.exists() and again.history() == []
    again.close()


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind not in ("text for a number", "bytes for a number")])
def test_a_file_that_is_damaged_while_it_is_used(tmp_path: Path, healthy: Path, kind: str) -> None:
    path = shutil.copy(healthy, tmp_path / NAME)
    store = Store.open(tmp_path, MACHINE)
    assert len(store.history()) == 200
    DAMAGES[kind](path)
    store.record(row())
    store.saved(TUNED)
    assert store.flush(), store.trouble
    assert row() in store.history()
    store.close()
    again = Store.open(tmp_path, MACHINE)
    again.record(row("1x1"))
    assert again.flush() and row("1x1") in again.history()
    again.close()


def test_another_process_that_has_the_damaged_file_open_goes_on_in_the_new_one(tmp_path: Path, healthy: Path) -> None:
    path = shutil.copy(healthy, tmp_path / NAME)
    other = Store.open(tmp_path, MACHINE)
    reading = sqlite3.connect(path, isolation_level=None)
    reading.execute("SELECT count(*) FROM history").fetchone()
    DAMAGES["text for a number"](path)
    store = Store.open(tmp_path, MACHINE)
    store.record(row())
    assert store.flush()
    # Where both had one name, this would delete the log of the new one.
    reading.close()
    other.record(row())
    assert other.flush() and other.trouble is None
    assert [found.uses for found in store.history()] == [2]
    assert sorted(file.name for file in tmp_path.iterdir()) == [NAME, NEXT]
    store.close()
    other.close()


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
    store = Store.open(tmp_path, MACHINE)
    store.history()
    store.saved(TUNED)
    store.record(row())
    assert store.flush(), store.trouble
    store.close()
    again = Store.open(tmp_path, MACHINE)
    assert again.trouble is None and row() in again.history()
    again.forget(PurgeFilter(["512x512"]))
    assert row() not in again.history()
    again.close()


def test_no_more_than_a_few_files_are_kept_aside(tmp_path: Path) -> None:
    for seed in range(5):
        (tmp_path / f"onediff-2-{seed + 1}.sqlite3").write_bytes(random.Random(seed).randbytes(3000))
        Store.open(tmp_path, MACHINE).close()
        (tmp_path / f"onediff-2-{seed + 2}.sqlite3").unlink()
    kept = sorted(tmp_path.iterdir())
    assert [file.read_bytes() for file in kept] == [random.Random(seed).randbytes(3000) for seed in (3, 4)]


@pytest.mark.parametrize("number", ["", "x", "²", "-5", "0"])
def test_a_file_whose_name_has_no_number_is_no_store(tmp_path: Path, number: str) -> None:
    (tmp_path / f"onediff-2-{number}.sqlite3").write_text("of somebody else")
    store = Store.open(tmp_path, MACHINE)
    assert store.trouble is None and store.path.name == NAME
    store.close()


@pytest.mark.skipif(os.name != "posix", reason="SQLite's drivers have other names here")
def test_a_file_system_without_shared_memory_gets_a_rollback_journal(
    tmp_path: Path, healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A log written elsewhere, with rows that are only in it, comes along when the folder is moved there.
    here, moved = tmp_path / "here", tmp_path / "moved"
    here.mkdir()
    writer = sqlite3.connect(shutil.copy(healthy, here / NAME), isolation_level=None)
    writer.execute("UPDATE history SET uses = 7 WHERE resolution = '7x8'")
    shutil.copytree(here, moved)
    writer.close()
    assert (moved / f"{NAME}-wal").stat().st_size > 0

    # SQLite's own driver for file systems without proper locks has no shared memory either.
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda address, uri, **options: connect(
        f"{Path(address).as_uri()}?vfs=unix-dotfile", uri=True, **options
    ))
    for folder, rows in ((moved, 200), (tmp_path / "new", 0)):
        store = Store.open(folder, MACHINE)
        assert store.trouble is None and len(store.history()) == rows
        store.record(row())
        assert store.flush() and len(store.history()) == rows + 1
        assert not rows or store.history()[0].uses == 7
        store.close()
        connection = connect(store.path)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        connection.close()
