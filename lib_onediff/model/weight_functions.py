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

from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]


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


@dataclass
class FunctionState:
    """What a host's functions consist of, as it was noted: equal as long as it is the same. Keeps nothing alive.

    layers: the places in the list of those to which anything is applied.
    """

    layers: list[int] = field(default_factory=list)
    facts: list[object] = field(default_factory=list)
    references: list[object] = field(default_factory=list)

    def note(self, fact: object) -> None:
        """Plain data, such as a LoRA's strength."""
        self.facts.append(fact)

    def note_object(self, given: Any) -> None:
        """An object that counts as the same as long as it is the same object."""
        self.references.append(weakref.ref(given))

    def __eq__(self, other: object) -> bool:
        # A live object has one plain weak reference, so references can be compared without their objects.
        return isinstance(other, FunctionState) and self.layers == other.layers and self.facts == other.facts and (
            len(self.references) == len(other.references) and all(map(operator.is_, self.references, other.references))
        )


class FunctionReader(Protocol):
    """Reads what one host's layers have."""

    def state(self, layers: Sequence[nn.Module]) -> FunctionState:
        """What is applied to these layers; at every call."""

    def of(self, layer: nn.Module) -> WeightFunctions:
        """What is applied to a layer that the state names."""

    def casts(self, layer: nn.Module) -> bool:
        """Whether a layer casts its parameters to its input's type."""
