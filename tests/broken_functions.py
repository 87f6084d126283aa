"""Finds the functions of OneDiff that some work calls, and makes one of them raise at a time."""
from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import lib_onediff

LIBRARY = Path(lib_onediff.__file__).parent
SCRIPT = LIBRARY.parent / "scripts" / "onediff.py"
# Code objects that belong to a function, and raise when the function does.
PARTS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>")
Name = tuple[str, str, int]


def name_of(code: CodeType) -> Name:
    """A function's file, name and line; the line distinguishes two lambdas."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def is_ours(file: str) -> bool:
    """Whether a file's functions belong to OneDiff. The demo counts as a host: of its files, only the adapter does."""
    path = Path(file)
    if path == SCRIPT or path.name == "onediff_adapter.py":
        return True
    return LIBRARY in path.parents and LIBRARY / "demo" not in path.parents


def functions_called(work: Callable[[], Any]) -> list[Name]:
    """The names of OneDiff's functions that work() calls in any thread, sorted."""
    found: set[CodeType] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(name_of(code) for code in found.copy() if is_ours(code.co_filename) and code.co_name not in PARTS)


class Broken(RuntimeError):
    """The exception that broken functions raise."""


def template(*args: Any, **kwargs: Any) -> Any:
    """The code of a broken function: `raising` replaces the constant "fail" by a function that raises."""
    fail: Any = "fail"
    return fail()


def raising(code: CodeType, fail: Callable[[], Any]) -> CodeType:
    """A code object whose calls raise, for a function with the same free variables."""
    constants = tuple(fail if constant == "fail" else constant for constant in template.__code__.co_consts)
    return template.__code__.replace(co_consts=constants, co_freevars=code.co_freevars)


def exchanged(code: CodeType, name: Name, fail: Callable[[], Any]) -> CodeType:
    """The code object of a function, changed so that the function of this name raises: the function itself, or one that
    is defined inside it. The same object if it contains no such function."""
    if name_of(code) == name:
        return raising(code, fail)
    constants = tuple(
        exchanged(constant, name, fail) if isinstance(constant, CodeType) else constant for constant in code.co_consts
    )
    same = all(one is other for one, other in zip(constants, code.co_consts, strict=True))
    return code if same else code.replace(co_consts=constants)


def ours_among_objects() -> list[FunctionType]:
    """OneDiff's functions that exist in this process and are not frozen by gc.freeze()."""
    return [one for one in gc.get_objects() if type(one) is FunctionType and is_ours(one.__code__.co_filename)]


class Breaker:
    """Makes functions raise, those that exist when the Breaker is made and later ones."""

    def __init__(self) -> None:
        # Objects frozen by gc.freeze() are not in gc.get_objects().
        gc.unfreeze()
        gc.collect()
        self._known = ours_among_objects()
        gc.freeze()

    @contextmanager
    def broken(self, name: Name, always: bool) -> Iterator[list[Name]]:
        """A context in which the function of this name raises: at its first call, or at every call (always). Yields a
        list that gets the name once for each exception."""
        raised: list[Name] = []
        kept: list[tuple[FunctionType, CodeType]] = []

        def restore() -> None:
            for function, code in kept:
                function.__code__ = code

        def fail() -> None:
            if not always:
                restore()
            raised.append(name)
            raise Broken("broken by a test")

        for function in [*self._known, *ours_among_objects()]:
            if function.__code__.co_filename == name[0]:
                code = exchanged(function.__code__, name, fail)
                if code is not function.__code__:
                    kept.append((function, function.__code__))
                    function.__code__ = code
        try:
            yield raised
        finally:
            restore()
