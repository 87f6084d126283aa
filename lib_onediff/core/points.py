"""Functions of other extensions that are called within a network's forward."""
from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor


class Points:
    """The points of one call at which functions of other extensions may stand. A family that runs such functions has a
    class of its own, with a method for each point, which its forward calls; it returns new values for its
    arguments, which it may have written to.

    structure: which points there are and whose; equal for calls that compute the same way.
    positions: the points at which functions stand, equal for calls whose functions stand at the same points.
    functions: every function that is called in this call; see verify.rewinder_of.
    """

    structure: tuple[str, ...] = ()
    positions: object = ()
    functions: Collection[Any] = ()

    def has_function(self, point: str, *arguments: Any) -> bool:
        """Whether the method of this name calls a function, or may, when it is called with these arguments now. Calls
        whose patches do not override this are not captured as CUDA graphs."""
        return True

    def begin(self, latent: Tensor) -> None:
        """A forward of this latent begins."""

    def unchanged(self, point: str, *arguments: Any) -> Any:
        """What the method of this name returns where no function stands."""
        raise NotImplementedError


class EveryPoint(Points):
    """Stands around the points of a call, of any family. Calls at() at every point, instead of the
    point's own method."""

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
        """What the point of this name returns for these arguments."""
        return getattr(self._patches, point)(*arguments)

    def __getattr__(self, name: str) -> Any:
        """The method of a point, or a plain value that the family's class has besides."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._patches, name)
        return partial(self.at, name) if callable(found) else found


class DoesNotFit(Exception):
    """Functions stand elsewhere than when the graphs were recorded, or return something of another shape.

    passed: the points of the forward up to the function that does not fit; None where its functions have to be called
    again for the call.
    """

    passed: list[PassedPoint] | None = None


class PassedPoint(NamedTuple):
    """A point that a forward has passed. answer: what the point has returned, if functions stand there or its answer is
    no tensor; otherwise it returns its arguments: see Points.unchanged."""

    name: str
    has_answer: bool
    answer: Any = None


class ResumedPoints(EveryPoint):
    """The points of a forward that begins anew where a replay did not fit: those that the replay has passed return what
    they have returned, and none of their functions is called again."""

    def __init__(self, patches: Points, passed: Iterable[PassedPoint]) -> None:
        super().__init__(patches)
        self._passed = deque(passed)

    def begin(self, latent: Tensor) -> None:
        """It has begun."""

    def at(self, point: str, *arguments: Any) -> Any:
        if not self._passed:
            return getattr(self._patches, point)(*arguments)
        passed = self._passed.popleft()
        if passed.name != point:
            raise RuntimeError(f"the forward comes to {point}, and the replay came to {passed.name}")
        return passed.answer if passed.has_answer else self.unchanged(point, *arguments)
