"""Whose code a function, method or class runs."""
from __future__ import annotations

import functools
from typing import Any


def origin(function: object) -> str:
    """The Python module whose code a function, method or callable object runs.

    Not function.__module__, which functools.wraps copies from the function that is being replaced. A decorator of
    torch's (inference_mode, compiler.disable) runs what it decorates.
    """
    inner = underlying(function)
    module_globals = getattr(inner, "__globals__", None)
    while module_globals is not None and package(module_globals.get("__name__", "")) == "torch" and (
        hasattr(inner, "__wrapped__")
    ):
        inner = inner.__wrapped__
        module_globals = getattr(inner, "__globals__", None)
    return type(inner).__module__ if module_globals is None else module_globals.get("__name__", "?")


def underlying(function: Any) -> Any:
    """The function of a bound method, and of a functools.partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def package(module: str) -> str:
    return module.partition(".")[0]
