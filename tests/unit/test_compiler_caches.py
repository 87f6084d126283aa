"""What compilers leave on the disk: kept in our folder, limited, purged."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lib_onediff
from lib_onediff.store import compiler_caches
from lib_onediff.store.compiler_caches import CompilerCaches
from lib_onediff.store.history import History

TRITON = "TRITON_CACHE_DIR"
LONG_AGO = time.time() - 1000


def filled(folder: Path, count: int = 4, size: int = 1000) -> CompilerCaches:
    """A folder for each of Triton's kernels, the first the oldest, and what an earlier OneDiff has left."""
    for number in range(count):
        write(folder / "triton" / f"KEY{number}" / "kernel.cubin", size, LONG_AGO + number)
        write(folder / "triton" / f"KEY{number}" / "__grp__kernel.json", 0, LONG_AGO + number)
    write(folder / "inductor" / "fxgraph" / "ab" / "key" / "graph", size, LONG_AGO - 1)
    write(folder / "inductor" / "loose", size, LONG_AGO - 2)
    return CompilerCaches(folder)


def write(path: Path, size: int, used: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (used, used))


def left(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


# --- whose folder it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [{}, {TRITON: "/elsewhere"}])
def test_the_compiler_is_told_whatever_it_was_told_before(tmp_path: Path, before: dict[str, str]) -> None:
    environment = dict(before)
    for _ in range(2):
        CompilerCaches(tmp_path / "compiled").use(environment)
        assert environment == {TRITON: str(tmp_path / "compiled" / "triton")}


def test_the_real_compiler_keeps_its_files_there(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from lib_onediff.store.history import History\n"
        "history = History(); history.open(Path(sys.argv[1])); history.keep_compiled()\n"
        "try:\n"
        "    from triton.runtime.cache import FileCacheManager\n"
        "except ImportError:\n"
        "    print('no Triton')\n"
        "else:\n"
        "    print(Path(FileCacheManager('KEY').put(b'kernel', 'kernel.cubin')).is_relative_to(sys.argv[1]))\n"
        "print(history.size_bytes() >= 6)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != TRITON}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=Path(lib_onediff.__file__).parents[1],
        env=environment, capture_output=True, text=True, check=True,
    )
    triton, counted = ended.stdout.splitlines()
    assert triton in ("True", "no Triton") and counted == "True"


# --- how much it is ---------------------------------------------------------------------------------------------------


def test_size_and_purge(tmp_path: Path) -> None:
    caches = filled(tmp_path)
    assert caches.size_bytes() == 6000
    assert caches.purge() == 6000
    assert caches.size_bytes() == 0 and left(tmp_path) == set()


def test_only_our_folder_is_purged(tmp_path: Path) -> None:
    write(tmp_path / "theirs" / "KEY" / "kernel", 10, LONG_AGO)
    (tmp_path / "ours" / "triton").mkdir(parents=True)
    (tmp_path / "ours" / "triton" / "link").symlink_to(tmp_path / "theirs", target_is_directory=True)
    write(tmp_path / "ours" / "notes.txt", 10, LONG_AGO)
    CompilerCaches(tmp_path / "ours").purge()
    assert left(tmp_path) == {"theirs/KEY/kernel", "ours/notes.txt"}


def test_what_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    caches = filled(tmp_path)
    caches.size_limit = 2500
    assert caches.evict() == 4000
    names = ("kernel.cubin", "__grp__kernel.json")
    assert left(tmp_path) == {f"triton/KEY{number}/{name}" for number in (2, 3) for name in names}
    assert caches.evict() == 0 and caches.size_bytes() == 2000


def test_a_kernel_that_was_read_lately_was_used(tmp_path: Path) -> None:
    caches = filled(tmp_path)
    os.utime(tmp_path / "triton" / "KEY0" / "kernel.cubin", (LONG_AGO + 500, LONG_AGO))
    caches.size_limit = 1000
    caches.evict()
    assert left(tmp_path) == {"triton/KEY0/kernel.cubin", "triton/KEY0/__grp__kernel.json"}


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    caches = filled(tmp_path)
    write(tmp_path / "triton" / "KEY9" / "kernel.cubin.tmp", 50, time.time())
    assert caches.purge() == 6000
    assert left(tmp_path) == {"triton/KEY9/kernel.cubin.tmp"} and caches.size_bytes() == 50


def test_what_was_written_before_the_clock_was_set_back_goes(tmp_path: Path) -> None:
    caches = filled(tmp_path, 1)
    write(tmp_path / "triton" / "KEY9" / "kernel.cubin", 50, time.time() + 3600)
    assert caches.purge() == 3050
    assert left(tmp_path) == set()


def test_what_a_killed_purge_has_left_goes_at_once(tmp_path: Path) -> None:
    caches = filled(tmp_path, 1)
    write(tmp_path / "triton" / f"KEY9{compiler_caches.GOING}0123" / "kernel.cubin", 50, time.time())
    caches.purge()
    assert left(tmp_path) == set()


def test_what_cannot_be_deleted_stays_and_nobody_is_told_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = filled(tmp_path, 2)
    replace = os.replace

    def refused(source: Path, target: Path) -> None:
        if "KEY1" in str(source):
            raise PermissionError("in use")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refused)
    assert caches.purge() == 3000
    assert left(tmp_path) == {"triton/KEY1/kernel.cubin", "triton/KEY1/__grp__kernel.json"}


def test_no_folder_no_bytes(tmp_path: Path) -> None:
    caches = CompilerCaches(tmp_path / "nowhere")
    assert caches.size_bytes() == caches.purge() == caches.evict() == 0


def test_the_size_is_not_asked_of_the_disk_at_every_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = filled(tmp_path)
    assert caches.size_bytes() == 6000
    write(tmp_path / "triton" / "KEY9" / "kernel.cubin", 50, LONG_AGO)
    assert caches.size_bytes() == 6000
    monkeypatch.setattr(compiler_caches, "SECONDS_A_SIZE_HOLDS", 0.0)
    assert caches.size_bytes() == 6050


# --- in the history ---------------------------------------------------------------------------------------------------


def test_the_history_counts_and_purges_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    history.open(tmp_path)
    store = history.size_bytes()
    filled(tmp_path / "compiled")
    monkeypatch.setattr(compiler_caches, "SECONDS_A_SIZE_HOLDS", 0.0)
    assert history.size_bytes() == store + 6000
    history.forget(["512x512"])
    history.forget(model="SD1")
    assert history.size_bytes() >= store + 6000, "a resolution's purge compiles nothing anew"
    history.forget()
    assert history.size_bytes() <= store and left(tmp_path / "compiled") == set()
