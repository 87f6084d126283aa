"""Stop what takes too long, in this very process."""
from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class OutOfTime(BaseException):
    """Not an Exception: Neo's Torch Compile has torch swallow those and carry on."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside when they are over; on the main thread alone. 0: no limit."""

    def over(signum: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
