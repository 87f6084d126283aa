"""Who may use the REST API: users of the WebUI's own API or, if that needs no login, users of its page.

No page of another site may use either: gradio runs our events on the WebUI's page for anyone who sends a request.
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import gradio as gr
import httpx
from fastapi import Depends, HTTPException, Request

from .gate import FOREIGN_PAGE, READING, Origins, origins_of

# Where the handlers of a WebUI's page are; none of them is a generator.
OURS = f"{__name__.partition('.')[0]}.ui."
HOSTS_OWN = "/sdapi/v1/txt2img"
# Since gradio 5 with a prefix.
LOGIN_CHECK = f"{getattr(getattr(gr, 'route_utils', None), 'API_PREFIX', '')}/login_check"
NO_CHECK = "This WebUI asks for an account by --api-auth, in a way that OneDiff does not support."
NO_PAGE = "There is no page to log in on with --nowebui: start the WebUI with --api-auth to use its API."
LOG_IN = "Log in on the WebUI's page first, and send its cookie{}."
OR_BY_API_AUTH = "; or start the WebUI with --api-auth"


def protection(app: Any, cmd_opts: Any) -> list[Any]:
    """The dependencies of every route of ours in app; cmd_opts: the WebUI's command line."""
    asks_for_login = bool(getattr(cmd_opts, "gradio_auth", None) or getattr(cmd_opts, "gradio_auth_path", None))
    has_accounts = bool(getattr(cmd_opts, "api_auth", None))
    # The demo has no such option.
    way = OR_BY_API_AUTH if hasattr(cmd_opts, "api_auth") else ""
    who = password_check(app) if has_accounts else [Depends(login_check(asks_for_login, way))]
    return [Depends(origin_check(origins_of(cmd_opts))), *who]


def password_check(app: Any) -> list[Any]:
    """What the WebUI's own API depends on where it was started with --api-auth; where that is not found, nobody is let
    in."""
    own = [route for route in app.routes if getattr(route, "path", "") == HOSTS_OWN]
    return next((route.dependencies for route in own if getattr(route, "dependencies", [])), [Depends(let_nobody_in)])


def let_nobody_in() -> None:
    raise HTTPException(401, NO_CHECK)


def login_check(asked_for: bool, other_way: str = "") -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets those in whom the page lets in: everybody, or with --gradio-auth who has logged in.

    asked_for: whether there must be a login, so that a WebUI without a page is not open where one was asked for.
    other_way: how else to get in, as the end of a sentence.
    """

    async def check(request: Request) -> None:
        page = page_in(request.app)
        if page is not None and await status_of(page, LOGIN_CHECK, request) != 200:
            raise HTTPException(401, LOG_IN.format(other_way))
        if page is None and asked_for:
            raise HTTPException(401, NO_PAGE)

    return check


def page_in(app: Any) -> Any:
    """gradio's application, which app is or has mounted; None where there is no page."""
    mounted = (getattr(route, "app", None) for route in app.routes)
    return next((one for one in (app, *mounted) if isinstance(one, gr.routes.App)), None)


async def status_of(app: Any, path: str, request: Request) -> int:
    """The status with which app answers the same browser's GET of another path; it needs no network.

    gradio's own check protects gradio's routes alone; it knows the names of its cookies, which change.
    """
    headers = [(name, value) for name, value in request.headers.raw if name in (b"cookie", b"host")]
    transport = httpx.ASGITransport(app, client=request.scope["client"])
    async with httpx.AsyncClient(transport=transport) as browser:
        answer = await browser.get(f"{request.scope['scheme']}://localhost{path}", headers=headers)
        return answer.status_code


def origin_check(origins: Origins) -> Callable[[Request], None]:
    """A dependency that refuses what another site's page makes a browser send.

    Browsers add cookies and remembered passwords to such requests, and reach a WebUI of this machine that asks for
    neither; a plain form may send them without asking first. That is stricter than asking for JSON, which a page can
    send without saying so. Reading needs no check: no page can see another site's answers.
    """

    def check(request: Request) -> None:
        if request.method not in READING and origins.is_foreign(request.headers):
            raise HTTPException(403, FOREIGN_PAGE)

    return check


def refuse_foreign_pages(page: Any, cmd_opts: Any) -> None:
    """Have each event of ours on page refuse what the page of another site has sent.

    page: the WebUI's gradio.Blocks, or None where it has no page. cmd_opts: its command line.
    """
    functions = getattr(page, "fns", ())
    origins = origins_of(cmd_opts)
    # A list in gradio 3.
    for function in functions.values() if isinstance(functions, Mapping) else functions:
        if str(getattr(function.fn, "__module__", "")).startswith(OURS):
            function.fn = checked(function.fn, origins)


def checked(function: Callable[..., Any], origins: Origins) -> Callable[..., Any]:
    """function, which gradio also hands the request."""

    # Not dressed up as function: by the signature gradio knows what to hand over.
    def answer(request: gr.Request, *values: Any) -> Any:
        headers = getattr(request, "headers", None) or {}
        if origins.is_foreign({name.lower(): value for name, value in headers.items()}):
            raise gr.Error(FOREIGN_PAGE)
        return function(*values)

    return answer
