"""Who may use the REST API: whoever may use the WebUI's own, and where that asks nobody, whoever may use its page.

No page of another site may use either: gradio runs our events on the WebUI's page for whoever sends a request.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from secrets import compare_digest
from typing import Any

import gradio as gr
from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPBasicCredentials

from .basic import Basic
from .origins import FOREIGN_PAGE, READING, Origins, origins_of

PACKAGE = __name__.partition(".")[0]
USER, LOGIN_CHECK = "/user", "/login_check"
NO_PAGE = "There is no page to log in on with --nowebui: start the WebUI with --api-auth to use its API."
LOG_IN = "Log in on the WebUI's page first, and send its cookie; or start the WebUI with --api-auth."


def protection(cmd_opts: Any) -> list[Any]:
    """The dependencies of every route; cmd_opts: the WebUI's command line."""
    api_auth = getattr(cmd_opts, "api_auth", None)
    asks_for_login = bool(getattr(cmd_opts, "gradio_auth", None) or getattr(cmd_opts, "gradio_auth_path", None))
    return [
        Depends(origin_check(origins_of(cmd_opts))),
        Depends(password_check(api_auth) if api_auth else login_check(asks_for_login)),
    ]


def password_check(api_auth: str) -> Callable[[HTTPBasicCredentials], None]:
    """A dependency that lets the accounts of --api-auth in, "user:password,user:password".

    As in A1111 and Forge, blanks count, and of two accounts with one name the last holds. They do not start with a
    password that contains ":"; here everything behind the first ":" is the password, as in HTTP itself.
    """
    written = (account.partition(":") for account in api_auth.split(","))
    passwords = {to_bytes(user): to_bytes(password) for user, colon, password in written if colon}

    def check(given: HTTPBasicCredentials = Depends(Basic())) -> None:  # noqa: B008
        user, password = to_bytes(given.username), to_bytes(given.password)
        # Every account is compared to its end, so that the time tells nothing.
        matches = [
            compare_digest(user, known) & compare_digest(password, passwords[known]) for known in passwords
        ]
        if not any(matches):
            raise HTTPException(401, "Incorrect username or password.", headers={"WWW-Authenticate": "Basic"})

    return check


def to_bytes(text: str) -> bytes:
    # What a command line holds need not be UTF-8.
    return text.encode("utf-8", "surrogateescape")


def login_check(asked_for: bool) -> Callable[[Request], None]:
    """A dependency that lets those in whom the page lets in: everybody, or with --gradio-auth who has logged in.

    It asks gradio's own check, which protects gradio's routes alone and knows the names of its cookies. asked_for:
    whether there must be one, so that a WebUI without a page is not open where a login was asked for.
    """

    def check(request: Request) -> None:
        user, login = gradio_function(request.app, USER), gradio_function(request.app, LOGIN_CHECK)
        if user is None or login is None:
            if asked_for:
                raise HTTPException(401, NO_PAGE)
            return
        try:
            login(user=user(request))
        except HTTPException as refused:
            raise HTTPException(401, LOG_IN) from refused

    return check


def gradio_function(app: Any, path: str) -> Callable[..., Any] | None:
    """What gradio itself answers at a path of app, or of its page where that is mounted into app; else None."""
    for route in app.routes:
        answers = getattr(route, "endpoint", None)
        if answers is not None and route.path == path and answers.__module__.startswith("gradio."):
            return answers
        page = getattr(route, "app", None)
        found = gradio_function(page, path) if answers is None and hasattr(page, "routes") else None
        if found is not None:
            return found
    return None


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
        if is_ours(function.fn):
            function.fn = checked(function.fn, origins)


def is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == PACKAGE


def checked(function: Callable[..., Any], origins: Origins) -> Callable[..., Any]:
    """function, or the generator that it is, which gradio also hands the request."""

    def check(request: gr.Request) -> None:
        headers = getattr(request, "headers", None) or {}
        if origins.is_foreign({name.lower(): value for name, value in headers.items()}):
            raise gr.Error(FOREIGN_PAGE)

    # Not dressed up as function: by the signature gradio knows what to hand over.
    def answer(request: gr.Request, *values: Any) -> Any:
        check(request)
        return function(*values)

    def generate(request: gr.Request, *values: Any) -> Iterator[Any]:
        check(request)
        yield from function(*values)

    return generate if inspect.isgeneratorfunction(function) else answer
