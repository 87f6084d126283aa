"""Whose code a function, method or class runs; and what peft puts around a layer: its plain LoRAs, as diffusers
loads them."""
from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from torch import nn

# Where WebUIs keep extensions, all of which have a package that is called scripts.
FOLDERS = ("extensions", "extensions-builtin")
# The package of our own code.
OURS = __name__.partition(".")[0]
# Of these classes, everything that a layer adds to the one within is in its attributes.
LORAS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.layer", "Conv2d")}
WITHIN = "base_layer"


def origin(function: object) -> str:
    """The Python module whose code a function, method, class or callable object runs."""
    return str(namespace_of(function).get("__name__", "?"))


def author(function: object) -> str:
    """Whose code that is, for people: the folder of the extension; the Python module, where it is in none."""
    return extension_of(str(namespace_of(function).get("__file__"))) or origin(function)


def namespace_of(function: object) -> Mapping[str, Any]:
    """Of the Python module whose code runs.

    Not function.__module__, which functools.wraps copies from the function that is being replaced. A decorator of
    torch's (inference_mode, compiler.disable) runs what it decorates.
    """
    inner = underlying(function)
    found = getattr(inner, "__globals__", None)
    while found is not None and package(found.get("__name__", "")) == "torch" and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
        found = getattr(inner, "__globals__", None)
    if found is None:
        name = (inner if isinstance(inner, type) else type(inner)).__module__
        found = {"__name__": name, "__file__": getattr(sys.modules.get(name), "__file__", None)}
    return found


@functools.lru_cache(maxsize=256)
def extension_of(path: str) -> str:
    """The folder of the extension to which a file belongs; "" where it is none's."""
    parts = PurePath(path).parts
    return next((name for folder, name in zip(parts, parts[1:-1], strict=False) if folder in FOLDERS), "")


def underlying(function: Any) -> Any:
    """The function of a bound method, and of a functools.partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def beneath_ours(function: Any) -> Any:
    """The function that stood in a class before OneDiff put its own there; any other function as it is."""
    while package(origin(function)) == OURS and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def package(module: str) -> str:
    return module.partition(".")[0]


def is_lora(kind: type) -> bool:
    return (kind.__module__, kind.__qualname__) in LORAS


def layer_within(module: nn.Module) -> nn.Module:
    """The layer around which a LoRA is; the module itself where there is none."""
    within = module._modules.get(WITHIN) if is_lora(type(module)) else None
    return module if within is None else within
