"""The weights of a UNet's largest linear layers in eight bits, kept beside the host's own and true to them."""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .binding import Binding
from .layout import FusedLinear, Linear, TransformerBlock, UNetLayout
from .weights import QuantizedWeight, Weights


class Kind(NamedTuple):
    """A type of eight bits. largest: the value that the largest number of a row becomes."""

    name: str
    dtype: torch.dtype
    largest: float


# Float8 e4m3 has no infinity.
FP8 = Kind("fp8", torch.float8_e4m3fn, 448.0)
INT8 = Kind("int8", torch.int8, 127.0)
# The one that auto prefers first.
KINDS = (FP8, INT8)
# Into which tensors the rows of a weight, (out, in), are rounded: values (out, in) and scales (1, out) or (1, 1).
Round = Callable[[Tensor, Tensor, Tensor], None]
# What makes the tokens that a layer reads: a layer norm, a GEGLU, or nothing that could give them in eight bits.
NORMED, GATED, PLAIN = "normed", "gated", "plain"
# What a layer is in its block. Layers of one class err alike, and one class can stay exact where the others do not.
SELF_QKV, SELF_OUT = "self-attention QKV", "self-attention out"
CROSS_QUERY, CROSS_OUT = "cross-attention query", "cross-attention out"
FEED_FORWARD_IN, FEED_FORWARD_OUT = "feed-forward in", "feed-forward out"
# The kinds in which each layer is wanted, by its name.
WantedKinds = Mapping[str, Collection[Kind]]
# Features in times features out. Smaller layers gain less in their products than their scales cost, at any size.
FEWEST_WEIGHTS = 1 << 20
ALIGNED = 16
# Of the values of a row, in float8, the smallest root mean square. Below 2**-6 their steps become no smaller; at this
# mean that makes the rounding error larger by a twentieth.
SMALLEST_MEAN = 2.0**-4


class LowBitLayer(NamedTuple):
    """source: what makes its tokens. layer_class: what it is in its block."""

    layer: Linear | FusedLinear
    source: str
    layer_class: str


def low_bit_layers(block: TransformerBlock, fewest_weights: int | None = None) -> Iterator[LowBitLayer]:
    """The linear layers of a block that may be worth it: the large ones, but for those that read the prompt, which are
    computed once in a generation. fewest_weights: instead of FEWEST_WEIGHTS."""
    fewest = FEWEST_WEIGHTS if fewest_weights is None else fewest_weights
    attention, cross = block.self_attention, block.cross_attention
    every = (
        LowBitLayer(attention.query_key_value, NORMED, SELF_QKV), LowBitLayer(attention.out, PLAIN, SELF_OUT),
        LowBitLayer(cross.query, NORMED, CROSS_QUERY), LowBitLayer(cross.out, PLAIN, CROSS_OUT),
        LowBitLayer(block.feed_forward_in, NORMED, FEED_FORWARD_IN),
        LowBitLayer(block.feed_forward_out, GATED, FEED_FORWARD_OUT),
    )
    for one in every:
        features, out = width_of(one.layer), one.layer.out_features
        if features * out >= fewest and features % ALIGNED == out % ALIGNED == 0:
            yield one


def classes_of_layers(layout: UNetLayout) -> dict[str, str]:
    """The class of every layer that can be in eight bits, large or small, by its name."""
    return {
        name_of(one.layer): one.layer_class
        for block in layout.layers(TransformerBlock) for one in low_bit_layers(block, fewest_weights=0)
    }


def width_of(layer: Linear | FusedLinear) -> int:
    return layer.members[0].in_features if isinstance(layer, FusedLinear) else layer.in_features


def name_of(layer: Linear | FusedLinear) -> str:
    return layer.name if isinstance(layer, FusedLinear) else layer.path


class LowBitWeights:
    """Stays in the same memory as long as the layout does: a captured graph knows the addresses alone. left_out: the
    classes of layers that are never among them."""

    def __init__(self, layout: UNetLayout, round_rows: Round, left_out: frozenset[str] = frozenset()) -> None:
        self.layout, self.left_out = layout, left_out
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

    def beside(
        self, weights: Weights, kinds: Collection[Kind], names: Collection[str] | None = None, alone: bool = False
    ) -> Weights:
        """The same weights, with those of these kinds beside their own. names: of these layers alone. alone: instead of
        their own; those have their shapes and their types, and no values."""
        found: dict[str, tuple[QuantizedWeight, ...]] = {}
        for (name, kind), kept in self._kept.items():
            if kind in kinds and (names is None or name in names):
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
    """A binding whose weights come with those in eight bits. names, alone: see LowBitWeights.beside."""

    def __init__(
        self, binding: Binding, low_bit: LowBitWeights, kinds: Collection[Kind], names: Collection[str] | None = None,
        alone: bool = False,
    ) -> None:
        self.layout: Any = binding.layout
        self._binding = binding
        self._low_bit = low_bit
        self._kinds, self._names, self._alone = kinds, names, alone

    def weights(self) -> Weights:
        return self._low_bit.beside(self._binding.weights(), self._kinds, self._names, self._alone)

    @property
    def dtype(self) -> torch.dtype:
        return self._binding.dtype


def empty_like(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """Room for a weight, (out, in), in a kind, with the scales that it needs; for float8 it has to be looked at. Edits
    keep them: no LoRA makes a row a thousand times smaller beside the others."""
    values = torch.empty(weight.shape, device=weight.device, dtype=kind.dtype)
    scales = 1 if kind is FP8 and one_scale_suffices(weight) else len(weight)
    return QuantizedWeight(values, torch.empty((1, scales), device=weight.device, dtype=torch.float32))


def one_scale_suffices(weight: Tensor) -> bool:
    """Whether every row of a weight, (out, in), keeps its digits in float8 by the scale of the largest value of all.
    Waits for the GPU."""
    means = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32) / weight.shape[1] ** 0.5
    # Zeros are exact.
    means = torch.where(means == 0, math.inf, means)
    return bool(means.amin() * FP8.largest >= SMALLEST_MEAN * largest_of(weight))


def largest_of(weight: Tensor) -> Tensor:
    """The largest absolute value, (), in float32."""
    largest: Tensor = torch.linalg.vector_norm(weight.detach(), math.inf, dtype=torch.float32)
    return largest
