"""Connections to the demo's server: clients that send nothing, send slowly, or do not read do not block others. "Head"
is the request line with the headers."""
from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import uvicorn

from lib_onediff.demo import connections
from lib_onediff.demo.connections import ACCEPTED_AT_ONCE, Connection, FewLines

MOST = 20
SILENT = 250
SECONDS = 20
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def application(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """The application behind the server: its response is the number of bytes in the request's body. The response of
    /stream never ends."""
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size = size + len(message["body"])
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    is_stream = scope["path"] == "/stream"
    await send({"type": "http.response.body", "body": b"%d\n" % size, "more_body": is_stream})
    while is_stream and (await receive())["type"] != "http.disconnect":
        pass


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server that keeps at most 20 connections (MOST), with time limits of a second or less."""
    monkeypatch.setattr(connections, "SECONDS_FOR_HEAD", 1.0)
    monkeypatch.setattr(connections, "SECONDS_FOR_PART", 0.5)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    config = uvicorn.Config(
        application, log_level="warning", access_log=False, ws="none", lifespan="off", backlog=ACCEPTED_AT_ONCE,
        http=type("Connection", (Connection,), {"most": MOST}),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(SECONDS)
    listener.close()


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(sent)
    return connection


def answer(port: int, request: bytes = GET) -> bytes:
    with connect(port, request) as connection:
        return connection.recv(4096)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection. Reads and drops what it has sent."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


BODY = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
WAITING = {"nothing": b"", "half a head": b"GET / HTTP/1.1\r\nHost: loc", "half a body": BODY + b"x",
           "a stream that is not read": GET.replace(b"/ ", b"/stream ")}


@pytest.mark.parametrize("sent", WAITING.values(), ids=WAITING)
def test_250_idle_connections_do_not_block_a_request(
    port: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When new connections come, the server closes the oldest ones above MOST. The time limits are too long here to
    close any. sent: what each of the 250 clients has sent before it waits."""
    monkeypatch.setattr(connections, "SECONDS_FOR_HEAD", 60.0)
    monkeypatch.setattr(connections, "SECONDS_FOR_PART", 60.0)
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(SILENT):
            opened.append(stack.enter_context(connect(port)))
            opened[-1].sendall(sent)
            if number % 50 == 49:
                assert answer(port).startswith(b"HTTP/1.1 200")
        assert answer(port).startswith(b"HTTP/1.1 200")
        for connection in opened:
            connection.settimeout(0.01)
        left = [connection for connection in opened if not is_closed(connection)]
        assert MOST // 2 < len(left) <= MOST


def test_connections_without_a_request_are_closed_before_those_with_one(port: int) -> None:
    """A stream stays open while 40 connections without a request come: the client's own timeout ends its reading, and
    not a closed connection."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(connect(port, GET.replace(b"/ ", b"/stream ")))
        assert stream.recv(4096).startswith(b"HTTP/1.1 200")
        for _ in range(2 * MOST):
            stack.enter_context(connect(port))
        assert answer(port).startswith(b"HTTP/1.1 200")
        stream.settimeout(0.2)
        with pytest.raises(TimeoutError):
            while stream.recv(4096):
                pass


@pytest.mark.parametrize("first", [b"", GET], ids=["at first", "after an answer"])
def test_a_connection_whose_head_arrives_byte_by_byte_is_closed(port: int, first: bytes) -> None:
    """No byte is late, but the head as a whole takes longer than its time limit. first: a whole request that is sent
    before the slow one on the same connection, or nothing."""
    with connect(port, first) as connection:
        if first:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            for letter in b"GET / HTTP/1.1\r\nX: " + b"x" * 1000:
                connection.sendall(bytes([letter]))
                time.sleep(0.05)
                assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("at_once", [0, 200_000])
def test_a_connection_whose_body_arrives_byte_by_byte_is_closed(port: int, at_once: int) -> None:
    """Each part of 64 KiB of a body has a time limit. at_once: how many bytes of the body are sent at once before the
    slow ones."""
    with connect(port, BODY + b"x" * at_once) as connection:
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < SECONDS:
                connection.sendall(b"x")
                time.sleep(0.05)


def test_a_large_body_that_arrives_steadily_is_accepted(port: int) -> None:
    """It takes a second, which is longer than the time limit of each part, 0.5 s here."""
    with connect(port, BODY) as connection:
        for _ in range(10):
            connection.sendall(b"x" * 100_000)
            time.sleep(0.1)
        assert b"1000000" in connection.recv(4096) + connection.recv(4096)


def test_a_connection_on_which_nothing_is_sent_is_closed_after_the_time_limit(port: int) -> None:
    with connect(port) as connection:
        assert is_closed(connection)


def test_a_hundred_invalid_requests_log_only_a_few_lines(port: int) -> None:
    """Each gets status 400. MOST_LINES lines are logged, of which the last says that further ones are left out."""
    lines: list[str] = []
    logger = logging.getLogger("uvicorn.error")
    few = FewLines()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addFilter(few)
    logger.addHandler(handler)
    try:
        for _ in range(100):
            assert answer(port, b"\x00\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    finally:
        logger.removeFilter(few)
        logger.removeHandler(handler)
    assert len(lines) == connections.MOST_LINES and "left out" in lines[-1]


def test_the_limit_of_connections_follows_the_limit_of_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is between 16 and 256, and leaves descriptors for other files and for connections that are being
    accepted. files: the limit of descriptors. most: the limit of connections."""
    resource = pytest.importorskip("resource")
    for files, most in ((256, 64), (1024, 256), (100, 16), (resource.RLIM_INFINITY, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, files=files: (files, files))
        assert connections.most_connections() == most
