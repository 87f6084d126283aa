"""Operands: the weight and bias that the kernels of one forward take for each layer, made from the stored parameters in
a list of steps.

`steps_of` returns the list. Its order, and what each step may rely on:

1. The binding gives each layer's parameters as its host stores them: on the device that computes (a network's own, or
   its copy on a second card, see mirror.py) or in main memory. Layers that are fused share one tensor, of which each
   is a view.
2. `Streamed` copies parameters in main memory to the device. All later steps get tensors on the device.
3. `Decoded` decodes a weight in few bits to the dtype of the computation. If the host multiplies its values as they
   are, the operand is in eight bits instead.
4. `Changed` replaces parameters that the host's functions change by the changed ones.
5. `Cast` casts a weight to the dtype of the computation.
6. `WithLoras` adds the LoRAs that are computed beside a layer's product.
7. `WithLowBit` adds the copies in eight bits. They were rounded from the operand of step 6, so they replace its weight
   and its LoRAs.

A weight "in few bits" is one that the host stores in 4 or 8 bits (weights/stored.py). In steps 1 and 2, the weight of
such a layer is its values as they are stored, of any dtype.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..core.call import Call
from ..core.layer_weights import LayerWeights, QuantizedWeight, Source, Weights, merged
from .binding import Binding
from .bound import BoundNetwork
from .on_the_fly import AppliedFunctions, OnTheFly
from .stored import StoredWeight, are_multiplied_alike
from .streaming import Streaming, Units


class OperandStep(ABC):
    """One step from a stored parameter to an operand, for one forward.

    replaced: the names of the layers whose weight this step makes without using the weight that earlier steps return.
    The constructors of earlier steps (Streamed, Decoded, Cast) take the names that later steps replace, as `replaced`,
    because they need not copy, decode or cast those weights.
    """

    replaced: frozenset[str] = frozenset()

    @abstractmethod
    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        """The operand of a layer after this step; `before` itself if the step changes nothing of it. name: a layer's
        path, or a fused layer's name. before: the operand after the earlier steps."""

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        """The bias of a layer after this step, for a forward that reads it without the weight. before: the bias after
        the earlier steps; None if the layer has none."""
        return before


class Operands(Mapping[str, LayerWeights]):
    """The operands of one forward, by the layer's name. Each is made again whenever it is read, so that there is never
    a second copy of the whole network. Streamed layers must be read in the forward's order.

    stored: the parameters of every layer by path, and of every fused layer by name; see Binding.weights.
    steps: the steps in their order.
    """

    def __init__(self, stored: Weights, steps: Sequence[OperandStep]) -> None:
        self.stored = stored
        self.steps = steps
        self._in_order = [step.operand for step in steps]

    def __getitem__(self, name: str) -> LayerWeights:
        """The operand of a layer, made now by all steps in their order. name: a path, or a fused layer's name. KeyError
        for a name that is not in `stored`."""
        operand = self.stored[name]
        for make in self._in_order:
            operand = make(name, operand)
        return operand

    def bias(self, name: str) -> Tensor | None:
        """The bias of a layer after all steps, without making its weight; None if it has none."""
        bias = self.stored[name].bias
        for step in self.steps:
            bias = step.bias(name, bias)
        return bias

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


class Streamed(OperandStep):
    """The first step: copies parameters in main memory to the device that computes, before the layers read them.

    operand() must be called for every layer, also for one whose weight a later step replaces: the calls show how far
    the forward is, and so which copies may be overwritten. A member of a fused layer is a view of that layer's copy.
    """

    def __init__(self, streaming: Streaming, stored: Weights, units: Units, replaced: frozenset[str]) -> None:
        """stored: see Operands. units: the layers in the order in which the forward reads them, in groups; see
        Family.units. replaced: layers whose weight is not copied, because a later step makes it."""
        self._forward = streaming.forward(units, replaced)
        self._stored = stored
        self._members = streaming.members

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        """The copies of a layer's weight and bias on the device that computes; `before` for what is not streamed."""
        if name in self._members:
            fused, first, count = self._members[name]
            joint = self.operand(fused, self._stored[fused])
            bias = None if joint.bias is None else joint.bias.narrow(0, first, count)
            return LayerWeights(joint.weight.narrow(0, first, count), bias)
        weight = self._forward.weight(name)
        bias = self._forward.bias(name)
        return LayerWeights(before.weight if weight is None else weight, before.bias if bias is None else bias)

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        """The copy of a layer's bias on the device that computes; `before` if it is not streamed."""
        bias = self._forward.bias(name)
        return before if bias is None else bias


class Decoded(OperandStep):
    """After Streamed: makes the operands of layers whose weights are in few bits.

    If the host multiplies all members of a fused layer in one eight-bit type, the operand's LayerWeights.low_bit has
    the numbers of the file, and nothing is rounded again; its weight then has a shape and no values. Otherwise the
    host's own function decodes the weight at each use, so that there is never a decoded copy of the network.
    """

    def __init__(
        self, binding: Binding, before: Operands, streaming: Streaming | None,
        replaced: frozenset[str], channels_last: bool,
    ) -> None:
        """before: the operands after the earlier steps. streaming: None if no parameter is in main memory. replaced:
        layers whose weight is not decoded, because a later step makes it. channels_last: whether decoded weights of
        convolutions are put in channels-last order."""
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
        """See the class. `before` for a layer without weights in few bits, and for one that a later step replaces."""
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
        """See OperandStep.bias. The members of some fused layers cannot share a tensor (Binding.apart): their biases
        are concatenated here at each call, so that a CUDA graph reads their present values."""
        if name not in self._binding.apart:
            return before
        biases = [bias for path in self._binding.members(name) if (bias := self._before.bias(path)) is not None]
        return torch.cat(biases) if biases else None

    def _scales(self, path: str, stored: StoredWeight | None) -> Sequence[Tensor]:
        """The scales of a layer's weight on the device that computes; () for a weight that is not in few bits."""
        if stored is None:
            return ()
        return stored.scales if self._streaming is None else self._streaming.scales(path, stored)

    def _weight(
        self, name: str, values: Tensor, members: Sequence[StoredWeight | None], scales: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """The weight of a layer, (out, ...), decoded to the dtype of the computation. values: the stored values of all
        members, one below the other; not used for members that cannot share a tensor (Binding.apart). members: the
        fused layer's members, or the layer alone; None for a weight that is not in few bits. scales: of each member."""
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
    """The weights of a fused layer's members as one operand in eight bits, with the numbers of the file. None unless
    the host multiplies all of them in the same eight-bit type and rotation. values: of all members, (sum of rows,
    width). members: None for a weight that is not in few bits. scales: of each member."""
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
    """After Decoded: replaces parameters by AppliedFunctions' tensors: those that the host's functions have changed,
    and cast copies of biases and norms. They were made at the last refresh, in the dtype of the computation, so Cast
    returns them as they are."""

    def __init__(self, applied: AppliedFunctions) -> None:
        self._weights = applied.weights
        self._biases = applied.biases
        self.replaced = frozenset(applied.weights)

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        """The operand with the changed or cast parameters of the layer in place of the stored ones, if it has some."""
        weight = self._weights.get(name)
        bias = self._biases.get(name, before.bias)
        if weight is not None:
            # Drop everything else that was made from the stored weight, such as its eight-bit operand.
            return LayerWeights(weight, bias)
        return before if bias is before.bias else before._replace(bias=bias)

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        """The changed or cast bias of the layer; `before` if it has none."""
        return self._biases.get(name, before)


class Cast(OperandStep):
    """After Changed: casts weights to the dtype of the computation, at each use. Does nothing for weights in it."""

    def __init__(self, dtype: torch.dtype, replaced: Collection[str] = (), vectors: bool = False) -> None:
        """dtype: of the computation. replaced: layers whose weight is not cast, because a later step makes it. vectors:
        whether to cast biases and the weights of norms too. False after Changed, which has cast copies of all biases
        and norms that the host casts."""
        self._dtype = dtype
        self._left = replaced
        self._vectors = vectors
        # Forwards read a layer twice in a row: for the norm before it, and for its product.
        self._last_name = ""
        self._last_weight: Tensor | None = None

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        """The operand with its weight cast, and with its bias cast if `vectors`; see __init__."""
        bias = self.bias(name, before.bias)
        weight = self._weight(name, before.weight)
        if weight is before.weight and bias is before.bias:
            return before
        return before._replace(weight=weight, bias=bias)

    def bias(self, name: str, before: Tensor | None) -> Tensor | None:
        """The bias, cast if `vectors`; see __init__."""
        return before.to(self._dtype) if self._vectors and before is not None else before

    def _weight(self, name: str, before: Tensor) -> Tensor:
        """The weight of a layer, cast; `before` itself if it need not be cast."""
        if before.dtype == self._dtype or name in self._left:
            return before
        if before.dim() == 1:
            return before.to(self._dtype) if self._vectors else before
        if self._last_weight is None or self._last_name != name:
            self._last_weight = before.to(self._dtype)
            self._last_name = name
        return self._last_weight


class WithLoras(OperandStep):
    """After Cast: adds the LoRAs that are computed beside a layer's product."""

    def __init__(self, applied: AppliedFunctions) -> None:
        self._low_rank = applied.low_rank

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        """The operand with the layer's LoRAs as LayerWeights.low_rank; `before` if it has none."""
        low_rank = self._low_rank.get(name)
        return before if low_rank is None else before._replace(low_rank=low_rank)


class WithLowBit(OperandStep):
    """The last step: adds the eight-bit copies of weights that the option Low-bit has made. LoRAs were added to the
    weights before the weights were rounded, so the operands of such layers have no LoRAs.

    replaced: the layers of which only the eight-bit weight is read. Their operand's weight has a shape and a dtype, and
    no values.
    """

    def __init__(
        self, kept: Mapping[str, tuple[QuantizedWeight, ...]], gated_scales: Mapping[str, Tensor], dtype: torch.dtype,
        replaced: frozenset[str] = frozenset(),
    ) -> None:
        """kept: the eight-bit copies (LayerWeights.low_bit), by the layer's name; other layers stay as they are.
        gated_scales: LayerWeights.gated_scale, by the layer's name. dtype: of the products' results. replaced: see the
        class."""
        self._kept = kept
        self._gated_scales = gated_scales
        self._dtype = dtype
        self.replaced: frozenset[str] = replaced

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        """The operand with the layer's eight-bit copies and without its LoRAs; `before` if it has no such copies."""
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
    """The steps of one forward, in their order.

    stored: the parameters; see Binding.weights. streaming: None if no parameter is in main memory. units: the layers in
    reading order, for streaming. applied: None if the host computes with its parameters as they are. low_bit: None for
    exact products. channels_last: see BoundNetwork.
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


def source_of(bound: BoundNetwork, call: Call, low_bit: WithLowBit | None = None) -> Source:
    """The Source of a call's forward: layout, dtype, and a function that makes the operands of one run of the forward.
    low_bit: None for exact products. Call it after bound.refresh(). Raises Refusal if memory that a step needs was
    freed since then."""
    binding = bound.binding
    streaming = bound.streaming_now()
    units: Units = () if streaming is None else bound.units(call)
    applied = bound.on_the_fly.applied_now()

    def operands() -> Operands:
        stored = binding.weights()
        return Operands(stored, steps_of(binding, stored, streaming, units, applied, low_bit, bound.channels_last))

    return Source(binding.layout, binding.dtype, operands)


def merged_operand(binding: Binding, on_the_fly: OnTheFly, name: str) -> LayerWeights:
    """A layer's exact operand with the LoRAs added to its weight, on the device that computes: the option Low-bit
    quantizes this weight. Copies a layer in main memory to the device. name: one of Binding.groups; KeyError for any
    other, such as a member of a fused layer. Raises Refusal if memory that a step needs was freed."""
    # One layer is copied as a whole, not in the order of a forward.
    stored = {name: binding.weights_on(binding.device, name)}
    steps = steps_of(binding, stored, None, (), on_the_fly.applied_now())
    return merged(Operands(stored, steps)[name])
