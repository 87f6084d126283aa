"""The points in a forward at which functions of other extensions are called, such as attention patches."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor


class Points(ABC):
    """The functions of other extensions in one call, by the points at which a forward calls them.

    A family that supports such functions has a subclass with a method for each point. The forward calls the method with
    its tensors, and continues with the values that it returns. A method may write to its arguments.

    structure: words for the points with functions and their authors; equal for calls that compute the same way.
    positions: the points at which functions are called; equal for calls with functions at the same points.
    functions: every function that is called in this call; see verify.rewinder_of.
    """

    structure: tuple[str, ...] = ()
    positions: object = ()
    functions: Collection[Any] = ()

    def has_function(self, point: str, *arguments: Any) -> bool:
        """Whether the method of this name may call a function when it gets these arguments now. If a subclass does not
        override this, its calls are not captured as CUDA graphs."""
        return True

    def begin(self, latent: Tensor) -> None:
        """Called when a forward of this latent begins, before the first point. Does nothing here."""

    @abstractmethod
    def unchanged(self, point: str, *arguments: Any) -> Any:
        """The result of the method of this name when no function is set at its point."""


class EveryPoint(Points):
    """Wraps the points of a call, of any family, and calls at() at every point instead of the point's own method.
    Subclasses override at() to do the same at all points, such as to record what a forward passes."""

    def __init__(self, patches: Any) -> None:
        self._patches = patches
        self.structure = patches.structure
        self.positions = patches.positions

    @property
    def functions(self) -> Collection[Any]:  # type: ignore[override]
        functions: Collection[Any] = self._patches.functions
        return functions

    def has_function(self, point: str, *arguments: Any) -> bool:
        return bool(self._patches.has_function(point, *arguments))

    def begin(self, latent: Tensor) -> None:
        self._patches.begin(latent)

    def unchanged(self, point: str, *arguments: Any) -> Any:
        return self._patches.unchanged(point, *arguments)

    def at(self, point: str, *arguments: Any) -> Any:
        """The result of the point of this name for these arguments."""
        return getattr(self._patches, point)(*arguments)

    def __getattr__(self, name: str) -> Any:
        """at() for the point of this name; for an attribute that is not callable, its value."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._patches, name)
        return partial(self.at, name) if callable(found) else found


class DoesNotFit(Exception):
    """The functions of this call are at other points than at the capture of the graphs, or returned another shape.

    passed: the points that the replay has passed, so that the forward can be repeated without calling their functions
    again (ResumedPoints); None if all functions must be called again.
    """

    passed: list[PassedPoint] | None = None


class PassedPoint(NamedTuple):
    """A point that a forward has passed. answer: its result, if has_answer; otherwise the point had no function, and
    its result follows from its arguments (Points.unchanged)."""

    name: str
    has_answer: bool
    answer: Any = None


class ResumedPoints(EveryPoint):
    """The points of a forward that repeats a call after a replay did not fit. The points that the replay has passed
    return the same results again, without calling their functions a second time."""

    def __init__(self, patches: Points, passed: Iterable[PassedPoint]) -> None:
        super().__init__(patches)
        self._passed = deque(passed)

    def begin(self, latent: Tensor) -> None:
        """Does nothing: the replay has called begin() already."""

    def at(self, point: str, *arguments: Any) -> Any:
        if not self._passed:
            return getattr(self._patches, point)(*arguments)
        passed = self._passed.popleft()
        if passed.name != point:
            raise RuntimeError(f"the forward is at point {point}, where the replay was at {passed.name}")
        return passed.answer if passed.has_answer else self.unchanged(point, *arguments)
