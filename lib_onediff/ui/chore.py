"""Work that waits for its turn between two images, while the page goes on."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ..core.guard import first_line
from ..core.refusal import NotKept

log = logging.getLogger("onediff")
# Runs work while the WebUI makes no image, and returns what work returns.
Exclusively = Callable[[Callable[[], Any]], Any]


class Chore:
    """Work in a thread of its own: no request of the page waits for it.

    outcome: what came of it once it is over; a sentence for the user where it failed.
    """

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        """name: for people, such as "Purging"."""
        self.name, self.failed = name, False
        self.outcome: Any = None
        self._work, self._over = work, threading.Event()
        threading.Thread(target=self._run, name=f"onediff-{name.split(' ')[0].lower()}", daemon=True).start()

    def over(self, seconds: float = 0.0) -> bool:
        """Whether it is over, for which this waits at most so long."""
        return self._over.wait(seconds)

    def _run(self) -> None:
        try:
            self.outcome = self._work()
        except NotKept as problem:
            self.failed, self.outcome = True, str(problem)
        except Exception as error:
            log.exception("%s failed", self.name)
            self.failed, self.outcome = True, f"{self.name} failed: {first_line(error)}."
        finally:
            self._over.set()
