"""Read Forge Neo's Anima (backend.nn.anima)."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.leaves import AdaptiveNorm, TimeEmbedding
from ...core.refusal import Refusal
from ..leaf_reader import LeafReader, is_genuine
from .layout import AdaptiveBlock, AnimaLayout, NormedCrossAttention, NormedSelfAttention, Positions

BASE = 10000.0
PLACES = ("self_attn", "cross_attn", "mlp")


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
    raise Refusal("its positions have other frequencies than those we know")


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


