"""Where Triton keeps what it compiles: in the cache folder, where it outlives containers and can be purged."""
from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from pathlib import Path

COMPILED = "compiled"
SECONDS_BEING_WRITTEN = 10.0


def keep_in(cache_folder: Path) -> None:
    """Let Triton keep its files in this cache folder, for the whole process and its children. They are run as they lie:
    where others can write, Triton keeps them at home."""
    folder = cache_folder.absolute() / COMPILED
    with contextlib.suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        if is_private(folder):
            os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")


def is_private(folder: Path) -> bool:
    """Whether no other user can put files there. Windows does not tell."""
    for path in () if os.name == "nt" else (folder, *folder.resolve().parents):
        found = path.lstat()
        # Linux gives every user a group of the same number.
        others = stat.S_IWOTH if found.st_gid == found.st_uid else stat.S_IWOTH | stat.S_IWGRP
        # In a folder such as /tmp nobody can rename what is not theirs.
        is_shared = found.st_mode & others and (path == folder or not found.st_mode & stat.S_ISVTX)
        if is_shared or found.st_uid not in (0, os.getuid()) or stat.S_ISLNK(found.st_mode):
            return False
    return True


def size_bytes(cache_folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.lstat().st_size for file in (cache_folder / COMPILED).rglob("*"))
    return 0


def purge(cache_folder: Path) -> None:
    """Delete it, as far as that can be done: what a link leads to is not ours, and what is new may be being written."""
    compiled = cache_folder / COMPILED
    with contextlib.suppress(OSError):
        for folder in compiled.glob("*/*"):
            links = any(path.is_symlink() for path in (compiled, folder.parent, folder))
            if not links and abs(time.time() - folder.stat().st_mtime) > SECONDS_BEING_WRITTEN:
                # At one stroke: Triton finds all of a kernel or nothing.
                shutil.rmtree(folder.rename(folder.with_suffix(".going")))
