"""The option Low-bit: finds the layers whose weights may be quantized to eight bits, and keeps the quantized weights
beside the host's own. They are quantized again after the host's weights have changed. (stored.py has the weights that a
model's file stores in 4 or 8 bits.)"""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.layer_weights import LayerWeights, QuantizedWeight
from ..core.leaves import Block, Convolution, FusedLinear, descriptions


class Kind(NamedTuple):
    """An 8-bit format of weights. name: as in Settings.low_bit. largest: the value to which the largest absolute number
    of a row is scaled."""

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
# round(weight, values, scales) quantizes a weight (out, in). It writes the results to values (out, in), of an 8-bit
# dtype, and scales, float32, (1, out) or (1, 1).
Round = Callable[[Tensor, Tensor, Tensor], None]
# The source of a convolution's input: it follows a group norm. See core.leaves.NORMED.
GROUP_NORMED = "group normed"
# A class of layers, which are quantized all or none: all convolutions. The class of a linear layer is its role in its
# block. Layers of one class have similar errors, and a class with large errors can stay in 16 bits.
CONVOLUTIONS = "convolutions"
# The wanted format of each layer that is to be quantized, by the layer's name.
WantedKinds = Mapping[str, Kind]
# The fewest weights, input features times output features, of a large layer. In smaller ones, computing the scales
# costs more than the product gains.
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
# The smallest value that gated_scale returns, so that weights of zeros have a scale too.
SMALLEST_SCALE = 2.0**-100
# The fewest pixels of feature maps whose convolutions may be in eight bits. Smaller ones use another norm kernel, which
# gains less.
FEWEST_PIXELS = 32 * 32


class LowBitLayer(NamedTuple):
    """A layer whose weight, as a matrix (rows, width), may be in eight bits.

    name: its key in core.layer_weights.Weights.
    source: the kind of operator that makes the layer's input: a TokenLinear's source, or GROUP_NORMED.
    layer_class: a TokenLinear's role, or CONVOLUTIONS.
    norm: the path of the norm before the layer, or ""; see TokenLinear.
    """

    name: str
    width: int
    rows: int
    source: str
    layer_class: str
    norm: str = ""


class Product(NamedTuple):
    """The sizes of a layer's product in one call: of an input (rows, width) and a weight (out, width).

    source: see LowBitLayer.
    size: (height, width) of a convolution's feature map, whose pixels are the rows; None for a linear layer.
    """

    rows: int
    width: int
    out: int
    source: str
    size: tuple[int, int] | None = None


def low_bit_layers(block: Block, fewest_weights: int | None = None) -> Iterator[LowBitLayer]:
    """The linear layers of a block that may be faster in eight bits: those over the image's tokens that are large
    enough, with sizes that kernels take (ALIGNED). fewest_weights: layers with fewer weights (input features times
    output features) are left out; None: FEWEST_WEIGHTS."""
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
    """The convolutions of a block that our 8-bit kernel can compute. They may be faster in eight bits on feature maps
    of FEWEST_PIXELS or more; the caller compares the size."""
    for layer in block.convolutions:
        if has_kernel(layer):
            width = KERNEL**2 * layer.in_channels
            yield LowBitLayer(layer.path, width, layer.out_channels, GROUP_NORMED, CONVOLUTIONS)


def has_kernel(layer: Convolution) -> bool:
    """Whether our 8-bit kernel can compute this convolution."""
    aligned = layer.in_channels % ALIGNED == layer.out_channels % ALIGNED == 0
    return (layer.kernel, layer.stride, layer.padding) == (KERNEL, STRIDE, PADDING) and aligned and not layer.circular


def every_low_bit_layer(layout: Any) -> list[LowBitLayer]:
    """All layers of a network whose weights can be in eight bits, large and small: first linear layers over the image's
    tokens, then convolutions. Layers over the prompt's tokens are not among them; see prompt_layers."""
    blocks = list(layout.layers(Block))
    linear = [layer for block in blocks for layer in low_bit_layers(block, fewest_weights=0)]
    return linear + [layer for block in blocks for layer in low_bit_convolutions(block)]


def prompt_layers(layout: Any) -> list[str]:
    """The names of the linear layers over the prompt's tokens. They are put in eight bits by the option "Low-bit only"
    alone, where the GPU has only the 8-bit weights of a layer."""
    return [layer.name for block in layout.layers(Block) for layer in block.prompt_layers]


def low_bit_products(
    layout: Any, batch: int, height: int, width: int, tokens: int, fewest_weights: int | None, convolutions: bool
) -> dict[str, Product]:
    """The products of a call that may be in eight bits, by the layers' names. batch, height, width: of the latent.
    tokens: how many the prompt has. fewest_weights: see low_bit_layers. convolutions: whether to include convolutions.
    """
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
    """The 8-bit weights of one network. Empty at first; fit() adds weights. Their addresses stay the same, because
    captured graphs contain them.

    layout: of the network, as it was when this was made.
    left_out: the classes of layers (LowBitLayer.layer_class) for which the caller wants no 8-bit weights; only noted.
    are_alone: whether the GPU has these 8-bit weights in place of weights that stay in main memory (the option "Low-bit
        only"). False: it has them beside the host's weights.
    fitted_to: the value of fit's `state` when all weights were last quantized; None before, and after a failure.
    gated_scales: LayerWeights.gated_scale, by the name of the linear layer before a GEGLU.
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
        """Quantize the wanted weights that are not kept yet; and quantize all kept ones again, at their addresses, if
        the host's weights have changed since the last call. Kept weights that are not wanted now stay.

        state: returns a value that is equal as long as the host's weights are unchanged. weights_of: returns the
        weights of the layer with this name, LoRAs included, on the device that computes. Raises
        torch.cuda.OutOfMemoryError, and what weights_of raises; the next call then quantizes everything again.
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
        """Drop 8-bit weights of at least `size` bytes, the newest first. Graphs that read them must not be replayed
        after this. If all weights together have fewer bytes, drops all and raises KeyError."""
        while size > 0:
            _, kept = self._kept.popitem()
            size -= kept.nbytes

    def linear_names(self, kinds: Collection[Kind]) -> frozenset[str]:
        """The names of the linear layers with a weight in one of these formats. A forward that uses these formats reads
        no 16-bit weight of such a layer. (Of a convolution, it may read the 8-bit and the 16-bit weight.)"""
        return frozenset(name for name, kind in list(self._kept) if kind in kinds and name in self._linear)

    def kept(
        self, kinds: Collection[Kind], names: Collection[str] | None = None
    ) -> dict[str, tuple[QuantizedWeight, ...]]:
        """The weights in these formats, by the layer's name; several for a layer that was quantized to several formats.
        names: only of these layers; None: of all."""
        found: dict[str, tuple[QuantizedWeight, ...]] = {}
        for (name, kind), weight in self._kept.items():
            if kind in kinds and (names is None or name in names):
                found[name] = (*found.get(name, ()), weight)
        return found

    def names(self) -> set[str]:
        """The names of the layers with an 8-bit weight."""
        return {name for name, _ in list(self._kept)}

    def kinds(self) -> set[Kind]:
        """The formats that some of the weights have."""
        return {kind for _, kind in list(self._kept)}

    @property
    def bytes(self) -> int:
        """The bytes of GPU memory of the 8-bit weights."""
        return sum(kept.nbytes for kept in list(self._kept.values()))


def kind_of(values: Tensor) -> Kind:
    """The format of 8-bit values, by their dtype. Raises StopIteration for a dtype of no Kind."""
    return next(kind for kind in KINDS if kind.dtype == values.dtype)


def empty_like(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """Uninitialised memory for a weight (out, in) in a format: values, and one scale for each row; or a single scale,
    if the format is float8 and one is enough for this weight's numbers. Waits for the GPU.

    The number of scales stays when the weight is edited: no LoRA makes a row a thousand times smaller than the others.
    """
    values = torch.empty(weight.shape, device=weight.device, dtype=kind.dtype)
    scales = 1 if kind is FP8 and one_scale_suffices(weight) else len(weight)
    room = torch.empty((1, scales), device=weight.device, dtype=torch.float32)
    return QuantizedWeight(values, room, stored=False)


def gated_scale(weight: Tensor, bias: Tensor | None, norm: LayerWeights) -> Tensor:
    """A scale, float32 (), a power of two, with which no output of a GEGLU overflows in float8. The GEGLU follows a
    linear layer, which follows a layer norm. Because the scale depends on weights alone, no maximum of the output has
    to be computed at each step.

    weight: (2 n, width), bias: (2 n,), of the linear layer. norm: of the layer norm. A row after a layer norm has at
    most the length sqrt(width), so the Cauchy-Schwarz inequality bounds both halves of the GEGLU's input; and
    |GELU(x)| <= |x|. The bound is about a hundred times the usual values, which costs no precision: float8 has the same
    relative precision over a range of 28,000.
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
    """A weight as a matrix: a linear layer's, (out, in), as it is; a convolution's, (out, in, height, width), as a new
    or viewed tensor (out, height * width * in), the order of QuantizedWeight."""
    return weight if weight.dim() == 2 else weight.detach().permute(0, 2, 3, 1).flatten(1).contiguous()


def one_scale_suffices(weight: Tensor) -> bool:
    """Whether one scale for a whole weight (out, in), that of its largest number, keeps the relative precision of every
    row in float8. Waits for the GPU."""
    means = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32) / weight.shape[1] ** 0.5
    # Rows of zeros are exact at any scale.
    means = torch.where(means == 0, math.inf, means)
    return bool(means.amin() * FP8.largest >= SMALLEST_MEAN * largest_of(weight))


def largest_of(weight: Tensor) -> Tensor:
    """The largest absolute number of a weight, float32 (), on its device."""
    largest: Tensor = torch.linalg.vector_norm(weight.detach(), math.inf, dtype=torch.float32)
    return largest
