"""The shape table's memory: what was used on this machine in this process and in those before it."""
from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from ..ops.card import card_name
from ..ops.tuning_cache import TuningCache
from ..shapes.image_times import Times
from ..shapes.key import ShapeKey
from ..shapes.table import Entry
from .compiler_caches import CompilerCaches
from .machine import Fingerprint
from .private_folder import private_folder
from .rows import CHOSEN, TUNED, VERDICTS, HistoryRow, PurgeFilter, ShapeName
from .store import Store

PINNED = "pinned"
# What no update of anything changes.
CHOSEN_BY_USERS = (PINNED,)
# Findings come in bursts, and while something is being measured: one write for all, when it is over.
WRITE_AFTER_SECONDS = 2.0
# In the cache folder.
COMPILED = "compiled"
# The one thing that says where the cache folder is.
CACHE_VARIABLE = "ONEDIFF_CACHE"


class Pins:
    """Pairs of model and resolution ("SD1", "512x512"). They outlive the process where a store is attached."""

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._tuning_cache = tuning_cache

    def all(self) -> frozenset[tuple[str, str]]:
        """Every pinned (model, resolution)."""
        stored = self._tuning_cache.get(PINNED)
        # Anybody may have written the store.
        pairs = stored if isinstance(stored, list) else []
        return frozenset(
            (pair[0], pair[1]) for pair in pairs
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(word, str) for word in pair)
        )

    def set(self, model: str, resolution: str, pinned: bool) -> None:
        """Pin, or unpin."""
        pairs = self.all()
        changed = pairs | {(model, resolution)} if pinned else pairs - {(model, resolution)}
        if changed != pairs:
            self.replace(changed)

    def replace(self, pairs: frozenset[tuple[str, str]]) -> None:
        """Pin these and no others."""
        self._tuning_cache.set(PINNED, sorted(map(list, pairs)))


def chosen_folder() -> Path | None:
    """Where the environment says that we remember; None: nothing."""
    chosen = os.environ.get(CACHE_VARIABLE, "").strip()
    return Path(chosen).expanduser().absolute() if chosen else None


class History:
    """Writes the use of entries to a store, between images and off the thread that makes them.

    compiled: what compilers leave in the cache folder; None where nothing is remembered.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        # The card whose times are kept: the history names no other.
        self._gpu = ""
        self.compiled: CompilerCaches | None = None
        self._elsewhere = ""
        self._lock = threading.Lock()
        self._counted: dict[ShapeKey, int] = {}
        self._verdicts: dict[str, float] = {}
        self._host_ms: dict[ShapeName, float] = {}
        self._writer: threading.Timer | None = None

    @property
    def trouble(self) -> str | None:
        """What the user should know about the cache folder, in a sentence or two; None if all is well."""
        store = "" if self._store is None else self._store.trouble or ""
        return " ".join(filter(None, (store, self._elsewhere))) or None

    @property
    def folder(self) -> Path | None:
        """Where is remembered; None: nowhere."""
        return None if self._store is None else self._store.folder

    def open(self, folder: Path) -> None:
        """Remember in this folder from now on; safe to call again with the same one."""
        if self._store is not None:
            if self._store.folder == folder:
                return
            self._store.close()
        machine = Fingerprint.of()
        self._store, self._gpu = Store.open(folder, machine), machine.gpu
        compiled, self._elsewhere = private_folder(folder / COMPILED)
        self.compiled = CompilerCaches(compiled)
        with self._lock:
            self._verdicts = {**sound_verdicts(self._store.saved(VERDICTS)), **self._verdicts}
        self._host_ms = {row.shape: row.host_ms for row in self._store.history() if row.host_ms}

    def close(self) -> None:
        """Write what is left, and remember nothing from now on."""
        if self._store is not None:
            self._store.close()
            self._store = self.compiled = None

    def keep_compiled(self) -> None:
        """Let Triton keep what it compiles in the cache folder too, or where nobody else can write; what
        is there beyond the limit goes. For the whole process."""
        if self.compiled is not None:
            self.compiled.use(os.environ)
            self.compiled.evict_in_the_background()

    def keep(
        self, entries: Iterable[Entry], in_images: bool = True,
        times_of: Callable[[Entry], Times | None] = lambda entry: None,
    ) -> None:
        """Take down what was used since the last call. Returns at once; the disk is written in a thread.

        in_images: False for what was used to make it ready: it is remembered with its times, but not as a use.
        times_of: the means over all steps of an image at a shape; None where they are the entry's own.
        """
        if self._store is None:
            return
        # A cached pass is in the mean of the whole shape's: half a step has no row of its own on the disk.
        with self._lock:
            used = [
                entry for entry in entries
                if entry.uses > self._counted.get(entry.key, 0) and not entry.key.is_cached_pass
            ]
            for entry in used:
                uses = entry.uses - self._counted.get(entry.key, 0) if in_images else 0
                row = history_row(entry, uses, times_of(entry))
                self._store.record(row if self._is_of(entry) else dataclasses.replace(row, step_ms=None, host_ms=None))
                self._counted[entry.key] = entry.uses
        if used and in_images:
            threading.Thread(target=self._store.flush, name="onediff-history", daemon=True).start()
        elif used:
            self._write_soon()

    def rows(self) -> list[HistoryRow]:
        """Everything that is remembered for this machine, the most used first."""
        return [] if self._store is None else self._store.history()

    def used(self) -> list[HistoryRow]:
        """What was used here before and after updates too, the most used first; of the times, whichever came last."""
        return [] if self._store is None else self._store.history(every_machine=True)

    def add(self, rows: Iterable[HistoryRow]) -> None:
        """Remember what was used elsewhere. Returns at once."""
        if self._store is not None:
            for row in rows:
                self._store.record(row)
            self._write_soon()

    def verdict(self, backend: str, key: ShapeKey, weights: str) -> float | None:
        """How far a backend's output was from the host's when this shape was checked over these weights
        (BoundUNet.identity), by whichever process; None if it was not, or if that was forgotten. Looks into memory
        alone."""
        return self._verdicts.get(verdict_name(backend, key, weights))

    def keep_verdict(self, backend: str, key: ShapeKey, weights: str, error: float | None) -> None:
        """Remember a relative error, so that no process need check again. One that is not finite is not kept."""
        if error is None or not is_error(error):
            return
        name = verdict_name(backend, key, weights)
        with self._lock:
            self._verdicts[name] = error
        self._save(VERDICTS, name, error)

    def host_ms(self, entry: Entry) -> float | None:
        """What the host's own forward took at this shape in an earlier process, in milliseconds; None if unknown."""
        return self._host_ms.get(history_row(entry, 0).shape) if self._is_of(entry) else None

    def _is_of(self, entry: Entry) -> bool:
        """Whether an entry's times may be kept: they are not another card's."""
        device = entry.key.device
        return card_name(device) in (self._gpu, device.type)

    def tuned(self) -> dict[str, Any]:
        """What was measured to be best on this machine, by name; see ops.tuning_cache.TuningCache.attach."""
        if self._store is None:
            return {}
        return {**self._store.saved(TUNED), **self._store.saved(CHOSEN)}

    def tune(self, name: str, value: Any) -> None:
        """Remember what was measured to be best. Returns at once. Raises TypeError if JSON cannot hold it."""
        self._save(CHOSEN if name in CHOSEN_BY_USERS else TUNED, name, value)

    def commit(self) -> None:
        """Write what is to be remembered, now. Raises NotKept where it is not on the disk then; where nothing is
        remembered, nothing was promised."""
        if self._store is not None:
            self._store.commit()

    def forget(
        self, resolutions: Collection[str] | None = None, model: str | None = None,
        architectures: Collection[str] = (),
    ) -> None:
        """Forget these resolutions ("512x512") and their verdicts, or all, of this model ("SD1"), or of all.

        architectures: whose verdicts are the model's, besides those that the history names. Without a choice, what was
        tuned goes as well, and what was compiled; what users chose stays. Raises NotKept.
        """
        if model is not None:
            architectures = {*architectures, *(row.architecture for row in self.rows() if row.model == model)}
        gone = PurgeFilter(resolutions, model, architectures)
        with self._lock:
            self._counted = {
                key: uses for key, uses in self._counted.items()
                if not gone.verdict(key.resolution, key.architecture)
            }
            self._verdicts = {
                name: error for name, error in self._verdicts.items() if not gone.finding(VERDICTS, name)
            }
        if self._store is not None:
            self._store.forget(gone)
        if gone.everything and self.compiled is not None:
            self.compiled.purge()

    def size_bytes(self) -> int:
        """What lies on the disk, compiled files included where they are kept in our folder."""
        if self._store is None or self.compiled is None:
            return 0
        return self._store.size_bytes() + self.compiled.size_bytes()

    def _save(self, kind: str, name: str, value: Any) -> None:
        if self._store is not None:
            self._store.save(kind, name, value)
            self._write_soon()

    def _write_soon(self) -> None:
        if self._store is not None and (self._writer is None or not self._writer.is_alive()):
            self._writer = threading.Timer(WRITE_AFTER_SECONDS, self._store.flush)
            self._writer.name, self._writer.daemon = "onediff-history", True
            self._writer.start()


def verdict_name(backend: str, key: ShapeKey, weights: str) -> str:
    """The name of a verdict: first resolution and architecture, by which it is purged; the digest tells the rest, the
    card included."""
    digest = hashlib.sha256(f"{key!r} {weights} on {card_name(key.device)}".encode()).hexdigest()[:16]
    dtype = str(key.dtype).removeprefix("torch.")
    return f"{key.resolution} {key.architecture} {backend}, batch {key.batch}, {key.tokens} tokens, {dtype}, {digest}"


def is_error(value: Any) -> bool:
    """Whether a value can be a relative error."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def sound_verdicts(stored: dict[str, Any]) -> dict[str, float]:
    """What of the stored verdicts makes sense."""
    return {name: float(error) for name, error in stored.items() if is_error(error)}


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
