"""Replaces one call of one object's method, for reading a sampling's schedule from any host."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

HostMethod = Callable[..., Any]


def replace_next_call(target: Any, method: str, replacement: Callable[..., Any]) -> None:
    """Replace the method named `method` of one object, `target`, for the method's next call. At that call, the object
    first gets back the method that it had, and then `replacement` is called. Does not keep the object alive.

    replacement: replacement(original, *args, **kwargs) returns the result of the call. original is the method that the
        object had before, bound; if the object is being deleted, a function that does nothing.
    """
    known = weakref.ref(target)
    # Another extension may have replaced the method of this object too.
    before = vars(target).get(method)

    def once(*args: Any, **kwargs: Any) -> Any:
        owner = known()
        if owner is None:
            return replacement(nothing, *args, **kwargs)
        original = before
        if before is None:
            original = getattr(type(owner), method).__get__(owner)
        if vars(owner).get(method) is once:
            if before is None:
                del vars(owner)[method]
            else:
                vars(owner)[method] = before
        return replacement(original, *args, **kwargs)

    vars(target)[method] = once


def nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing. replace_next_call passes it as `original` if the object is being deleted."""
