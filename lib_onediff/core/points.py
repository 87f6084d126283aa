"""Patch points that all come to one method: what records, resumes or guards the functions of other extensions."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from inspect import isfunction
from typing import Any, NamedTuple

from torch import Tensor

from .call import PatchPoints


class EveryPoint(PatchPoints):
    """Stands around the patch points of a call. at is called at every point, in place of the point's own method."""

    def __init__(self, patches: PatchPoints) -> None:
        self._patches = patches
        self.structure, self.places = patches.structure, patches.places
        self.sees_stages = patches.sees_stages
        self.norm = None if patches.norm is None else partial(self.at, "norm")

    @property
    def functions(self) -> Collection[Any]:  # type: ignore[override]
        return self._patches.functions

    def stands(self, point: str, *arguments: Any) -> bool:
        return self._patches.stands(point, *arguments)

    def begin(self, latent: Tensor) -> None:
        self._patches.begin(latent)

    def at(self, point: str, *arguments: Any) -> Any:
        """What the point of this name returns for these arguments."""
        return getattr(self._patches, point)(*arguments)


class DoesNotFit(Exception):
    """Functions stand elsewhere than when the graphs were recorded, or return something of another shape.

    passed: the points of the forward up to the function that does not fit; None where its functions have to be called
    again for the call.
    """

    passed: list[PassedPoint] | None = None


class PassedPoint(NamedTuple):
    """A point that a forward has passed. answer: what the point has returned, if functions stand there or its answer is
    no tensor; otherwise it returns its arguments, as PatchPoints does."""

    name: str
    has_answer: bool
    answer: Any = None


def coming_to_at(point: str) -> Callable[..., Any]:
    """The method of a point by its name."""

    def method(self: EveryPoint, *arguments: Any) -> Any:
        return self.at(point, *arguments)

    return method


for _name, _point in vars(PatchPoints).items():
    if isfunction(_point) and _name not in ("stands", "begin"):
        setattr(EveryPoint, _name, coming_to_at(_name))


class ResumedPoints(EveryPoint):
    """The points of a forward that begins anew where a replay did not fit: those that the replay has passed return what
    they have returned, and none of their functions is called again."""

    def __init__(self, patches: PatchPoints, passed: Iterable[PassedPoint]) -> None:
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
        return passed.answer if passed.has_answer else getattr(PatchPoints, point)(self, *arguments)
