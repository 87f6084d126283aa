"""The weights that a forward reads, by the paths of the layers: with quantized weights and LoRAs beside them."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The number of LoRA ranks that a kernel multiplies at once.
RANKS = 16


class QuantizedWeight(NamedTuple):
    """The weight of a layer in float8 (e4m3) or int8.

    values: (out, in); of a convolution (out, kernel height * kernel width * channels), with the channels contiguous.
    scales: float32, (1, out) or (1, 1). weight = values * scales, row by row.
    rotation: the group width, a power of 4, of a weight stored as W @ H^T for each group of inputs (ConvRot), where H
        is an orthonormal Hadamard matrix: the input's rows are multiplied by H. 0: not rotated.
    stored: whether the host's file contains the weight in this form; then the input is rounded as the host rounds it.
        False: the option Low-bit quantized the weight.
    """

    values: Tensor
    scales: Tensor
    rotation: int = 0
    stored: bool = True

    @property
    def nbytes(self) -> int:
        """The size of the values and the scales."""
        return self.values.nbytes + self.scales.nbytes


class LowRank(NamedTuple):
    """LoRAs of a layer, each of which adds up @ down @ x to the layer's product.

    down: the down matrices of all LoRAs, concatenated: (ranks, in), or (ranks, in, height, width) of a convolution.
    ups: a (first, up) pair for each LoRA. up: its matrix (rows, its ranks). first: the index of the first row of the
        layer's weight, or column of its output, that it adds to: in a fused layer, a LoRA of one member adds to that
        member's rows alone. The rows of `down` belong to the LoRAs in this order.
    scales: for each up a float32 scalar that multiplies its product. The host then computes the LoRAs in a narrower
        dtype than the layer and rounds after each product. (): the ups include the scale, in the layer's dtype.
    """

    down: Tensor
    ups: tuple[tuple[int, Tensor], ...]
    scales: tuple[Tensor, ...] = ()

    def scaled(self, index: int, product: Tensor) -> Tensor:
        """product times scales[index], rounded to the product's dtype; product itself without scales. product: the
        result of the up matrix with this index."""
        return (product.float() * self.scales[index]).to(product.dtype) if self.scales else product

    def of_rows(self, first: int, count: int) -> LowRank | None:
        """The LoRAs that add to the `count` rows of the weight from `first` on, with row indices relative to `first`;
        None if no LoRA adds to them. For one member of a fused layer: the rows of each LoRA must lie entirely inside or
        entirely outside of the member's."""
        downs: list[Tensor] = []
        ups: list[tuple[int, Tensor]] = []
        scales: list[Tensor] = []
        rank = 0
        for index, (row, up) in enumerate(self.ups):
            if first <= row < first + count:
                downs.append(self.down[rank:rank + up.shape[1]])
                ups.append((row - first, up))
                scales += self.scales[index:index + 1]
            rank += up.shape[1]
        if not ups:
            return None
        return LowRank(downs[0] if len(downs) == 1 else torch.cat(downs), tuple(ups), tuple(scales))

    def scaled_ups(self, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        """`ups` with each matrix multiplied by its scale in float32, then cast to a dtype. Without scales, `ups` as
        they are, in their own dtype."""
        if not self.scales:
            return list(self.ups)
        pairs = zip(self.ups, self.scales, strict=True)
        return [(row, (up.float() * scale).to(dtype)) for (row, up), scale in pairs]


class LayerWeights(NamedTuple):
    """The weights of one layer.

    weight: (out, in), or (out, in, height, width) of a convolution.
    bias: (out,), or None.
    low_bit: the same weight in eight bits, once for each format in use; () for none.
    low_rank: LoRAs that are not merged into the weight, and that an operator has to compute beside it; None for none.
    gated_scale: for a feed-forward's first layer in float8, the scale with which its GEGLU's output is written in
        float8: float32 (1, 1). None otherwise.
    """

    weight: Tensor
    bias: Tensor | None
    low_bit: tuple[QuantizedWeight, ...] = ()
    low_rank: LowRank | None = None
    gated_scale: Tensor | None = None


def merged(layer: LayerWeights) -> LayerWeights:
    """The layer with its LoRAs merged into a new weight (weight + up @ down) of the same dtype, rounded as the host
    rounds its own merged weight. The given weight is not changed. Without LoRAs, the layer itself."""
    if layer.low_rank is None:
        return layer
    low_rank = layer.low_rank
    weight = layer.weight.detach().flatten(1)
    down = low_rank.down.to(weight.dtype).flatten(1)
    ups = low_rank.scaled_ups(weight.dtype)
    # If the ups cover every row exactly once, the sums can be written without a copy of the weight. LoRAs with scales
    # may cover the same rows several times.
    is_whole = not low_rank.scales and sum(len(up) for _, up in ups) == len(weight)
    together = torch.empty_like(weight) if is_whole else weight.clone()
    before = weight if is_whole else together
    rank = 0
    for row, up in ups:
        rows, ranks = up.shape
        torch.addmm(before[row:row + rows], up, down[rank:rank + ranks], out=together[row:row + rows])
        rank += ranks
    return layer._replace(weight=together.view(layer.weight.shape), low_rank=None)


# The weights of a network's layers, by path; a fused layer's by its name (leaves.FusedLinear.name).
Weights = Mapping[str, LayerWeights]


def bias_of(weights: Weights, path: str) -> Tensor | None:
    """weights[path].bias. If the mapping makes a layer's weight when it is read (weights.operands.Operands, which has a
    method `bias`), the weight is not made for this."""
    bias: Callable[[str], Tensor | None] | None = getattr(weights, "bias", None)
    return weights[path].bias if bias is None else bias(path)


@dataclass(frozen=True)
class Source:
    """Everything that a forward reads from a network.

    layout: the network's layout.
    dtype: the dtype to compute in.
    weights: returns the Weights. It is a function, called anew for each call of the network, because its result is
        valid for one call and must not be kept.
    """

    layout: Any
    dtype: torch.dtype
    weights: Callable[[], Weights]
