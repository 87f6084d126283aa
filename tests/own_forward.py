"""The oracle of all tests: what a network of the host computes, whatever OneDiff has put into its class."""
from __future__ import annotations

import types
from typing import Any


def own_forward(module: Any) -> types.MethodType:
    """The forward that a module's class was defined with, bound to the module."""
    forward = type(module).forward
    while forward.__globals__["__name__"].startswith("lib_onediff."):
        forward = forward.__wrapped__
    return types.MethodType(forward, module)
