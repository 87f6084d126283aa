"""What outlives the process: history of use, timings, verdicts and what was tuned, in SQLite in the cache folder."""
from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from . import schema
from .connection import Unusable, opened, opened_as_it_lies
from .machine import Fingerprint
from .rows import Damaged, Finding, HistoryRow, NotKept, PurgeFilter, ShapeName

Result = TypeVar("Result")

NAME = f"onediff-{schema.VERSION}-"
ENDING = ".sqlite3"
# The stores of earlier versions are counted and purged with ours.
ALL_STORES = "onediff-[0-9]*"
SIZE_LIMIT = 2 << 20
# How many damaged files are kept for whoever wants to look at them.
KEPT_ASIDE = 2
# How many new stores may be damaged too before we give up.
STORES_TRIED = 3
# How many uses and findings stay in memory while they cannot be written.
PENDING = 4096
BUSY_SECONDS = 5.0
# A lock that did not go away while we waited must not hold up every image.
BUSY_SECONDS_IN_TROUBLE = 0.05


class Store:
    """The rows of one machine in one folder. All methods may be called from any thread; none raises for a reason of
    the environment: what cannot be written stays in memory, trouble says why, and the next flush() tries again.

    Every access opens the file anew, so nothing is held between images: another WebUI may share the folder, and a
    user may delete it. Files are numbered, and the highest is the store: where it is damaged, the next one is begun.
    To rename it would not be safe: SQLite finds a log by the name of its database, and another process that has the
    old one open would take, or delete, the log of the new one.
    """

    def __init__(self, folder: Path, machine: Fingerprint, size_limit: int = SIZE_LIMIT) -> None:
        self.folder = folder
        self.machine = machine.digest
        self.size_limit = size_limit
        self._pending: deque[HistoryRow | Finding] = deque(maxlen=PENDING)
        self._pending_lock = threading.Lock()
        self._disk_lock = threading.RLock()
        self._number = 1
        self._cause = ""
        self._damage = ""

    @classmethod
    def open(cls, folder: Path, machine: Fingerprint | None = None, size_limit: int = SIZE_LIMIT) -> Store:
        """The store in a folder, which is made if need be; it is read through once, and set aside if it is damaged.

        machine: whose rows they are, by default those of the device that torch uses. size_limit: in bytes; beyond it
        the history that was used least recently goes. Writes what is left at exit, until close().
        """
        store = cls(Path(folder), machine or Fingerprint.of(), size_limit)
        store._attempt(schema.check)
        atexit.register(store.close)
        return store

    @property
    def trouble(self) -> str | None:
        """What the user should know about this store, in one sentence; None if all is well."""
        if self._cause:
            return f"What OneDiff learns about resolutions is forgotten when this WebUI is closed: {self._cause}."
        return self._damage or None

    @property
    def on_disk(self) -> bool:
        """Whether what is recorded reaches the disk."""
        return not self._cause

    @property
    def path(self) -> Path:
        """The file in use: the one with the highest number."""
        return self._path(max((self._number, *self._numbers())))

    def record(self, row: HistoryRow) -> None:
        """Add to the history, in memory: microseconds, and never behind a write. flush() writes it."""
        # A file's name may hold what UTF-8 cannot, and SQLite takes NaN for unknown.
        error = row.relative_error
        self._add(dataclasses.replace(
            row, model=row.model.encode("utf-8", "replace").decode(),
            relative_error=math.inf if error is not None and math.isnan(error) else error,
        ))

    def save(self, kind: str, name: str, value: Any) -> None:
        """Remember a finding, in memory; flush() writes it. Raises TypeError if JSON cannot hold it."""
        self._add(Finding(kind, name, json.dumps(value)))

    def flush(self) -> bool:
        """Write all that was recorded before, in one transaction: whether it is on the disk now.

        What a True was said of survives a killed process. Takes some 20 ms; five seconds the first time that another
        program has locked the file.
        """
        with self._disk_lock:
            with self._pending_lock:
                items = list(self._pending)
            if not items and self.on_disk:
                return True
            if not self._attempt(lambda connection: schema.write(connection, self.machine, items, self.size_limit)):
                return False
            with self._pending_lock:
                for item in items:
                    # Unless what came meanwhile has pushed it out.
                    if self._pending and self._pending[0] is item:
                        self._pending.popleft()
            return True

    def history(self, every_machine: bool = False) -> list[HistoryRow]:
        """The shapes seen on this machine, written or not, the most used first. every_machine: with what was used
        under another driver, another torch, another version of ours."""
        machine = None if every_machine else self.machine
        known: dict[ShapeName, HistoryRow] = {}
        for row in self._read(lambda connection: schema.read_history(connection, machine), HistoryRow):
            known[row.shape] = row.after(known.get(row.shape))
        return sorted(known.values(), key=lambda row: (-row.uses, -row.last_used))

    def saved(self, kind: str) -> dict[str, Any]:
        """The findings of a kind that hold on this machine, written or not, by name."""
        found = self._read(lambda connection: schema.read_findings(connection, self.machine), Finding)
        return {finding.name: json.loads(finding.value) for finding in found if finding.kind == kind}

    def commit(self) -> None:
        """Write all that was recorded before. Raises NotKept where it is not on the disk then."""
        if not self.flush():
            raise NotKept(f"This holds until the WebUI ends, because it cannot be written to the disk: {self._cause}.")

    def forget(self, gone: PurgeFilter) -> None:
        """Forget history and verdicts on every machine, or everything, also the stores that were set aside and those of
        earlier versions. What cannot be deleted stays. Raises NotKept, which says why."""
        with self._disk_lock:
            with self._pending_lock:
                kept = (item for item in self._pending if not (
                    gone.history(item.resolution, item.model) if isinstance(item, HistoryRow)
                    else gone.finding(item.kind, item.name)
                ))
                self._pending = deque(kept, PENDING)
            if not self._attempt(lambda connection: schema.purge(connection, gone)):
                raise NotKept(f"What is on the disk stays there, because it cannot be deleted: {self._cause}.")
            if gone.everything:
                self._damage = ""
                # In this order: another process may begin a store meanwhile.
                files, current = self._files(ALL_STORES), self.path.name
                delete(file for file in files if not file.name.startswith(current))

    def size_bytes(self) -> int:
        """What the store takes on the disk, with its log, the stores set aside and those of earlier versions."""
        sizes = []
        for file in self._files(ALL_STORES):
            with contextlib.suppress(OSError):
                sizes.append(file.lstat().st_size)
        return sum(sizes)

    def close(self) -> None:
        """Write what is left, and forget the arrangement to do so at exit."""
        atexit.unregister(self.close)
        self.flush()

    def _add(self, item: HistoryRow | Finding) -> None:
        with self._pending_lock:
            self._pending.append(item)

    def _read(self, read: Callable[[sqlite3.Connection], list], kind: type) -> list:
        """What lies on the disk, and after it what is pending of this kind."""
        with self._disk_lock:
            found = self._attempt(read, writes=False) or []
            with self._pending_lock:
                return found + [item for item in self._pending if isinstance(item, kind)]

    def _attempt(self, work: Callable[[sqlite3.Connection], Result], writes: bool = True) -> Result | None:
        """work(connection), or None with a cause for the user; where the store is damaged, in a new one."""
        with self._disk_lock:
            busy_timeout = BUSY_SECONDS if self.on_disk else BUSY_SECONDS_IN_TROUBLE
            for _ in range(STORES_TRIED):
                path = self.path
                try:
                    with opened(path, busy_timeout, writes) as connection:
                        result = work(connection)
                except Damaged as damaged:
                    self._set_aside(path, str(damaged))
                    continue
                except Unusable as error:
                    self._cause = str(error)
                    if writes:
                        return None
                    # A full disk has no room for SQLite's file of locks, but what lies there can be read.
                    with contextlib.suppress(Unusable, Damaged), opened_as_it_lies(path) as connection:
                        return work(connection)
                    return None
                if writes:
                    self._cause = ""
                return result
            self._cause = f"the store in {self.folder} is damaged"
            return None

    def _set_aside(self, path: Path, what: str) -> None:
        """Leave a damaged store where it lies: all that notice it go on in the one with the next number."""
        number = number_of(path)
        self._number = number + 1
        self._damage = (
            f"OneDiff's store of resolutions was {what}, so a new one was begun; the old one is kept as {path.name} in "
            f"{self.folder}."
        )
        damaged = sorted(found for found in self._numbers() if found <= number)
        delete(file for old in damaged[:-KEPT_ASIDE] for file in self._files(f"{self._path(old).name}*"))

    def _path(self, number: int) -> Path:
        return self.folder / f"{NAME}{number}{ENDING}"

    def _numbers(self) -> list[int]:
        return [number_of(file) for file in self._files(f"{NAME}*{ENDING}")]

    def _files(self, pattern: str) -> list[Path]:
        with contextlib.suppress(OSError):
            return list(self.folder.glob(pattern))
        return []


def number_of(file: Path) -> int:
    """The number of a store; 0 for a name that is none of ours."""
    number = file.name[len(NAME):-len(ENDING)]
    return int(number) if number.isascii() and number.isdecimal() else 0


def delete(files: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
