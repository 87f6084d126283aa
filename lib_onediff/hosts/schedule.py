"""Functions for reading a sampling's schedule from any host: intercepting one call of one object, and the reason why
outputs of a sampler cannot be extrapolated. sampler_schedule.py and diffusers/schedule.py use them."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..core.sampling import OTHER_SAMPLER, UNKNOWN_SAMPLER

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


def why_no_forecast(sampler: str, is_first_order: bool) -> str:
    """Why the network's output cannot be extrapolated from earlier steps with this sampler, in one line for the user;
    "" if it can.

    sampler: the sampler's name; "" if unknown, which is a reason of its own. is_first_order: whether each step of the
    sampler uses one output of the network and adds no noise.
    """
    if not sampler:
        return UNKNOWN_SAMPLER
    return "" if is_first_order else OTHER_SAMPLER
