"""Idle warm-up: while nobody asks for images, the sizes that are used the most are made ready."""
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
            self._timer = threading.Timer(self._seconds, self._queue) if self._on else None
            if self._timer is not None:
                self._timer.name, self._timer.daemon = "onediff-idle", True
                self._timer.start()
        for job in self._warmup.jobs():
            if job.pending and job.source == SOURCE:
                self._warmup.cancel(job.id)

    def _queue(self) -> None:
        """Queue what is not ready: once for each time that nobody asks for images, so that sizes that do not fit beside
        each other do not take turns for ever."""
        if self._warmup.busy():
            self.disturb()
        try:
            rows, model = self._rows(), self._warmup.model
            missing = [wanted for wanted in self._most_used() if not is_ready(wanted, rows, model)]
            with self._lock:
                # Else somebody has disturbed it meanwhile.
                if self._timer is threading.current_thread():
                    for wanted in missing:
                        self._warmup.add([wanted.size], SOURCE, tokens=wanted.tokens)
        except ValueError as refusal:
            log.debug("idle warm-up: %s", refusal)
        except Exception:
            # Nobody asked for this now, so nobody is told but the log.
            log.exception("idle warm-up failed")


def is_ready(wanted: WantedSize, rows: list[ResolutionRow], model: str | None) -> bool:
    """Whether the usual call of a size is served by us in this process already. What is checked captures its graph in
    the next image."""
    return any(
        shape.state in USABLE and shape.tokens == wanted.tokens and shape.batch == 2 * wanted.size.batch
        for row in rows if row.resolution == wanted.size.resolution and row.model == model
        for shape in row.shapes
    )
