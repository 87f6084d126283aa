"""Parts that transformers share: norms with modulation, attention with norms of heads and rotary embeddings,
feed-forward layers, and their sum with the residual.

A block of a transformer is a few steps residual + gate * layer(norm(residual)). Each is written as

    residual, normed = layers.norm(residual, block.norm, attention.query_key_value, modulation)
    residual = layers.add(residual, layers.self_attention(attention, normed, rotary), attention.out, gate)

through_blocks runs the blocks, with the cut of a call that has one; blocks_read names those whose weights it reads.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

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

# See core.family.Family.schedule.
SCHEDULE = "transformer"
Block = TypeVar("Block")


def deepest_cut(blocks: Sequence[object]) -> int:
    """See core.family.Family.deepest: at least one block is left out."""
    return max(0, len(blocks) - 1)


def blocks_read(blocks: Sequence[Block], cut: Cut | None) -> Sequence[Block]:
    """The blocks that a call with this cut computes."""
    if cut is None or not cut.reads:
        return blocks
    return blocks[:min(cut.depth, deepest_cut(blocks))]


def through_blocks(
    ops: Operators, residual: Residual, blocks: Sequence[Block], cut: Cut | None,
    through: Callable[[Residual, int, Block], Residual],
) -> Residual:
    """The residual behind the last block. through: returns the residual behind one block, of its index and itself.

    cut: the first cut.depth blocks are computed by every call. Its memory has the sum of what the other blocks add to
    the residual: a call that reads it adds that in their place. The sum changes less from step to step than the
    residual itself. It is kept in the residual's dtype, whose rounding is that of one more layer, and takes half the
    memory of float32.
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
    # Operators may write into a residual's tokens.
    residual = Residual(shallow.clone())
    for index, block in enumerate(blocks[depth:], depth):
        residual = through(residual, index, block)
    tokens = ops.materialize(residual)
    cut.memory.write(tokens - shallow)
    return Residual(tokens)


@dataclass(frozen=True)
class TransformerLayers:
    """The layers of a transformer, given by their descriptions, with the weights and the operators that compute them.

    Tokens are (batch, tokens, width). Weights may be cast when they are looked up, so each is looked up where it is
    used, and a matrix only twice in a row: for the norm before it, and for its product.
    """

    weights: Weights
    ops: Operators
    upcast_attention: bool

    def norm(
        self, residual: Residual, norm: LayerNorm | RMSNorm | AdaptiveNorm, consumer: Linear | FusedLinear,
        modulation: Modulation | None = None,
    ) -> tuple[Residual, Rows]:
        """The residual, and its norm as the linear layer that reads it wants it."""
        layer = None if isinstance(norm, AdaptiveNorm) else self.weights[norm.path]
        return self.ops.residual_norm(residual, layer, norm, self._weights_of(consumer), modulation)

    def add(
        self, residual: Residual, x: Rows, layer: Linear, gate: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Residual:
        """residual + gate * norm(linear(x)), without what is None. gate: (batch, width)."""
        behind = None if norm is None else self._weighted(norm)
        return self.ops.add_linear(residual, x, self._weights_of(layer), gate, behind)

    def linear(self, x: Rows, layer: Linear | FusedLinear) -> Tensor:
        return self.ops.linear(x, self._weights_of(layer))

    def activated_linear(self, x: Rows, layer: Linear, activation: Activation, consumer: Linear) -> Rows:
        """The first half of a feed-forward layer: activation(linear(x)), as its second half, the consumer, wants it."""
        return self.ops.activated_linear(x, self._weights_of(layer), activation, self._weights_of(consumer))

    def gated_linear(self, x: Rows, layer: Linear | FusedLinear, unit: GatedUnit, consumer: Linear) -> Rows:
        """The first half of a feed-forward layer with a gated unit, as its second half, the consumer, wants it."""
        return self.ops.gated_linear(x, self._weights_of(layer), unit, self._weights_of(consumer))

    def sigmoid_gated(self, x: Tensor, gate: Tensor, consumer: Linear) -> Rows:
        """x * sigmoid(gate), (batch, tokens, width), as the linear layer that reads it wants it."""
        return self.ops.sigmoid_gated(x, gate, self._weights_of(consumer))

    def self_attention(
        self, attention: SelfAttention, normed: Rows, rotary: Rotary | None = None, mask: Tensor | Filled | None = None
    ) -> Rows:
        """The mix of values, (batch, tokens, heads * head width), as the output layer reads it. mask: see
        Operators.attention."""
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
        """As self_attention, with keys and values of the context, (batch, tokens, context width)."""
        query_norm, key_norm = self._head_norms(attention)
        projected = self.linear(normed, attention.query)
        [query] = self.ops.split_heads(projected, (Heads(attention.heads, query_norm),))
        projected = self.linear(context, attention.key_value)
        key, value = self.ops.split_heads(projected, (Heads(attention.heads, key_norm), Heads(attention.heads)))
        return self.attend(query, key, value, mask)

    def heads(self, projected: Tensor, number: int) -> Tensor:
        """(batch, tokens, heads * head width) -> (batch, heads, tokens, head width), without norm and rotation."""
        [heads] = self.ops.split_heads(projected, (Heads(number),))
        return heads

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | Filled | None = None) -> Tensor:
        """The mix of values, (batch, tokens, heads * head width), of (batch, heads, tokens, head width) each."""
        mixed = self.ops.attention(query, key, value, self.upcast_attention, mask)
        return mixed.transpose(1, 2).flatten(2)

    def _head_norms(
        self, attention: SelfAttention | CrossAttention
    ) -> tuple[WeightedNorm | None, WeightedNorm | None]:
        """The norms of queries and of keys."""
        if not attention.norms:
            return None, None
        query_norm, key_norm = attention.norms
        return self._weighted(query_norm), self._weighted(key_norm)

    def _weighted(self, norm: RMSNorm) -> WeightedNorm:
        return self.weights[norm.path], norm

    def _weights_of(self, layer: Linear | FusedLinear) -> LayerWeights:
        return self.weights[layer.name if isinstance(layer, FusedLinear) else layer.path]
