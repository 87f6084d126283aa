"""What an Anima network is, which parameter does what without holding any; read from Forge Neo's module
(backend.nn.anima)."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

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
from ..leaf_reader import LeafReader, is_genuine
from ..rotary import RotaryAxes

BASE = 10000.0
PLACES = ("self_attn", "cross_attn", "mlp")
# Of an attention: what makes queries, keys and values, the norms of the first two, the output and how many heads.
FORGES_PARTS = attrgetter("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "output_proj", "n_heads")


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

    def sized_layers(self, height: int, width: int) -> list[tuple[Any, tuple[int, int]]]:
        """See core.family.Layout."""
        size = -(-height // self.patch), -(-width // self.patch)
        return [(block, size) for block in self.blocks]


# --- Forge Neo's ------------------------------------------------------------------------------------------------------


def is_anima(network: nn.Module) -> bool:
    return type(network).__name__ == "Anima" and is_genuine(type(network)) and hasattr(network, "x_embedder")


def read_anima(network: Any) -> AnimaLayout:
    """The layout of an Anima module. Raises Refusal with the reason."""
    leaves = LeafReader(network)
    width = network.t_embedding_norm.normalized_shape[0]
    if network.patch_temporal != 1:
        raise Refusal(f"its patches take {network.patch_temporal} images of a video")
    embedder = network.t_embedder[1]
    final = network.final_layer
    patches = leaves.linear(network.x_embedder.proj[1])
    area = network.patch_spatial**2
    if patches.in_features != area * (network.in_channels + 1):
        raise Refusal("it takes no padding mask")
    pairs = [getattr(block, f"adaln_modulation_{place}") for block in network.blocks for place in PLACES]
    leaves.expect("SiLU", embedder.activation, *(pair[0] for pair in (*pairs, final.adaln_modulation)))
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
        axes=read_axes(network.pos_embedder),
        blocks=tuple(read_block(block, leaves) for block in network.blocks),
        out_norm=leaves.adaptive_norm(final.layer_norm, width), out=leaves.linear(final.linear),
    )
    leaves.refuse_unclaimed()
    refuse_biases(network)
    return layout


def read_axes(embedder: Any) -> RotaryAxes:
    """The axes of a module's rotary embedding. The exponents are buffers, which may have been rounded with the
    weights."""
    time = embedder.dim_temporal_range
    space = embedder.dim_spatial_range
    widths = 2 * len(time), 2 * len(space), 2 * len(space)
    for rounded in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if all(is_range(buffer, rounded) for buffer in (time, space)):
            return rotary_axes(embedder, widths, rounded, torch.float16)
    raise Refusal("its positions have frequencies that OneDiff does not know")


def is_range(buffer: Tensor, rounded: torch.dtype) -> bool:
    """Whether a buffer has the even numbers below a width, divided by the width, rounded to this type."""
    width = 2 * len(buffer)
    exact = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    return torch.equal(buffer.float().cpu(), exact.to(rounded).float())


def read_block(block: Any, leaves: LeafReader) -> AdaptiveBlock:
    width = block.self_attn.output_proj.weight.shape[0]
    norms = {leaves.adaptive_norm(getattr(block, f"layer_norm_{place}"), width) for place in PLACES}
    if leaves.kind(block) != "Block" or len(norms) != 1 or not isinstance(block.mlp.activation, nn.GELU):
        raise leaves.unknown(block)
    if block.mlp.activation.approximate != "none":
        raise leaves.unknown(block.mlp.activation)
    return AdaptiveBlock(
        *read_attentions(block.self_attn, block.cross_attn, FORGES_PARTS, leaves),
        leaves.linear(block.mlp.layer1), leaves.linear(block.mlp.layer2), norms.pop(),
    )


# --- what every host's readers share ----------------------------------------------------------------------------------


def read_attentions(
    own: Any, cross: Any, parts: Callable[[Any], tuple[Any, ...]], leaves: LeafReader
) -> tuple[SelfAttention, CrossAttention]:
    """A block's self attention (own) and cross attention. parts: returns the modules of one of the two, in the order of
    FORGES_PARTS."""
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
