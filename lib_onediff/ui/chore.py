"""Work in the background of a page, such as a purge that waits for the image in progress."""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ..core.guard import first_line
from ..core.refusal import NotKept

log = logging.getLogger("onediff")


class Chore:
    """Work in a thread of its own, which starts when this object is made. A request of the page can wait for a part of
    the work's time (over), and leave the rest to later requests.

    name: for users and the log, for example "Purging".
    failed: whether the work has raised an exception; False while it runs.
    outcome: what the work returned, or a sentence for the user if it failed; None while it runs.
    """

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self.failed = False
        self.outcome: Any = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"onediff-{name.split(' ')[0].lower()}", daemon=True)
        self._thread.start()

    def over(self, seconds: float = 0.0) -> bool:
        """Whether the work has returned or failed. Waits at most this many seconds for that."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """The body of the thread: run the work, and keep its result or a sentence on its failure. The message of a
        NotKept is for users as it is; any other exception is also logged with its traceback."""
        try:
            self.outcome = self._work()
        except NotKept as problem:
            self.failed = True
            self.outcome = str(problem)
        except Exception as error:
            log.exception("%s failed", self.name)
            self.failed = True
            self.outcome = f"{self.name} failed: {first_line(error)}."
