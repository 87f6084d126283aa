"""The lock that lets one generation run at a time, in the order of the requests."""
from __future__ import annotations

import threading
from collections import deque


class TurnLock:
    """A lock for `with`, which goes to the thread that has waited longest. It is not reentrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Event] = deque()

    def locked(self) -> bool:
        """Whether any thread holds the lock."""
        return self._is_held

    def __enter__(self) -> None:
        """Wait until it is this thread's turn."""
        turn = threading.Event()
        with self._guard:
            if self._is_held:
                self._waiting.append(turn)
            else:
                self._is_held = True
                turn.set()
        turn.wait()

    def __exit__(self, *exception: object) -> None:
        """Give the lock to the thread that has waited longest, or free it."""
        with self._guard:
            if self._waiting:
                # The next thread holds it now, so _is_held stays True.
                self._waiting.popleft().set()
            else:
                self._is_held = False


queue_lock = TurnLock()
