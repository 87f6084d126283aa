"""Keeps page and server to themselves: gradio's page asks a font service and a script host, and gradio fetches what a
request names; here nobody is asked."""
from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NoReturn

import httpx
from gradio import processing_utils

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

FOREIGN_ELEMENTS = re.compile(
    rb"""<link\s[^>]*rel="preconnect"[^>]*/?>|<script\s[^>]*src="https?://[^"]*"[^>]*>\s*</script>|<meta\s[^>]*content="https?://[^"]*"[^>]*/?>"""
)
POLICY = (
    b"default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'self'"
)


class OwnResourcesOnly:
    """ASGI middleware: takes references to other hosts out of HTML pages and forbids the browser to follow any."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Any, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/":
            await self.app(scope, receive, send)
            return
        start: Message = {}
        body = bytearray()

        async def collect(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body.extend(message.get("body", b""))
            if not message.get("more_body"):
                page = FOREIGN_ELEMENTS.sub(b"", bytes(body))
                await send({**start, "headers": own_headers(start["headers"], len(page))})
                await send({"type": "http.response.body", "body": page})

        await self.app(scope, receive, collect)


def own_headers(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """The answer's headers with its new length and the policy."""
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode()), (b"content-security-policy", POLICY)]


class NoNetwork(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """What gradio sends its requests with: a file that a client names by an address is not there."""

    def handle_request(self, request: httpx.Request) -> NoReturn:
        raise httpx.ConnectError("This host fetches no addresses.", request=request)

    async def handle_async_request(self, request: httpx.Request) -> NoReturn:
        self.handle_request(request)


def fetch_nothing() -> None:
    """Keep gradio in this process from fetching the addresses that a request gives for files."""
    processing_utils.sync_client = httpx.Client(transport=NoNetwork())
    processing_utils.async_client = httpx.AsyncClient(transport=NoNetwork())
