"""The weights that a forward reads of a network, by the paths of its layers."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# So many ranks of LoRAs a kernel multiplies at once.
RANKS = 16


class QuantizedWeight(NamedTuple):
    """The weight of a layer in float8 (e4m3) or int8: values (out, in), and scales (1, out), or (1, 1) for all rows, in
    float32, by which they are multiplied. Of a convolution, in is each place of the kernel after the other, with all
    channels: (out, height * width * channels).

    rotation: the width of the groups, a power of 4, of a weight that is stored as W @ H^T for each group of its inputs
    (ConvRot), with an orthonormal Hadamard matrix H: rows of the input are multiplied by H. 0: not rotated.
    stored: whether the host's file has the weight in this form, so that the input is rounded as the host rounds it; or
    the weight was rounded by Low-bit.
    """

    values: Tensor
    scales: Tensor
    rotation: int = 0
    stored: bool = True

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


class LowRank(NamedTuple):
    """LoRAs of a layer, which add up @ down @ x to its product.

    down: (ranks, in), or (ranks, in, height, width) of a convolution, of all LoRAs together. ups: for each LoRA the
    first row of the output that it adds to, and its matrix (rows, ranks); it takes the next ranks of down.
    scales: for each up a number in float32 that multiplies its product, if the LoRAs are computed in a narrower dtype
    than the layer, which rounds after each of the three products; () if the ups include it, in the layer's dtype.
    """

    down: Tensor
    ups: tuple[tuple[int, Tensor], ...]
    scales: tuple[Tensor, ...] = ()

    def scaled(self, index: int, product: Tensor) -> Tensor:
        """The product of the up with this index, times its scale, in the product's dtype."""
        return (product.float() * self.scales[index]).to(product.dtype) if self.scales else product

    def of_rows(self, first: int, count: int) -> LowRank | None:
        """The LoRAs that add to these rows of the output, counted from the first of them; None where none does. No LoRA
        may add to rows of which a part alone is among them."""
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
        """The ups, multiplied by their scales, in a dtype."""
        if not self.scales:
            return list(self.ups)
        pairs = zip(self.ups, self.scales, strict=True)
        return [(row, (up.float() * scale).to(dtype)) for (row, up), scale in pairs]


class LayerWeights(NamedTuple):
    """A layer's weight, and its bias or None.

    low_bit: the weight in eight bits, once in each kind that is used. low_rank: LoRAs that are computed beside it.
    gated_scale: for a feed-forward's first layer in float8, the scale of its GEGLU's output in float8, (1, 1) in
    float32.
    """

    weight: Tensor
    bias: Tensor | None
    low_bit: tuple[QuantizedWeight, ...] = ()
    low_rank: LowRank | None = None
    gated_scale: Tensor | None = None


def merged(layer: LayerWeights) -> LayerWeights:
    """The layer with its LoRAs merged into its weight (out, ...), rounded as the host's own merged weight is."""
    if layer.low_rank is None:
        return layer
    low_rank = layer.low_rank
    weight = layer.weight.detach().flatten(1)
    down = low_rank.down.to(weight.dtype).flatten(1)
    ups = low_rank.scaled_ups(weight.dtype)
    # If the ups cover every row once, the sum can be written without copying the weight first. LoRAs that have scales
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


Weights = Mapping[str, LayerWeights]


def bias_of(weights: Weights, path: str) -> Tensor | None:
    """weights[path].bias. weights.operands.Operands, which have a method for it, do not make the weight then."""
    bias: Callable[[str], Tensor | None] | None = getattr(weights, "bias", None)
    return weights[path].bias if bias is None else bias(path)


@dataclass(frozen=True)
class Source:
    """What a forward reads of a network.

    layout: the network's. dtype: which is computed in. weights: a function, because its result must not outlive the
    call; it returns every layer's tensors by path, and every fused layer's by its name.
    """

    layout: Any
    dtype: torch.dtype
    weights: Callable[[], Weights]
