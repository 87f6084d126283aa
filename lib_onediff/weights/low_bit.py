"""Which layers of a network may have their weights in eight bits, and these weights, kept beside the host's own and
rounded again when those change."""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.layer_weights import LayerWeights, QuantizedWeight
from ..core.leaves import Block, Convolution, FusedLinear, descriptions


class Kind(NamedTuple):
    """A type of eight bits. largest: the value to which the largest number of a row is scaled."""

    name: str
    dtype: torch.dtype
    largest: float


# Float8 e4m3 has no infinity.
FP8 = Kind("fp8", torch.float8_e4m3fn, 448.0)
INT8 = Kind("int8", torch.int8, 127.0)
# The one that auto prefers first.
KINDS = (FP8, INT8)
# The kinds that products may have, by settings.Settings.low_bit.
KINDS_OF = {"fp8": (FP8,), "int8": (INT8,), "auto": KINDS}
# round(weight, values, scales) rounds a weight (out, in) into values (out, in) and scales (1, out) or (1, 1).
Round = Callable[[Tensor, Tensor, Tensor], None]
# The source of the images that convolutions read; see core.leaves.NORMED.
GROUP_NORMED = "group normed"
# The class of convolutions; that of a linear layer is its role in its block. Layers of one class have similar errors,
# and a class with large ones can stay in 16 bits.
CONVOLUTIONS = "convolutions"
# The kind in which each layer's weight is wanted, by the layer's name.
WantedKinds = Mapping[str, Kind]
# Features in times features out. Smaller layers gain less in their products than their scales cost, at any size.
FEWEST_WEIGHTS = 1 << 20
# The only convolution that has a kernel.
KERNEL = 3
STRIDE = 1
PADDING = 1
# Kernels need widths that are multiples of this.
ALIGNED = 16
# The smallest root mean square of the values of a row in float8. Below 2**-6, float8's steps become no smaller; at this
# mean, that makes the rounding error larger by a twentieth.
SMALLEST_MEAN = 2.0**-4
# Float8 rounds tokens and weights up by a sixteenth at most, twice each in a GEGLU.
ROUNDING_MARGIN = 1.3
SMALLEST_SCALE = 2.0**-100
# The fewest pixels of an image whose convolutions may be in eight bits. The norm of a smaller one is another kernel,
# and gains less.
FEWEST_PIXELS = 32 * 32


class LowBitLayer(NamedTuple):
    """A layer that may have its weight, (rows, width), in eight bits. source: a TokenLinear's, or GROUP_NORMED.
    layer_class: a TokenLinear's role, or CONVOLUTIONS. norm: see TokenLinear."""

    name: str
    width: int
    rows: int
    source: str
    layer_class: str
    norm: str = ""


class Product(NamedTuple):
    """The product of tokens (rows, width) and a weight (out, width). source: see TokenLinear. size: of a convolution,
    the (height, width) of the images whose pixels are the rows."""

    rows: int
    width: int
    out: int
    source: str
    size: tuple[int, int] | None = None


def low_bit_layers(block: Block, fewest_weights: int | None = None) -> Iterator[LowBitLayer]:
    """The linear layers of a block that may gain by eight bits: the large ones over the image's tokens. fewest_weights:
    the fewest weights of a large one, by default FEWEST_WEIGHTS."""
    fewest = FEWEST_WEIGHTS if fewest_weights is None else fewest_weights
    for layer, source, role, norm in block.token_layers:
        if isinstance(layer, FusedLinear):
            name = layer.name
            width = layer.members[0].in_features
        else:
            name = layer.path
            width = layer.in_features
        if width * layer.out_features >= fewest and width % ALIGNED == layer.out_features % ALIGNED == 0:
            yield LowBitLayer(name, width, layer.out_features, source, role, norm)


def low_bit_convolutions(block: Block) -> Iterator[LowBitLayer]:
    """The convolutions of a block that may gain by eight bits, if the image has enough pixels."""
    for layer in block.convolutions:
        if has_kernel(layer):
            width = KERNEL**2 * layer.in_channels
            yield LowBitLayer(layer.path, width, layer.out_channels, GROUP_NORMED, CONVOLUTIONS)


def has_kernel(layer: Convolution) -> bool:
    """Whether a kernel of ours computes this convolution."""
    aligned = layer.in_channels % ALIGNED == layer.out_channels % ALIGNED == 0
    return (layer.kernel, layer.stride, layer.padding) == (KERNEL, STRIDE, PADDING) and aligned and not layer.circular


def every_low_bit_layer(layout: Any) -> list[LowBitLayer]:
    """All layers that can have their weights in eight bits, large or small."""
    blocks = list(layout.layers(Block))
    linear = [layer for block in blocks for layer in low_bit_layers(block, fewest_weights=0)]
    return linear + [layer for block in blocks for layer in low_bit_convolutions(block)]


def prompt_layers(layout: Any) -> list[str]:
    """The names of the layers over the prompt's tokens. They are in eight bits only where no weight is in 16."""
    return [layer.name for block in layout.layers(Block) for layer in block.prompt_layers]


def low_bit_products(
    layout: Any, batch: int, height: int, width: int, fewest_weights: int | None, convolutions: bool
) -> dict[str, Product]:
    """The products of a call that may be in eight bits, by the names of their layers. height, width: of the latent.
    fewest_weights: see low_bit_layers. convolutions: whether they may."""
    found = {}
    for part, size in layout.sized_layers(height, width):
        pixels = size[0] * size[1]
        for block in descriptions(part, Block):
            for layer in low_bit_layers(block, fewest_weights):
                found[layer.name] = Product(batch * pixels, layer.width, layer.rows, layer.source)
            if convolutions and pixels >= FEWEST_PIXELS:
                for layer in low_bit_convolutions(block):
                    found[layer.name] = Product(batch * pixels, layer.width, layer.rows, layer.source, size)
    return found


class LowBitWeights:
    """Weights in eight bits, in memory that stays the same as long as the layout does: captured graphs read it.

    left_out: the classes of layers that are never among them. are_alone: whether they stand for weights in main memory.
    fitted_to: the state of the weights that all were rounded from. gated_scales: LayerWeights.gated_scale by layer.
    """

    def __init__(
        self, layout: Any, round_rows: Round, left_out: frozenset[str] = frozenset(), are_alone: bool = False
    ) -> None:
        self.layout = layout
        self.left_out = left_out
        self.are_alone = are_alone
        self._round = round_rows
        self._kept: dict[tuple[str, Kind], QuantizedWeight] = {}
        self.gated_scales: dict[str, Tensor] = {}
        every = every_low_bit_layer(layout)
        self._norms = {one.name: one.norm for one in every if one.norm}
        self._linear = {one.name for one in every if one.layer_class != CONVOLUTIONS}
        self._linear.update(prompt_layers(layout))
        self.fitted_to: object = None

    def fit(
        self, state: Callable[[], object], weights_of: Callable[[str], LayerWeights], wanted: WantedKinds
    ) -> None:
        """Round the wanted weights that are not kept yet, and all kept ones again if the weights' state has changed
        since they were rounded. state: returns a value that is equal as long as the weights are. weights_of: returns a
        layer's tensors on the device that computes.

        Raises torch.cuda.OutOfMemoryError, and what weights_of raises.
        """
        due: dict[str, list[Kind]] = {}
        if state() != self.fitted_to:
            for name, kind in self._kept:
                due.setdefault(name, []).append(kind)
        for name, kind in wanted.items():
            if (name, kind) not in self._kept:
                due.setdefault(name, []).append(kind)
        if not due:
            return
        self.fitted_to = None
        for name, kinds in due.items():
            layer = weights_of(name)
            weight = layer.weight
            bias = layer.bias
            # Release our reference: a fused weight is a view that would keep its tensor alive.
            del layer
            rows = as_rows(weight)
            for kind in kinds:
                if (name, kind) not in self._kept:
                    self._kept[name, kind] = empty_like(rows, kind)
                kept = self._kept[name, kind]
                self._round(rows, kept.values, kept.scales)
            if name in self._norms and FP8 in kinds:
                scale = gated_scale(weight, bias, weights_of(self._norms[name]))
                if name not in self.gated_scales:
                    self.gated_scales[name] = torch.empty((1, 1), device=weight.device, dtype=torch.float32)
                self.gated_scales[name].copy_(scale)
            del weight, rows
        self.fitted_to = state()

    def give_up(self, size: int) -> None:
        """Free at least `size` bytes, newest first. Raises KeyError if there are fewer."""
        while size > 0:
            _, kept = self._kept.popitem()
            size -= kept.nbytes

    def linear_names(self, kinds: Collection[Kind]) -> frozenset[str]:
        """The linear layers that have weights in one of these kinds: their products need no other weight."""
        return frozenset(name for name, kind in list(self._kept) if kind in kinds and name in self._linear)

    def kept(
        self, kinds: Collection[Kind], names: Collection[str] | None = None
    ) -> dict[str, tuple[QuantizedWeight, ...]]:
        """The weights of these kinds, by layer. names: of these layers alone."""
        found: dict[str, tuple[QuantizedWeight, ...]] = {}
        for (name, kind), weight in self._kept.items():
            if kind in kinds and (names is None or name in names):
                found[name] = (*found.get(name, ()), weight)
        return found

    def names(self) -> set[str]:
        """The layers of which there are weights."""
        return {name for name, _ in list(self._kept)}

    def kinds(self) -> set[Kind]:
        """In which there are weights."""
        return {kind for _, kind in list(self._kept)}

    @property
    def bytes(self) -> int:
        """GPU memory that is held beside the host's own weights."""
        return sum(kept.nbytes for kept in list(self._kept.values()))


def kind_of(values: Tensor) -> Kind:
    """By the type of values in eight bits."""
    return next(kind for kind in KINDS if kind.dtype == values.dtype)


def empty_like(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """Room for a weight, (out, in), in a kind, with the scales that it needs; for float8 it has to be looked at. Edits
    keep them: no LoRA makes a row a thousand times smaller beside the others."""
    values = torch.empty(weight.shape, device=weight.device, dtype=kind.dtype)
    scales = 1 if kind is FP8 and one_scale_suffices(weight) else len(weight)
    room = torch.empty((1, scales), device=weight.device, dtype=torch.float32)
    return QuantizedWeight(values, room, stored=False)


def gated_scale(weight: Tensor, bias: Tensor | None, norm: LayerWeights) -> Tensor:
    """(), in float32, a power of two: the scale in float8 of what a GEGLU gives after a layer norm and a linear layer,
    weight (2 n, width), bias (2 n,).

    No layer norm's row is longer than the square root of its width, so by Cauchy's inequality neither half of the GEGLU
    is larger than this, and a GELU is no larger than what it is of. That is some hundred times what is usual: float8
    keeps its digits over a range of 28,000."""
    wide = weight.detach().float()
    factor = norm.weight.detach().to(wide)
    offset = torch.zeros_like(wide[:, 0]) if norm.bias is None else wide @ norm.bias.detach().to(wide)
    offset = offset if bias is None else offset + bias.detach().to(wide)
    length = torch.linalg.vector_norm(wide * factor, dim=1) * weight.shape[1] ** 0.5
    values, gates = (length + offset.abs()).chunk(2)
    largest = (values * gates).amax() * ROUNDING_MARGIN / FP8.largest
    return torch.exp2(torch.ceil(torch.log2(largest.clamp_min(SMALLEST_SCALE))))


def as_rows(weight: Tensor) -> Tensor:
    """A weight (out, in) as it is; a convolution's, (out, in, height, width), as QuantizedWeight has it."""
    return weight if weight.dim() == 2 else weight.detach().permute(0, 2, 3, 1).flatten(1).contiguous()


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
