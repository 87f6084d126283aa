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

    structure: the texts in ShapeKey.patches: the points with functions and their authors; equal for calls that compute
        the same way.
    positions: a value that identifies the points with functions: graphs fit only calls whose value equals the captured
        call's.
    position_points: the points whose methods write the position in the forward to the host's options. A replay calls
        these methods even if no function is set there.
    functions: every function that is called in this call, so that their state can be restored (verify.rewinder_of_all).
    """

    structure: tuple[str, ...] = ()
    positions: object = ()
    position_points: Collection[str] = ()
    functions: Collection[Any] = ()

    def has_function(self, point: str, *arguments: Any) -> bool:
        """Whether the method of this name (point) would call a function now for these arguments. A capture divides the
        forward into graphs there. A subclass has to override this: with the default, True at every point, its calls are
        not captured as CUDA graphs."""
        return True

    def begin(self, latent: Tensor) -> None:
        """Called by a forward before its first point, so that a subclass can prepare its functions. latent: the call's.
        """

    @abstractmethod
    def unchanged(self, point: str, *arguments: Any) -> Any:
        """What the method of this name (point) returns for these arguments if no function is set there."""


class EveryPoint(Points):
    """The points of a call, of any family, with one method for all of them: where a forward calls a point's own method,
    at() is called. Subclasses override at(), such as to record each point that a forward passes."""

    def __init__(self, patches: Any) -> None:
        """patches: the Points of the call, which stay as they are."""
        self._patches = patches
        self.structure = patches.structure
        self.positions = patches.positions
        self.position_points = patches.position_points

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
        """The result of the point of this name for these arguments. Here, the method of this name of the call's own
        Points is called."""
        return getattr(self._patches, point)(*arguments)

    def __getattr__(self, name: str) -> Any:
        """For the name of a point, a function that calls at() with it; for an attribute of the call's own Points that
        is not callable, its value."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._patches, name)
        return partial(self.at, name) if callable(found) else found


class DoesNotFit(Exception):
    """Raised by a replay whose graphs do not fit the call: its functions are at other points than at the capture, or
    one returned another shape. The caller then computes the call without graphs.

    passed: the points that the replay has passed, so that the forward can be repeated without calling their functions
        again (ResumedPoints); [] if no function was called yet; None if all functions must be called again.
    """

    passed: list[PassedPoint] | None = None


class PassedPoint(NamedTuple):
    """A point that a forward has passed.

    has_answer: whether `answer` has the point's result: True if a function was called there, or the result is a bool.
        Otherwise the result follows from the point's arguments (Points.unchanged).
    """

    name: str
    has_answer: bool
    answer: Any = None


class ResumedPoints(EveryPoint):
    """The points of a forward that repeats a call after a replay did not fit. The points that the replay has passed
    return the same results again, without calling their functions a second time."""

    def __init__(self, patches: Points, passed: Iterable[PassedPoint]) -> None:
        """patches: the Points of the call. passed: the points that the replay has passed, in order."""
        super().__init__(patches)
        self._passed = deque(passed)

    def begin(self, latent: Tensor) -> None:
        """Does nothing: the replay has called begin() already."""

    def at(self, point: str, *arguments: Any) -> Any:
        """The known result for each point that the replay has passed; then the results of the points themselves. Raises
        RuntimeError if the forward passes points in another order than the replay did."""
        if not self._passed:
            return getattr(self._patches, point)(*arguments)
        passed = self._passed.popleft()
        if passed.name != point:
            raise RuntimeError(f"the forward is at point {point}, where the replay was at {passed.name}")
        return passed.answer if passed.has_answer else self.unchanged(point, *arguments)
