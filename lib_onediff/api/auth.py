"""Decides who may use the REST API: users of the WebUI's own API or, if that needs no login, users of its page.

No page of another site may use the API or our events on the WebUI's page: gradio runs these for any request.
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import gradio as gr
import httpx
from fastapi import Depends, HTTPException, Request

from .gate import FOREIGN_PAGE, READING, Origins, origins_of

# The module prefix of our handlers. None of them is a generator.
OURS = f"{__name__.partition('.')[0]}.ui."
# The route of the WebUI's own API whose protection ours shares.
HOSTS_OWN = "/sdapi/v1/txt2img"
# The path at which gradio tells whether a request has a login; since gradio 5, it has a prefix.
LOGIN_CHECK = f"{getattr(getattr(gr, 'route_utils', None), 'API_PREFIX', '')}/login_check"
NO_CHECK = "This WebUI checks the accounts of --api-auth in a way that OneDiff does not know, so its API is closed."
NO_PAGE = "There is no page to log in on with --nowebui: start the WebUI with --api-auth to use its API."
LOG_IN = "Log in on the WebUI's page first, and send its cookie{}."
OR_BY_API_AUTH = "; or start the WebUI with --api-auth"


def protection(app: Any, cmd_opts: Any) -> list[Any]:
    """The FastAPI dependencies for each route of our API. They raise HTTPException 403 for pages of other sites, and
    401 for requests without a login if the WebUI asks for one. app: the WebUI's FastAPI application. cmd_opts: its
    command line."""
    asks_for_login = bool(getattr(cmd_opts, "gradio_auth", None) or getattr(cmd_opts, "gradio_auth_path", None))
    has_accounts = bool(getattr(cmd_opts, "api_auth", None))
    # The demo has no such option.
    way = OR_BY_API_AUTH if hasattr(cmd_opts, "api_auth") else ""
    who = password_check(app) if has_accounts else [Depends(login_check(asks_for_login, way))]
    return [Depends(origin_check(origins_of(cmd_opts))), *who]


def password_check(app: Any) -> list[Any]:
    """The dependencies with which a WebUI that was started with --api-auth protects its own API, read from its txt2img
    route. Without such a route, or if the route has no dependencies: [a dependency that refuses every request]."""
    own = [route for route in app.routes if getattr(route, "path", "") == HOSTS_OWN]
    return next((route.dependencies for route in own if getattr(route, "dependencies", [])), [Depends(let_nobody_in)])


def let_nobody_in() -> None:
    """A FastAPI dependency that raises HTTPException 401 for every request."""
    raise HTTPException(401, NO_CHECK)


def login_check(asked_for: bool, other_way: str = "") -> Callable[[Request], Awaitable[None]]:
    """A FastAPI dependency that admits the users of the WebUI's page: everybody, or with --gradio-auth the users who
    have logged in there. It raises HTTPException 401 for requests without such a login.

    With a page, gradio's own check of logins decides. asked_for: whether the command line requires a login; it counts
    only in a WebUI without a page (--nowebui), which then refuses everybody, because nobody can log in. other_way:
    another way to log in, as the end of the sentence for users; "" for none.
    """

    async def check(request: Request) -> None:
        page = page_in(request.app)
        if page is not None and await status_of(page, LOGIN_CHECK, request) != 200:
            raise HTTPException(401, LOG_IN.format(other_way))
        if page is None and asked_for:
            raise HTTPException(401, NO_PAGE)

    return check


def page_in(app: Any) -> Any:
    """gradio's application: the application itself, or one that is mounted in it; None without a page."""
    mounted = (getattr(route, "app", None) for route in app.routes)
    return next((one for one in (app, *mounted) if isinstance(one, gr.routes.App)), None)


async def status_of(app: Any, path: str, request: Request) -> int:
    """The HTTP status with which `app` answers a GET of a path, with the cookies of `request`. app is called in this
    process, not over the network.

    By it, login_check lets gradio decide whether a sender has logged in: only gradio knows the names of its cookies,
    which change with its releases.
    """
    headers = [(name, value) for name, value in request.headers.raw if name in (b"cookie", b"host")]
    transport = httpx.ASGITransport(app, client=request.scope["client"])
    async with httpx.AsyncClient(transport=transport) as browser:
        answer = await browser.get(f"{request.scope['scheme']}://localhost{path}", headers=headers)
        return answer.status_code


def origin_check(origins: Origins) -> Callable[[Request], None]:
    """A FastAPI dependency that raises HTTPException 403 for requests that a page of another site has sent, unless they
    only read.

    Browsers add cookies and saved passwords to such requests, and reach a WebUI of this machine that asks for neither.
    A plain form may send them without a preflight request, and so may a page that sends JSON as text. Reading needs no
    check, since a page cannot see another site's answers.
    """

    def check(request: Request) -> None:
        if request.method not in READING and origins.is_foreign(request.headers):
            raise HTTPException(403, FOREIGN_PAGE)

    return check


def refuse_foreign_pages(page: Any, cmd_opts: Any) -> None:
    """Replace, in place, the handler of each of our events on the page by one that raises gradio.Error for requests
    from pages of other sites. Call it once, when the page is built.

    page: the WebUI's gradio.Blocks; None without a page: then nothing is done. cmd_opts: the WebUI's command line.
    """
    functions = getattr(page, "fns", ())
    origins = origins_of(cmd_opts)
    # gradio 3 has a list of them, later versions a dictionary.
    for function in functions.values() if isinstance(functions, Mapping) else functions:
        if str(getattr(function.fn, "__module__", "")).startswith(OURS):
            function.fn = checked(function.fn, origins)


def checked(function: Callable[..., Any], origins: Origins) -> Callable[..., Any]:
    """A handler of an event that raises gradio.Error for a request from a page of another site, and otherwise returns
    function(*values). A request without headers counts as one of a program, which may use the page's events."""

    # Without functools.wraps: gradio passes the request because it sees this signature.
    def answer(request: gr.Request, *values: Any) -> Any:
        headers = getattr(request, "headers", None) or {}
        if origins.is_foreign({name.lower(): value for name, value in headers.items()}):
            raise gr.Error(FOREIGN_PAGE)
        return function(*values)

    return answer
