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
# The one that auto prefers first.
KINDS = (FP8, INT8)
# Into which tensors the rows of a weight, (out, in), are rounded: values (out, in) and scales (1, out).
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
        self._fitted_to: object = None

    def fit(self, state: object, weights: Callable[[], Weights], wanted: WantedKinds) -> None:
        """Round what is wanted and not there, and everything anew if the weights' state is not equal to what it was
        when that was done last.

        Raises torch.cuda.OutOfMemoryError.
        """
        missing = [(name, kind) for name, kinds in wanted.items() for kind in kinds if (name, kind) not in self._kept]
        stale = [] if state == self._fitted_to else list(self._kept)
        if not (missing or stale):
            return
        self._fitted_to = None
        now = weights()
        for name, kind in (*stale, *missing):
            weight = now[name].weight
            if (name, kind) not in self._kept:
                self._kept[name, kind] = empty_like(weight, kind)
            self._round(weight, *self._kept[name, kind])
        self._fitted_to = state

    def beside(self, weights: Weights, kinds: Collection[Kind], names: Collection[str] | None = None) -> Weights:
        """The same weights, with those of these kinds beside their own. names: of these layers alone."""
        found: dict[str, tuple[QuantizedWeight, ...]] = {}
        for (name, kind), kept in self._kept.items():
            if kind in kinds and (names is None or name in names):
                found[name] = (*found.get(name, ()), kept)
        return {**weights, **{name: weights[name]._replace(low_bit=kept) for name, kept in found.items()}}

    def kinds(self) -> set[Kind]:
        """In which there are weights."""
        return {kind for _, kind in list(self._kept)}

    @property
    def bytes(self) -> int:
        """GPU memory that is held beside the host's own weights."""
        return sum(part.nbytes for kept in list(self._kept.values()) for part in kept)


class LowBitBinding:
    """A binding whose weights come with those in eight bits. names: of these layers alone; None: of all."""

    def __init__(
        self, binding: Binding, low_bit: LowBitWeights, kinds: Collection[Kind], names: Collection[str] | None = None
    ) -> None:
        self.layout: Any = binding.layout
        self._binding = binding
        self._low_bit = low_bit
        self._kinds, self._names = kinds, names

    def weights(self) -> Weights:
        return self._low_bit.beside(self._binding.weights(), self._kinds, self._names)

    @property
    def dtype(self) -> torch.dtype:
        return self._binding.dtype


def empty_like(weight: Tensor, kind: Kind) -> QuantizedWeight:
    values = torch.empty(weight.shape, device=weight.device, dtype=kind.dtype)
    return QuantizedWeight(values, torch.empty((1, len(weight)), device=weight.device, dtype=torch.float32))
