"""The option Low-bit: finds the layers whose weights may be quantized to eight bits, and keeps the quantized weights
beside the host's own. They are quantized again when the host's change."""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.layer_weights import LayerWeights, QuantizedWeight
from ..core.leaves import Block, Convolution, FusedLinear, descriptions


class Kind(NamedTuple):
    """An 8-bit format. name: as in Settings.low_bit. largest: the value to which the largest number of a row is scaled.
    """

    name: str
    dtype: torch.dtype
    largest: float


# Float8 e4m3 has no infinity.
FP8 = Kind("fp8", torch.float8_e4m3fn, 448.0)
INT8 = Kind("int8", torch.int8, 127.0)
# In the order of preference of low_bit="auto".
KINDS = (FP8, INT8)
# The formats that products may use, by Settings.low_bit.
KINDS_OF = {"fp8": (FP8,), "int8": (INT8,), "auto": KINDS}
# round(weight, values, scales) quantizes a weight (out, in) into values (out, in) and scales (1, out) or (1, 1).
Round = Callable[[Tensor, Tensor, Tensor], None]
# The source of a convolution's input: it follows a group norm. See core.leaves.NORMED.
GROUP_NORMED = "group normed"
# The class of all convolutions; the class of a linear layer is its role in its block. Layers of one class have similar
# errors, and a class with large errors can stay in 16 bits.
CONVOLUTIONS = "convolutions"
# The wanted format of each layer, by the layer's name.
WantedKinds = Mapping[str, Kind]
# Input features times output features. In smaller layers, computing the scales costs more than the product gains.
FEWEST_WEIGHTS = 1 << 20
# The kernel size, stride and padding of the convolutions that our 8-bit kernel computes.
KERNEL = 3
STRIDE = 1
PADDING = 1
# Kernels need widths that are multiples of this.
ALIGNED = 16
# The smallest root mean square of a row in float8. float8's steps are constant below 2**-6; at this root mean square,
# that increases the rounding error by 1/20.
SMALLEST_MEAN = 2.0**-4
# float8 rounds tokens and weights up by at most 1/16, twice each in a GEGLU: (17/16)**4 = 1.27.
ROUNDING_MARGIN = 1.3
SMALLEST_SCALE = 2.0**-100
# The fewest pixels of feature maps whose convolutions may be in eight bits. Smaller ones use another norm kernel, which
# gains less.
FEWEST_PIXELS = 32 * 32


class LowBitLayer(NamedTuple):
    """A layer whose weight, (rows, width), may be in eight bits.

    name: its key in Weights.
    source: a TokenLinear's source, or GROUP_NORMED.
    layer_class: a TokenLinear's role, or CONVOLUTIONS.
    norm: see TokenLinear.
    """

    name: str
    width: int
    rows: int
    source: str
    layer_class: str
    norm: str = ""


class Product(NamedTuple):
    """The product of an input (rows, width) and a weight (out, width).

    source: see LowBitLayer.
    size: (height, width) of a convolution's feature map, whose pixels are the rows; None for a linear layer.
    """

    rows: int
    width: int
    out: int
    source: str
    size: tuple[int, int] | None = None


def low_bit_layers(block: Block, fewest_weights: int | None = None) -> Iterator[LowBitLayer]:
    """The linear layers of a block that may be faster in eight bits: the large ones over the image's tokens.
    fewest_weights: of a large layer, by default FEWEST_WEIGHTS."""
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
    """The convolutions of a block that may be faster in eight bits, for feature maps of FEWEST_PIXELS or more."""
    for layer in block.convolutions:
        if has_kernel(layer):
            width = KERNEL**2 * layer.in_channels
            yield LowBitLayer(layer.path, width, layer.out_channels, GROUP_NORMED, CONVOLUTIONS)


def has_kernel(layer: Convolution) -> bool:
    """Whether our 8-bit kernel can compute this convolution."""
    aligned = layer.in_channels % ALIGNED == layer.out_channels % ALIGNED == 0
    return (layer.kernel, layer.stride, layer.padding) == (KERNEL, STRIDE, PADDING) and aligned and not layer.circular


def every_low_bit_layer(layout: Any) -> list[LowBitLayer]:
    """All layers of a network whose weights can be in eight bits, large and small."""
    blocks = list(layout.layers(Block))
    linear = [layer for block in blocks for layer in low_bit_layers(block, fewest_weights=0)]
    return linear + [layer for block in blocks for layer in low_bit_convolutions(block)]


def prompt_layers(layout: Any) -> list[str]:
    """The names of the layers over the prompt's tokens. They are in eight bits only with Low-bit only, where the GPU
    has the 8-bit weights alone."""
    return [layer.name for block in layout.layers(Block) for layer in block.prompt_layers]


def low_bit_products(
    layout: Any, batch: int, height: int, width: int, tokens: int, fewest_weights: int | None, convolutions: bool
) -> dict[str, Product]:
    """The products of a call that may be in eight bits, by the layers' names. height, width: of the latent.
    tokens: of the prompt. fewest_weights: see low_bit_layers. convolutions: whether to include convolutions."""
    found = {}
    for part, size in layout.sized_layers(height, width, tokens):
        pixels = size[0] * size[1]
        for block in descriptions(part, Block):
            for layer in low_bit_layers(block, fewest_weights):
                found[layer.name] = Product(batch * pixels, layer.width, layer.rows, layer.source)
            if convolutions and pixels >= FEWEST_PIXELS:
                for layer in low_bit_convolutions(block):
                    found[layer.name] = Product(batch * pixels, layer.width, layer.rows, layer.source, size)
    return found


class LowBitWeights:
    """The 8-bit weights of one network. Their addresses stay the same, because captured graphs contain them.

    left_out: classes of layers without 8-bit weights.
    are_alone: whether they replace weights in main memory, rather than being kept beside weights on the GPU.
    fitted_to: the state of the weights from which all were quantized.
    gated_scales: LayerWeights.gated_scale by layer.
    """

    def __init__(
        self, layout: Any, round_rows: Round, left_out: frozenset[str] = frozenset(), are_alone: bool = False
    ) -> None:
        """layout: of the network. round_rows: the backend's quantizer; see Round. The other parameters: see the
        class."""
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
        """Quantize the wanted weights that are not kept yet; and all kept ones again, if the weights have changed.

        state: returns a value that is equal as long as the weights are unchanged. weights_of: returns a layer's weights
        on the device that computes. Raises torch.cuda.OutOfMemoryError, and what weights_of raises.
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
        """The names of the linear layers with a weight in one of these formats. Their products need no other weight."""
        return frozenset(name for name, kind in list(self._kept) if kind in kinds and name in self._linear)

    def kept(
        self, kinds: Collection[Kind], names: Collection[str] | None = None
    ) -> dict[str, tuple[QuantizedWeight, ...]]:
        """The weights in these formats, by layer. names: of these layers alone; None: of all."""
        found: dict[str, tuple[QuantizedWeight, ...]] = {}
        for (name, kind), weight in self._kept.items():
            if kind in kinds and (names is None or name in names):
                found[name] = (*found.get(name, ()), weight)
        return found

    def names(self) -> set[str]:
        """The names of the layers with an 8-bit weight."""
        return {name for name, _ in list(self._kept)}

    def kinds(self) -> set[Kind]:
        """The formats of the weights."""
        return {kind for _, kind in list(self._kept)}

    @property
    def bytes(self) -> int:
        """GPU memory of the 8-bit weights."""
        return sum(kept.nbytes for kept in list(self._kept.values()))


def kind_of(values: Tensor) -> Kind:
    """The format of 8-bit values, by their dtype."""
    return next(kind for kind in KINDS if kind.dtype == values.dtype)


def empty_like(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """Uninitialised memory for a weight (out, in) in a format: values, and one scale for each row, or a single one if
    that is enough for float8.

    The number of scales stays when the weight is edited: no LoRA makes a row a thousand times smaller than the others.
    """
    values = torch.empty(weight.shape, device=weight.device, dtype=kind.dtype)
    scales = 1 if kind is FP8 and one_scale_suffices(weight) else len(weight)
    room = torch.empty((1, scales), device=weight.device, dtype=torch.float32)
    return QuantizedWeight(values, room, stored=False)


def gated_scale(weight: Tensor, bias: Tensor | None, norm: LayerWeights) -> Tensor:
    """The float8 scale for the output of a GEGLU after a layer norm and a linear layer: a power of two, float32 ().

    weight: (2 n, width), bias: (2 n,), of the linear layer. A row after a layer norm has at most the length
    sqrt(width), so the Cauchy-Schwarz inequality bounds both halves of the GEGLU's input; and |GELU(x)| <= |x|. The
    bound is about a hundred times the usual values, which costs no precision: float8 has the same relative precision
    over a range of 28,000.
    """
    wide = weight.detach().float()
    factor = norm.weight.detach().to(wide)
    offset = torch.zeros_like(wide[:, 0]) if norm.bias is None else wide @ norm.bias.detach().to(wide)
    offset = offset if bias is None else offset + bias.detach().to(wide)
    length = torch.linalg.vector_norm(wide * factor, dim=1) * weight.shape[1] ** 0.5
    values, gates = (length + offset.abs()).chunk(2)
    largest = (values * gates).amax() * ROUNDING_MARGIN / FP8.largest
    return torch.exp2(torch.ceil(torch.log2(largest.clamp_min(SMALLEST_SCALE))))


def as_rows(weight: Tensor) -> Tensor:
    """A weight as (out, in): a linear layer's as it is; a convolution's, (out, in, height, width), reshaped to (out,
    height * width * in), as in QuantizedWeight."""
    return weight if weight.dim() == 2 else weight.detach().permute(0, 2, 3, 1).flatten(1).contiguous()


def one_scale_suffices(weight: Tensor) -> bool:
    """Whether one scale, that of the largest value, is enough for every row of a weight (out, in) to keep its relative
    precision in float8. Waits for the GPU."""
    means = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32) / weight.shape[1] ** 0.5
    # Rows of zeros are exact at any scale.
    means = torch.where(means == 0, math.inf, means)
    return bool(means.amin() * FP8.largest >= SMALLEST_MEAN * largest_of(weight))


def largest_of(weight: Tensor) -> Tensor:
    """The largest absolute value, float32 ()."""
    largest: Tensor = torch.linalg.vector_norm(weight.detach(), math.inf, dtype=torch.float32)
    return largest
