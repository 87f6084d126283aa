"""What an Anima network is: which parameter does what, without holding any."""
from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from ...core.call import Call
from ...core.leaves import (
    CROSS_OUT,
    CROSS_QUERY,
    FEED_FORWARD_IN,
    FEED_FORWARD_OUT,
    NORMED,
    PLAIN,
    SELF_OUT,
    SELF_QKV,
    AdaptiveNorm,
    FusedLinear,
    Linear,
    NormedHeads,
    Reader,
    RMSNorm,
    TimeEmbedding,
    descriptions,
    digest_without,
    names_of,
)
from ...core.refusal import Refusal


@dataclass(frozen=True)
class NormedSelfAttention:
    query_key_value: FusedLinear
    query_norm: RMSNorm
    key_norm: RMSNorm
    out: Linear
    heads: int


@dataclass(frozen=True)
class NormedCrossAttention:
    query: Linear
    key_value: FusedLinear
    query_norm: RMSNorm
    key_norm: RMSNorm
    out: Linear
    heads: int


@dataclass(frozen=True)
class AdaptiveBlock:
    """Self attention, cross attention and feed-forward layers, with the norm before each. Its shift and factor, and
    the gate behind the layer, follow from the timestep."""

    self_attention: NormedSelfAttention
    cross_attention: NormedCrossAttention
    feed_forward_in: Linear
    feed_forward_out: Linear
    norm: AdaptiveNorm

    @property
    def readers(self) -> tuple[Reader, ...]:
        """See Block."""
        own, cross = self.self_attention, self.cross_attention
        return (
            Reader(own.query_key_value, NORMED, SELF_QKV), Reader(own.out, PLAIN, SELF_OUT),
            Reader(cross.query, NORMED, CROSS_QUERY), Reader(cross.out, PLAIN, CROSS_OUT),
            Reader(self.feed_forward_in, NORMED, FEED_FORWARD_IN),
            Reader(self.feed_forward_out, PLAIN, FEED_FORWARD_OUT),
        )


@dataclass(frozen=True)
class Positions:
    """What turns queries and keys by their places: a rotary embedding in halves, by time, height and width.

    widths, thetas: how much of a head's width is turned by each, and the bases of its frequencies. rounded: the type to
    which the host has rounded their exponents; it computes the frequencies in float16.
    """

    widths: tuple[int, int, int]
    thetas: tuple[float, float, float]
    rounded: torch.dtype


@dataclass(frozen=True)
class AnimaLayout:
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
    positions: Positions
    blocks: tuple[AdaptiveBlock, ...]
    out_norm: AdaptiveNorm
    out: Linear
    foreign: tuple[str, ...] = ()
    model_name: str = field(default="Anima", compare=False)

    @cached_property
    def architecture(self) -> str:
        return digest_without(self, {"path", "name", "model_name", "foreign"})

    @cached_property
    def kernel_users(self) -> tuple[Any, ...]:
        heads = self.blocks[0].self_attention.heads
        return self.out_norm, NormedHeads(heads, self.width // heads)

    @property
    def residual_blocks(self) -> tuple[Any, ...]:
        return ()

    @cached_property
    def cross_attentions(self) -> tuple[NormedCrossAttention, ...]:
        return tuple(block.cross_attention for block in self.blocks)

    def sized_layers(self, height: int, width: int) -> list[tuple[Any, tuple[int, int]]]:
        """See core.family.Family.read."""
        size = -(-height // self.patch), -(-width // self.patch)
        return [(block, size) for block in self.blocks]

    def layers(self, kind: Any) -> tuple[Any, ...]:
        """Every description of this kind."""
        return tuple(descriptions(self, kind))

    def leaves(self) -> tuple[Any, ...]:
        """Every description of a module that holds parameters, each once."""
        return tuple(descriptions(self, (Linear, RMSNorm)))

    def fusions(self) -> tuple[FusedLinear, ...]:
        return tuple(descriptions(self, FusedLinear))

    def units(self) -> list[tuple[str, ...]]:
        """The names of the layers, in the order in which a forward reads them."""
        first = names_of(tuple(getattr(self, one.name) for one in fields(self) if one.name not in ("blocks", "out")))
        return [first, *(names_of(block) for block in self.blocks), names_of(self.out)]


def refuse_call(layout: AnimaLayout, call: Call) -> None:
    """Raise Refusal with the reason for inputs that cannot be this network's."""
    latent, context = call.latent, call.context
    if latent.dim() != 5 or latent.shape[1:3] != (layout.in_channels, 1):
        raise Refusal(f"the latent is {tuple(latent.shape)}, but Anima takes {layout.in_channels} channels, one image")
    if context.dim() != 3 or context.shape[-1] != layout.context_width:
        raise Refusal(f"the prompt is {tuple(context.shape)}, but Anima takes {layout.context_width} values a token")
    if context.shape[0] != latent.shape[0] or call.timestep.shape != latent.shape[:1]:
        raise Refusal("latent, timestep and prompt are of different batches")
    if call.y is not None or call.control is not None or call.image_prompts:
        raise Refusal("Anima takes no label, ControlNet or image prompt")
