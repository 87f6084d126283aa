"""The shape table's memory: what was used on this machine in this process and in those before it."""
from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from pathlib import Path

from .key import ShapeKey
from .store import HistoryRow, Store
from .table import Entry


class History:
    """Writes the use of entries to a store, between pictures and off the thread that makes them."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._counted: dict[ShapeKey, int] = {}

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

    def forget(self, resolutions: Collection[str] | None = None) -> None:
        """Forget these resolutions ("512x512"), or all."""
        self._counted = {
            key: uses for key, uses in self._counted.items()
            if resolutions is not None and key.resolution not in resolutions
        }
        if self._store is not None:
            self._store.forget(resolutions)

    def size_bytes(self) -> int:
        """What lies on the disk."""
        return 0 if self._store is None else self._store.size_bytes()


def history_row(entry: Entry, uses: int) -> HistoryRow:
    """An entry as the store keeps it, with the uses that are new."""
    key = entry.key
    return HistoryRow(
        architecture=key.architecture, model=entry.model, resolution=key.resolution, batch=key.batch,
        tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), uses=uses, last_used=entry.last_used,
        step_ms=entry.own.median_ms, host_ms=entry.host.median_ms, relative_error=entry.relative_error,
    )
