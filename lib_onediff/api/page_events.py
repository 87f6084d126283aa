"""Our events on the WebUI's page: gradio runs them for whoever sends a request, pages of other sites included."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gradio as gr

from .origins import FOREIGN_PAGE, Origins, origins_of

PACKAGE = __name__.partition(".")[0]


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
