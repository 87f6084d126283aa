"""The operators that a UNet needs. An implementation is a module with these functions.

Images are (batch, channels, height, width) in whatever memory format the implementation likes best; tokens are
(batch, tokens, width). Every function returns new tensors in the dtype of its first argument and sums in float32.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .layer_weights import LayerWeights
from .leaves import AdaptiveNorm, Convolution, GroupNorm, LayerNorm, RMSNorm, TimeEmbedding


class Residual(NamedTuple):
    """The residual of a transformer: tokens, and what is still to be added to them.

    deferred_bias, bias: (width,) each, or None: for every token the same. Two vectors cost less when the next norm adds
    them than when every linear layer does. update: of the shape of tokens, or None; update_scales: (..., 1) in float32,
    and gate: (batch, width), by which it is multiplied first, or None.
    """

    tokens: Tensor
    deferred_bias: Tensor | None = None
    bias: Tensor | None = None
    update: Tensor | None = None
    update_scales: Tensor | None = None
    gate: Tensor | None = None


class QuantizedTokens(NamedTuple):
    """Tokens in float8 (e4m3) or int8, as a matrix product wants them.

    values: (rows, width). scales: (rows, 1), or (1, 1) for all of them, in float32, by which they are multiplied.
    shape: what the rows are without their width, such as (batch, tokens). unit: the number one, (1, 1) in float32,
    beside float8's scales of rows: for a product that leaves these to who reads it.
    """

    values: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    unit: Tensor | None = None


class QuantizedImage(NamedTuple):
    """An image in float8 (e4m3) or int8, as a convolution wants it.

    values: (batch, height, width, channels). scales: (batch, 1) in float32, by which they are multiplied.
    """

    values: Tensor
    scales: Tensor


# Cosines and sines, (tokens, half a head's width) each, in float32: by which angles queries and keys are turned, in the
# planes of each number of their first half and the one at its place in their second half.
Rotary = tuple[Tensor, Tensor]
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
        reader: LayerWeights | None = None,
    ) -> Image:
        """Group norm of image + shift (batch, channels), followed by SiLU if silu. reader: the convolution that it is
        for, where there is one."""

    def layer_norm(
        self, residual: Residual, layer: LayerWeights, norm: LayerNorm | AdaptiveNorm, reader: LayerWeights
    ) -> tuple[Residual, Rows]:
        """The same residual, and its layer norm in the type of reader, the linear layer that it is for. layer: of
        (width,), or of (batch, width) for an adaptive norm."""

    def rms_norm(self, x: Tensor, layer: LayerWeights, norm: RMSNorm) -> Tensor:
        """The root mean square norm of x (..., width)."""

    def normed_heads(
        self, projected: Tensor, heads: int, norms: Sequence[tuple[LayerWeights, RMSNorm] | None], rotary: Rotary | None
    ) -> list[Tensor]:
        """(batch, tokens, parts * width) as parts of (batch, heads, tokens, width of a head): those that have a norm
        through it and, with a rotary embedding, rotated after it. May write into projected."""

    def add_linear(self, residual: Residual, x: Rows, layer: LayerWeights, gate: Tensor | None = None) -> Residual:
        """residual + linear(x), or residual + gate * linear(x) with a gate (batch, width). May write into the residual
        that it was given, which nobody uses afterwards."""

    def materialize(self, residual: Residual) -> Tensor:
        """The residual's tokens, with everything added."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool) -> Tensor:
        """Softmax attention over (batch, heads, tokens, width), scores in float32 if upcast."""

    def geglu(self, tokens: Tensor, reader: LayerWeights) -> Rows:
        """(..., 2 n) -> (..., n): the first half times the GELU (erf form) of the second. reader: as in layer_norm."""

    def gated_linear(self, x: Rows, layer: LayerWeights, reader: LayerWeights) -> Rows:
        """geglu(linear(x, layer), reader)."""

    def gelu_linear(self, x: Rows, layer: LayerWeights, reader: LayerWeights) -> Rows:
        """The GELU (erf form) of linear(x, layer). reader: as in layer_norm."""

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
