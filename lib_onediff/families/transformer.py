"""What transformers share: norms with modulation, attention with head norms and rotary embeddings, feed-forward layers,
and the sum of each layer's output with the residual.

A block of a transformer is a few steps of residual + gate * layer(norm(residual)). Each step is written as

    residual, normed = layers.norm(residual, block.norm, attention.query_key_value, modulation)
    residual = layers.add(residual, layers.self_attention(attention, normed, rotary), attention.out, gate)

through_blocks runs the blocks of a call, which DeepCache may have cut; blocks_read returns the blocks whose
weights such a call reads.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ..core.call import Cut
from ..core.layer_weights import LayerWeights, Weights
from ..core.leaves import AdaptiveNorm, CrossAttention, FusedLinear, LayerNorm, Linear, RMSNorm, SelfAttention
from ..core.operators import (
    Activation,
    Filled,
    GatedUnit,
    Heads,
    Modulation,
    Operators,
    Residual,
    Rotary,
    Rows,
    WeightedNorm,
)

# The name of the table of transformers in steps/schedules.json (core.family.Family.schedule).
SCHEDULE = "transformer"
# The usual sizes of images that models of a megapixel are trained at, and one of hires fix.
MEGAPIXEL_SIZES = (
    "1024x1024", "1152x896", "896x1152", "1216x832", "832x1216", "1344x768", "768x1344", "1536x1536",
)
Block = TypeVar("Block")


def patch_grid(height: int, width: int, patch: int) -> tuple[int, int]:
    """The numbers of rows and columns of patches that cover a latent of this size, partly filled ones included. patch:
    the side of a patch in latent pixels."""
    return -(-height // patch), -(-width // patch)


def padded_to_patches(latent: Tensor, patch: int) -> Tensor:
    """A latent (batch, channels, height, width), padded on the right and below until its sides are multiples of
    `patch`, the side of a patch. The padding is circular, as in the hosts: it repeats the opposite edge."""
    height, width = latent.shape[-2:]
    return functional.pad(latent, (0, -width % patch, 0, -height % patch), mode="circular")


def first_residual(tokens: Tensor) -> Residual:
    """The Residual that enters the first block, made of the tokens (batch, tokens, width). Tokens in float16 are
    widened to float32: the sums of many layers would overflow in float16, or be rounded too much. Tokens in other
    dtypes are not copied, so operators may write into them."""
    return Residual(tokens.float() if tokens.dtype == torch.float16 else tokens)


def deepest_cut(blocks: Sequence[object]) -> int:
    """The largest depth at which DeepCache can cut these blocks: one less than their number, because a cached step
    leaves out at least one. 0, with one block or none: it cannot cut them."""
    return max(0, len(blocks) - 1)


def blocks_read(blocks: Sequence[Block], cut: Cut | None) -> Sequence[Block]:
    """The blocks whose weights a call reads: all of them without a cut and in a full pass; in a cached pass (cut.reads)
    only the first cut.depth, but at most deepest_cut()."""
    if cut is None or not cut.reads:
        return blocks
    return blocks[:min(cut.depth, deepest_cut(blocks))]


def through_blocks(
    ops: Operators, residual: Residual, blocks: Sequence[Block], cut: Cut | None,
    through: Callable[[Residual, int, Block], Residual],
) -> Residual:
    """The residual after the last block, with the cached pass or the full pass of DeepCache if the call is cut.

    through(residual, index, block): returns the residual after one block.

    cut: None computes every block. Otherwise the first cut.depth blocks (at most deepest_cut()) are computed in any
        case. In a cached pass (cut.reads), the sum of what the later blocks added in an earlier call is read from
        cut.memory and added. In a full pass, the later blocks are computed, and the sum of what they add is written
        there. The sum is cached, and not the residual, because it changes less from step to step. It has the residual's
        dtype: the rounding is that of one more layer, and float32 would take twice the memory of bfloat16.
    """
    if cut is None:
        for index, block in enumerate(blocks):
            residual = through(residual, index, block)
        return residual
    depth = min(cut.depth, deepest_cut(blocks))
    for index, block in enumerate(blocks[:depth]):
        residual = through(residual, index, block)
    shallow = ops.materialize(residual)
    if cut.reads:
        return Residual(shallow + cut.memory.read())
    # Operators may write into a residual's tokens, and shallow is needed unchanged below.
    residual = Residual(shallow.clone())
    for index, block in enumerate(blocks[depth:], depth):
        residual = through(residual, index, block)
    tokens = ops.materialize(residual)
    cut.memory.write(tokens - shallow)
    return Residual(tokens)


@dataclass(frozen=True)
class TransformerLayers:
    """Computes the layers of a transformer from their descriptions (core.leaves).

    weights, ops: the network's weights and the device's operators. upcast_attention: compute attention scores in
        float32.

    Tokens are (batch, tokens, width). Rows are the same tokens as one operator leaves them for the next: a tensor, or
    already quantized for the linear layer that reads them. That layer is then an argument, consumer.

    A lookup in weights may cast a stored weight, so no method keeps what it has looked up. A matrix is looked up at
    most twice in a row: by the operator before its product, for the scales of that product, and by the product.
    """

    weights: Weights
    ops: Operators
    upcast_attention: bool

    def norm(
        self, residual: Residual, norm: LayerNorm | RMSNorm | AdaptiveNorm, consumer: Linear | FusedLinear,
        modulation: Modulation | None = None,
    ) -> tuple[Residual, Rows]:
        """The residual, and its norm as Rows for the linear layer that reads them (consumer).

        modulation: scales and shifts the norm's output; None for none. Use the returned residual from here on, not the
        given one: the norm may have computed a sum that the given one had deferred.
        """
        layer = None if isinstance(norm, AdaptiveNorm) else self.weights[norm.path]
        return self.ops.residual_norm(residual, layer, norm, self._weights_of(consumer), modulation)

    def add(
        self, residual: Residual, x: Rows, layer: Linear, gate: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Residual:
        """residual + gate * norm(linear(x)), where linear is this layer. Without a gate (None), nothing is multiplied;
        without a norm, the layer's output is added as it is.

        gate: (batch, width). The sum may be deferred to the next norm. The given residual must not be used afterwards:
        the operator may write into it.
        """
        weighted = None if norm is None else self._weighted(norm)
        return self.ops.add_linear(residual, x, self._weights_of(layer), gate, weighted)

    def linear(self, x: Rows, layer: Linear | FusedLinear) -> Tensor:
        """The output of a linear layer, (batch, tokens, out). For a group of fused layers: the outputs of all of them,
        side by side in the last dimension."""
        return self.ops.linear(x, self._weights_of(layer))

    def activated_linear(self, x: Rows, layer: Linear, activation: Activation, consumer: Linear) -> Rows:
        """activation(linear(x)), the first half of a feed-forward layer, as Rows for the second half (consumer)."""
        return self.ops.activated_linear(x, self._weights_of(layer), activation, self._weights_of(consumer))

    def gated_linear(self, x: Rows, layer: Linear | FusedLinear, unit: GatedUnit, consumer: Linear) -> Rows:
        """The first half of a feed-forward layer with a gated unit such as SwiGLU, as Rows for its second linear layer
        (consumer). layer: computes both the gate and the value. unit: how they are combined."""
        return self.ops.gated_linear(x, self._weights_of(layer), unit, self._weights_of(consumer))

    def sigmoid_gated(self, x: Tensor, gate: Tensor, consumer: Linear) -> Rows:
        """x * sigmoid(gate), both (batch, tokens, width), as Rows for the linear layer that reads them (consumer)."""
        return self.ops.sigmoid_gated(x, gate, self._weights_of(consumer))

    def self_attention(
        self, attention: SelfAttention, normed: Rows, rotary: Rotary | None = None, mask: Tensor | Filled | None = None
    ) -> Rows:
        """The output of a self attention before its last linear layer (attention.out), which the caller applies: Rows
        of (batch, tokens, heads * head width).

        normed: the block's tokens after their norm. rotary: rotates queries and keys after their head norms; None for
        no rotation. mask: the tokens to attend to, as in Operators.attention; None for all. If attention.gated, the
        projection computes a gate too, whose sigmoid multiplies the output.
        """
        projected = self.linear(normed, attention.query_key_value)
        gate: Tensor | None = None
        if attention.gated:
            width = attention.heads * attention.head_width
            projected, gate = projected.split([projected.shape[-1] - width, width], dim=-1)
        query_norm, key_norm = self._head_norms(attention)
        query, key, value = self.ops.split_heads(projected, (
            Heads(attention.heads, query_norm, rotary),
            Heads(attention.key_heads, key_norm, rotary),
            Heads(attention.key_heads),
        ))
        mixed = self.attend(query, key, value, mask)
        return mixed if gate is None else self.sigmoid_gated(mixed, gate, attention.out)

    def cross_attention(
        self, attention: CrossAttention, normed: Rows, context: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The output of a cross attention before its last linear layer (attention.out), which the caller applies:
        (batch, tokens, heads * head width).

        normed: the tokens of which queries are made. context: (batch, context tokens, context width), of which keys and
        values are made. mask: the context's tokens to attend to, as in Operators.attention; None for all.
        """
        query_norm, key_norm = self._head_norms(attention)
        projected = self.linear(normed, attention.query)
        [query] = self.ops.split_heads(projected, (Heads(attention.heads, query_norm),))
        projected = self.linear(context, attention.key_value)
        key, value = self.ops.split_heads(projected, (Heads(attention.heads, key_norm), Heads(attention.heads)))
        return self.attend(query, key, value, mask)

    def heads(self, projected: Tensor, number: int) -> Tensor:
        """A projection split into `number` heads, without norm or rotation: (batch, tokens, number * head width) ->
        (batch, number, tokens, head width)."""
        [heads] = self.ops.split_heads(projected, (Heads(number),))
        return heads

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Filled | None = None) -> Tensor:
        """Softmax attention, with the heads joined: (batch, heads, tokens, head width) each -> (batch, tokens, heads *
        head width). mask: as in Operators.attention; None to attend to all."""
        mixed = self.ops.attention(query, key, value, self.upcast_attention, mask)
        return mixed.transpose(1, 2).flatten(2)

    def _head_norms(
        self, attention: SelfAttention | CrossAttention
    ) -> tuple[WeightedNorm | None, WeightedNorm | None]:
        """The norms over each head of the queries and of the keys: (None, None) if the attention has no head norms."""
        if not attention.norms:
            return None, None
        query_norm, key_norm = attention.norms
        return self._weighted(query_norm), self._weighted(key_norm)

    def _weighted(self, norm: RMSNorm) -> WeightedNorm:
        """An RMS norm as operators take it: its weights, and its description."""
        return self.weights[norm.path], norm

    def _weights_of(self, layer: Linear | FusedLinear) -> LayerWeights:
        """The weights of a linear layer, looked up by its path, or of a group of fused layers, by the group's name."""
        return self.weights[layer.name if isinstance(layer, FusedLinear) else layer.path]
