"""What an Anima network is, which parameter does what without holding any."""
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
    digest_without,
    feed_forward_layers,
)
from ...core.refusal import Refusal
from ..leaf_reader import LeafReader
from ..rotary import RotaryAxes

BASE = 10000.0


@dataclass(frozen=True)
class AdaptiveBlock(Block):
    """Self attention, cross attention and feed-forward layers, with the norm before each. Its shift and factor, and
    the gate behind the layer, follow from the timestep."""

    self_attention: SelfAttention
    cross_attention: CrossAttention
    feed_forward_in: Linear
    feed_forward_out: Linear
    norm: AdaptiveNorm

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        feed_forward = feed_forward_layers(self.feed_forward_in, self.feed_forward_out, PLAIN_INPUT)
        return *self.self_attention.token_layers, *self.cross_attention.token_layers, *feed_forward

    @property
    def prompt_layers(self) -> tuple[FusedLinear, ...]:
        return (self.cross_attention.key_value,)


@dataclass(frozen=True)
class AnimaLayout(Layout):
    """time.second gives shift, factor and gate for all layers, to which each layer's own are added. downs, ups: the two
    linear layers that make these, three of each to a block in the order of its layers, and out_up with the last of
    downs for the output."""

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
    foreign: tuple[str, ...] = ()
    model_name: str = field(default="Anima", compare=False)

    @cached_property
    def architecture(self) -> str:
        return digest_without(self, {"path", "name", "model_name", "foreign"})

    @cached_property
    def kernel_users(self) -> list[Any]:
        heads = self.blocks[0].self_attention.heads
        return [self.out_norm, NormedHeads(heads, self.width // heads)]

    def sized_layers(self, height: int, width: int, tokens: int) -> list[tuple[Any, tuple[int, int]]]:
        """See core.family.Layout."""
        size = -(-height // self.patch), -(-width // self.patch)
        return [(block, size) for block in self.blocks]


# --- what every host's readers share ----------------------------------------------------------------------------------


def read_attentions(
    own: Any, cross: Any, parts: Callable[[Any], tuple[Any, ...]], leaves: LeafReader
) -> tuple[SelfAttention, CrossAttention]:
    """A block's self attention (own) and cross attention. parts: returns of one of the two what makes queries, keys and
    values, the norms of the first two, the output and how many heads, in this order."""
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
    """Time, height and width, in halves."""
    thetas = tuple(BASE * factor for factor in (embedder.t_ntk_factor, embedder.h_ntk_factor, embedder.w_ntk_factor))
    return RotaryAxes(widths, thetas, interleaved=False, exponents=exponents, frequencies=frequencies)


def refuse_biases(network: nn.Module) -> None:
    """Raise Refusal where a layer adds one: no network of this family has any, and ours computes none."""
    found = next((name for name, _ in network.named_parameters() if name.endswith("bias")), None)
    if found is not None:
        raise Refusal(f"{found} is a bias, where OneDiff knows none")
