"""The shape table's memory: what was used on this machine in this process and in those before it."""
from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .key import ShapeKey
from .store import HistoryRow, Store
from .store_schema import VERDICTS, ShapeName, resolution_of
from .table import Entry

# Under which name the store keeps what holds for every architecture.
EVERY_ARCHITECTURE = "every architecture"
# Findings come in bursts, and while something is being measured: one write for all, when it is over.
WRITE_AFTER_SECONDS = 2.0


class History:
    """Writes the use of entries to a store, between pictures and off the thread that makes them."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._counted: dict[ShapeKey, int] = {}
        self._verdicts: dict[str, float] = {}
        self._host_ms: dict[ShapeName, float] = {}
        self._writer: threading.Timer | None = None

    @property
    def trouble(self) -> str | None:
        """What the user should know about the cache folder, in one sentence; None if all is well."""
        return None if self._store is None else self._store.trouble

    def open(self, folder: Path) -> None:
        """Remember in this folder from now on; safe to call again with the same one."""
        if self._store is not None:
            if self._store.folder == folder:
                return
            self._store.close()
        self._store = Store.open(folder)
        self._verdicts = {**sound_verdicts(self._store.choices(VERDICTS)), **self._verdicts}
        self._host_ms = {row.shape: row.host_ms for row in self._store.history() if row.host_ms}

    def keep(self, entries: Iterable[Entry]) -> None:
        """Take down what was used since the last call. Returns at once; the disk is written in a thread."""
        if self._store is None:
            return
        used = [entry for entry in entries if entry.uses > self._counted.get(entry.key, 0)]
        for entry in used:
            self._store.record(history_row(entry, entry.uses - self._counted.get(entry.key, 0)))
            self._counted[entry.key] = entry.uses
        if used:
            threading.Thread(target=self._store.flush, name="onediff-history", daemon=True).start()

    def rows(self) -> list[HistoryRow]:
        """Everything that is remembered for this machine, the most used first."""
        return [] if self._store is None else self._store.history()

    def verdict(self, backend: str, key: ShapeKey) -> float | None:
        """How far a backend's output was from the host's when this shape was checked, by whichever process; None if
        it was not, or if that was forgotten. Looks into memory alone."""
        return self._verdicts.get(verdict_name(backend, key))

    def keep_verdict(self, backend: str, key: ShapeKey, error: float) -> None:
        """Remember a relative error, so that no process need check again. One that is not finite is not kept."""
        if not is_error(error):
            return
        name = verdict_name(backend, key)
        self._verdicts[name] = error
        self._choose(VERDICTS, name, error)

    def host_ms(self, entry: Entry) -> float | None:
        """What the host's own forward took at this shape in an earlier process, in milliseconds; None if unknown."""
        return self._host_ms.get(history_row(entry, 0).shape)

    def tuned(self) -> dict[str, Any]:
        """What was measured to be best on this machine, by name; see ops.choices.Choices.attach."""
        return {} if self._store is None else self._store.choices(EVERY_ARCHITECTURE)

    def tune(self, name: str, value: Any) -> None:
        """Remember what was measured to be best. Returns at once. Raises TypeError if JSON cannot hold it."""
        self._choose(EVERY_ARCHITECTURE, name, value)

    def forget(self, resolutions: Collection[str] | None = None) -> None:
        """Forget these resolutions ("512x512") and their verdicts, or all."""
        self._counted = {
            key: uses for key, uses in self._counted.items()
            if resolutions is not None and key.resolution not in resolutions
        }
        self._verdicts = {
            name: error for name, error in self._verdicts.items()
            if resolutions is not None and resolution_of(name) not in resolutions
        }
        if self._store is not None:
            self._store.forget(resolutions)

    def size_bytes(self) -> int:
        """What lies on the disk."""
        return 0 if self._store is None else self._store.size_bytes()

    def _choose(self, architecture: str, name: str, value: Any) -> None:
        if self._store is None:
            return
        self._store.choose(architecture, name, value)
        if self._writer is None or not self._writer.is_alive():
            self._writer = threading.Timer(WRITE_AFTER_SECONDS, self._store.flush)
            self._writer.name, self._writer.daemon = "onediff-history", True
            self._writer.start()


def verdict_name(backend: str, key: ShapeKey) -> str:
    """The name of a verdict: the resolution first, by which it is purged; the digest tells everything else apart."""
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    dtype = str(key.dtype).removeprefix("torch.")
    return f"{key.resolution} {backend}, batch {key.batch}, {key.tokens} tokens, {dtype}, {digest}"


def is_error(value: Any) -> bool:
    """Whether a value can be a relative error."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def sound_verdicts(stored: dict[str, Any]) -> dict[str, float]:
    """What of the stored verdicts makes sense."""
    return {name: float(error) for name, error in stored.items() if is_error(error)}


def history_row(entry: Entry, uses: int) -> HistoryRow:
    """An entry as the store keeps it, with the uses that are new."""
    key = entry.key
    return HistoryRow(
        architecture=key.architecture, model=entry.model, resolution=key.resolution, batch=key.batch,
        tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), uses=uses, last_used=entry.last_used,
        step_ms=entry.own.median_ms, host_ms=entry.host.median_ms, relative_error=entry.relative_error,
    )
