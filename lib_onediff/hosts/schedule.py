"""What every host needs to tell a sampling's schedule: following one call of one object, and naming the samplers whose
outputs lie on a line. Which object and which samplers are facts of a host: sampler_schedule.py, diffusers/schedule.py.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..core.sampling import OTHER_SAMPLER, UNKNOWN_SAMPLER

HostMethod = Callable[..., Any]


def replace_next_call(target: Any, method: str, replacement: Callable[..., Any]) -> None:
    """Replace the next call of one object's method; the object is left as it was, and is not kept alive.

    replacement: called as replacement(original, *args, **kwargs), where original is the object's method, or does
    nothing if the object is being deleted.
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
    """The method of an object that is being deleted."""


def why_no_line(sampler: str, is_first_order: bool) -> str:
    """Why outputs of a sampler do not lie on a line with those before, in one sentence for the user; "" if they do.

    sampler: its name; "" if the host does not tell. is_first_order: whether a step uses one output and adds no noise.
    """
    if not sampler:
        return UNKNOWN_SAMPLER
    return "" if is_first_order else OTHER_SAMPLER
