"""Where the disk is full, read-only, locked or gone: OneDiff goes on, says why, refuses what it would promise, and
catches up later."""
from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_builders import FILE, opened, row

import lib_onediff
from lib_onediff.core.refusal import NotKept
from lib_onediff.store import store as store_module

REPOSITORY = Path(lib_onediff.__file__).parents[1]
SCRIPT = """
import json, subprocess, sys
from pathlib import Path
from lib_onediff.core.refusal import NotKept
from lib_onediff.store.history import History, HistoryRow

disk, way = Path(sys.argv[1]), sys.argv[2]

def opened(name):
    history = History()
    history.open(disk / name)
    return history

def record(history, name):
    for number in range(300):
        history.record(HistoryRow("sd1", "SD1", f"{number}x{name}", 2, 77, "float16"))

def answer(work, *arguments):
    try:
        return work(*arguments)
    except NotKept as refusal:
        return str(refusal)

def remount(how):
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)

def refuse():
    if way == "read-only":
        return remount("ro")
    with open(disk / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass

begun = history = opened("cache")
record(history, "first")
before = [answer(history.pin, "SD1", "1x1", True), history.trouble, len(history.rows())]
refuse()
refused = []
for history in history, opened("new"):
    record(history, "second")
    answers = [answer(history.pin, "SD1", "2x2", True), answer(history.forget, ["8x8"]), answer(history.forget)]
    refused.append([history.trouble, len(history.rows()), sorted(history.pins()), answers])
if way == "read-only":
    remount("rw")
else:
    (disk / "ballast").unlink()
history = begun
record(history, "third")
after = [answer(history.pin, "SD1", "3x3", True), history.trouble, len(history.rows())]
print(json.dumps([before, refused, after, sorted(opened("cache").pins())]))
"""


def on_a_small_disk(folder: Path, kilobytes: int, script: str, *arguments: str) -> list:
    """Run a script with a file system of its own on folder, which goes when the script ends; what it printed."""
    namespace = ["unshare", "-m"] if getattr(os, "geteuid", int)() == 0 else ["unshare", "-Urm"]
    mount = f'mount -t tmpfs -o size={kilobytes}k none "$0" && exec "$@"'
    in_namespace = [*namespace, "sh", "-c", mount, folder]
    if shutil.which("unshare") is None or subprocess.run([*in_namespace, "true"], capture_output=True).returncode:
        pytest.skip("no file system of its own can be mounted here")
    command = [*in_namespace, sys.executable, "-c", script, folder, *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


@pytest.mark.parametrize("way", ["full", "read-only"])
def test_a_disk_that_refuses(tmp_path: Path, way: str) -> None:
    # The first images must fit with some room to spare, and nothing must fit beside the ballast.
    before, (with_store, without), after, pins = on_a_small_disk(tmp_path, 600, SCRIPT, way)
    assert before == [None, None, 300]
    for (trouble, rows, _, refusals), known in ((with_store, 300), (without, 0)):
        assert "cannot be written" in trouble and trouble.endswith(".") and "\n" not in trouble
        assert all("cannot be written to the disk" in refusal for refusal in refusals)
        assert rows == known, "what was there before can be read"
    assert with_store[2] == [["SD1", "1x1"], ["SD1", "2x2"]] and without[2] == [["SD1", "2x2"]]
    assert after == [None, None, 900], "it catches up"
    assert pins == [["SD1", "1x1"], ["SD1", "2x2"], ["SD1", "3x3"]]


@pytest.mark.parametrize("kind", ["the folder is a file", "the folder is below a file", "the file is a folder",
                                  "the folder is a dead link", "the name is too long"])
def test_a_path_that_can_hold_no_store(tmp_path: Path, kind: str, link: Callable[[Path, Path], None]) -> None:
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
    for promise in (history.commit, history.forget, lambda: history.pin("SD1", "8x8", True)):
        with pytest.raises(NotKept, match=r"disk.*\.$"):
            promise()
    assert history.rows() == [] and history.tuned() == {} and history.pins() == {("SD1", "8x8")}
    assert len(history._store._pending) == store_module.PENDING, "what waits does not pile up"
    history.size_bytes()
    history.close()


@pytest.mark.skipif(os.name == "nt", reason="a path of POSIX stands for a network share's")
def test_a_network_share_can_hold_a_store(tmp_path: Path) -> None:
    class Share(type(tmp_path)):  # type: ignore[misc]
        def as_uri(self) -> str:
            return super().as_uri().replace("file:///", "file://")

    history = opened(Share(tmp_path))
    history.pin("SD1", "8x8", True)
    assert history.trouble is None and (tmp_path / FILE).is_file()


@pytest.mark.parametrize("name", [FILE, f"{FILE}-wal", f"{FILE}-shm", f"{FILE}-journal", "onediff-2-7.sqlite3"])
@pytest.mark.parametrize("content", [b"", b"precious" * 1000])
def test_nobody_elses_file_is_written_through_a_link(
    tmp_path: Path, name: str, content: bytes, link: Callable[[Path, Path], None]
) -> None:
    theirs, folder = tmp_path / "theirs", tmp_path / "cache"
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
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.2)
    opened(tmp_path).close()
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    connect, timeouts = sqlite3.connect, []

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


def test_a_folder_that_is_deleted_while_it_is_used(tmp_path: Path) -> None:
    history = opened(tmp_path / "cache")
    history.record(row("64x64"))
    history.commit()
    shutil.rmtree(tmp_path / "cache")
    assert history.rows() == [] and history.trouble is None
    shutil.rmtree(tmp_path / "cache")
    history.record(row())
    history.commit()
    assert opened(tmp_path / "cache").rows() == [row()]
