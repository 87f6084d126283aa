"""What outlives the process: history of use, timings, verdicts and tuned choices, in SQLite in the cache folder."""
from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from . import schema
from .buffer import Buffer
from .file import BESIDE, InTheWay, Unusable, identity, locked, opened, understood
from .machine import Fingerprint
from .rows import Choice, Damaged, HistoryRow, PurgeFilter, ShapeName

Result = TypeVar("Result")

NAME = f"onediff-{schema.SCHEMA_VERSION}"
SIZE_LIMIT = 2 << 20
# How many damaged files are kept for whoever wants to look at them.
KEPT_ASIDE = 2
PATIENCE_SECONDS = 2.0
# A lock that did not go away while we waited must not hold up every picture.
PATIENCE_IN_TROUBLE_SECONDS = 0.05


class Store:
    """The rows of one machine in one folder. All methods may be called from any thread; none raises for a reason of
    the environment: what cannot be written stays in memory, trouble says why, and the next flush() tries again.

    Every access opens the file anew, so nothing is held between pictures: another WebUI may share the folder, and a
    user may delete it.
    """

    def __init__(self, folder: Path, machine: Fingerprint, size_limit: int = SIZE_LIMIT) -> None:
        self.folder = folder
        self.machine = machine
        self.size_limit = size_limit
        self._buffer = Buffer()
        self._buffer_lock = threading.Lock()
        self._disk_lock = threading.RLock()
        self._cause = ""
        self._set_aside = ""

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
        return self._set_aside or None

    @property
    def on_disk(self) -> bool:
        """Whether what is recorded reaches the disk."""
        return not self._cause

    def record(self, row: HistoryRow) -> None:
        """Add to the history, in memory: microseconds, and never behind a write. flush() writes it."""
        if not row.model.isascii():
            # A file's name may hold what UTF-8 cannot.
            row = dataclasses.replace(row, model=row.model.encode("utf-8", "replace").decode())
        if row.relative_error is not None and math.isnan(row.relative_error):
            # SQLite takes NaN for unknown.
            row = dataclasses.replace(row, relative_error=math.inf)
        with self._buffer_lock:
            self._buffer.add(row)

    def choose(self, architecture: str, name: str, value: Any) -> None:
        """Take down what was found to be best, under a name; flush() writes it. Raises TypeError if JSON cannot."""
        choice = Choice(json.dumps(value), time.time())
        with self._buffer_lock:
            self._buffer.choose((architecture, name), choice)

    def flush(self) -> bool:
        """Write all that was recorded before, in one transaction: whether it is on the disk now.

        What a True was said of survives a killed process. Takes some 20 ms; two seconds the first time that another
        program has locked the file.
        """
        with self._disk_lock:
            with self._buffer_lock:
                taken, self._buffer = self._buffer, Buffer()
            if not taken and self.on_disk:
                return True
            written = None
            try:
                written = self._attempt(lambda connection: schema.merge(
                    connection, self.machine, taken.rows.values(), taken.choices, self.size_limit
                ))
            finally:
                if written is None:
                    with self._buffer_lock:
                        self._buffer.put_back(taken)
            return written is not None

    def history(self, architecture: str | None = None, every_machine: bool = False) -> list[HistoryRow]:
        """The shapes seen on this machine, written or not, the most used first; of all architectures by default.
        every_machine: with what was used under another driver, another torch, another version of ours."""
        machine = None if every_machine else self.machine
        with self._disk_lock:
            rows = self._attempt(lambda connection: schema.read_history(connection, machine), writes=False) or []
            known: dict[ShapeName, HistoryRow] = {}
            with self._buffer_lock:
                for row in (*rows, *self._buffer.rows.values()):
                    known[row.shape] = row.with_other(known.get(row.shape))
        chosen = (row for row in known.values() if architecture in (None, row.architecture))
        return sorted(chosen, key=lambda row: (-row.uses, -row.last_used))

    def choices(self, architecture: str, every_machine: bool = False) -> dict[str, Any]:
        """What was found to be best for an architecture on this machine, by name. every_machine: as for history; of
        each name the latest."""
        machine = None if every_machine else self.machine
        with self._disk_lock:
            found = self._attempt(lambda connection: schema.read_choices(connection, machine), writes=False) or {}
            with self._buffer_lock:
                found.update(self._buffer.choices)
        return {name: json.loads(choice.value) for (of, name), choice in found.items() if of == architecture}

    def forget(
        self, resolutions: Collection[str] | None = None, model: str | None = None,
        architectures: Collection[str] = (),
    ) -> int:
        """Forget history and verdicts of these resolutions of this model, for every fingerprint; how many rows went.
        architectures: whose verdicts are the model's. None and None: everything, also the tuned choices and files set
        aside. What cannot be deleted stays; trouble says why.
        """
        doomed = PurgeFilter.of(resolutions, model, architectures)
        with self._disk_lock:
            if doomed.everything:
                self._discard_set_aside(keep=0)
                self._set_aside = ""
            self.flush()
            deleted = self._attempt(lambda connection: schema.delete(connection, doomed)) or 0
            with self._buffer_lock:
                before = len(self._buffer.rows)
                self._buffer.forget(doomed)
            return deleted + before - len(self._buffer.rows)

    def size_bytes(self) -> int:
        """What the store takes on the disk, its log and the files that were set aside included."""
        sizes = []
        with contextlib.suppress(OSError):
            for file in self.folder.glob(f"{NAME}*"):
                with contextlib.suppress(OSError):
                    sizes.append(file.lstat().st_size)
        return sum(sizes)

    def close(self) -> None:
        """Write what is left, and forget the arrangement to do so at exit."""
        atexit.unregister(self.close)
        self.flush()

    @property
    def path(self) -> Path:
        return self.folder / f"{NAME}.sqlite3"

    @property
    def _lock(self) -> Path:
        return self.folder / f"{NAME}.lock"

    def _attempt(self, work: Callable[[sqlite3.Connection], Result], writes: bool = True) -> Result | None:
        """work(connection), or None with a cause for the user."""
        with self._disk_lock:
            patience = PATIENCE_SECONDS if self.on_disk else PATIENCE_IN_TROUBLE_SECONDS
            try:
                result = self._access(work, patience)
            except Unusable as error:
                self._cause = str(error)
                if not writes and not isinstance(error, InTheWay):
                    # A full disk has no room for SQLite's file of locks, but what lies there can be read.
                    with contextlib.suppress(Unusable, Damaged), opened(self.path, patience, False) as connection:
                        return work(connection)
                return None
            if writes:
                self._cause = ""
            return result

    def _access(self, work: Callable[[sqlite3.Connection], Result], patience: float) -> Result:
        """work(connection), again while another process is in the way or once the file is mended. Raises Unusable."""
        deadline, mended = time.monotonic() + patience, 0
        while True:
            try:
                with locked(self._lock, patience), opened(self.path, patience) as connection:
                    file = identity(self.path)
                    result = work(connection)
                    if file != identity(self.path):
                        raise InTheWay(f"{self.path} is being replaced by another program")
                    return result
            except InTheWay:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
            except Damaged as damaged:
                if mended == 3:
                    raise Unusable(f"the store in {self.folder} is {damaged}") from damaged
                mended += 1
                with contextlib.suppress(InTheWay):
                    self._mend(patience)

    def _mend(self, patience: float) -> None:
        """Give a damaged file another name. Of several processes that notice it, one does. Raises Unusable.

        Nobody may have it open then: SQLite finds a log by the name of its database, and would take or delete that of
        the new one.
        """
        with locked(self._lock, patience, alone=True):
            try:
                with opened(self.path, patience) as connection:
                    schema.check(connection)
                return
            except Damaged as damaged:
                what = str(damaged)
            aside = f"{NAME}.set-aside-{datetime.now():%Y%m%d-%H%M%S-%f}.sqlite3"
            with understood(self.folder):
                # The database last: if we are killed on the way, the next one to look finds it damaged still.
                for ending in (*BESIDE, ""):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(f"{self.path}{ending}", self.folder / f"{aside}{ending}")
        self._set_aside = (
            f"OneDiff's store of resolutions was {what}, so a new one was begun; the old one is kept as {aside} in "
            f"{self.folder}."
        )
        self._discard_set_aside(KEPT_ASIDE)

    def _discard_set_aside(self, keep: int) -> None:
        with contextlib.suppress(OSError):
            databases = sorted(self.folder.glob(f"{NAME}.set-aside-*.sqlite3"))
            for database in databases[:len(databases) - keep]:
                for file in self.folder.glob(f"{database.name}*"):
                    file.unlink(missing_ok=True)
