"""Work between two pictures, for callers that do not wait for ever."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

MOST_WAITING = 8
Result = TypeVar("Result")


class Busy(Exception):
    """The turn did not come in time, and nothing was done; the message is one sentence."""


class Turns:
    """Hands work to exclusively(), which waits for the picture in progress however long that takes."""

    def __init__(self, exclusively: Callable[[Callable[[], Any]], Any]) -> None:
        self._exclusively = exclusively
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    def run(self, work: Callable[[], Result], seconds: float) -> Result:
        """What work() returns or raises; it begins within so many seconds, or not at all. Raises Busy."""
        if not self._waiting.acquire(blocking=False):
            raise Busy("Too many requests wait for the picture in progress; try again when it is done.")
        turn: Future[Result] = Future()
        threading.Thread(target=self._wait, args=(turn, work), name="onediff-api", daemon=True).start()
        try:
            return turn.result(seconds)
        except NotInTime:
            if turn.cancel():
                raise Busy(
                    f"A picture is being made and was not done after {seconds:g} s, so nothing was changed; try again, "
                    "or give a longer wait."
                ) from None
        return turn.result()

    def _wait(self, turn: Future[Result], work: Callable[[], Result]) -> None:
        try:
            self._exclusively(lambda: carry_out(turn, work))
        except Exception as error:
            with contextlib.suppress(InvalidStateError):
                turn.set_exception(error)
        finally:
            self._waiting.release()


def carry_out(turn: Future[Result], work: Callable[[], Result]) -> None:
    """Do the work of a turn, unless nobody waits for it any more."""
    if not turn.set_running_or_notify_cancel():
        return
    try:
        turn.set_result(work())
    except Exception as error:
        turn.set_exception(error)
