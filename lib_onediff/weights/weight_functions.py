"""What a host applies to a layer's weights at each use, a LoRA that is not merged above all, in a form of ours.

A plain LoRA is computed beside the layer, by two small products. Anything else is applied to a copy of the weight, once
for every change of it.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .contents import Place
from .watch import edit_count

Change = Callable[[Tensor], Tensor]
VERSION = operator.attrgetter("_version")


@dataclass(frozen=True)
class LowRankUpdate:
    """What a LoRA adds to a weight: scale * up @ down. up: (out, rank). down: (rank, in), or (rank, in, height, width)
    of a convolution."""

    up: Tensor
    down: Tensor
    scale: float


@dataclass(frozen=True)
class WeightFunctions:
    """What a host applies to the parameters of one layer, in the type that is computed in.

    updates: LoRAs of its weight, where that is all. weight, bias: functions of a tensor that they may write to; None
    where nothing is applied, or updates say it. lasting: whether the functions do the same until their state changes.
    """

    updates: tuple[LowRankUpdate, ...] = ()
    weight: Change | None = None
    bias: Change | None = None
    lasting: bool = True


@dataclass(frozen=True)
class Casts:
    """How a host casts what its layers hold, at each use.

    to: the type to which it casts the parameters of these layers, for inputs of a type; None where it computes with
    them as they are stored. norms: whether it casts those of norms too.
    """

    to: Callable[[Sequence[nn.Module], torch.dtype], torch.dtype | None]
    norms: bool = True


@dataclass
class WeightFunctionState:
    """What a host's functions consist of, as it was noted: equal as long as it is the same. Keeps nothing alive.

    layers: the places in the list of those to which anything is applied. facts: plain data, such as a LoRA's strength.
    references: of objects that count as the same as long as they are the same. places, edits: of tensors.
    """

    layers: list[int] = field(default_factory=list)
    facts: list[object] = field(default_factory=list)
    references: list[Callable[[], Any]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    edits: list[int] = field(default_factory=list)

    def note(self, objects: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Take down all of these at once."""
        self.references += map(weakref.ref, objects)
        self.places += map(Place.of, tensors)
        self.edits += edit_counts(tensors)

    def is_alive(self) -> bool:
        """Whether all that was noted still is: else something other may have its identity."""
        return all(reference() is not None for reference in self.references) and all(
            place.is_alive for place in self.places
        )

    def __eq__(self, other: object) -> bool:
        # A live object has one plain weak reference, so references can be compared without their objects.
        if not isinstance(other, WeightFunctionState) or len(self.references) != len(other.references):
            return False
        same = (self.layers, self.facts, self.edits, self.places) == (
            other.layers, other.facts, other.edits, other.places
        )
        return same and all(map(operator.is_, self.references, other.references))


def edit_counts(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was edited in place."""
    try:
        return list(map(VERSION, tensors))
    except RuntimeError:  # an inference tensor counts none
        return list(map(edit_count, tensors))


class FunctionReader(Protocol):
    """Reads what one host's layers have."""

    def state(self, layers: Sequence[nn.Module]) -> WeightFunctionState:
        """What is applied to these layers; milliseconds for a LoRA on all of them."""

    def glance(self, layers: Sequence[nn.Module]) -> list[object]:
        """What can be seen of that at every call, in less: equal as long as none of it is exchanged, or given another
        strength, while all that the state notes is alive. Empty where nothing is applied."""

    def of(self, layer: nn.Module) -> WeightFunctions:
        """What is applied to a layer that the state names."""
