"""Forge Neo's SingleStreamDiT (backend.nn.krea), which is Krea 2: reads its layout, the description of its structure
and layers by which our forward computes it, and converts its calls to ours."""
from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from ...core.call import Call
from ...families.krea2.call import Krea2Call, filled_prompt
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
from .call import HostCall, transformer_call

# The parts of a block, as gated_layers takes them.
NORMS = attrgetter("prenorm", "postnorm")
ATTENTION = attrgetter(*(
    f"attn.{part}" for part in ("wq", "wk", "wv", "gate", "qknorm.qnorm", "qknorm.knorm", "wo", "heads", "kvheads")
))
FEED_FORWARD = attrgetter("mlp.gate", "mlp.up", "mlp.down")


def is_krea2(network: nn.Module) -> bool:
    """Whether a module's class is Forge Neo's own SingleStreamDiT, and not a derived one."""
    return is_class(type(network), "backend.nn.krea", "SingleStreamDiT")


def read_krea2(network: Any) -> Krea2Layout:
    """The layout of a SingleStreamDiT module. Raises Refusal if the module is built in a way that our forward does not
    compute."""
    leaves = LeafReader(network)
    first, between, second = network.tmlp
    into_modulation, modulation = network.tproj
    prompt_norm, prompt_in, prompt_between, prompt_out = network.txtmlp
    fusion = network.txtfusion
    embedder = network.pe_embedder
    for kind, *modules in (
        ("SingleStreamBlock", *network.blocks), ("DoubleSharedModulation", *(block.mod for block in network.blocks)),
        ("TextFusionBlock", *fusion.layerwise_blocks, *fusion.refiner_blocks), ("LastLayer", network.last),
        ("SimpleModulation", network.last.modulation), ("TextFusionTransformer", fusion), ("EmbedND", embedder),
        ("GELU", between, into_modulation, prompt_between), ("RMSNorm", prompt_norm, network.last.norm),
    ):
        leaves.expect(kind, *modules)
    for gelu in (between, into_modulation, prompt_between):
        leaves.require(gelu, approximate="tanh")
    patches = leaves.linear(network.first)
    layout = Krea2Layout(
        channels=network.channels, patch=network.patch, width=patches.out_features,
        text_layers=network.txtlayers, text_width=network.txtdim, patches=patches,
        time=time_embedding(leaves.linear(first), leaves.linear(second)), modulation=leaves.linear(modulation),
        text=TextFusion(
            tuple(read_layers(block, leaves) for block in fusion.layerwise_blocks), leaves.linear(fusion.projector),
            tuple(read_layers(block, leaves) for block in fusion.refiner_blocks),
            leaves.shifted_norm(prompt_norm, "scale"), leaves.linear(prompt_in), leaves.linear(prompt_out),
        ),
        axes=axes_of(embedder.axes_dim, embedder.theta),
        blocks=tuple(
            StreamBlock(leaves.parameter(block.mod, "lin"), read_layers(block, leaves)) for block in network.blocks
        ),
        out_table=leaves.parameter(network.last.modulation, "lin"),
        out_norm=leaves.shifted_norm(network.last.norm, "scale"), out=leaves.linear(network.last.linear),
    )
    leaves.refuse_unclaimed()
    return layout


def read_layers(block: Any, leaves: LeafReader) -> GatedLayers:
    """The layout of the attention and feed-forward layers of a block, either of the transformer or of the text fusion.
    Raises Refusal for a block that computes anything else than our forward. leaves: the reader of the network, which
    notes the parameters that are read."""
    for kind, *modules in (
        ("RMSNorm", block.prenorm, block.postnorm, block.attn.qknorm.qnorm, block.attn.qknorm.knorm),
        ("Attention", block.attn), ("QKNorm", block.attn.qknorm), ("SwiGLU", block.mlp),
    ):
        leaves.expect(kind, *modules)
    return gated_layers(leaves, NORMS(block), ATTENTION(block), FEED_FORWARD(block), "scale")


def krea2_call(network: Any, given: HostCall, *how: Any) -> Call:
    """Our Call for a call of the host's network. Raises Refusal if only the host can compute the call.

    given: the host's call, whose context is (batch, tokens, width) or (batch, 1, tokens, width), without padding. The
    context of our Call is padded with zeros and has a mask (filled_prompt), so that prompts of most lengths share a
    shape. how: upcast_attention, names_read, image_prompts and changed, in this order, as for transformer_call.
    """

    def call_of(latent: Tensor, timestep: Tensor, context: Tensor, **others: Any) -> Krea2Call:
        return Krea2Call(latent, timestep, *filled_prompt(context), **others)

    return transformer_call(call_of, network, given._replace(context=given.context.squeeze(1)), *how)


FAMILIES.take_reader((is_krea2, read_krea2))
