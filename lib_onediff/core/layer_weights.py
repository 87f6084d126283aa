"""What a forward reads of a network: a weight and a bias for each layer, by the layer's path."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class QuantizedWeight(NamedTuple):
    """The weight of a layer in float8 (e4m3) or int8: values (out, in), and scales (1, out), or (1, 1) for all rows, in
    float32, by which they are multiplied. Of a convolution, in is each place of the kernel after the other, with all
    channels: (out, height * width * channels)."""

    values: Tensor
    scales: Tensor


class LowRank(NamedTuple):
    """What LoRAs add to a layer's product: up @ down @ x. down: (ranks, in), or (ranks, in, height, width) of a
    convolution. ups: the first row of each and its (rows, ranks); they share the ranks of down among them, in order.
    scales: of each up, what its product is multiplied by, a number in float32, where LoRAs are computed in a narrower
    type than the layer, which rounds after each of the three products; () where ups hold it, in the layer's type."""

    down: Tensor
    ups: tuple[tuple[int, Tensor], ...]
    scales: tuple[Tensor, ...] = ()

    def scaled(self, index: int, product: Tensor) -> Tensor:
        """The product of the up of this index, times its scale, in the product's type."""
        return (product.float() * self.scales[index]).to(product.dtype) if self.scales else product

    def scaled_ups(self, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        """The ups, multiplied by their scales, in a type."""
        if not self.scales:
            return list(self.ups)
        pairs = zip(self.ups, self.scales, strict=True)
        return [(row, (up.float() * scale).to(dtype)) for (row, up), scale in pairs]


class LayerWeights(NamedTuple):
    """A weight and its bias, or None where the layer has no bias; the weight in eight bits, in each kind in which it is
    wanted; and the LoRAs that are computed beside it.

    gated_scale: of a feed-forward's first layer in float8, the scale, (1, 1) in float32, of what its GEGLU gives in
    float8."""

    weight: Tensor
    bias: Tensor | None
    low_bit: tuple[QuantizedWeight, ...] = ()
    low_rank: LowRank | None = None
    gated_scale: Tensor | None = None


def merged(layer: LayerWeights) -> LayerWeights:
    """With its LoRAs in its weight, (out, ...), which is rounded as the host's own merged weight is."""
    if layer.low_rank is None:
        return layer
    weight, low_rank = layer.weight.detach().flatten(1), layer.low_rank
    down, ups = low_rank.down.to(weight.dtype), low_rank.scaled_ups(weight.dtype)
    # Several LoRAs of their own types may have the same rows.
    is_whole = not low_rank.scales and sum(len(up) for _, up in ups) == len(weight)
    together = torch.empty_like(weight) if is_whole else weight.clone()
    rank, down = 0, down.flatten(1)
    for row, up in ups:
        rows, ranks = up.shape
        before = weight if is_whole else together
        torch.addmm(before[row:row + rows], up, down[rank:rank + ranks], out=together[row:row + rows])
        rank += ranks
    return layer._replace(weight=together.view(layer.weight.shape), low_rank=None)


Weights = Mapping[str, LayerWeights]


def bias_of(weights: Weights, path: str) -> Tensor | None:
    """weights[path].bias, without the weight where that would have to be cast."""
    bias: Callable[[str], Tensor | None] | None = getattr(weights, "bias", None)
    return weights[path].bias if bias is None else bias(path)


@dataclass(frozen=True)
class Source:
    """What a forward reads of a network.

    layout: the network's. dtype: which is computed in. weights: gives every layer's tensors by path, and every fused
    layer's by its name; drop what it returns after the call.
    """

    layout: Any
    dtype: torch.dtype
    weights: Callable[[], Weights]
