"""Reads diffusers' Krea2Transformer2DModel into a layout: the description of its structure and layers by which our
forward computes it."""
from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn

from ...families.krea2.layout import (
    GatedLayers,
    Krea2Layout,
    StreamBlock,
    TextFusion,
    axes_of,
    gated_layers,
    time_embedding,
)
from ...families.leaf_reader import LeafReader, is_class
from ...families.registry import FAMILIES
from .krea2 import PATCH

# The parts of a block, as gated_layers takes them.
NORMS = attrgetter("norm1", "norm2")
ATTENTION = attrgetter(*(
    f"attn.{part}" for part in
    ("to_q", "to_k", "to_v", "to_gate", "norm_q", "norm_k", "to_out.0", "num_heads", "num_kv_heads")
))
FEED_FORWARD = attrgetter("ff.gate", "ff.up", "ff.down")
# The parameter of a block, and of the last layer, that is added to the timestep's scales, shifts and gates.
TABLE = "scale_shift_table"


def is_krea2(network: nn.Module) -> bool:
    """Whether a module's class is diffusers' own Krea2Transformer2DModel, and not a derived one."""
    return is_class(type(network), "diffusers.models.transformers.transformer_krea2", "Krea2Transformer2DModel")


def read_krea2(network: Any) -> Krea2Layout:
    """The layout of a Krea2Transformer2DModel, which takes a latent's patches as tokens (PATCH). Raises Refusal if the
    module is built in a way that our forward does not compute."""
    leaves = LeafReader(network, reads_loras=True)
    time = network.time_embed
    fusion = network.text_fusion
    prompt = network.txt_in
    final = network.final_layer
    rope = network.rotary_emb
    for kind, *modules in (
        ("Krea2TimestepEmbedding", time), ("Krea2TextFusion", fusion), ("Krea2TextProjection", prompt),
        ("Krea2FinalLayer", final), ("Krea2RotaryPosEmbed", rope), ("Krea2RMSNorm", prompt.norm, final.norm),
        ("Krea2TransformerBlock", *network.transformer_blocks),
        ("Krea2TextFusionBlock", *fusion.layerwise_blocks, *fusion.refiner_blocks),
    ):
        leaves.expect(kind, *modules)
    patches = leaves.linear(network.img_in)
    total = leaves.linear(fusion.projector)
    layout = Krea2Layout(
        channels=patches.in_features // PATCH**2, patch=PATCH, width=patches.out_features,
        text_layers=total.in_features, text_width=len(prompt.norm.weight), patches=patches,
        time=time_embedding(leaves.linear(time.linear_1), leaves.linear(time.linear_2)),
        modulation=leaves.linear(network.time_mod_proj),
        text=TextFusion(
            tuple(read_layers(block, leaves) for block in fusion.layerwise_blocks), total,
            tuple(read_layers(block, leaves) for block in fusion.refiner_blocks),
            leaves.shifted_norm(prompt.norm, "weight"), leaves.linear(prompt.linear_1), leaves.linear(prompt.linear_2),
        ),
        axes=axes_of(rope.axes_dim, rope.theta),
        blocks=tuple(
            StreamBlock(leaves.parameter(block, TABLE), read_layers(block, leaves))
            for block in network.transformer_blocks
        ),
        out_table=leaves.parameter(final, TABLE), out_norm=leaves.shifted_norm(final.norm, "weight"),
        out=leaves.linear(final.linear),
    )
    leaves.refuse_unclaimed()
    return layout


def read_layers(block: Any, leaves: LeafReader) -> GatedLayers:
    """The layout of the attention and feed-forward layers of a block, either of the transformer or of the text fusion.
    Raises Refusal for a block that computes anything else than our forward. leaves: the reader of the network, which
    notes the parameters that are read."""
    attention = block.attn
    for kind, *modules in (
        ("Krea2RMSNorm", block.norm1, block.norm2, attention.norm_q, attention.norm_k), ("Krea2Attention", attention),
        ("Krea2SwiGLU", block.ff), ("Dropout", attention.to_out[1]),
    ):
        leaves.expect(kind, *modules)
    if leaves.kind(attention.processor) != "Krea2AttnProcessor":
        raise leaves.unknown(attention, f"its processor is {leaves.kind(attention.processor)}")
    leaves.require(attention.processor, _parallel_config=None)
    return gated_layers(leaves, NORMS(block), ATTENTION(block), FEED_FORWARD(block), "weight")


FAMILIES.take_reader((is_krea2, read_krea2))
