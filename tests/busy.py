"""Loops that wait for a state, with time limits that grow with the load of the machine."""
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
    """The factor by which time limits are longer than on an idle machine: three times the running processes per core,
    and at least LEAST_PATIENCE."""
    if not hasattr(os, "getloadavg"):
        return LEAST_PATIENCE
    return max(LEAST_PATIENCE, 3 * os.getloadavg()[0] / (os.cpu_count() or 1))


def attempts(seconds: float, pause: float = 0.05, least: float = LEAST_SECONDS) -> Iterator[None]:
    """Yield until the time limit, with `pause` seconds after each iteration, for a loop that waits for a state.

    seconds: the limit on an idle machine, which is multiplied by patience(). least: no limit is shorter.
    """
    began = time.monotonic()
    while time.monotonic() - began < max(seconds * patience(), least):
        yield
        time.sleep(pause)


def until(condition: Callable[[], Any], what: Any = "", seconds: float = 60, pause: float = 0.05) -> Any:
    """Call condition() until its value is true, and return this value.

    Raises AssertionError after the time limit (see attempts). what: the text of the error, or a function that returns
    it.
    """
    for _ in attempts(seconds, pause):
        value = condition()
        if value:
            return value
    raise AssertionError(f"waited in vain for {what() if callable(what) else what}")
