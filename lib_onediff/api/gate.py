"""The checks of every request before the API or the page handles it: its sender, its content and its size.

Browsers name the page that sends a request in Origin, Sec-Fetch-Site and Host; programs do not.
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
# The code with which web sockets are closed.
POLICY_VIOLATION = 1008
# The values of Sec-Fetch-Site for our own page, and for an address that the user has typed.
ONES_OWN = ("same-origin", "none")
# The origin of a page without a site: a sandboxed frame, or a file.
NOBODY = "null"
FOREIGN_PAGE = "Pages of other sites may not use this API; --cors-allow-origins allows them."
# Options by which other machines reach a WebUI, or which give it a name that we do not know.
OPEN_TO_OTHERS = ("listen", "server_name", "share", "ngrok", "subpath")
FOREIGN_REQUEST = "A page of another site may not use this server."
UNKNOWN_NAME = "This server is not called {}: add the name with --allowed-hosts, or Ray Serve's allowed_hosts."
NO_FETCHING = "This server downloads nothing from addresses."
# Paths that links on other sites may open: they show a page and change nothing.
LINKED = ("/", "/docs")
# Without a login, no larger body is read than a login needs. In bytes.
LARGEST_LOGIN = 64 * 1024
LARGEST_BODY = 64 * 1024 * 1024
# gradio's routes for files, in the release that the demo installs.
FILE_PATHS = tuple(f"/gradio_api/{name}" for name in ("file=", "file/", "stream/", "proxy="))
# Browsers save other uploaded files instead of showing them: an uploaded page would count as this server's own.
SHOWN_FILES = ("image/png", "image/jpeg", "image/webp")
NOTHING_RUNS = "sandbox; default-src 'none'; img-src 'self'"


@dataclass(frozen=True)
class Origins:
    """The origins (scheme://host:port) whose pages may send requests. The server's own is always among them.

    allowed: other origins; "*" allows every origin.
    pattern: a regular expression; an origin that matches it from begin to end is allowed too. None: no further origin.
    strict_host: know no other name of this server than an IP address, localhost and `names`. A page under another name
        then belongs to another site, whose name was redirected to this server after the page had loaded (DNS
        rebinding). False: every host name is known. knows() decides that, and is_own() uses it; is_foreign() alone does
        not refuse a request for its Host header.
    names: host names of this server, without ports and in lower case.
    """

    allowed: Collection[str] = ()
    pattern: str | None = None
    strict_host: bool = False
    names: Collection[str] = ()

    def is_foreign(self, headers: Mapping[str, str]) -> bool:
        """Whether a browser sent the request for a page of another site that is not allowed. False for programs, which
        send none of these headers. headers: by names in lower case."""
        site = headers.get("sec-fetch-site")
        origin = headers.get("origin")
        if site is None and origin is None or origin != NOBODY and site in ONES_OWN:
            return False
        # Old browsers, and all browsers without TLS, send no Sec-Fetch-Site. X-Forwarded-Host comes from a proxy; no
        # page of another site can send it.
        hosts = (headers.get("host"), headers.get("x-forwarded-host"))
        if site is None and origin is not None and any(self.is_own(origin, host) for host in hosts):
            return False
        allowed = origin in self.allowed or "*" in self.allowed
        return not (allowed or self.pattern and re.fullmatch(self.pattern, origin or ""))

    def is_own(self, origin: str, host: str | None) -> bool:
        """Whether an origin (scheme://host:port) names this server's own page. host: the request's Host or
        X-Forwarded-Host header. False if it is None or "", or if knows() does not accept it.

        Schemes are not compared, because a proxy may have ended TLS. The header may lack the origin's port, because
        some proxies leave it out.
        """
        if not host or not self.knows(host):
            return False
        address = origin.lower().partition("://")[2]
        return host.lower() in (address, address.rpartition(":")[0])

    def knows(self, host: str | None) -> bool:
        """Whether a Host header, with or without a port, may name this server: any name, or with strict_host only an
        address, localhost, or one of `names`. False without a header."""
        name = host_name(host or "")
        return name in self.names or (is_fixed(name) if self.strict_host else bool(name))


def host_name(host: str) -> str:
    """The name in a Host header, without the port and in lower case; an IPv6 address without its brackets. "" for an
    empty header."""
    address = re.fullmatch(r"\[(.*)\](:\d*)?", host)
    return address[1].lower() if address else host.partition(":")[0].rstrip(".").lower()


def is_fixed(name: str) -> bool:
    """Whether a host name is an address or localhost, so that no name server can redirect it."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def origins_of(cmd_opts: Any) -> Origins:
    """The Origins for a WebUI's command line, cmd_opts. `allowed` has the origins of --cors-allow-origins, which commas
    separate, and `pattern` is --cors-allow-origins-regex.

    strict_host is on only if the WebUI has an option --listen, and no option of OPEN_TO_OTHERS is set: then only this
    machine reaches the WebUI. Otherwise users may call the WebUI by names that we do not know.
    """
    allowed, pattern = (getattr(cmd_opts, f"cors_allow_origins{end}", None) for end in ("", "_regex"))
    of_this_machine = hasattr(cmd_opts, "listen") and not any(getattr(cmd_opts, flag, None) for flag in OPEN_TO_OTHERS)
    return Origins(allowed.split(",") if allowed else (), pattern, strict_host=of_this_machine)


class Gate:
    """ASGI middleware of the demo and of Ray Serve around the whole application, including gradio's own routes.

    It answers a request that it does not let through with an HTTP error, before any other code reads the request, and
    closes every web socket. To other answers, it adds headers for the browser (harmless()).

    app: the ASGI application inside.
    identify: raises HTTPException for a request without a login, from the headers alone; None if no login is required.
        A request without a login still reaches `app`, which must refuse it, but only with a small body.
    largest: the largest body in bytes that users who have logged in may send, and everybody if identify is None. A
        request without a login may have LARGEST_LOGIN bytes.
    page_policy: the page's Content-Security-Policy; "" for none.
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
        """Handle one connection, as an ASGI server calls it; see the class."""
        if scope["type"] == "websocket":
            # No route uses web sockets, and any site's page may open one.
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
        """Raise HTTPException 403 for a Host that does not name this server, a request of another site's page (except a
        link to one of our pages), or a path by which gradio would download from an address. path: without the query."""
        host = headers.get("host", "")
        if not self.origins.knows(host):
            raise HTTPException(403, UNKNOWN_NAME.format(host_name(host) or '""'))
        if self.origins.is_foreign(headers) and not is_link(method, path, headers):
            raise HTTPException(403, FOREIGN_REQUEST)
        if path.startswith(FILE_PATHS) and "://" in path:
            raise HTTPException(403, NO_FETCHING)

    async def limit_for(self, request: Request) -> int:
        """The largest body in bytes that this request may have: LARGEST_LOGIN without a login, if one is required."""
        try:
            if self.identify is not None:
                await self.identify(request)
        except HTTPException:
            return LARGEST_LOGIN
        return self.largest

    def harmless(self, path: str, send: Send) -> Send:
        """An ASGI send function that passes the answer of a path on to `send`, with headers for the browser added.

        For every path: do not guess content types. For "/": page_policy. For FILE_PATHS: run no scripts of the file,
        and save it instead of showing it, except for the types of images in SHOWN_FILES.
        """

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
    """Whether a browser opens one of our pages (LINKED) in a tab, as when the user follows a link on another site."""
    shown = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return method in READING and path in LINKED and shown and "origin" not in headers


def bounded(receive: Receive, limit: int) -> Receive:
    """An ASGI receive function that passes on what `receive` gives, and raises HTTPException 413 once a body is longer
    than `limit` bytes. Needed because a body without Content-Length passes the check before."""
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
    """The HTTPException 413 for a body that is larger than `limit` bytes, to be raised."""
    return HTTPException(413, f"The request body is larger than {limit} bytes.")
