"""The weights of a UNet's largest linear layers in float8, kept beside the host's own and true to them."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .layout import FusedLinear, Linear, TransformerBlock, UNetLayout, descriptions
from .weights import Binding, Float8Weight, Weights

# Into which tensors the rows of a weight, (out, in), are rounded: values (out, in) and scales (1, out).
Round = Callable[[Tensor, Tensor, Tensor], None]
# Features in times features out. Smaller layers gain less in their products than their scales cost, at any size.
FEWEST_WEIGHTS = 1 << 20
ALIGNED = 16


def float8_layers(layout: UNetLayout) -> Iterator[Linear | FusedLinear]:
    """The linear layers that are worth it: their inputs come from a norm or a GEGLU, which can give them in float8, and
    they are large. The query of the cross attention is left alone: it gains a tenth of its time only."""
    for block in descriptions(layout, TransformerBlock):
        for layer in (block.self_attention.query_key_value, block.feed_forward_in, block.feed_forward_out):
            features, out = width_of(layer), layer.out_features
            if features * out >= FEWEST_WEIGHTS and features % ALIGNED == out % ALIGNED == 0:
                yield layer


def width_of(layer: Linear | FusedLinear) -> int:
    return layer.members[0].in_features if isinstance(layer, FusedLinear) else layer.in_features


def name_of(layer: Linear | FusedLinear) -> str:
    return layer.name if isinstance(layer, FusedLinear) else layer.path


class Float8Weights:
    """Stays in the same memory as long as the layout does: a captured graph knows the addresses alone."""

    def __init__(self, layout: UNetLayout, round_rows: Round) -> None:
        self.layout = layout
        self._names = [name_of(layer) for layer in float8_layers(layout)]
        self._round = round_rows
        self._kept: dict[str, Float8Weight] = {}
        self._fitted_to: object = None

    def fit(self, state: object, weights: Callable[[], Weights]) -> None:
        """Round the weights anew, if their state is not equal to what it was when that was done last.

        Raises torch.cuda.OutOfMemoryError.
        """
        if self._kept and state == self._fitted_to:
            return
        self._fitted_to = None
        now = weights()
        for name in self._names:
            weight = now[name].weight
            if name not in self._kept:
                self._kept[name] = empty_like(weight)
            self._round(weight, *self._kept[name])
        self._fitted_to = state

    def beside(self, weights: Weights) -> Weights:
        """The same weights, with those in float8 beside their own."""
        return {**weights, **{name: weights[name]._replace(float8=kept) for name, kept in self._kept.items()}}

    @property
    def bytes(self) -> int:
        """GPU memory that is held beside the host's own weights."""
        return sum(part.nbytes for kept in list(self._kept.values()) for part in kept)


class Float8Binding:
    """A binding whose weights come with those in float8."""

    def __init__(self, binding: Binding, float8: Float8Weights) -> None:
        self.layout: Any = binding.layout
        self._binding = binding
        self._float8 = float8

    def weights(self) -> Weights:
        return self._float8.beside(self._binding.weights())

    @property
    def dtype(self) -> torch.dtype:
        return self._binding.dtype


def empty_like(weight: Tensor) -> Float8Weight:
    values = torch.empty(weight.shape, device=weight.device, dtype=torch.float8_e4m3fn)
    return Float8Weight(values, torch.empty((1, len(weight)), device=weight.device, dtype=torch.float32))
