"""Limits for the connections to the demo: their number, how long a request may take to arrive, and how much is logged.

uvicorn itself waits for a request without a limit, and asyncio logs thousands of lines a second if the process has no
file descriptors left for connections.
"""
from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# The largest number of connections; a page has a few. asyncio accepts up to ACCEPTED_AT_ONCE new connections in each of
# several ROUNDS before Connection can count them; the uncounted connections need file descriptors too, and the rest of
# the process needs OTHER_FILES. If the process's limit leaves fewer, there are still FEWEST_CONNECTIONS.
MOST_CONNECTIONS = 256
ACCEPTED_AT_ONCE = 16
ROUNDS = 4
OTHER_FILES = 128
FEWEST_CONNECTIONS = 16
# The time for the head of a request to arrive, and for each BYTES_OF_PART of its body.
SECONDS_FOR_HEAD = 15.0
SECONDS_FOR_PART = 30.0
BYTES_OF_PART = 64 * 1024
# A connection without a request is not taken for an idle one for this time: the request may still be on its way.
SECONDS_ON_THE_WAY = 1.0
# At most MOST_LINES lines are logged in SECONDS_OF_LINES by the NOISY loggers, whose lines a request can cause.
MOST_LINES = 20
SECONDS_OF_LINES = 60.0
NOISY = ("uvicorn.error", "asyncio", "python_multipart.multipart")


def most_connections() -> int:
    """The number of connections to allow: as many as the process's limit of file descriptors leaves room for, from
    FEWEST_CONNECTIONS to MOST_CONNECTIONS."""
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
    """uvicorn's HTTP connection, which closes itself if a request arrives too slowly.

    If there are more than `most` with a new connection, an older one is closed: one with the lowest stage(); of
    several, one from the address that has the most connections; of these, the one whose stage began first.

    most: the number of connections that may be open; serve() sets it.
    """

    most = MOST_CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        """Called by asyncio for a new connection: start its time limit, and close an older one if there are too
        many."""
        super().connection_made(transport)
        self._phase: tuple[Any, int] = (None, 0)
        self._since = time.monotonic()
        self._requests = 0
        self._counted = 0
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None
        self._renew_time_limit()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the connection is closed."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio when bytes of a request arrive: count them and renew the time limit."""
        self._received += len(data)
        super().data_received(data)
        self._renew_time_limit()

    def on_response_complete(self) -> None:
        """Called by uvicorn when a request is answered: the connection waits for the next one."""
        super().on_response_complete()
        self._requests += 1
        self._renew_time_limit()

    def _renew_time_limit(self) -> None:
        """If the connection now waits for something else than before (a request's head, or the next part of its body),
        stop the earlier time limit and start a new one; none while a request is being answered. Called whenever data
        may have changed the state."""
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
        """Start the time limit for the next part (BYTES_OF_PART) of a request's body."""
        self._counted = self._received
        self._timer = self.loop.call_later(SECONDS_FOR_PART, self._end_of_part)

    def _end_of_part(self) -> None:
        """Called when the time for a part is over: close the connection if less than a part has arrived, unless the
        application does not read at the moment; otherwise wait for the next part."""
        # While the application does not read, the client cannot send.
        if self.flow.read_paused or self._received - self._counted >= BYTES_OF_PART:
            self._wait_for_part()
        else:
            self.transport.abort()

    def _stop_timer(self) -> None:
        """Stop the time limit, if one runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> None:
        """Close one of the older connections if there are more than `most`; the class's docstring tells which."""
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
        """The client's IP address; "" if unknown."""
        return self.client[0] if self.client else ""

    def stage(self, now: float) -> int:
        """What the connection is doing; a connection with a lower number is closed first. now: time.monotonic().

        0: waiting for a request. 1: waiting for a request's body. 2: waiting for one of the two, but for less than
        SECONDS_ON_THE_WAY. 3: answering a request.
        """
        stage = {h11.IDLE: 0, h11.SEND_BODY: 1}.get(self.conn.their_state)
        if stage is None:
            return 3
        return 2 if now - self._since < SECONDS_ON_THE_WAY else stage


class FewLines(logging.Filter):
    """A log filter that lets through MOST_LINES lines in SECONDS_OF_LINES, so that a client that sends nonsense cannot
    fill the disk. The last line before some are left out has a remark about it."""

    def __init__(self) -> None:
        super().__init__()
        self._times: deque[float] = deque(maxlen=MOST_LINES)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line may be logged. Writes the remark into the record of the last line that may."""
        now = time.monotonic()
        if len(self._times) == MOST_LINES and now - self._times[0] < SECONDS_OF_LINES:
            return False
        self._times.append(now)
        if len(self._times) == MOST_LINES and now - self._times[0] < SECONDS_OF_LINES:
            record.msg = f"{record.getMessage()} (More of these are left out for a minute.)"
            record.args = ()
        return True
