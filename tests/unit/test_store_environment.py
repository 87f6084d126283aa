"""The store where the disk is full, read-only, locked or gone: it works in memory, says why, and catches up later."""
from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import lib_onediff
from lib_onediff.store import store as store_module
from lib_onediff.store.machine import Fingerprint
from lib_onediff.store.rows import HistoryRow, NotKept, PurgeFilter
from lib_onediff.store.store import Store

resource = pytest.importorskip("resource", reason="limits and rights are set as on Unix")
REPOSITORY = Path(lib_onediff.__file__).parents[1]
MACHINE = Fingerprint("a GPU", "580.1", "2.9.0", "3.5.0", "0.1.0")

FULL_DISK = """
import json, os, sys
from pathlib import Path
from lib_onediff.store.store import HistoryRow, Store
from lib_onediff.store.machine import Fingerprint

disk, when = Path(sys.argv[1]), sys.argv[2]
folder, ballast = disk / "cache", disk / "ballast"
machine = Fingerprint("a GPU", "580.1", "2.9.0", "3.5.0", "0.1.0")

def fill():
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass

def use(store, name):
    for number in range(300):
        store.record(HistoryRow("sd1", "SD1", f"{number}x{name}", 2, 77, "float16"))
    store.save("tuned", name, 1)
    return store.flush()

steps = []
def note(store, flushed):
    steps.append([flushed, store.on_disk, store.trouble, len(store.history()), sorted(store.saved("tuned"))])

if when == "before it is made":
    fill()
store = Store.open(folder, machine)
if when == "between pictures":
    note(store, use(store, "first"))
    fill()
note(store, use(store, "second"))
note(store, use(store, "third"))
ballast.unlink()
note(store, use(store, "fourth"))
note(Store.open(folder, machine), None)
print(json.dumps(steps))
"""

READ_ONLY = """
import json, subprocess, sys
from pathlib import Path
from lib_onediff.store.store import HistoryRow, NotKept, PurgeFilter, Store
from lib_onediff.store.machine import Fingerprint

disk, machine = Path(sys.argv[1]), Fingerprint("a GPU", "580.1", "2.9.0", "3.5.0", "0.1.0")
before = Store.open(disk / "cache", machine)
before.record(HistoryRow("sd1", "SD1", "512x512", 2, 77, "float16"))
before.close()
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
steps = []
def forget(store):
    try:
        store.forget(PurgeFilter(["64x64"]))
    except NotKept as problem:
        return str(problem)
for folder in (disk / "cache", disk / "new"):
    store = Store.open(folder, machine)
    opened_with = store.trouble
    store.record(HistoryRow("sd1", "SD1", "64x64", 2, 77, "float16"))
    store.record(HistoryRow("sd1", "SD1", "512x512", 2, 77, "float16"))
    store.save("tuned", "layout", "nhwc")
    steps.append([opened_with, store.flush(), store.trouble, {row.resolution: row.uses for row in store.history()},
                  store.saved("tuned"), forget(store), len(store.history())])
before.record(HistoryRow("sd1", "SD1", "512x512", 2, 77, "float16"))
steps.append([before.flush(), before.history()[0].uses])
subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
steps.append([before.flush(), before.trouble, Store.open(disk / "cache", machine).history()[0].uses])
print(json.dumps(steps))
"""


def row(resolution: str = "512x512") -> HistoryRow:
    return HistoryRow("sd1", "SD1", resolution, 2, 77, "float16", last_used=1000.0)


def on_a_small_disk(folder: Path, kilobytes: int, script: str, *arguments: str) -> list:
    """Run a script with a file system of its own on folder, which goes when the script ends; what it printed."""
    namespace = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    mount = f'mount -t tmpfs -o size={kilobytes}k none "$0" && exec "$@"'
    in_namespace = [*namespace, "sh", "-c", mount, folder]
    if shutil.which("unshare") is None or subprocess.run([*in_namespace, "true"], capture_output=True).returncode:
        pytest.skip("no file system of its own can be mounted here")
    command = [*in_namespace, sys.executable, "-c", script, folder, *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return json.loads(ended.stdout)


@pytest.mark.parametrize("when", ["before it is made", "between pictures"])
def test_a_full_disk(tmp_path: Path, when: str) -> None:
    # The first pictures must fit with some room to spare, and nothing must fit beside the ballast.
    *before, second, third, fourth, after = on_a_small_disk(tmp_path, 600, FULL_DISK, when)
    first = 300 if before else 0
    names = ["first"] if before else []
    if before:
        assert before == [[True, True, None, 300, ["first"]]]
    for step, count, more in ((second, first + 300, ["second"]), (third, first + 600, ["second", "third"])):
        flushed, on_disk, trouble, rows, choices = step
        assert (flushed, on_disk, rows, choices) == (False, False, count, names + more)
        assert "full" in trouble or not before and "cannot be written" in trouble, trouble
        assert trouble.endswith(".") and "\n" not in trouble
    everything = sorted(["second", "third", "fourth", *names])
    assert fourth == [True, True, None, first + 900, everything], "it catches up once there is room"
    assert after == [None, True, None, first + 900, everything]


def test_a_file_that_must_not_grow(tmp_path: Path) -> None:
    store = Store.open(tmp_path, MACHINE)
    store.record(row("64x64"))
    assert store.flush()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 10, before[1]))
    try:
        for number in range(1000):
            store.record(row(f"{number}x8"))
        assert not store.flush() and not store.on_disk and store.trouble
        assert len(store.history()) == 1001
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.flush() and store.trouble is None
    assert len(Store.open(tmp_path, MACHINE).history()) == 1001


def test_a_read_only_folder(tmp_path: Path) -> None:
    with_store, without, caught, after = on_a_small_disk(tmp_path, 2000, READ_ONLY)
    for opened_with, flushed, trouble, _, tuned, not_purged, _ in (with_store, without):
        assert not_purged.startswith("What is on the disk stays there")
        assert "cannot be written" in opened_with and opened_with.endswith(".")
        assert not flushed and trouble == opened_with
        assert tuned == {"layout": "nhwc"}
    assert with_store[3] == {"512x512": 2, "64x64": 1}, "what others left there is read"
    assert without[3] == {"512x512": 1, "64x64": 1}
    assert with_store[-1] == without[-1] == 1
    assert caught == [False, 2]
    assert after == [True, None, 2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    store = Store.open(tmp_path, MACHINE)
    tmp_path.chmod(0o755)
    assert store.trouble is not None and "cannot be written" in store.trouble


@pytest.mark.parametrize("kind", ["the folder is a file", "the folder is below a file", "the file is a folder",
                                  "the folder is a dead link", "the name is too long"])
def test_a_path_that_can_hold_no_store(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    (tmp_path / "full" / "onediff-2-1.sqlite3" / "inside").mkdir(parents=True)
    folder = {
        "the folder is a file": tmp_path / "file", "the folder is below a file": tmp_path / "file" / "below",
        "the file is a folder": tmp_path / "full", "the folder is a dead link": tmp_path / "link",
        "the name is too long": tmp_path / ("long" * 100),
    }[kind]
    store = Store.open(folder, MACHINE)
    assert store.trouble is not None and str(folder) in store.trouble
    assert store.trouble.endswith(".") and "\n" not in store.trouble
    store.record(row())
    assert not store.flush() and not store.on_disk
    assert store.history() == [row()] and store.saved("tuned") == {}
    store.size_bytes()
    for work in (store.commit, lambda: store.forget(PurgeFilter())):
        with pytest.raises(NotKept, match=r"disk.*\.$"):
            work()
    assert store.history() == []
    store.close()


def test_a_store_that_another_program_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.2)
    Store.open(tmp_path, MACHINE).close()
    other = sqlite3.connect(tmp_path / "onediff-2-1.sqlite3", isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    connect, timeouts = sqlite3.connect, []

    def noted(*where: Path, timeout: float, **how: Any) -> sqlite3.Connection:
        timeouts.append(timeout)
        return connect(*where, timeout=timeout, **how)

    monkeypatch.setattr(sqlite3, "connect", noted)
    store = Store.open(tmp_path, MACHINE)
    assert store.trouble is not None and "locked" in store.trouble
    store.record(row())
    assert not store.flush() and store.history() == [row()]
    assert timeouts[0] == 0.2 and 0.2 not in timeouts[1:], "only the first attempt waits long"
    other.execute("ROLLBACK")
    other.close()
    assert store.flush() and store.trouble is None
    assert Store.open(tmp_path, MACHINE).history() == [row()]


def test_a_short_lock_is_waited_for_and_recording_waits_for_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path, MACHINE)
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    store.record(row())
    with ThreadPoolExecutor() as pool:
        flush = pool.submit(store.flush)
        time.sleep(0.3)
        store.record(row())
        assert not flush.done()
        holder.execute("ROLLBACK")
        holder.close()
        assert flush.result() and store.trouble is None
    assert [found.uses for found in Store.open(tmp_path, MACHINE).history()] == [1]
    assert store.flush()
    assert [found.uses for found in Store.open(tmp_path, MACHINE).history()] == [2]


def test_a_folder_that_is_deleted_while_it_is_used(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "cache", MACHINE)
    store.record(row("64x64"))
    store.flush()
    shutil.rmtree(tmp_path / "cache")
    assert store.history() == [] and store.trouble is None
    shutil.rmtree(tmp_path / "cache")
    store.record(row())
    assert store.flush()
    assert Store.open(tmp_path / "cache", MACHINE).history() == [row()]


def test_nothing_is_held_open_between_pictures(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("open files are not listed here")
    store = Store.open(tmp_path, MACHINE)
    store.record(row())
    store.flush()
    opened = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
              if os.path.exists(f"/proc/self/fd/{number}")]
    assert not [name for name in opened if name.startswith(str(tmp_path))]
