"""One generation at a time, in the order in which they were asked for."""
from __future__ import annotations

import threading
from collections import deque


class TurnLock:
    """A lock that goes to whoever has waited longest."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Event] = deque()

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> None:
        turn = threading.Event()
        with self._guard:
            if self._is_held:
                self._waiting.append(turn)
            else:
                self._is_held = True
                turn.set()
        turn.wait()

    def __exit__(self, *exception: object) -> None:
        with self._guard:
            if self._waiting:
                # It is held on, by the next.
                self._waiting.popleft().set()
            else:
                self._is_held = False


queue_lock = TurnLock()
