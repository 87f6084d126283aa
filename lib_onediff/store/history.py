"""The uses, checks, measurements and pins of this machine, of this process and of earlier ones."""
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

# The one thing that says where the cache folder is.
CACHE_VARIABLE = "ONEDIFF_CACHE"
# Findings come in bursts: one write for all.
WRITE_AFTER_SECONDS = 2.0
# The kinds of findings. What users chose holds on every machine.
VERDICTS = "verdict"
TUNED = "tuned"
CHOSEN = "chosen"
KINDS = (VERDICTS, TUNED, CHOSEN)
# Which errors a check accepts: another rule is another name, and earlier verdicts are not found any more.
CHECK = "check 2"
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
        """The fields that are equal in two rows of the same shape."""
        return dataclasses.astuple(self)[:6]


def chosen_folder() -> Path | None:
    """The cache folder that the environment names; None if it names none."""
    chosen = os.environ.get(CACHE_VARIABLE, "").strip()
    return Path(chosen).expanduser().absolute() if chosen else None


class History:
    """Kept in memory and, from open() on, in a folder. Only pin(), commit() and forget() wait for the
    disk; the rest is written by a thread."""

    def __init__(self) -> None:
        self._store: Store | None = None
        # The history names no card: its times are this one's.
        self._gpu = self._machine = ""
        self._findings: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self._host_ms: dict[tuple[Any, ...], float] = {}
        self._writer: threading.Timer | None = None
        # Pages, the pre-warm queue and images note findings at once. Not held while the disk is waited for.
        self._lock = threading.RLock()
        self._opening = threading.Lock()

    @property
    def trouble(self) -> str | None:
        """The problem of the cache folder, in a sentence for the user; None if it has none."""
        store = self._store
        return None if store is None else store.trouble

    @property
    def folder(self) -> Path | None:
        """The cache folder; None if there is none."""
        store = self._store
        return None if store is None else store.folder

    @property
    def is_shared_with_newer(self) -> bool:
        """Whether a newer version of OneDiff keeps files in the folder, which no purge deletes."""
        store = self._store
        return store is not None and store.is_shared_with_newer

    def open(self, folder: Path, gpu: str = "cpu", machine: str = "") -> None:
        """Remember in this folder until close(), or the end of the process; safe to call again with the same one.

        gpu: whose times are kept. machine: what else they depend on, and verdicts and tuned choices, as a digest.
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
                    self._find(kind, name, value)
            self._host_ms = {row.shape: row.host_ms for row in self.rows() if row.host_ms}

    def close(self) -> None:
        """Write what is left, and remember nothing on the disk from now on."""
        atexit.unregister(self.close)
        with contextlib.suppress(NotKept):
            self.commit()
        self._store = None

    # --- uses and times -------------------------------------------------------------------------------------------

    def keep(self, entries: Iterable[Entry], in_images: bool = True) -> None:
        """Take down what was used since the last call.

        in_images: False for what was used to make it ready: it is remembered with its times, but not as a use.
        """
        for entry in entries if self._store is not None else ():
            with self._lock:
                uses = entry.uses - entry.kept_uses
                entry.kept_uses = entry.uses
            # A cached pass is in the mean of the whole shape's: half a step has no row of its own on the disk.
            if uses > 0 and not entry.key.is_cached_pass:
                row = history_row(entry, uses if in_images else 0)
                self.record(row if self._is_of(entry) else dataclasses.replace(row, step_ms=None, host_ms=None))

    def record(self, row: HistoryRow) -> None:
        """Add to the history."""
        self._write_soon(RECORD, self._machine, *dataclasses.astuple(row))

    def rows(self, every_machine: bool = False) -> list[HistoryRow]:
        """What is remembered for this machine, the most used first. every_machine: also what was used under another
        driver, torch or version of ours; of the times, those that came last."""
        store = self._store
        found = [] if store is None else store.read(ROWS, self._machine, every_machine)
        return [HistoryRow(*values) for values in found]

    def most_used(self, model: str | None, count: int) -> list[WantedSize]:
        """The sizes that this model ("SD1") has made the most UNet calls at, here before and after updates, the most
        used first: each resolution once, with the number of images and the prompt's length that were the most usual
        there."""
        by_resolution: dict[str, Counter[tuple[int, int]]] = {}
        for row in self.rows(every_machine=True):
            if row.model == model and row.uses and row.tokens:
                # With guidance, a UNet call has two rows for each image.
                images = row.batch if row.batch % 2 else row.batch // 2
                by_resolution.setdefault(row.resolution, Counter())[images, row.tokens] += row.uses
        found = []
        for resolution in sorted(by_resolution, key=lambda resolution: -by_resolution[resolution].total()):
            ((images, tokens), _), = by_resolution[resolution].most_common(1)
            # What an extension has drawn at may be no size that a user could ask for.
            with contextlib.suppress(ValueError):
                size = Size(parse_size(resolution).width, parse_size(resolution).height, images)
                found.append(WantedSize(size, tokens if tokens in TOKEN_CHOICES else TOKENS))
        return found[:count]

    def _is_of(self, entry: Entry) -> bool:
        """Whether an entry's times may be kept: they are not another card's."""
        return card_name(entry.key.device) in (self._gpu, entry.key.device.type)

    # --- what was found and chosen --------------------------------------------------------------------------------

    def recall(self, entry: Entry) -> bool:
        """Whether this shape was checked over these weights on this machine before, by whichever process; then the
        entry knows how far our output was from the host's, and how long the host took."""
        error = self._findings[VERDICTS].get(verdict_name(entry))
        if not is_error(error):
            return False
        entry.relative_error = error
        host_ms = self._host_ms.get(history_row(entry, 0).shape) if self._is_of(entry) else None
        if host_ms is not None and entry.host.settled_ms is None:
            entry.host.remembered = host_ms
        return True

    def keep_verdict(self, entry: Entry) -> None:
        """Remember an entry's relative error, so that no process need check again. One that is not finite is not kept.
        """
        if is_error(entry.relative_error):
            self._find(VERDICTS, verdict_name(entry), entry.relative_error)

    def tuned(self) -> dict[str, Any]:
        """The choices that were measured to be the fastest here, by name; see core.card.TuningCache.attach."""
        return self._findings[TUNED].copy()

    def tune(self, name: str, value: Any) -> None:
        """Remember what was measured to be best. Raises TypeError if JSON cannot hold it."""
        self._find(TUNED, name, value)

    def pins(self) -> frozenset[tuple[str, str]]:
        """Every pinned (model, resolution), as ("SD1", "512x512")."""
        chosen = self._findings[CHOSEN].copy()
        pinned = (name.split(" ", 2) for name, is_pinned in chosen.items() if is_pinned is True)
        return frozenset((words[2], words[1]) for words in pinned if len(words) == 3)

    def pin(self, model: str, resolution: str, pinned: bool) -> None:
        """Pin, or unpin; it is on the disk when this returns. Raises NotKept where later processes will not know."""
        self._find(CHOSEN, pin_name(model, resolution), pinned)
        self.commit()

    def _find(self, kind: str, name: str, value: Any) -> None:
        """Remember a value under a name, in place of what was there."""
        encoded = json.dumps(value)
        with self._lock:
            self._findings[kind][name] = value
        self._write_soon(SAVE, "" if kind == CHOSEN else self._machine, kind, name, encoded)

    # --- the disk -------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Write what is to be remembered, now. Raises NotKept where it is not on the disk then; where nothing is
        remembered, nothing was promised."""
        store = self._store
        if store is not None:
            store.commit()

    def forget(
        self, resolutions: Collection[str] | None = None, model: str | None = None,
        architectures: Collection[str] = (),
    ) -> None:
        """Forget these resolutions ("512x512") with their verdicts, or all, of this model ("SD1"), or of all models, on
        every machine. Raises NotKept.

        architectures: whose verdicts are the model's, besides those that the history names. Without a choice, what was
        tuned goes as well; what users chose stays.
        """
        everything = resolutions is None and model is None
        rows = self.rows(every_machine=True) if model else ()
        names = {model, *architectures, *(row.architecture for row in rows if row.model == model)}

        def goes(resolution: str, name: str) -> bool:
            """name: of a model or an architecture."""
            return (resolutions is None or resolution in resolutions) and (model is None or name in names)

        def is_gone(verdict: str) -> bool:
            # Of a name that was damaged, a part may be missing.
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
        store = self._store
        if store is None:
            return
        # A file's name may hold what UTF-8 cannot.
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
                # While the process ends no thread begins any more, and close() writes.
                self._writer = None

    def _write(self) -> None:
        with self._lock:
            self._writer = None
        with contextlib.suppress(NotKept):
            self.commit()


def findings_of(rows: Iterable[tuple]) -> dict[str, Any]:
    """Stored (name, value), the last saved last, as values by name. Anybody may have written them."""
    found = {}
    for name, value in rows:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            found[str(name)] = json.loads(value)
    # OneDiff 0.2.0 kept one list of pins; what was chosen since counts more.
    before = found.pop("pinned", None)
    for pair in before if isinstance(before, list) else ():
        if isinstance(pair, list) and len(pair) == 2:
            found.setdefault(pin_name(*pair), True)
    return found


def pin_name(model: str, resolution: str) -> str:
    return f"pinned {resolution} {model}"


def verdict_name(entry: Entry) -> str:
    """The name of a verdict: first resolution and architecture, by which it is purged; the digest tells the rest, the
    weights and the card included."""
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
    """An entry as the store keeps it, with the uses that are new. Its times are the means over all steps of its last
    image; the entry's own before the first.

    Two times together are a ratio to whoever reads them: the host's is kept only where both were timed often enough,
    and ours not beside one of the host's that is kept already, before it is. Alone it tells how long a call may take.
    """
    key = entry.key
    step_ms, host_ms, ratio = entry.in_image or (entry.own.median_ms, entry.host.median_ms, entry.ratio)
    return HistoryRow(
        architecture=key.architecture, model=entry.model, resolution=key.resolution, batch=key.batch,
        tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), uses=uses, last_used=entry.last_used,
        step_ms=step_ms if ratio is not None or entry.host.remembered is None else None,
        host_ms=None if ratio is None else host_ms, relative_error=entry.relative_error,
    )
