"""The weights of a UNet's largest linear layers in eight bits, kept beside the host's own and true to them."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import FusedLinear, Linear, TransformerBlock, UNetLayout
from .weights import Binding, QuantizedWeight, Weights


class Kind(NamedTuple):
    """A type of eight bits. largest: the value that the largest number of a row becomes."""

    name: str
    dtype: torch.dtype
    largest: float


# Float8 e4m3 has no infinity.
FP8 = Kind("fp8", torch.float8_e4m3fn, 448.0)
INT8 = Kind("int8", torch.int8, 127.0)
KINDS = (FP8, INT8)
# Into which tensors the rows of a weight, (out, in), are rounded: values (out, in) and scales (1, out).
Round = Callable[[Tensor, Tensor, Tensor], None]
# What makes the tokens that a layer reads: a layer norm, a GEGLU, or nothing that could give them in eight bits.
NORMED, GATED, PLAIN = "normed", "gated", "plain"
# The kinds in which each layer is wanted, by its name.
WantedKinds = Mapping[str, Collection[Kind]]
# Features in times features out. Smaller layers gain less in their products than their scales cost, at any size.
FEWEST_WEIGHTS = 1 << 20
ALIGNED = 16


def low_bit_layers(
    block: TransformerBlock, fewest_weights: int | None = None
) -> Iterator[tuple[Linear | FusedLinear, str]]:
    """The linear layers of a block that may be worth it, with what makes their tokens: the large ones, but for those
    that read the prompt, which are computed once in a generation. fewest_weights: instead of FEWEST_WEIGHTS."""
    fewest = FEWEST_WEIGHTS if fewest_weights is None else fewest_weights
    attention, cross = block.self_attention, block.cross_attention
    every: tuple[tuple[Linear | FusedLinear, str], ...] = (
        (attention.query_key_value, NORMED), (attention.out, PLAIN), (cross.query, NORMED), (cross.out, PLAIN),
        (block.feed_forward_in, NORMED), (block.feed_forward_out, GATED),
    )
    for layer, source in every:
        features, out = width_of(layer), layer.out_features
        if features * out >= fewest and features % ALIGNED == out % ALIGNED == 0:
            yield layer, source


def width_of(layer: Linear | FusedLinear) -> int:
    return layer.members[0].in_features if isinstance(layer, FusedLinear) else layer.in_features


def name_of(layer: Linear | FusedLinear) -> str:
    return layer.name if isinstance(layer, FusedLinear) else layer.path


class LowBitWeights:
    """Stays in the same memory as long as the layout does: a captured graph knows the addresses alone."""

    def __init__(self, layout: UNetLayout, round_rows: Round) -> None:
        self.layout = layout
        self._round = round_rows
        self._kept: dict[tuple[str, Kind], QuantizedWeight] = {}
        self._shapes: dict[str, Tensor] = {}
        self._fitted_to: object = None

    def fit(
        self, state: Callable[[], object], weights: Callable[[], Weights], wanted: WantedKinds, device: torch.device,
        rounded: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Round what is wanted and not there, and everything anew if the weights' state is not equal to what it was
        when that was done last. device: where the UNet computes. rounded: told of every layer once it is done.

        Raises torch.cuda.OutOfMemoryError, and what rounded raises.
        """
        due: dict[str, list[Kind]] = {}
        for name, kind in () if state() == self._fitted_to else self._kept:
            due.setdefault(name, []).append(kind)
        for name, kinds in wanted.items():
            for kind in kinds:
                if (name, kind) not in self._kept:
                    due.setdefault(name, []).append(kind)
        if not due:
            return
        self._fitted_to = None
        now = dict(weights())
        for name, kinds in due.items():
            # Nobody else may hold it: of a fused layer, it is a view that keeps the tensor alive.
            weight = now.pop(name).weight.to(device)
            for kind in kinds:
                if (name, kind) not in self._kept:
                    self._kept[name, kind] = empty_like(weight, kind)
                self._round(weight, *self._kept[name, kind])
            del weight
            rounded(name)
        self._fitted_to = state()

    def beside(self, weights: Weights, kinds: Collection[Kind], alone: bool = False) -> Weights:
        """The same weights, with those of these kinds beside their own. alone: instead of them; those have their shapes
        and their types, and no values."""
        found: dict[str, tuple[QuantizedWeight, ...]] = {}
        for (name, kind), kept in self._kept.items():
            if kind in kinds:
                found[name] = (*found.get(name, ()), kept)
        new = {}
        for name, low_bit in found.items():
            affine = weights[name]
            weight = self._without_values(name, affine.weight) if alone else affine.weight
            new[name] = affine._replace(weight=weight, low_bit=low_bit)
        return {**weights, **new}

    def _without_values(self, name: str, weight: Tensor) -> Tensor:
        known = self._shapes.get(name)
        if known is None or known.dtype != weight.dtype:
            known = self._shapes[name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        return known

    def names(self) -> set[str]:
        """The layers of which there are weights."""
        return {name for name, _ in list(self._kept)}

    def kinds(self) -> set[Kind]:
        """In which there are weights."""
        return {kind for _, kind in list(self._kept)}

    @property
    def bytes(self) -> int:
        """GPU memory that is held beside the host's own weights."""
        return sum(part.nbytes for kept in list(self._kept.values()) for part in kept)


class LowBitBinding:
    """A binding whose weights come with those in eight bits. alone: see LowBitWeights.beside."""

    def __init__(self, binding: Binding, low_bit: LowBitWeights, kinds: Collection[Kind], alone: bool = False) -> None:
        self.layout: Any = binding.layout
        self._binding = binding
        self._low_bit = low_bit
        self._kinds, self._alone = kinds, alone

    def weights(self) -> Weights:
        return self._low_bit.beside(self._binding.weights(), self._kinds, self._alone)

    @property
    def dtype(self) -> torch.dtype:
        return self._binding.dtype


def empty_like(weight: Tensor, kind: Kind) -> QuantizedWeight:
    values = torch.empty(weight.shape, device=weight.device, dtype=kind.dtype)
    return QuantizedWeight(values, torch.empty((1, len(weight)), device=weight.device, dtype=torch.float32))
