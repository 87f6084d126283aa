"""What was used, checked, measured and pinned on this machine, in this process and in those before it."""
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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.card import card_name
from ..core.image_times import Times
from ..core.key import ShapeKey
from ..core.table import Entry
from . import triton_cache
from .machine import Fingerprint
from .store import NotKept, Store

# The one thing that says where the cache folder is.
CACHE_VARIABLE = "ONEDIFF_CACHE"
# Findings come in bursts, and while something is being measured: one write for all, when it is over.
WRITE_AFTER_SECONDS = 2.0
# The kinds of findings. What users chose holds on every machine.
VERDICTS, TUNED, CHOSEN = "verdict", "tuned", "chosen"
# What is saved last has the highest rowid, whatever the clock says.
SAVE = "REPLACE INTO finding VALUES (?, ?, ?, ?)"
FINDINGS = "SELECT name, value FROM finding WHERE machine IN (?, '') AND kind = ? ORDER BY rowid"
# Uses add up; of the rest the latest that is known counts.
RECORD = """
    INSERT INTO history VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (machine, architecture, model, resolution, batch, tokens, dtype) DO UPDATE SET
    uses = uses + excluded.uses, last_used = excluded.last_used,
    step_ms = coalesce(excluded.step_ms, step_ms), host_ms = coalesce(excluded.host_ms, host_ms),
    relative_error = coalesce(excluded.relative_error, relative_error)"""
# Beside max() SQLite gives the other columns of the same row. What is of another type was not written by us.
ROWS = """
    SELECT architecture, model, resolution, batch, tokens, dtype, sum(uses), max(last_used), step_ms, host_ms,
    relative_error FROM history WHERE (machine = ? OR ?)
    AND typeof(batch) || typeof(tokens) || typeof(uses) || typeof(last_used) = 'integerintegerintegerreal'
    AND typeof(coalesce(step_ms, 0.0)) || typeof(coalesce(host_ms, 0.0)) = 'realreal'
    AND typeof(coalesce(relative_error, 0.0)) = 'real' AND max(uses, last_used) < 1e12 AND min(uses, last_used) >= 0
    GROUP BY architecture, model, resolution, batch, tokens, dtype ORDER BY 7 DESC, 8 DESC"""


@dataclass(frozen=True)
class HistoryRow:
    """Uses of a shape, summed. Times are medians in milliseconds; None is not known yet.

    resolution: in pixels, as "512x768". batch: the UNet's. last_used: time.time(). relative_error: how far our output
    was from the host's at the first use.
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
        """What makes two rows the same shape."""
        return self.architecture, self.model, self.resolution, self.batch, self.tokens, self.dtype

    @property
    def ratio(self) -> float | None:
        """How many times faster than the host's own forward, or None while one of the two is unknown."""
        return self.host_ms / self.step_ms if self.host_ms and self.step_ms else None


def chosen_folder() -> Path | None:
    """Where the environment says that we remember; None: nothing."""
    chosen = os.environ.get(CACHE_VARIABLE, "").strip()
    return Path(chosen).expanduser().absolute() if chosen else None


class History:
    """What is remembered: in memory, and from open() on in a folder. Only pin(), commit() and forget() wait for the
    disk; the rest is written by a thread."""

    def __init__(self) -> None:
        self._store: Store | None = None
        # The history names no card: its times are this one's.
        self._gpu = self._machine = ""
        self._lock = threading.Lock()
        self._counted: dict[ShapeKey, int] = {}
        self._verdicts: dict[str, float] = {}
        # Those of earlier processes that this one has not used yet.
        self._unused: set[str] = set()
        self._host_ms: dict[tuple[Any, ...], float] = {}
        self._pins: frozenset[tuple[str, str]] = frozenset()
        self._writer: threading.Timer | None = None

    @property
    def trouble(self) -> str | None:
        """What the user should know about the cache folder, in a sentence; None if all is well."""
        return None if self._store is None else self._store.trouble

    @property
    def folder(self) -> Path | None:
        """Where is remembered; None: nowhere."""
        return None if self._store is None else self._store.folder

    def open(self, folder: Path) -> None:
        """Remember in this folder until close(), or the end of the process; safe to call again with the same one."""
        if self.folder != folder:
            self.close()
            machine = Fingerprint.of()
            self._store, self._gpu, self._machine = Store(folder), machine.gpu, machine.digest
            atexit.register(self.close)
            stored = {name: error for name, error in self._saved(VERDICTS).items() if is_error(error)}
            self._unused = set(stored) - set(self._verdicts)
            self._verdicts = {**stored, **self._verdicts}
            self._host_ms = {row.shape: row.host_ms for row in self.rows() if row.host_ms}
            self._pins |= stored_pins(self._saved(CHOSEN))

    def close(self) -> None:
        """Write what is left, and remember nothing on the disk from now on."""
        atexit.unregister(self.close)
        with contextlib.suppress(NotKept):
            self.commit()
        self._store = None

    def keep_compiled(self) -> None:
        """Let Triton keep what it compiles in the cache folder too. For the whole process."""
        if self._store is not None:
            triton_cache.keep_in(self._store.folder)

    def keep(
        self, entries: Iterable[Entry], in_images: bool = True,
        times_of: Callable[[Entry], Times | None] = lambda entry: None,
    ) -> None:
        """Take down what was used since the last call.

        in_images: False for what was used to make it ready: it is remembered with its times, but not as a use.
        times_of: the means over all steps of an image at a shape; None where they are the entry's own.
        """
        if self._store is None:
            return
        with self._lock:
            # A cached pass is in the mean of the whole shape's: half a step has no row of its own on the disk.
            used = [
                entry for entry in entries
                if entry.uses > self._counted.get(entry.key, 0) and not entry.key.is_cached_pass
            ]
            for entry in used:
                uses = entry.uses - self._counted.get(entry.key, 0) if in_images else 0
                row = history_row(entry, uses, times_of(entry))
                self.record(row if self._is_of(entry) else dataclasses.replace(row, step_ms=None, host_ms=None))
                self._counted[entry.key] = entry.uses
        if used:
            self._write_soon(0.0 if in_images else WRITE_AFTER_SECONDS)

    def record(self, row: HistoryRow) -> None:
        """Add to the history, in memory."""
        self._add(RECORD, self._machine, *dataclasses.astuple(row))

    def rows(self, every_machine: bool = False) -> list[HistoryRow]:
        """What is remembered for this machine, the most used first. every_machine: also what was used under another
        driver, torch or version of ours; of the times, those that came last."""
        found = [] if self._store is None else self._store.read(ROWS, self._machine, every_machine)
        return [HistoryRow(*values) for values in found]

    def used(self) -> list[HistoryRow]:
        """What was used here before and after updates, the most used first."""
        return self.rows(every_machine=True)

    def verdict(self, backend: str, key: ShapeKey, weights: str) -> float | None:
        """How far a backend's output was from the host's when this shape was checked over these weights
        (BoundUNet.identity), by whichever process; None if it was not, or if that was forgotten."""
        name = verdict_name(backend, key, weights)
        error = self._verdicts.get(name)
        if error is not None and name in self._unused:
            # The disk keeps those that were used last.
            self.keep_verdict(backend, key, weights, error)
        return error

    def keep_verdict(self, backend: str, key: ShapeKey, weights: str, error: float | None) -> None:
        """Remember a relative error, so that no process need check again. One that is not finite is not kept."""
        if error is not None and is_error(error):
            name = verdict_name(backend, key, weights)
            with self._lock:
                self._verdicts[name] = error
                self._unused.discard(name)
            self._save(VERDICTS, name, error)

    def host_ms(self, entry: Entry) -> float | None:
        """What the host's own forward took at this shape in an earlier process, in milliseconds; None if unknown."""
        return self._host_ms.get(history_row(entry, 0).shape) if self._is_of(entry) else None

    def _is_of(self, entry: Entry) -> bool:
        """Whether an entry's times may be kept: they are not another card's."""
        return card_name(entry.key.device) in (self._gpu, entry.key.device.type)

    def tuned(self) -> dict[str, Any]:
        """What was measured to be best on this machine, by name; see ops.tuning_cache.TuningCache.attach."""
        return self._saved(TUNED)

    def tune(self, name: str, value: Any) -> None:
        """Remember what was measured to be best. Raises TypeError if JSON cannot hold it."""
        self._save(TUNED, name, value)

    def pins(self) -> frozenset[tuple[str, str]]:
        """Every pinned (model, resolution), as ("SD1", "512x512")."""
        return self._pins

    def pin(self, model: str, resolution: str, pinned: bool) -> None:
        """Pin, or unpin; it is on the disk when this returns. Raises NotKept where later processes will not know."""
        pair = {(model, resolution)}
        with self._lock:
            self._pins = self._pins | pair if pinned else self._pins - pair
        self._save(CHOSEN, f"pinned {resolution} {model}", pinned)
        self.commit()

    def commit(self) -> None:
        """Write what is to be remembered, now. Raises NotKept where it is not on the disk then; where nothing is
        remembered, nothing was promised."""
        if self._store is not None:
            self._store.commit()

    def forget(
        self, resolutions: Collection[str] | None = None, model: str | None = None,
        architectures: Collection[str] = (),
    ) -> None:
        """Forget these resolutions ("512x512") with their verdicts, or all, of this model ("SD1"), or of all models, on
        every machine. Raises NotKept.

        architectures: whose verdicts are the model's, besides those that the history names. Without a choice, what was
        tuned goes as well, and what was compiled; what users chose stays.
        """
        everything = resolutions is None and model is None
        names = {model, *architectures, *(row.architecture for row in self.used() if model and row.model == model)}

        def goes(resolution: str, name: str) -> bool:
            """name: of a model or an architecture."""
            return (resolutions is None or resolution in resolutions) and (model is None or name in names)

        def is_gone(verdict: str) -> bool:
            resolution, _, rest = verdict.partition(" ")
            return goes(resolution, rest.partition(" ")[0])

        def purge(connection: sqlite3.Connection) -> None:
            connection.create_function("goes", 2, goes)
            connection.create_function("is_gone", 1, is_gone)
            connection.execute("DELETE FROM history WHERE goes(resolution, model)")
            connection.execute("DELETE FROM finding WHERE kind = ? AND is_gone(name)", (VERDICTS,))
            connection.execute("DELETE FROM finding WHERE kind != ? AND ?", (CHOSEN, everything))

        with self._lock:
            self._counted = {
                key: uses for key, uses in self._counted.items() if not goes(key.resolution, key.architecture)
            }
            self._verdicts = {name: error for name, error in self._verdicts.items() if not is_gone(name)}
        if self._store is not None:
            self._store.commit(purge)
            if everything:
                self._store.delete_others()
                triton_cache.purge(self._store.folder)

    def size_bytes(self) -> int:
        """What lies on the disk, Triton's files included where they are kept in our folder."""
        return 0 if self._store is None else self._store.size_bytes() + triton_cache.size_bytes(self._store.folder)

    def _saved(self, kind: str) -> dict[str, Any]:
        """The findings of a kind that hold on this machine, by name, the last saved last."""
        found = {}
        for name, value in [] if self._store is None else self._store.read(FINDINGS, self._machine, kind):
            # Anybody may have written the file.
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                found[str(name)] = json.loads(value)
        return found

    def _save(self, kind: str, name: str, value: Any) -> None:
        self._add(SAVE, "" if kind == CHOSEN else self._machine, kind, name, json.dumps(value))
        self._write_soon(WRITE_AFTER_SECONDS)

    def _add(self, statement: str, *values: Any) -> None:
        # A file's name may hold what UTF-8 cannot.
        clean = [value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in values]
        if self._store is not None:
            self._store.add(lambda connection: connection.execute(statement, clean))

    def _write_soon(self, seconds: float) -> None:
        with self._lock:
            if self._store is not None and (self._writer is None or not seconds):
                self._writer = threading.Timer(seconds, self._write)
                self._writer.name, self._writer.daemon = "onediff-history", True
                self._writer.start()

    def _write(self) -> None:
        with self._lock:
            self._writer = None
        with contextlib.suppress(NotKept):
            self.commit()


def stored_pins(chosen: dict[str, Any]) -> set[tuple[str, str]]:
    """The pins among what users chose: "pinned" lists those of OneDiff 0.2.0, and what was chosen since counts more.
    Anybody may have written them."""
    before = chosen.get("pinned")
    pins = {(str(pair[0]), str(pair[1])) for pair in (before if isinstance(before, list) else ())
            if isinstance(pair, list) and len(pair) == 2}
    for name, pinned in chosen.items():
        word, *pair = name.split(" ", 2)
        if word == "pinned" and len(pair) == 2:
            (pins.add if pinned is True else pins.discard)((pair[1], pair[0]))
    return pins


def verdict_name(backend: str, key: ShapeKey, weights: str) -> str:
    """The name of a verdict: first resolution and architecture, by which it is purged; the digest tells the rest, the
    card included."""
    digest = hashlib.sha256(f"{key!r} {weights} on {card_name(key.device)}".encode()).hexdigest()[:16]
    dtype = str(key.dtype).removeprefix("torch.")
    return f"{key.resolution} {key.architecture} {backend}, batch {key.batch}, {key.tokens} tokens, {dtype}, {digest}"


def is_error(value: Any) -> bool:
    """Whether a value can be a relative error."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def history_row(entry: Entry, uses: int, times: Times | None = None) -> HistoryRow:
    """An entry as the store keeps it, with the uses that are new. times: the means over all steps of its last image, if
    there was one.

    Two times together are a ratio to whoever reads them: the host's is kept only where both were timed often enough,
    and ours not beside one of the host's that is kept already, before it is. Alone it tells how long a call may take.
    """
    key = entry.key
    step_ms, host_ms, ratio = times or (entry.own.median_ms, entry.host.median_ms, entry.ratio)
    return HistoryRow(
        architecture=key.architecture, model=entry.model, resolution=key.resolution, batch=key.batch,
        tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), uses=uses, last_used=entry.last_used,
        step_ms=step_ms if ratio is not None or not entry.host.is_remembered else None,
        host_ms=None if ratio is None else host_ms, relative_error=entry.relative_error,
    )
