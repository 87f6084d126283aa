"""Reads diffusers' CosmosTransformer3DModel, the network of Cosmos-Predict2 and Anima, into a layout: the description
of its structure and layers by which our forward computes it."""
from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...core.leaves import TimeEmbedding
from ...core.refusal import unsupported_model
from ...families.anima.layout import (
    AdaptiveBlock,
    AnimaLayout,
    read_attentions,
    refuse_biases,
    rotary_axes,
)
from ...families.leaf_reader import LeafReader, is_class
from ...families.registry import FAMILIES

# An attention's projections to queries, keys and values, the norms of queries and keys, the output projection, and the
# number of heads; see read_attentions.
PARTS = attrgetter("to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out.0", "heads")
# Entries of the configuration that switch on parts which our forward does not compute, each with a name for users.
VARIANTS = {
    "extra_pos_embed_type": "learned positions", "use_crossattn_projection": "a projection of the prompt",
    "img_context_dim_in": "a second attention, to images",
}


def is_cosmos(network: nn.Module) -> bool:
    """Whether a module's class is diffusers' own CosmosTransformer3DModel, and not a derived one."""
    return is_class(type(network), "diffusers.models.transformers.transformer_cosmos", "CosmosTransformer3DModel")


def made_of_anima(network: Any) -> bool:
    """Whether a CosmosTransformer3DModel is Anima's: the path or model name that it was loaded from contains "anima",
    in upper or lower case. Cosmos-Predict2 is the same network with other weights, so this only decides the model's
    name for users."""
    return "anima" in str(network.config.get("_name_or_path")).lower()


def read_cosmos(network: Any) -> AnimaLayout:
    """The layout of a CosmosTransformer3DModel. The layout's in_channels include the channels of the masks, which the
    network takes as further channels of the latent. Raises Refusal if the module is built in a way that our forward
    does not compute."""
    leaves = LeafReader(network, reads_loras=True)
    time = network.time_embed
    final = network.norm_out
    rope = network.rope
    for name, what in VARIANTS.items():
        if network.config.get(name):
            raise unsupported_model(f"it has {what} ({name})")
    sizes = {tuple(part.patch_size) for part in (network.config, network.patch_embed, rope)}
    (frames, patch, across), *others = sizes
    if others or frames != 1 or patch != across:
        raise unsupported_model(f"its patches are {' and '.join(map(str, sizes))} instead of squares of one frame")
    places = [norm for block in network.transformer_blocks for norm in (block.norm1, block.norm2, block.norm3)]
    for kind, *modules in (
        ("CosmosPatchEmbed", network.patch_embed), ("CosmosEmbedding", time), ("Timesteps", time.time_proj),
        ("CosmosTimestepEmbedding", time.t_embedder), ("CosmosRotaryPosEmbed", rope), ("CosmosAdaLayerNorm", final),
        ("CosmosAdaLayerNormZero", *places), ("SiLU", *(one.activation for one in (time.t_embedder, *places, final))),
    ):
        leaves.expect(kind, *modules)
    time_norm = leaves.rms_norm(time.norm)
    width = time_norm.width
    patches = leaves.linear(network.patch_embed.proj)
    blocks = tuple(cosmos_block(block, leaves) for block in network.transformer_blocks)
    out = network.proj_out
    layout = AnimaLayout(
        in_channels=patches.in_features // patch**2, out_channels=out.out_features // patch**2, patch=patch,
        width=width, context_width=blocks[0].cross_attention.key_value.members[0].in_features, patches=patches,
        time=TimeEmbedding(
            channels=time.time_proj.num_channels, cosine_first=time.time_proj.flip_sin_to_cos,
            frequency_shift=float(time.time_proj.downscale_freq_shift), scale=float(time.time_proj.scale),
            condition=None, first=leaves.linear(time.t_embedder.linear_1),
            second=leaves.linear(time.t_embedder.linear_2),
        ),
        time_norm=time_norm,
        downs=leaves.fused("modulation.down", *(place.linear_1 for place in (*places, final))),
        ups=leaves.fused("modulation.up", *(place.linear_2 for place in places)), out_up=leaves.linear(final.linear_2),
        axes=rotary_axes(rope, (rope.dim_t, rope.dim_h, rope.dim_w), torch.float32, torch.float32),
        blocks=blocks, out_norm=leaves.adaptive_norm(final.norm, width), out=leaves.linear(out),
        model_name="Anima" if made_of_anima(network) else "Cosmos",
    )
    leaves.refuse_unclaimed()
    refuse_biases(network)
    return layout


def cosmos_block(block: Any, leaves: LeafReader) -> AdaptiveBlock:
    """The layout of one CosmosTransformerBlock. Raises Refusal for a block that computes anything else than our
    forward. leaves: the reader of the network, which notes the parameters that are read."""
    own = block.attn1
    cross = block.attn2
    into, between, out = block.ff.net
    width = own.to_q.out_features
    for kind, *modules in (
        ("CosmosTransformerBlock", block), ("Attention", own, cross), ("FeedForward", block.ff), ("GELU", into),
        ("Dropout", own.to_out[1], cross.to_out[1], between),
    ):
        leaves.expect(kind, *modules)
    leaves.require(into, approximate="none")
    for attention in (own, cross):
        leaves.require(attention, inner_dim=width, inner_kv_dim=width)
        if leaves.kind(attention.processor) != "CosmosAttnProcessor2_0":
            raise leaves.unknown(attention, f"its processor is {leaves.kind(attention.processor)}")
    norms = {leaves.adaptive_norm(norm.norm, width) for norm in (block.norm1, block.norm2, block.norm3)}
    if len(norms) != 1:
        raise leaves.unknown(block, "its norms differ")
    return AdaptiveBlock(
        *read_attentions(own, cross, PARTS, leaves), leaves.linear(into.proj), leaves.linear(out),
        norms.pop(),
    )


FAMILIES.take_reader((is_cosmos, read_cosmos))
