"""The history that outlives the process: rows with the uses and times of shapes, and findings: results of checks
(verdicts), choices that were measured to be the fastest (tuned), and pins."""
from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.card import card_name
from ..core.refusal import NotKept
from ..core.sizes import TOKEN_CHOICES, TOKENS, Size, WantedSize, parse_size
from ..core.table import Entry
from .store import Store

# The environment variable that names the cache folder.
CACHE_VARIABLE = "ONEDIFF_CACHE"
# Findings come in bursts, so one transaction writes all findings of this interval.
WRITE_AFTER_SECONDS = 2.0
# The kinds of findings. VERDICTS: results of checks. TUNED: choices that were measured to be the fastest. CHOSEN: pins,
# which users choose, and which hold on every machine.
VERDICTS = "verdict"
TUNED = "tuned"
CHOSEN = "chosen"
KINDS = (VERDICTS, TUNED, CHOSEN)
# The version of the rule by which a check accepts errors. It is part of a verdict's name, so that a new rule does not
# find verdicts of an older one.
CHECK = "check 2"
# Writes a finding: (machine, kind, name, JSON text). REPLACE gives the latest finding the highest rowid, whatever the
# clock shows.
SAVE = "REPLACE INTO finding VALUES (?, ?, ?, ?)"
# Reads the findings of a machine and of all machines, the oldest first; parameters: machine, kind.
FINDINGS = "SELECT name, value FROM finding WHERE machine IN (?, '') AND kind = ? ORDER BY rowid"
# Writes a row of a shape. Uses add up. In every other column the latest known value replaces the earlier one.
RECORD = """
    INSERT INTO history VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (machine, architecture, model, resolution, batch, tokens, dtype) DO UPDATE SET
    uses = uses + excluded.uses, last_used = excluded.last_used,
    step_ms = coalesce(excluded.step_ms, step_ms), host_ms = coalesce(excluded.host_ms, host_ms),
    relative_error = coalesce(excluded.relative_error, relative_error)"""
# Reads the fields of HistoryRow; parameters: machine, whether to take every machine. With max(last_used), SQLite takes
# the bare columns from the row that has the maximum. Rows with values of other types were not written by OneDiff, and
# are left out.
ROWS = """
    SELECT architecture, model, resolution, batch, tokens, dtype, sum(uses), max(last_used), step_ms, host_ms,
    relative_error FROM history WHERE (machine = ? OR ?)
    AND typeof(batch) || typeof(tokens) || typeof(uses) || typeof(last_used) = 'integerintegerintegerreal'
    AND typeof(coalesce(step_ms, 0.0)) || typeof(coalesce(host_ms, 0.0)) = 'realreal'
    AND typeof(coalesce(relative_error, 0.0)) = 'real' AND max(uses, last_used) < 1e12 AND min(uses, last_used) >= 0
    GROUP BY architecture, model, resolution, batch, tokens, dtype ORDER BY 7 DESC, 8 DESC"""


@dataclass(frozen=True)
class HistoryRow:
    """Uses and times of one shape, as stored and shown to users.

    architecture: Layout.architecture, a digest of the network's structure.
    model: the model's name for users ("SD1").
    resolution: in pixels, as "512x768".
    batch: rows of a call. tokens: the context length; 0 for a VAE. dtype: that of the computation, without "torch.".
    uses: the number of calls. last_used: the moment of the last call, as time.time() gives it.
    step_ms, host_ms: the time of one step by OneDiff and by the host, in milliseconds; None if unknown.
    relative_error: of our output against the host's in the check of the shape; None if unknown.
    """

    architecture: str
    model: str
    resolution: str
    batch: int
    tokens: int
    dtype: str
    uses: int = 1
    last_used: float = field(default_factory=time.time)
    step_ms: float | None = None
    host_ms: float | None = None
    relative_error: float | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """The values of the fields that identify the shape: architecture to dtype."""
        return dataclasses.astuple(self)[:6]


def chosen_folder() -> Path | None:
    """The cache folder that the user has chosen by the environment variable, as an absolute path; None if the variable
    is not set or blank. Does not create the folder."""
    chosen = os.environ.get(CACHE_VARIABLE, "").strip()
    return Path(chosen).expanduser().absolute() if chosen else None


class History:
    """Everything that OneDiff keeps for later processes. Findings are in memory and, from open() to close(), in a
    folder; uses and times of shapes are in the folder alone.

    Safe in any thread. open(), close(), rows(), most_used(), pin(), commit() and forget() wait for the database, and
    size_bytes() and is_shared_with_newer list the folder. Everything else works in memory, and a thread writes it to
    the database a little later.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        # Rows of the history have no column for the card: times are kept for this one alone.
        self._gpu = ""
        self._machine = ""
        self._findings: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self._host_ms: dict[tuple[Any, ...], float] = {}
        self._writer: threading.Timer | None = None
        # Pages, the pre-warm queue and images add findings from several threads. It is not held during disk access.
        self._lock = threading.RLock()
        self._opening = threading.Lock()

    @property
    def trouble(self) -> str | None:
        """Why the cache folder cannot be used, or what was damaged in it, as a sentence for the user; None if all is
        well or no folder is open."""
        store = self._store
        return None if store is None else store.trouble

    @property
    def saves(self) -> bool:
        """Whether findings could be written to the cache folder the last time; True too if no folder is open."""
        store = self._store
        return store is None or store.saves

    @property
    def folder(self) -> Path | None:
        """The cache folder; None before open() and after close()."""
        store = self._store
        return None if store is None else store.folder

    @property
    def is_shared_with_newer(self) -> bool:
        """Whether a newer version of OneDiff has files in the folder. forget() does not delete these. False if no
        folder is open."""
        store = self._store
        return store is not None and store.is_shared_with_newer

    def open(self, folder: Path, gpu: str = "cpu", machine: str = "") -> None:
        """Load the findings of this folder, and write to it until close() or the end of the process. Findings that are
        in memory already replace those of the same name in the folder. If another folder is open, it is closed first.
        Does nothing if this folder is open.

        A folder that cannot be read or written raises nothing: `trouble` has the cause then.
        gpu: the name of the card; the times of other cards are not stored. machine: a digest of everything else that
            times, verdicts and tuned choices depend on, such as the driver and torch.
        """
        with self._opening:
            if self.folder == folder:
                return
            self.close()
            store = Store(folder)
            self._store = store
            self._gpu = gpu
            self._machine = machine
            atexit.register(self.close)
            for kind in KINDS:
                found = findings_of(store.read(FINDINGS, self._machine, kind))
                with self._lock:
                    known = self._findings[kind]
                    self._findings[kind] = found
                for name, value in known.items():
                    self._remember(kind, name, value)
            self._host_ms = {row.shape: row.host_ms for row in self.rows() if row.host_ms}

    def close(self) -> None:
        """Write everything that is pending, and stop using the folder. Findings stay in memory. If the write fails,
        what was pending is lost, and nothing is raised."""
        atexit.unregister(self.close)
        with contextlib.suppress(NotKept):
            self.commit()
        self._store = None

    # --- uses and times -------------------------------------------------------------------------------------------

    def keep(self, entries: Iterable[Entry], in_images: bool = True) -> None:
        """Add the uses of each entry since its last keep() to those stored, and store its times (history_row). An entry
        is left out if it had no call since, and always if it is of a cached pass. For an entry of another card than the
        one given to open(), uses are stored, and no times. Does nothing without a folder; does not wait for the disk.

        in_images: False for the calls of warm-ups: the entries' times are stored, and no uses are added.
        """
        for entry in entries if self._store is not None else ():
            with self._lock:
                uses = entry.uses - entry.kept_uses
                entry.kept_uses = entry.uses
            # A cached pass has no row of its own: its steps are part of the mean times of the full pass's shape.
            if uses > 0 and not entry.key.is_cached_pass:
                row = history_row(entry, uses if in_images else 0)
                if not self._is_of_this_card(entry):
                    row = dataclasses.replace(row, step_ms=None, host_ms=None)
                self.record(row)

    def record(self, row: HistoryRow) -> None:
        """Add a row's uses to those stored for its shape on this machine, and replace the other values by those of the
        row that are not None. Does nothing without a folder; does not wait for the disk."""
        self._write_soon(RECORD, self._machine, *dataclasses.astuple(row))

    def rows(self, every_machine: bool = False) -> list[HistoryRow]:
        """The stored rows, one for each shape, the most used first; [] without a folder, or if it cannot be read.

        every_machine: False: the rows of the `machine` given to open(). True: also the rows of other drivers and
            versions of torch and OneDiff; a shape's uses are then summed, and its other values are those of the row
            that was used last.
        """
        store = self._store
        found = [] if store is None else store.read(ROWS, self._machine, every_machine)
        return [HistoryRow(*values) for values in found]

    def most_used(self, model: str | None, count: int) -> list[WantedSize]:
        """Up to `count` sizes at which this model ("SD1") had the most calls, the most used first, on any machine; []
        if the model is None, or without a folder.

        Each resolution comes once, with the number of images at once and the prompt length in tokens that were used
        most often there; a length that a user cannot choose becomes TOKENS. Resolutions that a user cannot choose are
        left out.
        """
        by_resolution: dict[str, Counter[tuple[int, int]]] = {}
        for row in self.rows(every_machine=True):
            if row.model == model and row.uses and row.tokens:
                # With classifier-free guidance, a UNet call has two rows for each image.
                images = row.batch if row.batch % 2 else row.batch // 2
                by_resolution.setdefault(row.resolution, Counter())[images, row.tokens] += row.uses
        found = []
        for resolution in sorted(by_resolution, key=lambda resolution: -by_resolution[resolution].total()):
            ((images, tokens), _), = by_resolution[resolution].most_common(1)
            # An extension may have used a size that is none of those that a user can choose.
            with contextlib.suppress(ValueError):
                size = Size(parse_size(resolution).width, parse_size(resolution).height, images)
                found.append(WantedSize(size, tokens if tokens in TOKEN_CHOICES else TOKENS))
        return found[:count]

    def _is_of_this_card(self, entry: Entry) -> bool:
        """Whether times of this entry may be stored and read: it is of the card given to open(), or of the CPU."""
        return card_name(entry.key.device) in (self._gpu, entry.key.device.type)

    # --- findings -------------------------------------------------------------------------------------------------

    def recall(self, entry: Entry) -> bool:
        """Whether this shape has a verdict: this process or an earlier one on this machine has compared our output with
        the host's, with these weights and this card, and the two agreed.

        If so, the entry gets the relative error of that check, and the host's stored time if the entry has no settled
        one (Stopwatch.remembered). The entry's state is left to the caller.
        """
        error = self._findings[VERDICTS].get(verdict_name(entry))
        if not is_error(error):
            return False
        entry.relative_error = error
        host_ms = self._host_ms.get(history_row(entry, 0).shape) if self._is_of_this_card(entry) else None
        if host_ms is not None and entry.host.settled_ms is None:
            entry.host.remembered = host_ms
        return True

    def keep_verdict(self, entry: Entry) -> None:
        """Store the relative error of an entry that has passed its check, so that the shape need not be checked again
        with these weights, in this process and later ones. Does nothing if the error is None or not finite. Does not
        wait for the disk."""
        if is_error(entry.relative_error):
            self._remember(VERDICTS, verdict_name(entry), entry.relative_error)

    def tuned(self) -> dict[str, Any]:
        """The choices that were measured to be the fastest on this machine, by name; a new dict. Names and values are
        those of core.card.TuningCache, which is filled with them."""
        return self._findings[TUNED].copy()

    def tune(self, name: str, value: Any) -> None:
        """Store a choice that was measured to be the fastest, in place of an earlier one of this name. Does not wait
        for the disk. Raises TypeError if JSON cannot hold the value."""
        self._remember(TUNED, name, value)

    def pins(self) -> frozenset[tuple[str, str]]:
        """Every pinned (model, resolution), such as ("SD1", "512x512"): those of the folder when it was opened, from
        all machines that share it, and those of this process."""
        chosen = self._findings[CHOSEN].copy()
        pinned = (name.split(" ", 2) for name, is_pinned in chosen.items() if is_pinned is True)
        return frozenset((words[2], words[1]) for words in pinned if len(words) == 3)

    def pin(self, model: str, resolution: str, pinned: bool) -> None:
        """Pin a resolution ("512x512") of a model ("SD1"), or unpin it if `pinned` is False. Waits until it is on the
        disk. If it could not be written, the pin is valid in this process, a later commit() tries again, and NotKept is
        raised. Without a folder, the pin is valid in this process alone, and nothing is raised."""
        self._remember(CHOSEN, pin_name(model, resolution), pinned)
        self.commit()

    def _remember(self, kind: str, name: str, value: Any) -> None:
        """Set the finding of this kind (one of KINDS) and name in memory at once, and in the folder, if one is open,
        soon. value: anything that JSON can represent; raises TypeError otherwise."""
        encoded = json.dumps(value)
        with self._lock:
            self._findings[kind][name] = value
        self._write_soon(SAVE, "" if kind == CHOSEN else self._machine, kind, name, encoded)

    # --- the disk -------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Write everything that is pending to the disk, and wait for that. Raises NotKept if the write fails;
        everything stays pending then. Does nothing without a folder."""
        store = self._store
        if store is not None:
            store.commit()

    def forget(
        self, resolutions: Collection[str] | None = None, model: str | None = None,
        architectures: Collection[str] = (),
    ) -> None:
        """Delete the rows and verdicts of these resolutions ("512x512") of this model ("SD1"), in memory and on the
        disk, of all machines. resolutions: None for all of them; model: None for all models. Pins always stay.

        If resolutions and model are both None, tuned choices, damaged files and files of earlier versions are deleted
        too.
        architectures: more values of Layout.architecture whose verdicts belong to the model. A verdict names an
            architecture and no model; the architectures in the model's stored rows need not be given.
        Raises NotKept if the disk could not be written; memory is purged then, and the folder is not.
        """
        everything = resolutions is None and model is None
        rows = self.rows(every_machine=True) if model else ()
        names = {model, *architectures, *(row.architecture for row in rows if row.model == model)}

        def goes(resolution: str, name: str) -> bool:
            """Whether to delete a row of this resolution and model, or a verdict of this resolution and architecture.
            name: the model or the architecture."""
            return (resolutions is None or resolution in resolutions) and (model is None or name in names)

        def is_gone(verdict: str) -> bool:
            # A damaged name may lack parts.
            parts = [*verdict.split(" ", 2), "", ""]
            return goes(parts[0], parts[1])

        def purge(connection: sqlite3.Connection) -> None:
            connection.create_function("goes", 2, goes)
            connection.create_function("is_gone", 1, is_gone)
            connection.execute("DELETE FROM history WHERE goes(resolution, model)")
            connection.execute("DELETE FROM finding WHERE kind = ? AND is_gone(name)", (VERDICTS,))
            connection.execute("DELETE FROM finding WHERE kind != ? AND ?", (CHOSEN, everything))

        with self._lock:
            known = self._findings[VERDICTS]
            self._findings[VERDICTS] = {name: value for name, value in known.items() if not is_gone(name)}
            if everything:
                self._findings[TUNED] = {}
        store = self._store
        if store is not None:
            store.commit(purge)
            if everything:
                store.delete()

    def size_bytes(self) -> int:
        """The bytes of OneDiff's files in the cache folder, without those of newer versions; 0 without a folder."""
        store = self._store
        return 0 if store is None else store.size_bytes()

    def _write_soon(self, statement: str, *values: Any) -> None:
        """Hand an SQL statement and its parameters to the store. A thread runs all pending statements
        WRITE_AFTER_SECONDS after the first of them was handed over. Does nothing without a folder."""
        store = self._store
        if store is None:
            return
        # A model is named after its file, whose name may not be valid UTF-8.
        clean = (value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in values)
        store.add(statement, *clean)
        with self._lock:
            if self._writer is not None:
                return
            self._writer = threading.Timer(WRITE_AFTER_SECONDS, self._write)
            self._writer.name = "onediff-history"
            self._writer.daemon = True
            try:
                self._writer.start()
            except RuntimeError:
                # A process that is ending starts no threads. close() writes then.
                self._writer = None

    def _write(self) -> None:
        """Write everything that is pending; run by the thread that _write_soon starts. A failure raises nothing:
        `trouble` has the cause. No retry is planned: the statements stay pending until something new is stored, or a
        method that waits for the database is called (see History)."""
        with self._lock:
            self._writer = None
        with contextlib.suppress(NotKept):
            self.commit()


def findings_of(rows: Iterable[tuple]) -> dict[str, Any]:
    """The findings in rows of (name, JSON text), as values by name. The oldest row comes first; of several rows with
    one name, the last counts. Rows that are not valid JSON are left out. OneDiff 0.2.0's list of pins becomes one
    finding for each pin."""
    found = {}
    for name, value in rows:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            found[str(name)] = json.loads(value)
    # OneDiff 0.2.0 kept one list of pins. Later choices replace it.
    before = found.pop("pinned", None)
    for pair in before if isinstance(before, list) else ():
        if isinstance(pair, list) and len(pair) == 2:
            found.setdefault(pin_name(*pair), True)
    return found


def pin_name(model: str, resolution: str) -> str:
    """The name of the finding that pins a resolution of a model, such as "pinned 512x512 SD1". History.pins reads both
    from it."""
    return f"pinned {resolution} {model}"


def verdict_name(entry: Entry) -> str:
    """The name of an entry's verdict. It differs for every key, weights, card and version of the check (CHECK), by a
    digest at the end. Resolution and architecture come first, because forget() selects by them."""
    key = entry.key
    label = f"{key!r} {entry.weights} on {card_name(key.device)}, {CHECK}"
    digest = hashlib.sha256(label.encode()).hexdigest()[:16]
    dtype = str(key.dtype).removeprefix("torch.")
    return (
        f"{key.resolution} {key.architecture} {key.backend}, batch {key.batch}, {key.tokens} tokens, {dtype}, {digest}"
    )


def is_error(value: Any) -> bool:
    """Whether a value, such as one read from the disk, is a valid relative error: a finite number from 0 up."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def history_row(entry: Entry, uses: int) -> HistoryRow:
    """A new row for an entry, to be recorded. uses: the number of calls to add; 0 for warm-ups.

    step_ms and host_ms are means over all steps of the entry's last image; before its first image, the medians of its
    stopwatches. Readers of a row divide the two times, so they must be of one measurement: host_ms is None unless both
    were measured often enough (Entry.ratio). Until then step_ms is set alone, to show how long a call takes; but it is
    None too if the store has a host's time from an earlier session (Stopwatch.remembered), by which it would be
    divided.
    """
    key = entry.key
    step_ms, host_ms, ratio = entry.in_image or (entry.own.median_ms, entry.host.median_ms, entry.ratio)
    return HistoryRow(
        architecture=key.architecture, model=entry.model, resolution=key.resolution, batch=key.batch,
        tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), uses=uses, last_used=entry.last_used,
        step_ms=step_ms if ratio is not None or entry.host.remembered is None else None,
        host_ms=None if ratio is None else host_ms, relative_error=entry.relative_error,
    )
