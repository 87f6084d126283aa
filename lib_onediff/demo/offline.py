"""What gradio would do and this host does not: ask other hosts, fetch what a request names, open any file as an image.
"""
from __future__ import annotations

import re
import warnings
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NoReturn

import httpx
from gradio import processing_utils
from PIL import Image

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

FOREIGN_ELEMENTS = re.compile(
    rb"""<link\s[^>]*rel="preconnect"[^>]*/?>|<script\s[^>]*src="https?://[^"]*"[^>]*>\s*</script>|<meta\s[^>]*content="https?://[^"]*"[^>]*/?>"""
)
POLICY = (
    b"default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'self'"
)
FORMATS = ("PNG", "JPEG", "WEBP")
# Of the image that a file's header promises: a few KiB may hold gigabytes.
MOST_PIXELS = 32 << 20


class OwnResourcesOnly:
    """ASGI middleware: takes references to other hosts out of the page and forbids the browser to follow any."""

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
                kept = [header for header in start["headers"] if header[0].lower() != b"content-length"]
                added = [(b"content-length", str(len(page)).encode()), (b"content-security-policy", POLICY)]
                await send({**start, "headers": [*kept, *added]})
                await send({"type": "http.response.body", "body": page})

        await self.app(scope, receive, collect)


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


def limit_pillow() -> None:
    """Have Pillow read FORMATS alone in this process, and nothing larger than MOST_PIXELS.

    It reads dozens, some of them by code that nobody looks after.
    """
    Image.init()
    Image.ID[:] = FORMATS
    for name in Image.OPEN.keys() - set(FORMATS):
        del Image.OPEN[name]
    # From here on it warns, and at the double it raises.
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
