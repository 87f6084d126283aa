"""Patch points that all come to one method: what records, resumes or guards the functions of other extensions."""
from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from inspect import isfunction
from typing import Any

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


def coming_to_at(point: str) -> Callable[..., Any]:
    """The method of a point by its name."""

    def method(self: EveryPoint, *arguments: Any) -> Any:
        return self.at(point, *arguments)

    return method


for _name, _point in vars(PatchPoints).items():
    if isfunction(_point) and _name not in ("stands", "begin"):
        setattr(EveryPoint, _name, coming_to_at(_name))
