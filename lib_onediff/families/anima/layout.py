"""What an Anima network is, which parameter does what without holding any; read from Forge Neo's module
(backend.nn.anima)."""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

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
)
from ...core.refusal import Refusal
from ..leaf_reader import LeafReader, is_genuine

BASE = 10000.0
PLACES = ("self_attn", "cross_attn", "mlp")


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


# --- reading ----------------------------------------------------------------------------------------------------------


def is_anima(network: nn.Module) -> bool:
    return type(network).__name__ == "Anima" and is_genuine(type(network)) and hasattr(network, "x_embedder")


def read_anima(network: Any) -> AnimaLayout:
    """The layout of an Anima module. Raises Refusal with the reason."""
    leaves, width = LeafReader(network), network.t_embedding_norm.normalized_shape[0]
    if network.patch_temporal != 1:
        raise Refusal(f"its patches take {network.patch_temporal} images of a video")
    embedder, final = network.t_embedder[1], network.final_layer
    patches = leaves.linear(network.x_embedder.proj[1])
    area = network.patch_spatial**2
    if patches.in_features != area * (network.in_channels + 1):
        raise Refusal("it takes no padding mask")
    pairs = [getattr(block, f"adaln_modulation_{place}") for block in network.blocks for place in PLACES]
    for module in (embedder.activation, *(pair[0] for pair in (*pairs, final.adaln_modulation))):
        if leaves.kind(module) != "SiLU":
            raise leaves.unknown(module, "expected SiLU")
    layout = AnimaLayout(
        in_channels=network.in_channels, out_channels=network.out_channels, patch=network.patch_spatial, width=width,
        context_width=network.blocks[0].cross_attn.k_proj.weight.shape[1], patches=patches,
        time=TimeEmbedding(
            channels=network.t_embedder[0].num_channels, cosine_first=True, frequency_shift=0.0, scale=1.0,
            condition=None, first=leaves.linear(embedder.linear_1), second=leaves.linear(embedder.linear_2),
        ),
        time_norm=leaves.rms_norm(network.t_embedding_norm),
        downs=leaves.fused("modulation.down", *(pair[1] for pair in (*pairs, final.adaln_modulation))),
        ups=leaves.fused("modulation.up", *(pair[2] for pair in pairs)),
        out_up=leaves.linear(final.adaln_modulation[2]),
        positions=read_positions(network.pos_embedder),
        blocks=tuple(read_block(block, leaves) for block in network.blocks),
        out_norm=adaptive_norm(final.layer_norm, width, leaves), out=leaves.linear(final.linear),
    )
    leaves.refuse_unclaimed()
    return layout


def read_positions(embedder: Any) -> Positions:
    """The exponents are buffers, which may have been rounded with the weights."""
    time, space = embedder.dim_temporal_range, embedder.dim_spatial_range
    at_time, at_height, at_width = (
        BASE * factor for factor in (embedder.t_ntk_factor, embedder.h_ntk_factor, embedder.w_ntk_factor)
    )
    widths = 2 * len(time), 2 * len(space), 2 * len(space)
    for rounded in (torch.float32, torch.bfloat16, torch.float16):
        if all(is_range(buffer, rounded) for buffer in (time, space)):
            return Positions(widths, (at_time, at_height, at_width), rounded)
    raise Refusal("its positions have frequencies that OneDiff does not know")


def is_range(buffer: Tensor, rounded: torch.dtype) -> bool:
    """Whether these are the even numbers below a width over that width, rounded to this type."""
    width = 2 * len(buffer)
    return torch.equal(buffer.float().cpu(), (torch.arange(0, width, 2).float() / width).to(rounded).float())


def read_block(block: Any, leaves: LeafReader) -> AdaptiveBlock:
    path, own, cross = leaves.path(block), block.self_attn, block.cross_attn
    width = own.output_proj.weight.shape[0]
    norms = {adaptive_norm(getattr(block, f"layer_norm_{place}"), width, leaves) for place in PLACES}
    if leaves.kind(block) != "Block" or len(norms) != 1 or not isinstance(block.mlp.activation, nn.GELU):
        raise leaves.unknown(block)
    if block.mlp.activation.approximate != "none":
        raise leaves.unknown(block.mlp.activation)
    return AdaptiveBlock(
        self_attention=NormedSelfAttention(
            leaves.fused(f"{path}.self_attn", own.q_proj, own.k_proj, own.v_proj),
            leaves.rms_norm(own.q_norm), leaves.rms_norm(own.k_norm), leaves.linear(own.output_proj), own.n_heads,
        ),
        cross_attention=NormedCrossAttention(
            leaves.linear(cross.q_proj), leaves.fused(f"{path}.cross_attn", cross.k_proj, cross.v_proj),
            leaves.rms_norm(cross.q_norm), leaves.rms_norm(cross.k_norm), leaves.linear(cross.output_proj),
            cross.n_heads,
        ),
        feed_forward_in=leaves.linear(block.mlp.layer1), feed_forward_out=leaves.linear(block.mlp.layer2),
        norm=norms.pop(),
    )


def adaptive_norm(norm: Any, width: int, leaves: LeafReader) -> AdaptiveNorm:
    """A layer norm without weight. Raises Refusal for any other."""
    if norm.weight is not None or norm.bias is not None or tuple(norm.normalized_shape) != (width,):
        raise leaves.unknown(norm, "expected a layer norm without weight")
    return AdaptiveNorm(width, float(norm.eps))
