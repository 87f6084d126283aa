"""Waiting for a state on a machine that does other work too."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

# What was measured on an idle machine takes so many times as long beside the tests' other processes.
LEAST_PATIENCE = 3.0
# No wait is given up before this: a busy machine may stand still for that long.
LEAST_SECONDS = 120.0


def patience() -> float:
    """How many times as long as an idle machine this one may take now: it grows with the processes for each core."""
    if not hasattr(os, "getloadavg"):
        return LEAST_PATIENCE
    return max(LEAST_PATIENCE, 3 * os.getloadavg()[0] / (os.cpu_count() or 1))


def attempts(seconds: float, pause: float = 0.05, least: float = LEAST_SECONDS) -> Iterator[None]:
    """Turns of a loop that waits for a state. seconds: how long an idle machine may take; a busy one gets more."""
    began = time.monotonic()
    while time.monotonic() - began < max(seconds * patience(), least):
        yield
        time.sleep(pause)


def until(condition: Callable[[], Any], what: Any = "", seconds: float = 60, pause: float = 0.05) -> Any:
    """The first value of condition() that is true. AssertionError with what was awaited where there is none. what: a
    text, or a function that says it in the end."""
    for _ in attempts(seconds, pause):
        value = condition()
        if value:
            return value
    raise AssertionError(f"waited in vain for {what() if callable(what) else what}")
