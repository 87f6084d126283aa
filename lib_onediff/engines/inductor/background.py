"""A thread for long work that nobody waits for when the program ends."""
from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """Does one thing after the other, in the order in which they come. An executor would hold the program's end up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        """Begin work(*given) when all that came before it is done; what ends with it."""
        future: Future[Any] = Future()
        self._waiting.put((future, work, given))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            future, work, given = self._waiting.get()
            try:
                result = work(*given)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # What is done is not kept until the next work comes.
            del future, work, given
