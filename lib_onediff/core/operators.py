"""The operators that networks are written in. An implementation is a module, or an object, with these functions.

Images are (batch, channels, height, width) in whatever memory format the implementation likes best; tokens are
(batch, tokens, width). Every function returns new tensors in the dtype of its first argument, unless it says otherwise,
and sums in float32. Elementwise functions of small vectors, such as the gates of a timestep, need no operator: a
forward calls torch's.
"""
from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .layer_weights import LayerWeights
from .leaves import AdaptiveNorm, Convolution, GroupNorm, LayerNorm, RMSNorm, TimeEmbedding

# An RMS norm's weight, and its description.
WeightedNorm = tuple[LayerWeights, RMSNorm]


class Residual(NamedTuple):
    """The residual of a transformer: tokens, and what is still to be added to them. Its value is
    tokens + norm(update * update_scales) * gate + deferred_bias + bias; whatever is None is left out.

    update: of the shape of tokens, what the last layer adds, where it is not in tokens yet; update_scales: (..., 1), in
    float32; norm: behind that layer; gate: (batch, width). These are of the update alone, not of the biases.
    bias: (width,), of the last linear layer. deferred_bias: (width,), in float32: the sum of the biases of layers
    before. The next norm adds these vectors as it reads the tokens, and writes deferred_bias + bias as the new
    deferred_bias: that costs less than if every linear layer added its own bias to all tokens.
    """

    tokens: Tensor
    deferred_bias: Tensor | None = None
    bias: Tensor | None = None
    update: Tensor | None = None
    update_scales: Tensor | None = None
    gate: Tensor | None = None
    norm: WeightedNorm | None = None


class Modulation(NamedTuple):
    """Vectors that change a norm's output, usually made from the timestep: norm * scale + shift.

    scale: (batch, width). The caller adds 1 first where a network stores scale - 1. shift: (batch, width), or None for
    no shift.
    """

    scale: Tensor
    shift: Tensor | None = None


class Rotary(NamedTuple):
    """A rotary embedding: the angles by which the heads of queries and keys are rotated.

    cosines, sines: (tokens, head width / 2), or (batch, tokens, head width / 2) where the positions of the rows differ,
    in float32. interleaved: the pairs of numbers that are rotated are 2 i and 2 i + 1; otherwise (halves) they are i
    and i + head width / 2.
    """

    cosines: Tensor
    sines: Tensor
    interleaved: bool = False


class Heads(NamedTuple):
    """The heads that one part of a projection holds: queries, keys or values.

    number: how many. norm: the RMS norm over each head, or None. rotary: rotates them behind the norm, or None.
    """

    number: int
    norm: WeightedNorm | None = None
    rotary: Rotary | None = None


class Filled(NamedTuple):
    """Rows of tokens that are filled up to one length. Those that count come first in each row; the others are seen by
    none of them, and what an operator computes for them has no meaning, but is finite.

    used: (batch,), integers: how many count. ends: (2 * batch + 1,), int32: with all rows one after the other, where
    the tokens that count begin and end in each, and the end of the last row. Both are read on their device: their
    numbers may change between replays of a graph.
    """

    used: Tensor
    ends: Tensor

    @classmethod
    def of(cls, used: Tensor, tokens: int) -> Filled:
        """tokens: the length of every row."""
        begins = tokens * torch.arange(len(used) + 1, dtype=torch.int32, device=used.device)
        inner = torch.stack([begins[:-1], begins[:-1] + used.to(torch.int32)], dim=1)
        return cls(used, torch.cat([inner.flatten(), begins[-1:]]))

    def mask(self, tokens: int) -> Tensor:
        """Which keys every query sees, as a mask of Operators.attention."""
        places = torch.arange(tokens, dtype=torch.int64, device=self.used.device)
        # The softmax over no key at all is not a number.
        seen = torch.where(self.used > 0, self.used, tokens)
        return (places < seen[:, None])[:, None, None]


class Activation(Enum):
    """GELU: in its erf form. GELU_TANH: its approximation by tanh. SIGMOID: of a gate alone."""

    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SIGMOID = "sigmoid"


class GatedUnit(NamedTuple):
    """A gated linear unit over one half of its input's width: value * activation(gate).

    gate_first: the first half is the gate, and the second one the value; otherwise the other way round.
    """

    activation: Activation
    gate_first: bool


# As diffusers has it, and as LLaMA does with its first and third layer in one.
GEGLU = GatedUnit(Activation.GELU, gate_first=False)
SWIGLU = GatedUnit(Activation.SILU, gate_first=True)


class QuantizedTokens(NamedTuple):
    """Tokens in float8 (e4m3) or int8, as a matrix product wants them.

    values: (rows, width). scales: (rows, 1), or (1, 1) for all of them, in float32, by which they are multiplied.
    shape: what the rows are without their width, such as (batch, tokens). unit: the number one, (1, 1) in float32,
    beside float8's scales of rows: for a product that leaves these to who reads it. plain: the same rows in the model's
    dtype, (*shape, width), which LoRAs of the layer read; None where there are none.
    """

    values: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    unit: Tensor | None = None
    plain: Tensor | None = None


class QuantizedImage(NamedTuple):
    """An image in float8 (e4m3) or int8, as a convolution wants it.

    values: (batch, height, width, channels). scales: (batch, 1) in float32, by which they are multiplied.
    """

    values: Tensor
    scales: Tensor


# What an implementation hands from one of its operators to the next: a tensor, or what it makes in the place of one.
# Nobody else looks into it.
Rows = Any
Image = Any


class Operators(Protocol):
    def sinusoids(self, timestep: Tensor, time: TimeEmbedding) -> Tensor:
        """(batch,) -> (batch, channels) in float32: cosines and sines of the timestep at falling frequencies."""

    def join(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors, one after the other in one."""

    def linear(self, x: Rows, layer: LayerWeights) -> Tensor:
        """(..., in) -> (..., out). A weight of (out, in, 1, 1) is a 1x1 convolution's and means the same."""

    def pointwise(self, image: Image, layer: LayerWeights) -> Tensor:
        """A 1x1 convolution as a GEMM: (batch, in, h, w) -> (batch, out, h, w)."""

    def convolution(self, image: Image, layer: LayerWeights, shape: Convolution) -> Tensor:
        """A square 2D convolution, padded with zeros or, if shape.circular, with the opposite edge."""

    def group_norm(
        self, image: Image, layer: LayerWeights, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        consumer: LayerWeights | None = None,
    ) -> Image:
        """Group norm of image + shift (batch, channels), followed by SiLU if silu. consumer: the convolution that it is
        for, where there is one."""

    def residual_norm(
        self, residual: Residual, layer: LayerWeights | None, norm: LayerNorm | RMSNorm | AdaptiveNorm,
        consumer: LayerWeights, modulation: Modulation | None = None,
    ) -> tuple[Residual, Rows]:
        """The same residual, and its norm in the dtype of consumer, the linear layer that reads it. layer: the norm's
        weight and bias, or None for an AdaptiveNorm."""

    def rms_norm(self, x: Tensor, layer: LayerWeights, norm: RMSNorm) -> Tensor:
        """The root mean square norm of x (..., width)."""

    def split_heads(self, projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
        """(batch, tokens, heads of all parts * head width) as one (batch, heads, tokens, head width) for each part,
        normed and rotated as the part says. May write into projected."""

    def add_linear(
        self, residual: Residual, x: Rows, layer: LayerWeights, gate: Tensor | None = None,
        norm: WeightedNorm | None = None,
    ) -> Residual:
        """residual + gate * norm(linear(x, layer)), without what is None. gate: (batch, width). May write into the
        given residual, which must not be used afterwards."""

    def materialize(self, residual: Residual) -> Tensor:
        """The residual's tokens, with everything added to them."""

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, upcast: bool, mask: Tensor | Filled | None = None
    ) -> Tensor:
        """Softmax attention over (batch, heads, tokens, head width), in float32 if upcast.

        Keys and values may have fewer heads than queries (grouped-query attention): each serves as many heads of
        queries, which lie one after the other. mask: bool, of a shape that broadcasts to (batch, heads, queries, keys),
        True where a query sees a key; a query that sees no key gives zeros. Or Filled, of queries and keys alike.
        """

    def gated(self, tokens: Tensor, unit: GatedUnit, consumer: LayerWeights) -> Rows:
        """A gated linear unit: (..., 2 n) -> (..., n). consumer: as in residual_norm."""

    def sigmoid_gated(self, x: Tensor, gate: Tensor, consumer: LayerWeights) -> Rows:
        """x * sigmoid(gate), of (batch, tokens, width) each. gate may be a part of a wider product. consumer: as in
        residual_norm."""

    def gated_linear(self, x: Rows, layer: LayerWeights, unit: GatedUnit, consumer: LayerWeights) -> Rows:
        """gated(linear(x, layer), unit, consumer)."""

    def activated_linear(self, x: Rows, layer: LayerWeights, activation: Activation, consumer: LayerWeights) -> Rows:
        """activation(linear(x, layer)). consumer: as in residual_norm."""

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""

    def residual_add(self, image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        """image + update + bias (channels)."""

    def concatenate(self, image: Tensor, skip: Tensor) -> Image:
        """Along the channels."""

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        """Nearest neighbour, as torch.nn.functional.interpolate defines it."""

    def image_to_tokens(self, image: Tensor) -> Tensor:
        """(batch, channels, h, w) -> (batch, h * w, channels)."""

    def tokens_to_image(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """(batch, h * w, channels) -> (batch, channels, h, w)."""
