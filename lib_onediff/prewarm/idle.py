"""Idle warm-up: while nobody asks for images, the sizes that are used the most are made ready, one at a time."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..core.sizes import WantedSize
from ..core.table import State
from ..runtime.rows import ResolutionRow
from .worker import WarmUp

log = logging.getLogger("onediff")
SOURCE = "idle"
SECONDS_UNTIL_IDLE = 60.0
SECONDS_BETWEEN_LOOKS = 0.5
USABLE = (State.READY.value, State.PROVED.value)


class IdleWarmUp:
    """A timer that runs while the setting is on, and begins anew with every image. Safe to use from any thread."""

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
        self._on = False
        self._timer: threading.Timer | None = None

    def follow(self, on: bool) -> None:
        """Begin, or end, as the setting says; safe to call again."""
        if on != self._on:
            self._on = on
            self.disturb()

    def stop(self) -> None:
        """End, with what was queued."""
        self.follow(False)

    def disturb(self) -> None:
        """An image begins or ends: what idle warm-up has queued goes, and it waits anew."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._seconds, self._make_ready) if self._on else None
            if self._timer is not None:
                self._timer.name, self._timer.daemon = "onediff-idle", True
                self._timer.start()
        self._cancel()

    def _cancel(self) -> None:
        for job in self._warmup.jobs():
            if job.pending and job.source == SOURCE:
                self._warmup.cancel(job.id)

    # --- the timer's thread ---------------------------------------------------------------------------------------

    def _make_ready(self) -> None:
        """Warm up what is not ready, until an image is asked for, or until something else had to go for it.

        That is once for each time that nobody asks for images.
        """
        # A timer that is cancelled has finished.
        disturbed: threading.Event = threading.current_thread().finished  # type: ignore[attr-defined]
        try:
            if self._warmup.busy():
                self.disturb()
            for wanted in self._most_used():
                if disturbed.is_set():
                    return
                rows = self._rows()
                if wanted in self._unfinished or not is_ready(wanted, rows, self._warmup.model):
                    self._warm(wanted, disturbed)
                    if count_ready(self._rows()) <= count_ready(rows):
                        return
        except ValueError as refusal:
            log.debug("idle warm-up: %s", refusal)
        except Exception:
            # Nobody asked for this now, so nobody is told but the log.
            log.exception("idle warm-up failed")

    def _warm(self, wanted: WantedSize, disturbed: threading.Event) -> None:
        """Make one size ready. Raises ValueError where nothing can be made ready."""
        self._unfinished.add(wanted)
        (job,) = self._warmup.add([wanted.size], SOURCE, tokens=wanted.tokens)
        while any(now.id == job.id and now.pending for now in self._warmup.jobs()):
            if disturbed.wait(SECONDS_BETWEEN_LOOKS):
                self._warmup.cancel(job.id)
                return
        self._unfinished.discard(wanted)


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
