"""What Triton compiles, kept in our cache folder: there it is counted, limited and purged."""
from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from .private_folder import is_link

# The compiler's own variable for its folder, which it reads whenever it looks for something.
FOLDERS = {"TRITON_CACHE_DIR": "triton"}
# What earlier versions of OneDiff compiled by another compiler is still counted and purged.
ABANDONED = "inductor"
SIZE_LIMIT = 1 << 30
# What changed so lately may be what a compiler is writing.
SECONDS_BEING_WRITTEN = 10.0
SECONDS_A_SIZE_HOLDS = 5.0
GOING = ".going-"


class CompilerCaches:
    """The folder of one cache folder. None of its methods raises for what the disk refuses: that stays."""

    def __init__(self, folder: Path, size_limit: int = SIZE_LIMIT) -> None:
        self.folder = folder
        self.size_limit = size_limit
        self._size: tuple[float, int] | None = None

    def use(self, environment: MutableMapping[str, str]) -> None:
        """Let the compiler of this process, and of those that it starts, keep its files here and nowhere else, whatever
        the variable says already."""
        for variable, name in FOLDERS.items():
            environment[variable] = str(self.folder.absolute() / name)

    def size_bytes(self) -> int:
        """What lies here; looked at anew every few seconds."""
        now = time.monotonic()
        if self._size is None or now - self._size[0] > SECONDS_A_SIZE_HOLDS:
            self._size = now, sum(size_of(path) for path in self._units())
        return self._size[1]

    def purge(self) -> int:
        """Delete everything but what is being written just now; the bytes of disk that came back."""
        return self._delete(0)

    def evict(self) -> int:
        """Delete what was used least recently until the limit is kept; the bytes of disk that came back."""
        return self._delete(self.size_limit)

    def evict_in_the_background(self) -> threading.Thread:
        """evict(), without anybody waiting for the disk."""
        thread = threading.Thread(target=self.evict, name="onediff-compiled", daemon=True)
        thread.start()
        return thread

    def _delete(self, limit: int) -> int:
        units = {path: (last_use(path), size_of(path)) for path in self._units()}
        total = left = sum(size for _, size in units.values())
        now = time.time()
        for path, (used, size) in sorted(units.items(), key=lambda item: item[1][0]):
            if left <= limit:
                break
            # What the clock has not reached yet was written before somebody set it back.
            touched = used if limit else last_change(path)
            if GOING in path.name or abs(now - touched) > SECONDS_BEING_WRITTEN:
                left -= size if remove(path) else 0
        self._size = None
        return total - left

    def _units(self) -> Iterator[Path]:
        """What stays or goes as one: the folders that hold files. A compiler finds all of an entry or none of it."""
        roots = {self.folder / name for name in (*FOLDERS.values(), ABANDONED)}
        # What a link leads to is not ours.
        waiting = [] if is_link(self.folder) else [root for root in roots if not is_link(root)]
        while waiting:
            folder = waiting.pop()
            with contextlib.suppress(OSError):
                inside = list(os.scandir(folder))
                folders = [Path(entry.path) for entry in inside if entry.is_dir(follow_symlinks=False)]
                if folder not in roots and len(folders) < len(inside):
                    yield folder
                    continue
                yield from (Path(entry.path) for entry in inside if not entry.is_dir(follow_symlinks=False))
                waiting += folders


def files_of(path: Path) -> Iterator[os.stat_result]:
    """What the system says of a file, or of all files below a folder."""
    if not path.is_dir() or path.is_symlink():
        with contextlib.suppress(OSError):
            yield path.stat(follow_symlinks=False)
        return
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                yield Path(parent, name).stat(follow_symlinks=False)


def size_of(path: Path) -> int:
    return sum(found.st_size for found in files_of(path))


def last_use(path: Path) -> float:
    """When it was read or written last, in time.time(); reading counts on most file systems at least once a day."""
    return max((max(found.st_atime, found.st_mtime) for found in files_of(path)), default=0.0)


def last_change(path: Path) -> float:
    return max((found.st_mtime for found in files_of(path)), default=0.0)


def remove(path: Path) -> bool:
    """Delete a file or a folder at one stroke: under another name first. Returns whether that could be done."""
    if GOING not in path.name:
        going = path.with_name(f"{path.name}{GOING}{uuid.uuid4().hex[:8]}")
        try:
            os.replace(path, going)
        except OSError:
            return False
        path = going
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    return not path.exists()
