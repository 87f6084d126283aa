"""What a host applies to a layer's weights at each use, a LoRA that is not merged above all, in a form of ours.

A plain LoRA is computed beside the layer, by two small products. Anything else is applied to a copy of the weight, once
for every change of it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .watch import edit_counts, layout_of

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
    where nothing is applied, or updates say it. lasting: whether the functions do the same until their parts change.
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
class Parts:
    """What a host's functions consist of, as one look finds them. It keeps them alive: drop it after the call.

    places: in the list of layers, of those to which anything is applied. facts: plain data, such as a LoRA's strength.
    objects: what is the same as long as it is the same object. tensors: what is computed with.
    """

    places: list[int] = field(default_factory=list)
    facts: list[object] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def mark(self) -> list[object]:
        """Equal for the same parts, as long as those that it was made of are alive: else something other may have
        their identities. Of tensors, what is in them is not among it."""
        tensors = self.tensors
        where = [list(map(look, tensors)) for look in (Tensor.data_ptr, layout_of, Tensor.stride)]
        return [self.places, self.facts, list(map(id, self.objects)), where, edit_counts(tensors)]


class FunctionReader(Protocol):
    """Reads what one host's layers have."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """Whether anything could come to be applied to these layers without a change of the module tree."""

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        """Of what is applied to these layers now: asked at every call, about 5 microseconds a layer with a LoRA. Raises
        Refusal where the host has to compute them."""

    def of(self, layer: nn.Module) -> WeightFunctions:
        """What is applied to a layer, at one of those places. Raises Refusal where the host has to compute it."""
