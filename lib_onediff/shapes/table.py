"""The per-resolution cache: what is known about every shape that was seen."""
from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from .key import ShapeKey
from .timing import Ratio, Stopwatch


class State(str, Enum):
    """cold: seen, not proved. proved: agrees with the host, runs plainly. ready: the next call replays. failed: the
    host serves this shape, reason says why."""

    COLD = "cold"
    PROVED = "proved"
    READY = "ready"
    FAILED = "failed"


@dataclass
class Entry:
    """model: its name for people. bytes: how much GPU memory comes back when its graph alone goes. needs: how much its
    graph takes of the memory that all graphs share, alone; known from its plain calls on. no_graph: why it has no graph
    and will get none; waits: why it has none yet."""

    key: ShapeKey
    model: str = ""
    bytes: int = 0
    needs: int = 0
    state: State = State.COLD
    reason: str = ""
    no_graph: str = ""
    waits: str = ""
    relative_error: float | None = None
    uses: int = 0
    last_used: float = field(default_factory=time.time)
    own: Stopwatch = field(default_factory=Stopwatch)
    host: Stopwatch = field(default_factory=Stopwatch)

    @property
    def ratio(self) -> Ratio | None:
        """How many times faster than the host's own forward; None while one of the two was not timed often enough."""
        return Ratio.of(self.own.timing, self.host.timing)

    def fail(self, reason: str) -> None:
        self.state, self.reason = State.FAILED, reason


class ShapeTable:
    """Entries by key. Shared by all checkpoints of an architecture."""

    def __init__(self) -> None:
        self._entries: dict[ShapeKey, Entry] = {}
        # Pages look and purge while another thread makes images.
        self._lock = threading.Lock()

    def entry(self, key: ShapeKey, model: str = "") -> Entry:
        """The entry for a shape, made cold at its first use. model: its name for people."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(key, model)
        entry.uses += 1
        entry.last_used = time.time()
        return entry

    def entries(self) -> list[Entry]:
        """All entries, the last used first."""
        return sorted(self.by_key().values(), key=lambda entry: -entry.last_used)

    def by_key(self) -> dict[ShapeKey, Entry]:
        """All entries."""
        with self._lock:
            return dict(self._entries)

    def forget(self, keys: Collection[ShapeKey]) -> None:
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if key not in keys}
