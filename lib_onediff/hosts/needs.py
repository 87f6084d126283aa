"""What an adapter needs of its host, asked for before anything is hooked."""
from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from ..core.origins import origin, package
from ..core.refusal import Refusal

log = logging.getLogger("onediff")


class Need(NamedTuple):
    """Something that a module of the host must have.

    name: an attribute, with dots for one of a class. parameters: which a function must take by these names.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()


def offers(module: str) -> bool:
    """Whether the host has this module. Imports the packages around it, and not the module itself."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def check_needs(release: str, needs: Iterable[Need]) -> None:
    """Raise Refusal with a sentence that names the first need that this release does not meet."""
    for need in needs:
        if lack := lack_of(need):
            raise Refusal(f"{release} has {lack}: OneDiff does not know this release, and changes nothing")


def lack_of(need: Need) -> str:
    """What the host has in place of a need, or lacks; "" where it meets it."""
    try:
        module = importlib.import_module(need.module)
    except Exception as error:
        log.debug("%s cannot be imported", need.module, exc_info=True)
        return f"no module {need.module} that can be imported ({type(error).__name__}: {error})"
    if first_missing(module, [need.name]):
        return f"no {need.name} in {need.module}"
    found = attrgetter(need.name)(module)
    names = ", ".join(name for name in need.parameters if not takes(found, name, need.module))
    return f"a {need.name} in {need.module} that does not take {names}" if names else ""


def takes(function: Any, parameter: str, module: str) -> bool:
    """Whether a function has a parameter of this name, below any decorator that keeps its signature.

    What another package has put there and takes everything is believed: it hands it on to the module's own.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    kinds = {found.kind for found in parameters.values()}
    takes_all = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return parameter in parameters or (takes_all and package(origin(function)) != package(module))


def first_missing(holder: Any, paths: Iterable[str]) -> str | None:
    """The first of these dotted attribute paths that leads nowhere from holder; None where all lead somewhere."""
    for path in paths:
        try:
            attrgetter(path)(holder)
        except AttributeError:
            return path
    return None
