"""The queue: one generation at a time, in the order of asking."""
from __future__ import annotations

import threading
from collections import deque


class FIFOLock:
    """A lock that is granted in the order in which threads asked for it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Event] = deque()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; without blocking, False when another thread has it."""
        with self._guard:
            if not self._held:
                self._held = True
                return True
            if not blocking:
                return False
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()
        return True

    def release(self) -> None:
        """Hand the lock to the thread that has waited longest."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


queue_lock = FIFOLock()
