"""Time UNet calls without making anybody wait."""
from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Stopwatch:
    """The last times of one thing, in milliseconds. On a GPU it reads events only once they have happened."""

    def __init__(self, kept: int = 32) -> None:
        self._times: deque[float] = deque(maxlen=kept)
        # A page and the runtime may ask at once.
        self._reading = threading.Lock()
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=kept)

    def time(self, device: torch.device, work: Callable[[], Result]) -> Result:
        if device.type != "cuda":
            start = time.perf_counter()
            result = work()
            self._times.append((time.perf_counter() - start) * 1e3)
            return result
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = work()
        end.record()
        self._pending.append((begin, end))
        return result

    def remember(self, milliseconds: float) -> None:
        """Count what another process has measured."""
        self._times.append(milliseconds)

    @property
    def median_ms(self) -> float | None:
        with self._reading:
            while self._pending and self._pending[0][1].query():
                begin, end = self._pending.popleft()
                self._times.append(begin.elapsed_time(end))
        return statistics.median(self._times) if self._times else None
