"""The oracle of all tests: a host's network by its own code, whatever OneDiff has set on its class."""
from __future__ import annotations

import types
from typing import Any


def own_forward(module: Any) -> types.MethodType:
    """The forward that a module's class was defined with, bound to the module."""
    forward = type(module).forward
    while forward.__globals__["__name__"].startswith("lib_onediff."):
        forward = forward.__wrapped__
    return types.MethodType(forward, module)
