"""The checks of every request before the API or the page handles it: its sender, its content and its size.

Browsers tell of the page that sends a request in Origin, Sec-Fetch-Site and Host; programs do not.
"""
from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from .bodies import refusal

READING = ("GET", "HEAD")
# Of web sockets.
POLICY_VIOLATION = 1008
ONES_OWN = ("same-origin", "none")
# A page that a browser takes for nobody's: a sandboxed frame, a file.
NOBODY = "null"
FOREIGN_PAGE = "Pages of other sites may not use this API; --cors-allow-origins allows them."
# What of a WebUI's command line lets others than this machine reach it, or gives it a name that we cannot know.
OPEN_TO_OTHERS = ("listen", "server_name", "share", "ngrok", "subpath")
FOREIGN_REQUEST = "A page of another site may not use this server."
UNKNOWN_NAME = "This server is not called {}: add the name with --allowed-hosts, or Ray Serve's allowed_hosts."
NO_FETCHING = "This server downloads nothing from addresses."
# To these a link on another site's page may lead: they show the page and change nothing.
LINKED = ("/", "/docs")
# Of somebody who has not logged in no more is read than a login takes.
LARGEST_LOGIN = 64 * 1024
LARGEST_BODY = 64 * 1024 * 1024
# gradio's, of the release that the demo installs.
FILE_PATHS = tuple(f"/gradio_api/{name}" for name in ("file=", "file/", "stream/", "proxy="))
# All others that somebody has uploaded are saved and never shown: a page among them would be this server's own.
SHOWN_FILES = ("image/png", "image/jpeg", "image/webp")
NOTHING_RUNS = "sandbox; default-src 'none'; img-src 'self'"


@dataclass(frozen=True)
class Origins:
    """Whose pages may send requests. Those of the server itself may always.

    allowed, pattern: other origins, as --cors-allow-origins and its regex have them. strict_host: the server is asked
    by address, as localhost or by one of names; a page under another name is another site's, whose name was made to
    lead here once the page was loaded (DNS rebinding).
    """

    allowed: Collection[str] = ()
    pattern: str | None = None
    strict_host: bool = False
    names: Collection[str] = ()

    def is_foreign(self, headers: Mapping[str, str]) -> bool:
        """Whether a browser sent this for a page of another site. headers: by names in lower case."""
        site = headers.get("sec-fetch-site")
        origin = headers.get("origin")
        if site is None and origin is None or origin != NOBODY and site in ONES_OWN:
            return False
        # A browser that does not name the relation, or has none to name: no TLS.
        # The second is a proxy's: no page of another site can have it sent.
        hosts = (headers.get("host"), headers.get("x-forwarded-host"))
        if site is None and origin is not None and any(self.is_own(origin, host) for host in hosts):
            return False
        allowed = origin in self.allowed or "*" in self.allowed
        return not (allowed or self.pattern and re.fullmatch(self.pattern, origin or ""))

    def is_own(self, origin: str, host: str | None) -> bool:
        """Whether an origin is the server's that was asked by this host name.

        The scheme may be that of a proxy; some proxies leave out the port.
        """
        if not host or not self.knows(host):
            return False
        address = origin.lower().partition("://")[2]
        return host.lower() in (address, address.rpartition(":")[0])

    def knows(self, host: str | None) -> bool:
        """Whether a Host header can be the server's own."""
        name = host_name(host or "")
        return name in self.names or (is_fixed(name) if self.strict_host else bool(name))


def host_name(host: str) -> str:
    """A Host header without its port, in lower case; an IPv6 address without its brackets."""
    address = re.fullmatch(r"\[(.*)\](:\d*)?", host)
    return address[1].lower() if address else host.partition(":")[0].rstrip(".").lower()


def is_fixed(name: str) -> bool:
    """Whether no name server says where a host name leads: an address, or localhost."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def origins_of(cmd_opts: Any) -> Origins:
    """As a WebUI's command line has it; where that does not tell who can reach the server, everybody can."""
    allowed, pattern = (getattr(cmd_opts, f"cors_allow_origins{end}", None) for end in ("", "_regex"))
    of_this_machine = hasattr(cmd_opts, "listen") and not any(getattr(cmd_opts, flag, None) for flag in OPEN_TO_OTHERS)
    return Origins(allowed.split(",") if allowed else (), pattern, strict_host=of_this_machine)


class Gate:
    """ASGI middleware around the whole application, gradio's own routes included.

    identify: raises HTTPException, by a request's headers alone, for somebody who has not logged in; None: nobody must.
    largest: how many bytes the body of everybody else may have. page_policy: what the page may load, for browsers.
    """

    def __init__(
        self, app: Any, origins: Origins, identify: Callable[[Request], Awaitable[None]] | None = None,
        largest: int = LARGEST_BODY, page_policy: str = "",
    ) -> None:
        self.app = app
        self.origins = origins
        self.identify = identify
        self.largest = largest
        self.page_policy = page_policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # No route takes one, and another site's page may open one without being asked.
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self.check(scope["method"], scope["path"], headers)
            limit = await self.limit_for(Request(scope))
            if int(headers.get("content-length") or 0) > limit:
                raise too_large(limit)
        except HTTPException as refused:
            await refusal(refused.status_code, refused.detail, refused.headers)(scope, receive, send)
            return
        await self.app(scope, bounded(receive, limit), self.harmless(scope["path"], send))

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise HTTPException for a request that this server does not take."""
        host = headers.get("host", "")
        if not self.origins.knows(host):
            raise HTTPException(403, UNKNOWN_NAME.format(host_name(host) or '""'))
        if self.origins.is_foreign(headers) and not is_link(method, path, headers):
            raise HTTPException(403, FOREIGN_REQUEST)
        if path.startswith(FILE_PATHS) and "://" in path:
            raise HTTPException(403, NO_FETCHING)

    async def limit_for(self, request: Request) -> int:
        """The largest number of bytes that a body may have."""
        try:
            if self.identify is not None:
                await self.identify(request)
        except HTTPException:
            return LARGEST_LOGIN
        return self.largest

    def harmless(self, path: str, send: Send) -> Send:
        """send, which has browsers take an answer for what it says it is, and save files that they should not show."""

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers["x-content-type-options"] = "nosniff"
                if path == "/" and self.page_policy:
                    headers["content-security-policy"] = self.page_policy
                if path.startswith(FILE_PATHS):
                    headers["content-security-policy"] = NOTHING_RUNS
                    if not re.match("|".join(SHOWN_FILES), headers.get("content-type", "")):
                        headers["content-type"] = "application/octet-stream"
                        headers["content-disposition"] = "attachment"
            await send(message)

        return send_marked


def is_link(method: str, path: str, headers: Headers) -> bool:
    """Whether a browser shows one of our pages in a tab of its own, because somebody has followed a link to it."""
    shown = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return method in READING and path in LINKED and shown and "origin" not in headers


def bounded(receive: Receive, limit: int) -> Receive:
    """receive, which ends a body that grows beyond limit without having said so."""
    size = 0

    async def receive_part() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large(limit)
        return message

    return receive_part


def too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"The request body is larger than {limit} bytes.")
