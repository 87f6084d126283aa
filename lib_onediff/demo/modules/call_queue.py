"""The queue: one generation at a time, in the order of asking."""
from __future__ import annotations

import threading


class FIFOLock:
    """A lock that is granted in the order in which threads asked for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._served = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; without blocking, False when another thread has it."""
        with self._changed:
            if not blocking and self._next != self._served:
                return False
            ticket = self._next
            self._next += 1
            return self._changed.wait_for(lambda: self._served == ticket)

    def release(self) -> None:
        """Hand the lock to the thread that has waited longest."""
        with self._changed:
            self._served += 1
            self._changed.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


queue_lock = FIFOLock()
