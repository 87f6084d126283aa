"""If the disk is full, read-only, locked or gone, OneDiff continues, tells the user why, raises NotKept for what the
user asked to store, and writes later."""
from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store_builders import FILE, opened, row

from lib_onediff.core.refusal import NotKept
from lib_onediff.store import store as store_module
from lib_onediff.store.history import History


def record(history: History, name: str) -> None:
    for number in range(300):
        history.record(row(f"{number}x{name}"))


@pytest.mark.parametrize("limit", ["max_page_count = 1", "query_only = ON"], ids=["full", "read-only"])
def test_rows_that_a_full_or_read_only_disk_refuses_are_reported_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """limit: a PRAGMA by which SQLite raises the errors of such a disk. readable_rows: how many rows can be read
    meanwhile. A user's requests (pins, purges) raise NotKept at once, and are carried out later."""
    history = opened(tmp_path / "cache")
    connect = sqlite3.connect

    def refusing(*where: Any, **how: Any) -> sqlite3.Connection:
        connection = connect(*where, **how)
        connection.execute(f"PRAGMA {limit}")
        return connection

    record(history, "first")
    history.pin("SD1", "1x1", True)
    assert history.trouble is None and len(history.rows()) == 300
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", refusing)
        for readable_rows, unwritable in ((300, history), (0, opened(tmp_path / "new"))):
            record(unwritable, "second")
            pin = partial(unwritable.pin, "SD1", "2x2", True)
            for request in (pin, partial(unwritable.forget, ["8x8"]), unwritable.forget):
                with pytest.raises(NotKept, match="cannot be written to the disk"):
                    request()
            trouble = unwritable.trouble or ""
            assert "cannot be written" in trouble and trouble.endswith(".") and "\n" not in trouble
            assert len(unwritable.rows()) == readable_rows, "the rows of before can be read"
            assert ("SD1", "2x2") in unwritable.pins()
    record(history, "third")
    history.pin("SD1", "3x3", True)
    assert history.trouble is None and len(history.rows()) == 900, "the rows of both times are written"
    assert opened(tmp_path / "cache").pins() == {("SD1", "1x1"), ("SD1", "2x2"), ("SD1", "3x3")}


@pytest.mark.parametrize("kind", ["the folder is a file", "the folder is below a file", "the file is a folder",
                                  "the folder is a dead link", "the name is too long"])
def test_a_folder_that_can_hold_no_store_is_named_in_the_message(
    tmp_path: Path, kind: str, link: Callable[[Path, Path], None]
) -> None:
    """kind: why it can hold none. Nothing is stored, and the number of rows that wait in memory to be written is
    limited."""
    (tmp_path / "file").touch()
    if kind == "the folder is a dead link":
        link(tmp_path / "link", tmp_path / "nowhere" / "at all")
    (tmp_path / "full" / FILE / "inside").mkdir(parents=True)
    folder = {
        "the folder is a file": tmp_path / "file", "the folder is below a file": tmp_path / "file" / "below",
        "the file is a folder": tmp_path / "full", "the folder is a dead link": tmp_path / "link",
        "the name is too long": tmp_path / ("long" * 100),
    }[kind]
    history = opened(folder)
    assert history.trouble is not None and str(folder) in history.trouble
    assert history.trouble.endswith(".") and "\n" not in history.trouble
    for number in range(10_000):
        history.record(row(f"{number}x8"))
    for request in (history.commit, history.forget, lambda: history.pin("SD1", "8x8", True)):
        with pytest.raises(NotKept, match=r"disk.*\.$"):
            request()
    assert history.rows() == [] and history.tuned() == {} and history.pins() == {("SD1", "8x8")}
    assert len(history._store._pending) == store_module.PENDING, "the waiting rows are limited"
    history.size_bytes()
    history.close()


@pytest.mark.skipif(os.name == "nt", reason="a path of POSIX stands for a network share's")
def test_a_network_share_can_hold_a_store(tmp_path: Path) -> None:
    """The URI of a folder on a share begins with file:// and the server's name, which SQLite refuses. Share is a path
    with such a URI."""
    class Share(type(tmp_path)):  # type: ignore[misc]
        def as_uri(self) -> str:
            return super().as_uri().replace("file:///", "file://")

    history = opened(Share(tmp_path))
    history.pin("SD1", "8x8", True)
    assert history.trouble is None and (tmp_path / FILE).is_file()


@pytest.mark.parametrize("name", [FILE, f"{FILE}-wal", f"{FILE}-shm", f"{FILE}-journal", "onediff-2-7.sqlite3"])
@pytest.mark.parametrize("content", [b"", b"precious" * 1000])
def test_no_file_is_written_through_a_link_in_the_cache_folder(
    tmp_path: Path, name: str, content: bytes, link: Callable[[Path, Path], None]
) -> None:
    """name: a file that the store uses; here, a link to a file elsewhere. content: the content of that file, which must
    not change. Once the link is deleted, everything is written."""
    theirs = tmp_path / "theirs"
    folder = tmp_path / "cache"
    theirs.write_bytes(content)
    folder.mkdir()
    link(folder / name, theirs)
    history = opened(folder)
    history.tune("tile", 64)
    with pytest.raises(NotKept, match="is a link, which OneDiff does not follow: delete it"):
        history.commit()
    assert str(folder / name) in (history.trouble or "") and theirs.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "theirs"]
    (folder / name).unlink()
    history.commit()
    assert history.trouble is None and history.tuned() == {"tile": 64}


def test_only_the_first_access_waits_long_for_another_programs_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that keeps the lock so delays an image at most once. What was recorded meanwhile is written
    afterwards."""
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.2)
    opened(tmp_path).close()
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    timeouts = []

    def noted(*where: Path, timeout: float, **how: Any) -> sqlite3.Connection:
        timeouts.append(timeout)
        return connect(*where, timeout=timeout, **how)

    monkeypatch.setattr(sqlite3, "connect", noted)
    history = opened(tmp_path)
    assert history.trouble is not None and "locked" in history.trouble
    history.record(row())
    with pytest.raises(NotKept, match="locked"):
        history.commit()
    assert timeouts[0] == 0.2 and 0.2 not in timeouts[1:]
    other.execute("ROLLBACK")
    other.close()
    history.commit()
    assert history.trouble is None and opened(tmp_path).rows() == [row()]


def test_a_cache_folder_deleted_while_in_use_is_made_again(tmp_path: Path) -> None:
    """What was in the folder is gone; later rows are written."""
    history = opened(tmp_path / "cache")
    history.record(row("64x64"))
    history.commit()
    shutil.rmtree(tmp_path / "cache")
    assert history.rows() == [] and history.trouble is None
    shutil.rmtree(tmp_path / "cache")
    history.record(row())
    history.commit()
    assert opened(tmp_path / "cache").rows() == [row()]
