"""The operators: the functions of tensors with which forwards are written. Each device (backend) implements them, as a
module or as an object.

Images are (batch, channels, height, width) in any memory format; tokens are (batch, tokens, width). Unless documented
otherwise, an operator returns new tensors in the dtype of its first argument, and sums in float32. Elementwise
functions of small vectors, such as the gates of a timestep, are no operators: a forward calls torch's.
"""
from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .layer_weights import LayerWeights
from .leaves import AdaptiveNorm, Convolution, GroupNorm, LayerNorm, RMSNorm, TimeEmbedding

# The weights and the description of an RMS norm.
WeightedNorm = tuple[LayerWeights, RMSNorm]


class Residual(NamedTuple):
    """The residual of a transformer (the tokens to which its blocks add), as a sum that is computed later:

        tokens + norm(update * update_scales) * gate + deferred_bias + bias

    without the parts that are None. The next operator that reads the residual computes the sum as it reads.

    tokens: (batch, tokens, width).
    update: the output of the last layer, of the shape of tokens. update_scales: float32 (..., 1), which a product in
        float8 leaves to the reader. norm: the norm after that layer. gate: (batch, width).
    bias: (width,), the bias of the last linear layer. deferred_bias: float32 (width,), the sum of the biases of earlier
        layers. The next norm adds bias and deferred_bias to the tokens as it reads them, and returns their sum as the
        new deferred_bias: this takes less time than an addition to all tokens after each linear layer.
    """

    tokens: Tensor
    deferred_bias: Tensor | None = None
    bias: Tensor | None = None
    update: Tensor | None = None
    update_scales: Tensor | None = None
    gate: Tensor | None = None
    norm: WeightedNorm | None = None


class Modulation(NamedTuple):
    """Vectors that modulate a norm's output, usually computed from the timestep: norm * scale + shift.

    scale: (batch, width). If a network computes scale - 1, its forward adds 1. shift: (batch, width), or None.
    """

    scale: Tensor
    shift: Tensor | None = None


class Rotary(NamedTuple):
    """A rotary embedding of tokens: cosines and sines of the angles by which heads of queries and keys are rotated.

    cosines, sines: float32 (tokens, head width / 2), or (batch, tokens, head width / 2) if the positions differ from
        row to row of the batch.
    interleaved: the numbers 2i and 2i + 1 of a head are rotated as a pair. Otherwise i and i + head width / 2 are.
    """

    cosines: Tensor
    sines: Tensor
    interleaved: bool = False


class Heads(NamedTuple):
    """How one part of a projection (its queries, keys or values) is split into heads.

    number: the number of heads. norm: the RMS norm over each head's width, or None. rotary: applied after the norm, or
    None.
    """

    number: int
    norm: WeightedNorm | None = None
    rotary: Rotary | None = None


class Filled(NamedTuple):
    """A batch whose rows are padded to one number of tokens, as a mask of attention. In each row, the padding comes
    last. No token sees padding; what an operator computes for padding has no meaning, but is finite.

    used: int (batch,), how many tokens of each row are not padding.
    ends: int32 (2 * batch + 1,): indices of tokens in all rows concatenated. For each row, the index of its first token
        and that of its first padding; finally the number of all tokens.
    certain: how many of the first tokens of each row are never padding, such as an image's before its prompt. 0 if that
        is not known. No value of `used` is below `certain`.
    used and ends are read on their device, so their values may change between replays of a graph.
    """

    used: Tensor
    ends: Tensor
    certain: int

    @classmethod
    def of(cls, used: Tensor, tokens: int, certain: int = 0) -> Filled:
        """The Filled of a batch. used, certain: see Filled. tokens: the number of tokens of each row, padding
        included."""
        begins = tokens * torch.arange(len(used) + 1, dtype=torch.int32, device=used.device)
        inner = torch.stack([begins[:-1], begins[:-1] + used.to(torch.int32)], dim=1)
        return cls(used, torch.cat([inner.flatten(), begins[-1:]]), certain)

    def mask(self, tokens: int) -> Tensor:
        """A bool mask for Operators.attention, (batch, 1, 1, tokens): True for the tokens that are not padding. A row
        of nothing but padding is all True, so that its softmax is finite. tokens: the number of tokens of each row."""
        indices = torch.arange(tokens, dtype=torch.int64, device=self.used.device)
        # A row without used tokens sees all of them: a softmax over no key would be NaN.
        seen = torch.where(self.used > 0, self.used, tokens)
        return (indices < seen[:, None])[:, None, None]


class Activation(Enum):
    """An activation function. GELU: its exact form, with erf. GELU_TANH: its tanh approximation. SILU: x * sigmoid(x).
    SIGMOID: only for gates."""

    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SIGMOID = "sigmoid"


class GatedUnit(NamedTuple):
    """A gated linear unit, value * activation(gate). value and gate are the two halves of the input along its width.

    gate_first: whether the gate is the first half.
    """

    activation: Activation
    gate_first: bool


# GEGLU as in diffusers: the first half is the value. SWIGLU: the first half is the gate, the output of LLaMA's
# feed-forward layer w1; the second half is that of w3.
GEGLU = GatedUnit(Activation.GELU, gate_first=False)
SWIGLU = GatedUnit(Activation.SILU, gate_first=True)


class QuantizedTokens(NamedTuple):
    """Tokens in float8 (e4m3) or int8, for a matrix product.

    values: (rows, width). scales: float32, (rows, 1), or (1, 1) for all rows. tokens = values * scales.
    shape: the dimensions that are flattened to rows, such as (batch, tokens).
    unit: float32 (1, 1), the number one; None unless the tokens are in float8 with a scale for each row. A product may
        multiply by `unit` in place of `scales`, and leave `scales` to the operator that reads its result.
    plain: the same tokens in the model's dtype, (*shape, width), for LoRAs of the layer; None without LoRAs.
    """

    values: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    unit: Tensor | None = None
    plain: Tensor | None = None


class QuantizedImage(NamedTuple):
    """An image in float8 (e4m3) or int8, for a convolution.

    values: (batch, height, width, channels). scales: float32 (batch, 1). image = values * scales.
    """

    values: Tensor
    scales: Tensor


# Tokens (Rows) or an image (Image) as one operator passes them to another of the same device: a tensor, or a form that
# only this device's operators understand, such as QuantizedTokens. A forward does not read them.
Rows = Any
Image = Any


class Operators(Protocol):
    """The operators of one device (backend).

    consumer: an argument of several operators: the weights of the layer that reads the result. The result is in the
        dtype of this layer's weight; a device may write it in eight bits if the layer has low_bit weights.
    """

    def sinusoids(self, timestep: Tensor, time: TimeEmbedding) -> Tensor:
        """Cosines and sines of the timestep at falling frequencies: (batch,) -> float32 (batch, channels), where
        `time` has the number of channels and the formula."""

    def join(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors of any widths and one dtype, concatenated to one vector."""

    def linear(self, x: Rows, layer: LayerWeights) -> Tensor:
        """A linear layer, with its bias and LoRAs: (..., in) -> (..., out). The weight may be a 1x1 convolution's,
        (out, in, 1, 1)."""

    def pointwise(self, image: Image, layer: LayerWeights) -> Tensor:
        """A 1x1 convolution as a GEMM: (batch, in, h, w) -> (batch, out, h, w)."""

    def convolution(self, image: Image, layer: LayerWeights, shape: Convolution) -> Tensor:
        """A square 2D convolution, padded with zeros or, if shape.circular, with the opposite edge."""

    def group_norm(
        self, image: Image, layer: LayerWeights, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        consumer: LayerWeights | None = None,
    ) -> Image:
        """The group norm of image + shift, followed by SiLU if silu. shift: (batch, channels), or None for zero.
        consumer: a convolution, or None if something else reads the result."""

    def residual_norm(
        self, residual: Residual, layer: LayerWeights | None, norm: LayerNorm | RMSNorm | AdaptiveNorm,
        consumer: LayerWeights, modulation: Modulation | None = None,
    ) -> tuple[Residual, Rows]:
        """(residual, normed): the norm of the residual's value for consumer, a linear layer; and a residual of the same
        value as the given one, to be used in its place. Its tokens may be the sum that the norm had to compute.

        layer: the norm's weight and bias; None for an AdaptiveNorm. modulation: applied to the normed tokens, or None.
        """

    def rms_norm(self, x: Tensor, layer: LayerWeights, norm: RMSNorm) -> Tensor:
        """The root mean square norm of x (..., width)."""

    def split_heads(self, projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
        """The queries, keys or values in a projection, split into heads, each with its norm and rotary embedding
        applied: (batch, tokens, heads of all parts * head width) -> one (batch, heads, tokens, head width) for each
        part. May write into projected."""

    def add_linear(
        self, residual: Residual, x: Rows, layer: LayerWeights, gate: Tensor | None = None,
        norm: WeightedNorm | None = None,
    ) -> Residual:
        """The residual plus gate * norm(linear(x, layer)). gate: (batch, width), None for no gate. norm: None for no
        norm. May write into the given residual, which must not be used afterwards."""

    def materialize(self, residual: Residual) -> Tensor:
        """The residual's value as one tensor, (batch, tokens, width): computes its deferred sum."""

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, upcast: bool, mask: Tensor | Filled | None = None
    ) -> Tensor:
        """Softmax attention over (batch, heads, tokens, head width), with scores in float32 if upcast.

        Keys and values may have fewer heads than queries (grouped-query attention): each of their heads is used by a
        group of consecutive heads of queries.
        mask: bool, of a shape that broadcasts to (batch, heads, queries, keys), True where a query sees a key; the
            output of a query that sees no key is zero. Or a Filled, if queries and keys are the tokens that it
            describes. None: every query sees every key.
        """

    def gated(self, tokens: Tensor, unit: GatedUnit, consumer: LayerWeights) -> Rows:
        """The gated linear unit of tokens: (..., 2 n) -> (..., n)."""

    def sigmoid_gated(self, x: Tensor, gate: Tensor, consumer: LayerWeights) -> Rows:
        """x * sigmoid(gate), of (batch, tokens, width) each. gate may be a slice of a wider tensor, and so not be
        contiguous."""

    def gated_linear(self, x: Rows, layer: LayerWeights, unit: GatedUnit, consumer: LayerWeights) -> Rows:
        """gated(linear(x, layer), unit, consumer)."""

    def activated_linear(self, x: Rows, layer: LayerWeights, activation: Activation, consumer: LayerWeights) -> Rows:
        """activation(linear(x, layer))."""

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""

    def residual_add(self, image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        """image + update + bias, as a new image. bias: (channels,), or None."""

    def concatenate(self, image: Tensor, skip: Tensor) -> Image:
        """image and skip, concatenated along the channels."""

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        """Nearest-neighbour resizing, as torch.nn.functional.interpolate defines it."""

    def image_to_tokens(self, image: Tensor) -> Tensor:
        """(batch, channels, h, w) -> (batch, h * w, channels)."""

    def tokens_to_image(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """(batch, h * w, channels) -> (batch, channels, h, w)."""
