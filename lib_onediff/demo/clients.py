"""Pictures for clients of the API: each waits its turn without keeping anybody else from an answer, and may leave."""
from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from .modules import shared
from .refusal import Refusal

MOST_WAITING = 64
SECONDS_BETWEEN_LOOKS = 0.2
Result = TypeVar("Result")


class Client:
    """Somebody who waits for pictures. Who leaves gets none, and nobody else loses one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = self._served = False

    def leave(self) -> None:
        """End what is being made for this client, and begin nothing more."""
        with self._lock:
            self._left = True
            if self._served:
                shared.state.interrupt()

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Stands around the making of the pictures. Raises Refusal where nobody waits for them any more."""
        with self._lock:
            if self._left:
                raise Refusal("The client has left.", status=499)
            self._served = True
        try:
            yield
        finally:
            with self._lock:
                self._served = False


class WaitingRoom:
    """Threads of its own for the requests that wait: the server's are few, and interrupt and progress need them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_WAITING, "onediff-pictures")
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    async def make(self, request: Request, work: Callable[[Client], Result]) -> Result:
        """What work() returns or raises. Raises Refusal where too many wait, or where the client has gone."""
        if not self._waiting.acquire(blocking=False):
            raise Refusal(f"{MOST_WAITING} requests wait already; try again when there are fewer.", status=503)
        client = Client()
        future = self._threads.submit(work, client)
        future.add_done_callback(lambda done: self._waiting.release())
        made = asyncio.wrap_future(future)
        while not (await asyncio.wait([made], timeout=SECONDS_BETWEEN_LOOKS))[0]:
            if await request.is_disconnected():
                client.leave()
                # Nobody looks at what becomes of it.
                made.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise Refusal("The client has left.", status=499)
        return made.result()
