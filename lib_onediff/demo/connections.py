"""Connections to the demo: no more than the process has files for, none waited for without an end, few lines about it.

uvicorn waits for ever for a request that does not come, and asyncio writes thousands of lines a second where there are
no files left for connections.
"""
from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# A page holds a few. asyncio accepts those that come at once before it counts them, some rounds long: they need files
# too, as everything else does.
MOST_CONNECTIONS = 256
ACCEPTED_AT_ONCE = 16
ROUNDS = 4
OTHER_FILES = 128
FEWEST_CONNECTIONS = 16
# For the head of a request; and for each next so many bytes of its body.
SECONDS_FOR_HEAD = 15.0
SECONDS_FOR_PART = 30.0
BYTES_OF_PART = 64 * 1024
# What has just been connected may have sent what has not arrived yet.
SECONDS_ON_THE_WAY = 1.0
# Of lines that any request can cause.
MOST_LINES = 20
SECONDS_OF_LINES = 60.0
NOISY = ("uvicorn.error", "asyncio", "python_multipart.multipart")


def most_connections() -> int:
    """How many connections the process has files for."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(FEWEST_CONNECTIONS, min(MOST_CONNECTIONS, files - OTHER_FILES - ROUNDS * ACCEPTED_AT_ONCE))


class Connection(H11Protocol):
    """uvicorn's HTTP connection. It is closed where a request comes too slowly, and where there are too many: those
    without a request first, then those without all of its body, then those that were just made, and those that are
    being answered last; of these the oldest of the busiest address."""

    most = MOST_CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._phase: tuple[Any, int] = (None, 0)
        self._since = time.monotonic()
        self._requests = 0
        self._counted = 0
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._requests += 1
        self._look()

    def _look(self) -> None:
        """Wait anew where something else is waited for than before."""
        phase = self.conn.their_state, self._requests
        if phase == self._phase:
            return
        self._phase = phase
        self._since = time.monotonic()
        self._stop_timer()
        if phase[0] is h11.IDLE:
            self._timer = self.loop.call_later(SECONDS_FOR_HEAD, self.transport.abort)
        elif phase[0] is h11.SEND_BODY:
            self._wait_for_part()

    def _wait_for_part(self) -> None:
        self._counted = self._received
        self._timer = self.loop.call_later(SECONDS_FOR_PART, self._end_of_part)

    def _end_of_part(self) -> None:
        # Where the application does not read, the client cannot send.
        if self.flow.read_paused or self._received - self._counted >= BYTES_OF_PART:
            self._wait_for_part()
        else:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> None:
        present = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(present) <= self.most:
            return
        by_address = Counter(one.address for one in present)
        others = [one for one in present if one is not self]
        now = time.monotonic()
        victim = min(others, key=lambda one: (one.stage(now), -by_address[one.address], one._since))
        victim.transport.abort()

    @property
    def address(self) -> str:
        """Whose it is."""
        return self.client[0] if self.client else ""

    def stage(self, now: float) -> int:
        """0: a request is waited for; 1: its body; 2: either, and it may be on its way; 3: it is being answered."""
        stage = {h11.IDLE: 0, h11.SEND_BODY: 1}.get(self.conn.their_state)
        if stage is None:
            return 3
        return 2 if now - self._since < SECONDS_ON_THE_WAY else stage


class FewLines(logging.Filter):
    """Lets some lines through in any minute: whoever sends nonsense must not fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._times: deque[float] = deque(maxlen=MOST_LINES)

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if len(self._times) == MOST_LINES and now - self._times[0] < SECONDS_OF_LINES:
            return False
        self._times.append(now)
        if len(self._times) == MOST_LINES and now - self._times[0] < SECONDS_OF_LINES:
            record.msg = f"{record.getMessage()} (More of these are left out for a minute.)"
            record.args = ()
        return True
