"""Operands: what the kernels of one forward take for each layer, made in one list of steps from stored parameters.

`steps_of` has the list. Its order, and what each step may rely on:

1. The binding gives each layer's parameters as its host stores them: on the device that computes (a network's own, or
   its copy on a second card, see mirror.py) or in main memory. Layers that are fused share one tensor, of which each
   is a view.
2. `Streamed` brings what lies in main memory to the device. All later steps find tensors there.
3. `Decoded` makes of values in few bits a weight in the type that is computed in or, where the host multiplies them as
   they are, an operand in eight bits.
4. `Changed` puts what the host's functions make of a parameter in its place.
5. `Cast` gives a weight the type that is computed in.
6. `WithLoras` adds the LoRAs that are computed beside a layer. The weight has the type of its product by now.
7. `WithLowBit` adds the copies in eight bits. They were rounded from the operand of step 6, so they take the place of
   its weight and its LoRAs.

A weight that a file stores in few bits (weights/stored.py) stands in 1 and 2 as its values, whatever their type.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..core.call import Call
from ..core.layer_weights import LayerWeights, QuantizedWeight, Source, Weights, merged
from .binding import Binding
from .bound import BoundUNet
from .on_the_fly import AppliedFunctions, OnTheFly
from .stored import StoredWeight, are_multiplied_alike
from .streaming import Streaming, Units


class OperandStep(ABC):
    """One step from a stored parameter to an operand, for one forward.

    replaced: the layers whose weight this step makes by itself, whatever the steps before it return. What the
    constructors of Streamed and Cast take as replaced are those of later steps: layers whose weight they need not copy
    or cast.
    """

    replaced: frozenset[str] = frozenset()

    @abstractmethod
    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        """The operand of a layer after this step. before: as the earlier steps leave it."""

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        """The bias of a layer after this step, where a forward reads it without the weight."""
        return before


class Operands(Mapping[str, LayerWeights]):
    """The operands of one forward, each made when it is read: there is never a second copy of the whole network.

    stored: the parameters of every layer by path, and of every fused layer by name. steps: in their order.
    """

    def __init__(self, stored: Weights, steps: Sequence[OperandStep]) -> None:
        self.stored = stored
        self.steps = steps
        self._in_order = [step.operand for step in steps]

    def __getitem__(self, name: str) -> LayerWeights:
        operand = self.stored[name]
        for make in self._in_order:
            operand = make(name, operand)
        return operand

    def bias(self, name: str) -> Tensor | None:
        """The bias of a layer, without making its weight."""
        bias = self.stored[name].bias
        for step in self.steps:
            bias = step.bias(name, bias)
        return bias

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


class Streamed(OperandStep):
    """First: copies what lies in main memory to the device that computes, ahead of the layers that read it.

    It is asked for every layer, also where a later step replaces the weight: the layers read tell it how far the
    forward is. A member of a fused layer is a view of that layer's copy.
    """

    def __init__(self, streaming: Streaming, stored: Weights, units: Units, replaced: frozenset[str]) -> None:
        """units: the order in which the forward reads its layers. replaced: layers whose weight is not copied, because
        a later step makes it."""
        self._forward = streaming.forward(units, replaced)
        self._stored = stored
        self._members = streaming.members

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        if name in self._members:
            fused, first, count = self._members[name]
            joint = self.operand(fused, self._stored[fused])
            bias = None if joint.bias is None else joint.bias.narrow(0, first, count)
            return LayerWeights(joint.weight.narrow(0, first, count), bias)
        weight = self._forward.weight(name)
        bias = self._forward.bias(name)
        return LayerWeights(before.weight if weight is None else weight, before.bias if bias is None else bias)

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        bias = self._forward.bias(name)
        return before if bias is None else bias


class Decoded(OperandStep):
    """Where the values of weights in few bits are on the device: makes the operand of their layers.

    Where the host multiplies all members of a layer in one type of eight bits, the operand has the file's own numbers
    (LayerWeights.low_bit alone), and nothing is rounded again. Otherwise its weight is decoded by the host's own
    function, anew at each use: there is never a decoded copy of the network.
    """

    def __init__(
        self, binding: Binding, before: Operands, streaming: Streaming | None,
        replaced: frozenset[str], channels_last: bool,
    ) -> None:
        """before: the operands as the earlier steps leave them. streaming: None where no parameter is in main memory.
        replaced: the layers whose weight a later step brings. channels_last: how convolutions' weights lie."""
        self._binding = binding
        self._before = before
        self._streaming = streaming
        self._dtype = binding.dtype
        self._left = replaced
        self._channels_last = channels_last
        # Forwards read a layer twice in a row: for the norm before it, and for its product.
        self._last_name = ""
        self._last_weight: Tensor | None = None

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        binding = self._binding
        if name in binding.apart:
            before = before._replace(bias=self.bias(name, None))
        paths = binding.members(name)
        if name in self._left or binding.layers.formats.keys().isdisjoint(paths):
            return before
        members = [binding.layers.stored(path) for path in paths]
        scales = [self._scales(path, stored) for path, stored in zip(paths, members, strict=True)]
        joint = None if name in binding.apart else quantized(before.weight, members, scales)
        if joint is not None:
            shape = torch.empty(joint.values.shape, dtype=self._dtype, device="meta")
            return before._replace(weight=shape, low_bit=(joint,))
        if self._last_weight is None or self._last_name != name:
            self._last_weight = self._weight(name, before.weight, members, scales)
            self._last_name = name
        return before._replace(weight=self._last_weight)

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        """Of layers that cannot lie together, their biases in one: made when it is read, so that a graph makes it of
        what is in the biases then."""
        if name not in self._binding.apart:
            return before
        biases = [bias for path in self._binding.members(name) if (bias := self._before.bias(path)) is not None]
        return torch.cat(biases) if biases else None

    def _scales(self, path: str, stored: StoredWeight | None) -> Sequence[Tensor]:
        """The scales of a layer's weight on the device that computes."""
        if stored is None:
            return ()
        return stored.scales if self._streaming is None else self._streaming.scales(path, stored)

    def _weight(
        self, name: str, values: Tensor, members: Sequence[StoredWeight | None], scales: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """The decoded weight of a layer. values: of all its members, unless these cannot lie together."""
        binding = self._binding
        pieces: Sequence[Tensor] = (values,)
        if name in binding.apart:
            pieces = [self._before[path].weight for path in binding.members(name)]
        elif len(members) > 1:
            pieces = values.split([binding.fusion_of[path][2] for path in binding.members(name)])
        found: list[Tensor] = []
        for piece, stored, own in zip(pieces, members, scales, strict=True):
            found.append(piece.to(self._dtype) if stored is None else stored.decode(piece, own, self._dtype))
        weight = found[0] if len(found) == 1 else torch.cat(found)
        if weight.dim() == 4 and self._channels_last:
            weight = weight.contiguous(memory_format=torch.channels_last)
        return weight


def quantized(
    values: Tensor, members: Sequence[StoredWeight | None], scales: Sequence[Sequence[Tensor]]
) -> QuantizedWeight | None:
    """The weights of layers over the same input as one operand in eight bits; None where the host does not multiply all
    of them so, or not alike. values: of all, one below the other. scales: of each."""
    stored = [member for member in members if member is not None]
    if len(stored) < len(members) or not are_multiplied_alike(member.format for member in stored):
        return None
    found: list[Tensor] = []
    for member, own in zip(stored, scales, strict=True):
        scale = own[0].float().reshape(1, -1)
        found.append(scale if len(members) == 1 else scale.expand(1, member.shape[0]))
    rotation = stored[0].format.rotation
    return QuantizedWeight(values, found[0] if len(found) == 1 else torch.cat(found, dim=1), rotation)


class Changed(OperandStep):
    """Before the cast: puts what a host's functions make of a parameter in its place, and small parameters that the
    host casts. Both were made at the last refresh and are of the computed type, so the cast leaves them alone."""

    def __init__(self, applied: AppliedFunctions) -> None:
        self._weights = applied.weights
        self._biases = applied.biases
        self.replaced = frozenset(applied.weights)

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        weight = self._weights.get(name)
        bias = self._biases.get(name, before.bias)
        if weight is not None:
            # Nothing else that was made of the stored weight holds for this one.
            return LayerWeights(weight, bias)
        return before if bias is before.bias else before._replace(bias=bias)

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        return self._biases.get(name, before)


class Cast(OperandStep):
    """After all that replaces a weight: gives it the type that is computed in."""

    def __init__(self, dtype: torch.dtype, replaced: Collection[str] = (), vectors: bool = False) -> None:
        """replaced: layers whose weight is left as it is, because a later step brings it. vectors: whether biases and
        the weights of norms are cast too; where a host computes with some as they are, `Changed` has cast the others.
        """
        self._dtype = dtype
        self._left = replaced
        self._vectors = vectors
        # Forwards read a layer twice in a row: for the norm before it, and for its product.
        self._last_name = ""
        self._last_weight: Tensor | None = None

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        bias = self.bias(name, before.bias)
        weight = self._weight(name, before.weight)
        if weight is before.weight and bias is before.bias:
            return before
        return before._replace(weight=weight, bias=bias)

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        return before.to(self._dtype) if self._vectors and before is not None else before

    def _weight(self, name: str, before: Tensor) -> Tensor:
        if before.dtype == self._dtype or name in self._left:
            return before
        if before.dim() == 1:
            return before.to(self._dtype) if self._vectors else before
        if self._last_weight is None or self._last_name != name:
            self._last_weight = before.to(self._dtype)
            self._last_name = name
        return self._last_weight


class WithLoras(OperandStep):
    """After the cast: adds the LoRAs that are computed beside a layer's product."""

    def __init__(self, applied: AppliedFunctions) -> None:
        self._low_rank = applied.low_rank

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        low_rank = self._low_rank.get(name)
        return before if low_rank is None else before._replace(low_rank=low_rank)


class WithLowBit(OperandStep):
    """Last: adds the copies of a weight in eight bits, which were rounded with the LoRAs in it.

    replaced: the layers that are read in eight bits alone. Their weight is a shape and a type without values.
    """

    def __init__(
        self, kept: Mapping[str, tuple[QuantizedWeight, ...]], gated_scales: Mapping[str, Tensor], dtype: torch.dtype,
        replaced: frozenset[str] = frozenset(),
    ) -> None:
        """kept, gated_scales: LayerWeights.low_bit and LayerWeights.gated_scale, by layer. dtype: that of products."""
        self._kept = kept
        self._gated_scales = gated_scales
        self._dtype = dtype
        self.replaced: frozenset[str] = replaced

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        kept = self._kept.get(name)
        if kept is None:
            return before
        weight = before.weight
        if name in self.replaced:
            weight = torch.empty_like(weight, dtype=self._dtype, device="meta")
        scale = self._gated_scales.get(name)
        return before._replace(weight=weight, low_bit=kept, low_rank=None, gated_scale=scale)


def steps_of(
    binding: Binding, stored: Weights, streaming: Streaming | None, units: Units, applied: AppliedFunctions | None,
    low_bit: WithLowBit | None = None, channels_last: bool = False,
) -> list[OperandStep]:
    """The steps of one forward, in their order: the one place that has it.

    stored: the parameters. streaming, units: None where no parameter is in main memory. applied: None where the host
    computes with its parameters as they are. low_bit: None for exact products. channels_last: see BoundUNet.
    """
    dtype = binding.dtype
    changed = None if applied is None else Changed(applied)
    last = frozenset[str]() if low_bit is None else low_bit.replaced
    replaced = last if changed is None else last | changed.replaced
    steps: list[OperandStep] = []
    if streaming is not None:
        steps.append(Streamed(streaming, stored, units, replaced))
    if binding.layers.formats:
        steps.append(Decoded(binding, Operands(stored, list(steps)), streaming, replaced, channels_last))
    if applied is not None and changed is not None:
        steps.append(changed)
        steps.append(Cast(dtype, last))
        steps.append(WithLoras(applied))
    if low_bit is not None:
        steps.append(low_bit)
    return steps


def source_of(bound: BoundUNet, call: Call, low_bit: WithLowBit | None = None) -> Source:
    """What the forward of a call reads of a bound network. Raises Refusal where memory that a step needs was freed."""
    binding = bound.binding
    streaming = bound.streaming_now()
    units: Units = () if streaming is None else bound.units(call)
    applied = bound.on_the_fly.applied_now()

    def operands() -> Operands:
        stored = binding.weights()
        return Operands(stored, steps_of(binding, stored, streaming, units, applied, low_bit, bound.channels_last))

    return Source(binding.layout, binding.dtype, operands)


def merged_operand(binding: Binding, on_the_fly: OnTheFly, name: str) -> LayerWeights:
    """A layer's operand with the LoRAs added to its weight, on the device that computes: what is rounded to eight bits.

    Raises Refusal where memory that a step needs was freed.
    """
    # One layer is copied as a whole, not in the order of a forward.
    stored = {name: binding.weights_on(binding.device, name)}
    steps = steps_of(binding, stored, None, (), on_the_fly.applied_now())
    return merged(Operands(stored, steps)[name])
