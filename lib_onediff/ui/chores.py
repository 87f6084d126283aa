"""Work that waits until no picture is being made, without a request of the page that waits for it."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ..guard import first_line, outcome_of

log = logging.getLogger("onediff")
Exclusively = Callable[[Callable[[], Any]], Any]


class Chore:
    """A piece of work in a thread of its own."""

    def __init__(self, name: str, exclusively: Exclusively, work: Callable[[], str]) -> None:
        """name: for people. exclusively: runs work while the WebUI makes no picture. work: returns what to tell."""
        self.name = name
        self.failed = False
        self._told = ""
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(exclusively, work), name=f"onediff-{name.split(' ')[0].lower()}", daemon=True
        )
        self._thread.start()

    def told(self, seconds: float = 0.0) -> str | None:
        """What came of it; None while it is not over, for which this waits at most so long."""
        return self._told if self._over.wait(seconds) else None

    def _run(self, exclusively: Exclusively, work: Callable[[], str]) -> None:
        try:
            # Forge prints a traceback for what is raised in its main thread.
            self._told = exclusively(lambda: outcome_of(work)).result()
        except Exception as error:
            log.exception("%s failed", self.name)
            self.failed = True
            self._told = f"{self.name} failed: {first_line(error)}."
        finally:
            self._over.set()
