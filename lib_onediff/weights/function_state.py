"""What functions of other extensions remember between calls: random generators of their own, and numbers in attributes.

The first use of a shape calls them more often than the host would. What can be set back is set back, so that they draw
and count as if they had been called once.
"""
from __future__ import annotations

import contextlib
import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..core.origins import origin, package, underlying

# How many objects of an extension are looked at.
MOST = 4096
SCRIPT = ".py"


class FunctionState:
    """The state of functions that can be set back: random.Random objects in their modules, bool, int and float
    attributes of the objects of their own packages and of WebUIs' scripts that they can reach, and lists that are
    attributes of what they are methods of (ControlNet's reference records in such)."""

    def __init__(self, functions: Iterable[Any]) -> None:
        functions = list(functions)
        found = [value for one in functions for value in getattr(underlying(one), "__globals__", {}).values()]
        self._generators = list({id(value): value for value in found if isinstance(value, random.Random)}.values())
        packages = {package(origin(function)) for function in functions}
        self._attributes = [vars(one) for one in objects_of(functions, packages)]
        bound = {id(one.__self__): one.__self__ for one in functions if isinstance(one, types.MethodType)}
        self._recorders = [vars(one) for one in bound.values() if hasattr(one, "__dict__")]

    def save(self) -> Callable[[], None]:
        """A function that sets everything back to what it is now."""
        drawn = [(generator, generator.getstate()) for generator in self._generators]
        counted = [
            (space, {name: value for name, value in space.items() if type(value) in (bool, int, float)})
            for space in self._attributes
        ]
        recorded = [
            (space, name, value, list(value))
            for space in self._recorders for name, value in space.items() if type(value) is list
        ]

        def rewind() -> None:
            for generator, state in drawn:
                generator.setstate(state)
            for space, numbers in counted:
                space.update(numbers)
            for space, name, value, members in recorded:
                value[:] = members
                space[name] = value

        return rewind


def objects_of(functions: Iterable[Any], packages: set[str]) -> Iterator[Any]:
    """The objects of these packages and of scripts, which WebUIs name by their files, at most MOST, that functions
    reach: bound objects, what closures hold, and what is in their attributes, lists and dictionaries."""
    waiting, seen = list(functions), set[int]()
    while waiting and len(seen) < MOST:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        module = type(one).__module__
        if isinstance(one, types.MethodType):
            waiting += [one.__self__, one.__func__]
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.FunctionType):
            for cell in one.__closure__ or ():
                # One that nothing has been put into yet.
                with contextlib.suppress(ValueError):
                    waiting.append(cell.cell_contents)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif (package(module) in packages or module.endswith(SCRIPT)) and isinstance(
            getattr(one, "__dict__", None), dict
        ):
            yield one
            waiting += vars(one).values()
