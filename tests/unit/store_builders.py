"""Histories in a folder, as other processes would open them, and rows and entries for them."""
from __future__ import annotations

import threading
from pathlib import Path

from lib_onediff.core.key import ShapeKey
from lib_onediff.core.table import Entry, Verdict
from lib_onediff.store.history import History, HistoryRow

FILE = "onediff-2-1.sqlite3"
NEXT_FILE = "onediff-2-2.sqlite3"


def opened(folder: Path, machine: str = "") -> History:
    """A new History of this folder. The writes that earlier Histories have put off are made first."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.name == "onediff-history":
            thread.cancel()
            thread.function()
    history = History()
    history.open(folder, machine=machine)
    return history


def row(resolution: str = "512x512", architecture: str = "sd1", **values: float | None) -> HistoryRow:
    """A row of one shape, as a History stores it. values: others of its fields."""
    return HistoryRow(architecture, "SD1", resolution, 2, 77, "float16", **{"last_used": 1000.0, **values})


def uses(history: History) -> dict[str, int]:
    """The number of uses of each resolution."""
    return {found.resolution: found.uses for found in history.rows()}


def checked(key: ShapeKey) -> Entry:
    """An entry whose output was compared with the host's and is close to it."""
    return Entry(key, weights="weights and sources", verdict=Verdict(relative_error=1e-3))
