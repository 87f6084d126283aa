"""How long steps have taken on this card, in this process and before: whether they are slower than they were, and why.

A time under another load says nothing of the WebUI's, and an update that made steps slower should not go unnoticed.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..core.card import card_name
from ..core.table import Entry
from ..store.history import History

# Medians of two images differ by less, on a GPU that does nothing else and on a CPU.
SLOWER_THAN_USUAL, SLOWER_SINCE = 1.25, 1.1


class Slower(NamedTuple):
    """reason: for users. is_load: whether the time says nothing of the WebUI's, which was taken under another load."""

    reason: str
    is_load: bool


class StepTimes:
    """The best time of each shape under the present versions, and under those before them."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._versions: dict[str, str] = {}

    def open(self, versions: dict[str, str]) -> None:
        """versions: of what a step's time depends on, by what users call it, while what follows is timed."""
        self._versions = versions

    def note(self, entries: Iterable[Entry]) -> None:
        """Remember how long steps took; call it between images."""
        for entry in entries:
            name, ms = time_name(entry), entry.own.settled_ms
            if not self._versions or ms is None:
                continue
            best = read(self._history.time_of(name))
            if best is None:
                self._history.time(name, {"ms": ms, "by": self._versions})
            elif best["by"] != self._versions:
                self._history.time(name, {"ms": ms, "by": self._versions, "before": best})
            elif ms < best["ms"]:
                self._history.time(name, {**best, "ms": ms})

    def slower(self, entry: Entry) -> Slower | None:
        """How steps of this shape take longer than they did; None where they do not, or nobody knows."""
        best, ms = read(self._history.time_of(time_name(entry))), entry.own.settled_ms
        if ms is not None:
            # The stopwatch knows of earlier images too.
            ms = entry.image_ms or ms
        if best is None or ms is None or best["by"] != self._versions:
            return None
        if ms > SLOWER_THAN_USUAL * best["ms"]:
            usual = f"{ms:.3g} ms, usually {best['ms']:.3g} ms"
            return Slower(f"slower than usual ({usual}): something else may use this device, or it is hot", True)
        before = read(best.get("before"))
        if before is None or best["ms"] <= SLOWER_SINCE * before["ms"]:
            return None
        changed = ", ".join(
            f"{what} ({before['by'].get(what)} to {version})" for what, version in self._versions.items()
            if before["by"].get(what) != version
        )
        times = f"{best['ms']:.3g} ms a step, before {before['ms']:.3g} ms"
        return Slower(f"slower since the update of {changed}: {times}", False)


def time_name(entry: Entry) -> str:
    """First resolution and architecture, by which it is purged; the digest tells the rest: how it is computed, and
    where."""
    key = entry.key
    digest = hashlib.sha256(f"{key!r} {entry.state.value} on {card_name(key.device)}".encode()).hexdigest()[:16]
    return f"{key.resolution} {key.architecture} {digest}"


def read(value: Any) -> dict[str, Any] | None:
    """A time that was remembered; None for anything else: anybody may have written it."""
    if isinstance(value, dict) and isinstance(value.get("ms"), float) and isinstance(value.get("by"), dict):
        return value if value["ms"] > 0 else None
    return None
