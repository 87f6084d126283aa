"""What an adapter needs of its host, asked for before anything is hooked."""
from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ..core.origins import origin, package
from ..core.refusal import Refusal

log = logging.getLogger("onediff")


@dataclass(frozen=True)
class Need:
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
    lacks = f"{release} has "
    for need in needs:
        try:
            found: Any = importlib.import_module(need.module)
        except Exception as error:
            log.debug("%s cannot be imported", need.module, exc_info=True)
            lacks += f"no module {need.module} that can be imported ({type(error).__name__}: {error})"
            break
        if first_missing(found, [need.name]):
            lacks += f"no {need.name} in {need.module}"
            break
        function = attrgetter(need.name)(found)
        names = [name for name in need.parameters if not takes(function, name, need.module)]
        if names:
            lacks += f"a {need.name} in {need.module} that does not take {', '.join(names)}"
            break
    else:
        return
    raise Refusal(f"{lacks}: OneDiff does not know this release, and changes nothing")


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


def why_unknown(release: str, checkpoint: Any, paths: Iterable[str]) -> str | None:
    """Why a checkpoint that this release has loaded is the host's, also for the log: it lacks one of these attribute
    paths. None where it has all."""
    path = first_missing(checkpoint, paths)
    if path is None:
        return None
    reason = f"{release} has loaded a checkpoint without {path}: OneDiff does not know this release"
    log.warning("%s.", reason)
    return reason


def first_missing(holder: Any, paths: Iterable[str]) -> str | None:
    """The first of these dotted attribute paths that leads nowhere from holder; None where all lead somewhere."""
    for path in paths:
        try:
            attrgetter(path)(holder)
        except AttributeError:
            return path
    return None
