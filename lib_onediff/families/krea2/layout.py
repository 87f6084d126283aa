"""The structure of a Krea 2 network: which parameter does what, without holding any; and what all hosts' readers of it
share."""
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
    feed_forward_layers,
)
from ..leaf_reader import LeafReader
from ..rotary import RotaryAxes
from ..transformer import patch_grid

# The timestep, from 0 to 1, is multiplied by this before its sinusoids.
TIME_SCALE = 1000.0


@dataclass(frozen=True)
class GatedLayers:
    """A self attention whose output is multiplied by a sigmoid gate, with an RMS norm before it (norm); then a
    feed-forward layer with SwiGLU, also with an RMS norm before it."""

    norm: RMSNorm
    attention: SelfAttention
    feed_forward_norm: RMSNorm
    feed_forward_in: FusedLinear
    feed_forward_out: Linear


@dataclass(frozen=True)
class StreamBlock(Block):
    """A block over the tokens of prompt and image together (the main stream).

    table: 6 * width numbers that are added to the modulation that all blocks share: scale - 1, shift and gate of the
        attention, then scale - 1, shift and gate of the feed-forward layer.
    """

    table: FreeParameter
    layers: GatedLayers

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """The linear layers over the tokens, in the order of the forward. Their weights may be in 8 bits."""
        layers = self.layers
        feed_forward = feed_forward_layers(layers.feed_forward_in, layers.feed_forward_out, GATED)
        return *layers.attention.token_layers, *feed_forward


@dataclass(frozen=True)
class TextFusion:
    """Turns the outputs of several layers of the text encoder into one vector for each token of the prompt.

    In the order of the forward: across_layers: blocks whose attention is among the layers of one token. sum: the
        weights of a sum over the layers. across_tokens: blocks whose attention is among the prompt's tokens. norm,
        into, out: a norm and two linear layers, which bring the tokens to the network's width.
    """

    across_layers: tuple[GatedLayers, ...]
    sum: Linear
    across_tokens: tuple[GatedLayers, ...]
    norm: RMSNorm
    into: Linear
    out: Linear


@dataclass(frozen=True)
class Krea2Layout(Layout):
    """A Krea 2 transformer.

    patches: the linear layer over the values of a patch. patch: the patch's side in latent pixels.
    text_layers, text_width: how many layers of the text encoder the context has, and their width.
    text: makes the prompt's tokens from the context.
    time: the embedding of the timestep. modulation: makes the modulation vector that all blocks share from this
        embedding.
    axes: the rotary embedding. blocks: the main stream, over the tokens of prompt and image.
    out_table: 2 * width numbers that are added to the time embedding: this makes scale - 1 and shift of the norm before
        the last layer (out).
    """

    # FreeParameter.shape: the tables have equally many numbers in all hosts' modules, in different shapes.
    ignored_fields = Layout.ignored_fields | {"shape"}

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
    model_name: str = field(default="Krea 2", compare=False)

    @cached_property
    def kernel_users(self) -> list[Any]:
        """The layers for which a device loads kernels (see Layout.kernel_users): the gate of the main stream's
        attentions, and of two blocks the norm, the SwiGLU and the norms of heads. One is the first block of the main
        stream, which stands for the whole stream. The other is the first block of text.across_tokens, which stands for
        all blocks of `text`. The blocks for which one stands have its sizes."""
        users: list[Any] = [SigmoidGate(self.width)]
        for layers in (self.blocks[0].layers, self.text.across_tokens[0]):
            attention = layers.attention
            users += [
                layers.norm, SwiGLU(layers.feed_forward_out.in_features),
                NormedHeads(attention.heads, attention.head_width, interleaved=True),
            ]
        return users

    def sized_layers(self, height: int, width: int, tokens: int) -> list[tuple[Any, tuple[int, int]]]:
        """All blocks of the main stream, without those of `text`, each with (1, tokens): the product is the number of
        tokens over which the block runs.

        height, width: of the latent. tokens: of the prompt; the image's are added.
        """
        return [(block, (1, tokens + self.patches_over(height, width))) for block in self.blocks]

    def patches_over(self, height: int, width: int) -> int:
        """The number of patches that cover a latent of this height and width. Each is one token."""
        rows, columns = patch_grid(height, width, self.patch)
        return rows * columns


# --- what every host's readers share ----------------------------------------------------------------------------------


def gated_layers(
    leaves: LeafReader, norms: tuple[Any, ...], attention: tuple[Any, ...], feed_forward: tuple[Any, ...], weight: str
) -> GatedLayers:
    """The description of a block's layers, from the host's modules, whose parameters `leaves` claims.

    norms: two modules, before the attention and before the feed-forward layer.
    attention: the linear layers of queries, keys, values and gate; the norms of queries and of keys; the linear layer
        of the output; and the numbers of heads of queries and of keys.
    feed_forward: the linear layers of gate, value and output.
    weight: the name of the parameter in the host's norms. They must multiply by 1 + this parameter in float32 (see
        LeafReader.shifted_norm): the caller checks that, because norms that multiply by the parameter itself would be
        computed wrongly.

    Raises Refusal for modules that LeafReader does not know, or if the given number of heads of keys contradicts the
    layers' sizes.
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
    """The description of Krea 2's timestep embedding: sinusoids, whose channels are the inputs of `first`, then these
    two linear layers. The forward multiplies the timestep by TIME_SCALE before."""
    return TimeEmbedding(
        channels=first.in_features, cosine_first=True, frequency_shift=0.0, scale=1.0, condition=None, first=first,
        second=second,
    )


def axes_of(widths: Any, theta: float) -> RotaryAxes:
    """The rotary embedding over time, height and width. widths: a sequence: how many numbers of a head each axis
    rotates. theta: the base of the frequencies of all three axes."""
    return RotaryAxes(tuple(widths), (float(theta),) * len(widths), interleaved=True, angles=torch.float64)
