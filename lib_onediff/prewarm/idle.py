"""Idle warm-up: while nobody asks for images, the sizes that are used the most are made ready, one at a time."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..core.table import State
from ..runtime.rows import ResolutionRow
from .presets import WantedSize
from .worker import WarmUp

log = logging.getLogger("onediff")
SOURCE = "idle"
SECONDS_UNTIL_IDLE = 60.0
SECONDS_BETWEEN_LOOKS = 0.5
USABLE = (State.READY.value, State.PROVED.value)
STOP_SECONDS = 5.0


class IdleWarmUp:
    """Its thread lives while the setting is on. Safe to use from any thread."""

    def __init__(
        self, warmup: WarmUp, rows: Callable[[], list[ResolutionRow]], most_used: Callable[[], list[WantedSize]],
        seconds: float = SECONDS_UNTIL_IDLE,
    ) -> None:
        """rows: what is known of every resolution now. most_used: what to make ready, the best first. seconds: without
        an image, before it begins."""
        self._warmup = warmup
        self._rows = rows
        self._most_used = most_used
        self._seconds = seconds
        self._unfinished: set[WantedSize] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._disturbed = threading.Event()

    def follow(self, on: bool) -> None:
        """Begin, or end, as the setting says; safe to call again."""
        with self._lock:
            if on and self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._ended,), name="onediff-idle", daemon=True
                )
                self._thread.start()
        if not on:
            self.stop()

    def disturb(self) -> None:
        """An image begins or ends: what idle warm-up has queued goes, and it waits anew."""
        if self._thread is not None:
            self._disturbed.set()
            self._cancel()

    def stop(self) -> None:
        """End, with what was queued; waits a few seconds at most for the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._ended.set()
        self._disturbed.set()
        self._cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)

    def _cancel(self) -> None:
        for job in self._warmup.jobs():
            if job.pending and job.source == SOURCE:
                self._warmup.cancel(job.id)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self._disturbed.clear()
            if ended.is_set():
                return
            if self._disturbed.wait(self._seconds) or ended.is_set() or self._warmup.busy():
                continue
            try:
                self._make_ready(ended)
            except Exception:
                # Nobody asked for this now, so nobody is told but the log.
                log.exception("idle warm-up failed")
            while not self._disturbed.wait(self._seconds) and not ended.is_set():
                pass  # Once for each time that nobody asks for images.

    def _make_ready(self, ended: threading.Event) -> None:
        """Warm up what is not ready, until an image is asked for, or until something else had to go for it."""
        for wanted in self._most_used():
            rows = self._rows()
            if wanted not in self._unfinished and is_ready(wanted, rows, self._warmup.model):
                continue
            if self._disturbed.is_set() or ended.is_set():
                return
            before = count_ready(rows)
            self._unfinished.add(wanted)
            try:
                (job,) = self._warmup.add([wanted.size], SOURCE, tokens=wanted.tokens)
            except ValueError as refusal:
                log.debug("idle warm-up: %s", refusal)
                return
            while any(now.id == job.id and now.pending for now in self._warmup.jobs()):
                if self._disturbed.wait(SECONDS_BETWEEN_LOOKS) or ended.is_set():
                    self._cancel()
                    return
            self._unfinished.discard(wanted)
            if count_ready(self._rows()) <= before:
                return


def is_ready(wanted: WantedSize, rows: list[ResolutionRow], model: str | None) -> bool:
    """Whether the usual call of a size is served by us in this process already."""
    return any(
        shape.state in USABLE and shape.tokens == wanted.tokens and shape.batch == 2 * wanted.size.batch
        for row in rows if row.resolution == wanted.size.resolution and row.model == model
        for shape in row.shapes
    )


def count_ready(rows: list[ResolutionRow]) -> int:
    """How many kinds of calls are served by us, and how many of them by a graph: each counts."""
    states = [shape.state for row in rows if not row.is_decode for shape in row.shapes]
    return sum(states.count(state) for state in USABLE) + states.count(State.READY.value)
