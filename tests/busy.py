"""Waits for a state on a machine that does other work too."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

# How many times longer than on an idle machine work takes beside the tests' other processes.
LEAST_PATIENCE = 3.0
# No wait ends before this, because a busy machine may stall for so long.
LEAST_SECONDS = 120.0


def patience() -> float:
    """How many times as long as an idle machine this one may take: it grows with the number of processes per core."""
    if not hasattr(os, "getloadavg"):
        return LEAST_PATIENCE
    return max(LEAST_PATIENCE, 3 * os.getloadavg()[0] / (os.cpu_count() or 1))


def attempts(seconds: float, pause: float = 0.05, least: float = LEAST_SECONDS) -> Iterator[None]:
    """Iterations of a loop that waits for a state. seconds: the limit on an idle machine; a busy one gets more."""
    began = time.monotonic()
    while time.monotonic() - began < max(seconds * patience(), least):
        yield
        time.sleep(pause)


def until(condition: Callable[[], Any], what: Any = "", seconds: float = 60, pause: float = 0.05) -> Any:
    """The first value of condition() that is true. Raises AssertionError with `what`, a text or a function that returns
    one, after the time limit."""
    for _ in attempts(seconds, pause):
        value = condition()
        if value:
            return value
    raise AssertionError(f"waited in vain for {what() if callable(what) else what}")
