"""What a Krea 2 network is, which parameter does what without holding any."""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ...core.family import Layout
from ...core.leaves import (
    GATED,
    Block,
    FreeParameter,
    FusedLinear,
    Linear,
    NormedHeads,
    RMSNorm,
    SelfAttention,
    SigmoidGate,
    SwiGLU,
    TimeEmbedding,
    TokenLinear,
    digest_without,
    feed_forward_layers,
)
from ..leaf_reader import LeafReader
from ..rotary import RotaryAxes

# By this a timestep is multiplied before its sinusoids are computed.
TIME_SCALE = 1000.0


@dataclass(frozen=True)
class GatedLayers:
    """A gated self attention and a SwiGLU, with the norm before each."""

    norm: RMSNorm
    attention: SelfAttention
    feed_forward_norm: RMSNorm
    feed_forward_in: FusedLinear
    feed_forward_out: Linear


@dataclass(frozen=True)
class StreamBlock(Block):
    """A block over the tokens of prompt and image. table: what is added to the shared modulation vector: factor, shift
    and gate of the attention, then those of the feed-forward layers."""

    table: FreeParameter
    layers: GatedLayers

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        layers = self.layers
        feed_forward = feed_forward_layers(layers.feed_forward_in, layers.feed_forward_out, GATED)
        return *layers.attention.token_layers, *feed_forward


@dataclass(frozen=True)
class TextFusion:
    """Makes one vector a token of those that several layers of the text encoder give: across the layers of each token,
    then by one sum of them, then across the tokens, then by two linear layers into the network's width."""

    across_layers: tuple[GatedLayers, ...]
    sum: Linear
    across_tokens: tuple[GatedLayers, ...]
    norm: RMSNorm
    into: Linear
    out: Linear


@dataclass(frozen=True)
class Krea2Layout(Layout):
    """modulation: makes the modulation vector that all blocks share. out_table: factor and shift of the last norm,
    relative to the time's embedding."""

    channels: int
    patch: int
    width: int
    text_layers: int
    text_width: int
    patches: Linear
    time: TimeEmbedding
    modulation: Linear
    text: TextFusion
    axes: RotaryAxes
    blocks: tuple[StreamBlock, ...]
    out_table: FreeParameter
    out_norm: RMSNorm
    out: Linear
    foreign: tuple[str, ...] = ()
    model_name: str = field(default="Krea 2", compare=False)

    @cached_property
    def architecture(self) -> str:
        return digest_without(self, {"path", "name", "shape", "model_name", "foreign"})

    @cached_property
    def kernel_users(self) -> list[Any]:
        users: list[Any] = [SigmoidGate(self.width)]
        for layers in (self.blocks[0].layers, self.text.across_tokens[0]):
            attention = layers.attention
            users += [
                layers.norm, SwiGLU(layers.feed_forward_out.in_features),
                NormedHeads(attention.heads, attention.head_width, interleaved=True),
            ]
        return users

    def sized_layers(self, height: int, width: int, tokens: int) -> list[tuple[Any, tuple[int, int]]]:
        """See core.family.Layout."""
        image = -(-height // self.patch) * -(-width // self.patch)
        return [(block, (1, tokens + image)) for block in self.blocks]


# --- what every host's readers share ----------------------------------------------------------------------------------


def gated_layers(
    leaves: LeafReader, norms: tuple[Any, ...], attention: tuple[Any, ...], feed_forward: tuple[Any, ...], weight: str
) -> GatedLayers:
    """Attention and feed-forward layers of a block.

    norms: before the attention, and before the feed-forward layers. attention: what makes queries, keys, values and
    gate, the norms of the first two, the output, and the numbers of heads of queries and of keys. feed_forward: what
    makes gate and value, and the output. weight: the name of a norm's parameter.
    """
    *projections, query_norm, key_norm, out, heads, key_heads = attention
    gate, up, down = feed_forward
    norm, feed_forward_norm = (leaves.shifted_norm(one, weight) for one in norms)
    head_norms = leaves.shifted_norm(query_norm, weight), leaves.shifted_norm(key_norm, weight)
    fused = leaves.fused(f"{leaves.path(out)} projections", *projections)
    found = SelfAttention(fused, leaves.linear(out), heads, head_norms, gated=True)
    if found.key_heads != key_heads:
        raise leaves.unknown(out, f"{found.key_heads} heads of keys, not {key_heads}")
    into = leaves.fused(f"{leaves.path(down)} gate and value", gate, up)
    return GatedLayers(norm, found, feed_forward_norm, into, leaves.linear(down))


def time_embedding(first: Linear, second: Linear) -> TimeEmbedding:
    """Of a timestep that is multiplied by TIME_SCALE before."""
    return TimeEmbedding(
        channels=first.in_features, cosine_first=True, frequency_shift=0.0, scale=1.0, condition=None, first=first,
        second=second,
    )


def axes_of(widths: Any, theta: float) -> RotaryAxes:
    """Over time, height and width, with one base for all."""
    return RotaryAxes(tuple(widths), (float(theta),) * len(widths), interleaved=True, angles=torch.float64)
