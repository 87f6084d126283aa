"""Finds the Python module and the extension that a callable's code belongs to. Recognises peft's plain LoRA layers."""
from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from torch import nn

TORCH = "torch"
# The folders in which WebUIs keep extensions. Every extension has a package called scripts, so that its top package
# does not identify it.
FOLDERS = ("extensions", "extensions-builtin")
# The package of our own code.
OURS = __name__.partition(".")[0]
# The classes (module, name) of LoRA layers whose attributes contain everything that they add to the layer inside.
LORAS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.layer", "Conv2d")}
# The name, within a LoRA layer, of the layer that it wraps.
WITHIN = "base_layer"
# functions_within() looks into at most this many callables, because one may reach any number of others.
MOST_PARTS = 64
# The types of objects that only wrap a function.
HOLDERS = (types.MethodType, functools.partial, staticmethod, classmethod, property)


def origin(function: object) -> str:
    """The name of the Python module that contains the code of a function, method, class or callable object, such as
    "modules.sd_hijack"; "?" if it is unknown."""
    return str(namespace_of(function).get("__name__", "?"))


def author(function: object) -> str:
    """The author of a callable's code, for the user: the name of the extension's folder if the code is in an extension,
    else the name of the Python module, "?" if unknown. If the function's __code__ was replaced by one from another
    file, that file decides, and its name without ".py" is the module's."""
    inner = undecorated(function)
    namespace = globals_of(inner)
    code = getattr(inner, "__code__", None)
    name = str(namespace.get("__name__", "?"))
    file = str(namespace.get("__file__"))
    own = code.co_filename if code is not None and code.co_filename.endswith(".py") else file
    if PurePath(own).name != PurePath(file).name:
        # The function's __code__ was replaced by one from another file.
        name = PurePath(own).stem
    return extension_of(own) or name


def namespace_of(function: object) -> Mapping[str, Any]:
    """globals_of() the function inside of torch's decorators (see undecorated)."""
    return globals_of(undecorated(function))


def undecorated(function: object) -> Any:
    """The function that a callable runs, without the partials, bound methods and decorators of torch (inference_mode,
    compiler.disable) around it.

    The decorated function is taken from the decorator's closure. __module__ and __wrapped__ do not help: an extension
    that replaces a function copies them with functools.wraps from the replaced function.
    """
    inner = underlying(function)
    seen = set[int]()
    while package(str(globals_of(inner).get("__name__"))) == TORCH and id(inner) not in seen:
        seen.add(id(inner))
        inner = underlying(next((one for one in callables_within(inner) if is_wrapped_by_torch(one)), inner))
    return inner


def globals_of(function: object) -> Mapping[str, Any]:
    """The global variables of a function's code, among them __name__ and __file__. For a class, or an object that is no
    Python function, only these two, of the module that defines the class; __file__ is None if it is unknown."""
    found = getattr(function, "__globals__", None)
    if isinstance(found, dict):
        return found
    name = (function if isinstance(function, type) else type(function)).__module__
    return {"__name__": name, "__file__": getattr(sys.modules.get(name), "__file__", None)}


def is_wrapped_by_torch(function: object) -> bool:
    """Whether a callable that was found inside of one of torch's decorators is the decorated function, and not a helper
    of torch. It is if it is a function of another package than torch, or has a closure, as another decorator of torch
    has."""
    inner = underlying(function)
    return isinstance(inner, types.FunctionType) and (
        package(str(inner.__globals__.get("__name__"))) != TORCH or inner.__closure__ is not None
    )


def callables_within(function: object) -> Iterator[Any]:
    """The callables directly inside of a callable, which it may call: in a function, those in its closure and defaults;
    in a partial, its function and arguments; in a bound, static or class method, the function; in a property, the
    getter; in another object, those in its attributes. None in a class or a module (of Python or of torch); classes and
    torch modules are not returned either."""
    if isinstance(function, types.FunctionType):
        parts = [*map(content_of, function.__closure__ or ()), *(function.__defaults__ or ())]
        parts += (function.__kwdefaults__ or {}).values()
    elif isinstance(function, (types.MethodType, staticmethod, classmethod)):
        parts = [function.__func__]
    elif isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(function, property):
        parts = [function.fget]
    elif isinstance(function, (type, nn.Module, types.ModuleType)):
        parts = []
    else:
        # functools.cache, for example, has the function in its attribute __wrapped__.
        parts = list(getattr(function, "__dict__", {}).values())
    return (part for part in parts if callable(part) and not isinstance(part, (type, nn.Module)))


def functions_within(function: object) -> Iterator[Any]:
    """The functions and callable objects that may run when a callable is called: the callable itself, then those inside
    of it (see callables_within), such as the function that a decorator wraps, then those inside of these, and so on.
    Each once; the search ends after MOST_PARTS callables. What only wraps a function (HOLDERS: partials, methods,
    properties) is followed, but not returned."""
    waiting = [function]
    seen = dict[int, Any]()
    while waiting and len(seen) < MOST_PARTS:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if not isinstance(one, HOLDERS) and callable(one):
            yield one
        waiting.extend(callables_within(one))


def content_of(cell: types.CellType) -> Any:
    """The object in a cell of a function's closure; None if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(maxsize=256)
def extension_of(path: str) -> str:
    """The name of the folder of the extension to which the file of this path belongs; "" if it belongs to none."""
    parts = PurePath(path).parts
    return next((name for folder, name in zip(parts, parts[1:-1], strict=False) if folder in FOLDERS), "")


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package (in site-packages or dist-packages), rather than to an extension
    or the WebUI."""
    return bool({"site-packages", "dist-packages"}.intersection(PurePath(file).parts))


def underlying(function: Any) -> Any:
    """The function that a partial or a bound method calls in the end: of nested partials the innermost function,
    without the object to which it may be bound. Any other callable is returned as it is."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def beneath_ours(function: Any) -> Any:
    """The function that a class had before OneDiff replaced it by a hook: the hook's __wrapped__. Any function that is
    not a hook of ours is returned as it is."""
    while package(origin(function)) == OURS and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def package(module: str) -> str:
    """The name of the top-level package of a Python module: "torch" for "torch.nn". A WebUI gives a script its file's
    name as the module name ("random.py"), which is returned as it is: it must not be taken for the package random."""
    return module if module.endswith(".py") else module.partition(".")[0]


def is_lora(kind: type) -> bool:
    """Whether a class of modules is one of peft's plain LoRA layers (LORAS); False for classes derived from them."""
    return (kind.__module__, kind.__qualname__) in LORAS


def layer_within(module: nn.Module) -> nn.Module:
    """The layer inside of one of peft's plain LoRA layers; any other module is returned as it is."""
    within = module._modules.get(WITHIN) if is_lora(type(module)) else None
    return module if within is None else within
