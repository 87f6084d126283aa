"""The history that outlives the process: uses of shapes, results of checks, measured choices, and pins."""
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
# Findings come in bursts: one transaction writes those of this interval.
WRITE_AFTER_SECONDS = 2.0
# The kinds of findings: results of checks, measured choices, and pins. Pins hold on every machine.
VERDICTS = "verdict"
TUNED = "tuned"
CHOSEN = "chosen"
KINDS = (VERDICTS, TUNED, CHOSEN)
# The version of the rule by which a check accepts errors. It is part of a verdict's name, so that a new rule does not
# find verdicts of an older one.
CHECK = "check 2"
# REPLACE gives the latest finding the highest rowid, whatever the clock shows.
SAVE = "REPLACE INTO finding VALUES (?, ?, ?, ?)"
FINDINGS = "SELECT name, value FROM finding WHERE machine IN (?, '') AND kind = ? ORDER BY rowid"
# Uses add up. In every other column the latest known value replaces the earlier one.
RECORD = """
    INSERT INTO history VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (machine, architecture, model, resolution, batch, tokens, dtype) DO UPDATE SET
    uses = uses + excluded.uses, last_used = excluded.last_used,
    step_ms = coalesce(excluded.step_ms, step_ms), host_ms = coalesce(excluded.host_ms, host_ms),
    relative_error = coalesce(excluded.relative_error, relative_error)"""
# With max(last_used), SQLite takes the bare columns from the row that has the maximum. Rows with values of other types
# were not written by OneDiff, and are left out.
ROWS = """
    SELECT architecture, model, resolution, batch, tokens, dtype, sum(uses), max(last_used), step_ms, host_ms,
    relative_error FROM history WHERE (machine = ? OR ?)
    AND typeof(batch) || typeof(tokens) || typeof(uses) || typeof(last_used) = 'integerintegerintegerreal'
    AND typeof(coalesce(step_ms, 0.0)) || typeof(coalesce(host_ms, 0.0)) = 'realreal'
    AND typeof(coalesce(relative_error, 0.0)) = 'real' AND max(uses, last_used) < 1e12 AND min(uses, last_used) >= 0
    GROUP BY architecture, model, resolution, batch, tokens, dtype ORDER BY 7 DESC, 8 DESC"""


@dataclass(frozen=True)
class HistoryRow:
    """Uses of a shape, summed.

    model: its name for users ("SD1").
    resolution: in pixels, as "512x768".
    batch: rows of a UNet call. tokens: the context length. dtype: that of the computation, without "torch.".
    uses: the number of calls.
    last_used: time.time().
    step_ms, host_ms: medians of our steps and of the host's; None if unknown.
    relative_error: of our output against the host's in the first check; None if unknown.
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
        """The fields that identify the shape, from architecture to dtype."""
        return dataclasses.astuple(self)[:6]


def chosen_folder() -> Path | None:
    """The cache folder from the environment variable; None if it is not set."""
    chosen = os.environ.get(CACHE_VARIABLE, "").strip()
    return Path(chosen).expanduser().absolute() if chosen else None


class History:
    """Everything that OneDiff keeps for later processes: in memory and, from open() on, in a folder.

    Only pin(), commit() and forget() wait for the disk; a thread writes everything else.
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
        """The fault of the cache folder, as a sentence for the user; None without one."""
        store = self._store
        return None if store is None else store.trouble

    @property
    def folder(self) -> Path | None:
        """The cache folder; None if there is none."""
        store = self._store
        return None if store is None else store.folder

    @property
    def is_shared_with_newer(self) -> bool:
        """Whether a newer version of OneDiff has files in the folder. A purge does not delete these."""
        store = self._store
        return store is not None and store.is_shared_with_newer

    def open(self, folder: Path, gpu: str = "cpu", machine: str = "") -> None:
        """Load the history of this folder, and write to it until close() or the end of the process. Safe to call again
        with the same folder.

        gpu: the name of the card; times of other cards are not kept. machine: a digest of everything else that times,
        verdicts and tuned choices depend on, such as the driver and torch.
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
        """Write everything that is pending. From now on, the history is in memory alone."""
        atexit.unregister(self.close)
        with contextlib.suppress(NotKept):
            self.commit()
        self._store = None

    # --- uses and times -------------------------------------------------------------------------------------------

    def keep(self, entries: Iterable[Entry], in_images: bool = True) -> None:
        """Record the uses and times of these entries since the last call.

        in_images: False for warm-ups: their times are recorded, and no uses.
        """
        for entry in entries if self._store is not None else ():
            with self._lock:
                uses = entry.uses - entry.kept_uses
                entry.kept_uses = entry.uses
            # A cached pass has no row of its own: its steps are part of the mean times of the whole shape.
            if uses > 0 and not entry.key.is_cached_pass:
                row = history_row(entry, uses if in_images else 0)
                self.record(row if self._is_of(entry) else dataclasses.replace(row, step_ms=None, host_ms=None))

    def record(self, row: HistoryRow) -> None:
        """Add a row's uses to those of its shape, and replace its times."""
        self._write_soon(RECORD, self._machine, *dataclasses.astuple(row))

    def rows(self, every_machine: bool = False) -> list[HistoryRow]:
        """The rows of this machine, the most used first.

        every_machine: sum them with those of other drivers and versions of torch and OneDiff; times are the latest.
        """
        store = self._store
        found = [] if store is None else store.read(ROWS, self._machine, every_machine)
        return [HistoryRow(*values) for values in found]

    def most_used(self, model: str | None, count: int) -> list[WantedSize]:
        """The sizes at which this model ("SD1") had the most UNet calls, the most used first, whatever driver and
        versions were in use.

        Each resolution comes once, with the batch size and the prompt length that were used most often there.
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

    def _is_of(self, entry: Entry) -> bool:
        """Whether the entry's times are of the card whose times are kept."""
        return card_name(entry.key.device) in (self._gpu, entry.key.device.type)

    # --- findings -------------------------------------------------------------------------------------------------

    def recall(self, entry: Entry) -> bool:
        """Whether any process on this machine has checked this shape with these weights before.

        If so, writes the relative error of that check and the host's time into the entry.
        """
        error = self._findings[VERDICTS].get(verdict_name(entry))
        if not is_error(error):
            return False
        entry.relative_error = error
        host_ms = self._host_ms.get(history_row(entry, 0).shape) if self._is_of(entry) else None
        if host_ms is not None and entry.host.settled_ms is None:
            entry.host.remembered = host_ms
        return True

    def keep_verdict(self, entry: Entry) -> None:
        """Keep an entry's relative error, so that later processes need not check again. Ignored unless it is finite."""
        if is_error(entry.relative_error):
            self._remember(VERDICTS, verdict_name(entry), entry.relative_error)

    def tuned(self) -> dict[str, Any]:
        """The choices that were measured to be the fastest here, by name; see core.card.TuningCache.attach."""
        return self._findings[TUNED].copy()

    def tune(self, name: str, value: Any) -> None:
        """Keep the choice that was measured to be fastest. Raises TypeError if JSON cannot hold the value."""
        self._remember(TUNED, name, value)

    def pins(self) -> frozenset[tuple[str, str]]:
        """Every pinned (model, resolution), as ("SD1", "512x512")."""
        chosen = self._findings[CHOSEN].copy()
        pinned = (name.split(" ", 2) for name, is_pinned in chosen.items() if is_pinned is True)
        return frozenset((words[2], words[1]) for words in pinned if len(words) == 3)

    def pin(self, model: str, resolution: str, pinned: bool) -> None:
        """Pin or unpin a resolution of a model; it is on the disk when this returns. Raises NotKept if it could not be
        written: then it holds in this process alone."""
        self._remember(CHOSEN, pin_name(model, resolution), pinned)
        self.commit()

    def _remember(self, kind: str, name: str, value: Any) -> None:
        """Set the finding of this kind and name in memory, and write it soon. value: anything that JSON can represent;
        raises TypeError otherwise."""
        encoded = json.dumps(value)
        with self._lock:
            self._findings[kind][name] = value
        self._write_soon(SAVE, "" if kind == CHOSEN else self._machine, kind, name, encoded)

    # --- the disk -------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Write everything that is pending to the disk now. Raises NotKept if that fails. Does nothing without a
        folder."""
        store = self._store
        if store is not None:
            store.commit()

    def forget(
        self, resolutions: Collection[str] | None = None, model: str | None = None,
        architectures: Collection[str] = (),
    ) -> None:
        """Delete the rows and verdicts of these resolutions ("512x512") of this model ("SD1"), on every machine. None
        stands for all. Raises NotKept if the disk could not be written.

        Without both arguments, tuned choices are deleted as well. Pins always stay. architectures: those whose verdicts
        belong to the model, besides those in the history.
        """
        everything = resolutions is None and model is None
        rows = self.rows(every_machine=True) if model else ()
        names = {model, *architectures, *(row.architecture for row in rows if row.model == model)}

        def goes(resolution: str, name: str) -> bool:
            """Whether a row or verdict is deleted. name: the model's or the architecture's."""
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
        """The size of the cache folder's files."""
        store = self._store
        return 0 if store is None else store.size_bytes()

    def _write_soon(self, statement: str, *values: Any) -> None:
        """Add an SQL statement that a thread writes within WRITE_AFTER_SECONDS. Does nothing without a folder."""
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
        """The thread's function: write everything that is pending. After a failure, `trouble` has the cause, and the
        next write tries again."""
        with self._lock:
            self._writer = None
        with contextlib.suppress(NotKept):
            self.commit()


def findings_of(rows: Iterable[tuple]) -> dict[str, Any]:
    """The values by name of rows (name, JSON), the oldest first. Rows that are not valid JSON are left out."""
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
    """The name of a pin among the findings; History.pins parses it."""
    return f"pinned {resolution} {model}"


def verdict_name(entry: Entry) -> str:
    """The name of a verdict: resolution and architecture first, because a purge selects by them; the digest covers the
    whole key, the weights and the card."""
    key = entry.key
    label = f"{key!r} {entry.weights} on {card_name(key.device)}, {CHECK}"
    digest = hashlib.sha256(label.encode()).hexdigest()[:16]
    dtype = str(key.dtype).removeprefix("torch.")
    return (
        f"{key.resolution} {key.architecture} {key.backend}, batch {key.batch}, {key.tokens} tokens, {dtype}, {digest}"
    )


def is_error(value: Any) -> bool:
    """Whether a value can be a relative error."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def history_row(entry: Entry, uses: int) -> HistoryRow:
    """The row of an entry, with this number of new uses. Times are means over all steps of its last image; before the
    first image, the medians of the entry's stopwatches.

    Readers divide the two times of a row, so both must be of one measurement: the host's time is set only if both were
    measured often enough. Until then our time is set alone, to show how long a call takes; but not if the store has a
    host's time from an earlier session, by which it would be divided.
    """
    key = entry.key
    step_ms, host_ms, ratio = entry.in_image or (entry.own.median_ms, entry.host.median_ms, entry.ratio)
    return HistoryRow(
        architecture=key.architecture, model=entry.model, resolution=key.resolution, batch=key.batch,
        tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), uses=uses, last_used=entry.last_used,
        step_ms=step_ms if ratio is not None or entry.host.remembered is None else None,
        host_ms=None if ratio is None else host_ms, relative_error=entry.relative_error,
    )
