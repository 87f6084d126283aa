"""The structure of an Anima network: which parameter does what, without holding any; and what all hosts' readers of it
share."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...core.family import Layout
from ...core.leaves import (
    PLAIN_INPUT,
    AdaptiveNorm,
    Block,
    CrossAttention,
    FusedLinear,
    Linear,
    NormedHeads,
    RMSNorm,
    SelfAttention,
    TimeEmbedding,
    TokenLinear,
    feed_forward_layers,
)
from ...core.refusal import unsupported_model
from ..leaf_reader import LeafReader
from ..rotary import RotaryAxes
from ..transformer import patch_grid

# The base of rotary frequencies, before a network's factor for each axis.
BASE = 10000.0


@dataclass(frozen=True)
class AdaptiveBlock(Block):
    """Self attention, cross attention and a feed-forward layer. The timestep modulates the norm before each of these
    three layers, and gates each layer's output. norm: has no parameters, and describes all three norms."""

    self_attention: SelfAttention
    cross_attention: CrossAttention
    feed_forward_in: Linear
    feed_forward_out: Linear
    norm: AdaptiveNorm

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """The linear layers over the image's tokens, in the order of the forward. Their weights may be in 8 bits."""
        feed_forward = feed_forward_layers(self.feed_forward_in, self.feed_forward_out, PLAIN_INPUT)
        return *self.self_attention.token_layers, *self.cross_attention.token_layers, *feed_forward

    @property
    def prompt_layers(self) -> tuple[FusedLinear, ...]:
        """The linear layers over the prompt's tokens: keys and values of the cross attention. Their weights may be in 8
        bits."""
        return (self.cross_attention.key_value,)


@dataclass(frozen=True)
class AnimaLayout(Layout):
    """A Cosmos-Predict2 transformer.

    in_channels: of the latent. The network may append a padding mask to it (see forward.patches_of).
    patches: the linear layer over the values of a patch. patch: the patch's side in latent pixels.
    time: makes, from the timestep, the shift, scale and gate that all layers share.
    time_norm, downs, ups, out_up: each layer adds vectors of its own to the shared ones. They are made from the
        timestep's sinusoids, after time_norm, by a low-rank pair of linear layers for each layer. downs has the first
        linear layers of the pairs of all blocks, in order, and ups the second ones. One more pair is for the norm
        before the last layer (out): the last member of downs, and out_up.
    context_width: the width of the prompt's tokens.
    """

    in_channels: int
    out_channels: int
    patch: int
    width: int
    context_width: int
    patches: Linear
    time: TimeEmbedding
    time_norm: RMSNorm
    downs: FusedLinear
    ups: FusedLinear
    out_up: Linear
    axes: RotaryAxes
    blocks: tuple[AdaptiveBlock, ...]
    out_norm: AdaptiveNorm
    out: Linear
    model_name: str = field(default="Anima", compare=False)

    @cached_property
    def kernel_users(self) -> list[Any]:
        """The layers for which a device loads kernels (see Layout.kernel_users): the norm before the last layer, which
        stands for the equally wide ones in the blocks, and the norms of heads of the first block, which stand for those
        of all blocks."""
        heads = self.blocks[0].self_attention.heads
        return [self.out_norm, NormedHeads(heads, self.width // heads)]

    def sized_layers(self, height: int, width: int, tokens: int) -> list[tuple[Any, tuple[int, int]]]:
        """All blocks, each with the (rows, columns) of patches whose product is the number of tokens of an image.

        height, width: of the latent. tokens: the prompt's; unused, because no block runs over the prompt's tokens.
        """
        size = patch_grid(height, width, self.patch)
        return [(block, size) for block in self.blocks]


# --- what every host's readers share ----------------------------------------------------------------------------------


def read_attentions(
    own: Any, cross: Any, parts: Callable[[Any], tuple[Any, ...]], leaves: LeafReader
) -> tuple[SelfAttention, CrossAttention]:
    """The descriptions of a block's self attention and cross attention.

    own, cross: the host's modules, the self attention's and the cross attention's.
    parts: returns, for an attention module, seven things: its linear layers of queries, of keys and of values, the
        norms of queries and of keys, the output's linear layer, and the number of heads.
    leaves: claims the parameters of the modules that `parts` returns. Raises Refusal for a module that it does not
        know.
    """
    query, key, value, *norms, out, heads = parts(own)
    query_key_value = leaves.fused(leaves.path(own), query, key, value)
    norms_read = tuple(map(leaves.rms_norm, norms))
    self_attention = SelfAttention(query_key_value, leaves.linear(out), heads, norms_read)
    query, key, value, *norms, out, heads = parts(cross)
    key_value = leaves.fused(leaves.path(cross), key, value)
    norms_read = tuple(map(leaves.rms_norm, norms))
    cross_attention = CrossAttention(leaves.linear(query), key_value, leaves.linear(out), heads, norms_read)
    return self_attention, cross_attention


def rotary_axes(
    embedder: Any, widths: tuple[int, ...], exponents: torch.dtype, frequencies: torch.dtype
) -> RotaryAxes:
    """The rotary embedding over time, height and width, with the bases of a host's embedder.

    embedder: the host's module; its t_, h_ and w_ntk_factor multiply BASE. widths: how many numbers of a head each axis
        rotates. exponents, frequencies: the dtypes in which the host computes these; see RotaryAxes.
    """
    thetas = tuple(BASE * factor for factor in (embedder.t_ntk_factor, embedder.h_ntk_factor, embedder.w_ntk_factor))
    return RotaryAxes(widths, thetas, interleaved=False, exponents=exponents, frequencies=frequencies)


def refuse_biases(network: nn.Module) -> None:
    """Raise Refusal if any layer of the network has a bias, as after an extension has added one: our forward would
    ignore it."""
    found = next((name for name, _ in network.named_parameters() if name.endswith("bias")), None)
    if found is not None:
        raise unsupported_model(f"one of its layers has a bias ({found})")
