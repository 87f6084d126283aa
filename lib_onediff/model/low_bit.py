"""The weights of a UNet's largest linear layers in eight bits, kept beside the host's own and true to them."""
from __future__ import annotations

import math
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
# Into which tensors the rows of a weight, (out, in), are rounded: values (out, in) and scales (1, out) or (1, 1).
Round = Callable[[Tensor, Tensor, Tensor], None]
# What makes the tokens that a layer reads: a layer norm, a GEGLU, or nothing that could give them in eight bits.
NORMED, GATED, PLAIN = "normed", "gated", "plain"
# The kinds in which each layer is wanted, by its name.
WantedKinds = Mapping[str, Collection[Kind]]
# Features in times features out. Smaller layers gain less in their products than their scales cost, at any size.
FEWEST_WEIGHTS = 1 << 20
ALIGNED = 16
# Of the values of a row, in float8, the smallest root mean square. Below 2**-6 their steps become no smaller; at this
# mean that makes the rounding error larger by a twentieth.
SMALLEST_MEAN = 2.0**-4


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

    def beside(self, weights: Weights, kinds: Collection[Kind]) -> Weights:
        """The same weights, with those of these kinds beside their own."""
        found: dict[str, tuple[QuantizedWeight, ...]] = {}
        for (name, kind), kept in self._kept.items():
            if kind in kinds:
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
    """A binding whose weights come with those in eight bits."""

    def __init__(self, binding: Binding, low_bit: LowBitWeights, kinds: Collection[Kind]) -> None:
        self.layout: Any = binding.layout
        self._binding = binding
        self._low_bit = low_bit
        self._kinds = kinds

    def weights(self) -> Weights:
        return self._low_bit.beside(self._binding.weights(), self._kinds)

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
