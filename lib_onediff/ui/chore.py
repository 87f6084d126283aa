"""Work that waits for its turn between two images, while the page goes on."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ..core.guard import first_line
from ..core.refusal import NotKept

log = logging.getLogger("onediff")


def attempted(name: str, work: Callable[[], Any]) -> tuple[Any, bool]:
    """What work returns, or a sentence for the user where it fails; and whether it has. name: for people, such as
    "Purging"."""
    try:
        return work(), False
    except NotKept as problem:
        return str(problem), True
    except Exception as error:
        log.exception("%s failed", name)
        return f"{name} failed: {first_line(error)}.", True


class Chore:
    """Work in a thread of its own: no request of the page waits for it.

    outcome: what came of it once it is over; a sentence for the user where it failed.
    """

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        """name: see attempted."""
        self.name = name
        self.failed = False
        self.outcome: Any = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"onediff-{name.split(' ')[0].lower()}", daemon=True)
        self._thread.start()

    def over(self, seconds: float = 0.0) -> bool:
        """Whether it is over, for which this waits at most so long."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self.outcome, self.failed = attempted(self.name, self._work)
