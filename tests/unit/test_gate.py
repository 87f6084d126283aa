"""Which requests count as those of a browser that follows a link, and what of a request is passed on to the WebUI's own
check of the login."""
from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

pytest.importorskip("gradio")
from lib_onediff.api.auth import status_of
from lib_onediff.api.gate import is_link

LINK = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(("method", "path", "changed", "is_one"), [
    ("GET", "/", {}, True), ("HEAD", "/docs", {}, True),
    ("POST", "/", {}, False), ("GET", "/sdapi/v1/options", {}, False), ("GET", "/docs/more", {}, False),
    ("GET", "/", {"sec-fetch-mode": "no-cors"}, False), ("GET", "/", {"sec-fetch-dest": "iframe"}, False),
    ("GET", "/", {"sec-fetch-mode": ""}, False), ("GET", "/", {"origin": "http://evil.example"}, False),
    ("GET", "/", {"origin": ""}, False),
])
def test_only_reading_one_of_our_pages_by_navigation_counts_as_following_a_link(
    method: str, path: str, changed: dict[str, str], is_one: bool
) -> None:
    """A page that a browser opens in a tab, by a link on another site, may be shown, because that site cannot read it.
    LINK: the headers that browsers send then. changed: headers with another value. is_one: whether the
    request counts as one."""
    assert is_link(method, path, Headers({**LINK, **changed})) is is_one


def test_the_login_check_of_the_webui_gets_cookies_and_host_of_a_request_and_no_other_header() -> None:
    """status_of(app, path, request) makes a GET of the path in the WebUI's app, with the client's address and the
    scheme of the request, and returns the status of the answer."""
    seen: list[Any] = []

    async def page(request: Request) -> JSONResponse:
        seen.append((request.method, request.url, dict(request.headers), request.client))
        return JSONResponse({}, 418)

    sent = {
        "cookie": "access-token=one", "host": "here.example:7860", "authorization": "Basic me", "origin": "http://evil",
        "x-forwarded-for": "10.0.0.1", "content-length": "5", "range": "bytes=0-1", "cookies": "another",
    }
    scope = {
        "type": "http", "method": "POST", "path": "/onediff/v1/status", "query_string": b"", "scheme": "https",
        "client": ("10.1.2.3", 4567), "server": ("here.example", 7860),
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
    }
    app = Starlette(routes=[Route("/config", page)])
    assert asyncio.run(status_of(app, "/config", Request(scope))) == 418
    [(method, url, headers, client)] = seen
    assert (method, url.path, url.scheme, tuple(client)) == ("GET", "/config", "https", ("10.1.2.3", 4567))
    assert headers["cookie"] == sent["cookie"] and headers["host"] == sent["host"]
    assert not {"authorization", "origin", "x-forwarded-for", "content-length", "range", "cookies"} & set(headers)
    assert asyncio.run(status_of(app, "/elsewhere", Request(scope))) == 404
