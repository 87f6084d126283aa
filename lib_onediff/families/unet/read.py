"""Reads UNets of the ldm family into layouts: ldm's (A1111's SD1 and SD2), sgm's (SDXL), Forge's and ldm_patched's."""
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn

from ...core.leaves import CrossAttention, SelfAttention, TimeEmbedding
from ...core.origins import package
from ...core.refusal import unsupported_model
from ..leaf_reader import LeafReader, is_genuine
from .layout import (
    Downsample,
    LabelEmbedding,
    Layer,
    ResidualBlock,
    SpatialTransformer,
    Stage,
    TransformerBlock,
    UNetLayout,
    Upsample,
)

# Names of classes in ldm, sgm, Forge and ldm_patched.
BLOCK = "BasicTransformerBlock"
FORGES_UNET = "IntegratedUNet2DConditionModel"
UNET_CLASSES = {"UNetModel", FORGES_UNET}


def read_transformer(
    transformer: Any, block_reader: Callable[[Any, LeafReader], TransformerBlock], leaves: LeafReader
) -> SpatialTransformer:
    """The description of a spatial transformer of ldm or of diffusers, in which its parts have the same names. Used by
    this file and by the reader of diffusers' UNets.

    block_reader: the host's function that returns the description of a transformer block: it checks that the host
        computes the block as we do, raises Refusal if not, and calls read_block.
    """
    return SpatialTransformer(
        norm=leaves.group_norm(transformer.norm), project_in=leaves.linear(transformer.proj_in),
        # Iterated rather than indexed: A1111 turns SDXL into SSD-1B by deleting members, which leaves gaps.
        blocks=tuple(block_reader(block, leaves) for block in transformer.transformer_blocks),
        project_out=leaves.linear(transformer.proj_out),
    )


def read_block(block: Any, leaves: LeafReader) -> TransformerBlock:
    """The description of a transformer block of ldm or of diffusers, in which its parts have the same names. The caller
    has checked the block's class and options. Raises Refusal for a feed-forward layer without GEGLU, and for layers
    that LeafReader refuses."""
    path = leaves.path(block)
    own = block.attn1
    cross = block.attn2
    layers = block.ff.net
    if leaves.kind(layers[0]) != "GEGLU":
        raise unsupported_model(f"the feed-forward layer of {path} is {leaves.kind(layers[0])}, not GEGLU")
    return TransformerBlock(
        self_norm=leaves.layer_norm(block.norm1),
        self_attention=SelfAttention(
            leaves.fused(f"{path}.attn1", own.to_q, own.to_k, own.to_v), leaves.linear(own.to_out[0]), own.heads
        ),
        cross_norm=leaves.layer_norm(block.norm2),
        cross_attention=CrossAttention(
            leaves.linear(cross.to_q), leaves.fused(f"{path}.attn2", cross.to_k, cross.to_v),
            leaves.linear(cross.to_out[0]), cross.heads,
        ),
        feed_forward_norm=leaves.layer_norm(block.norm3),
        feed_forward_in=leaves.linear(layers[0].proj), feed_forward_out=leaves.linear(layers[2]),
    )


def is_ldm_unet(unet: nn.Module) -> bool:
    """Whether a module is to be read by read_ldm: its class has one of the names in UNET_CLASSES, and it has
    input_blocks. Another package may use the same name for another network, which read_ldm refuses."""
    return type(unet).__name__ in UNET_CLASSES and hasattr(unet, "input_blocks")


def is_block(kind: type) -> bool:
    """Whether a class is named BasicTransformerBlock, in any package, or is derived from a class of that name."""
    return any(base.__name__ == BLOCK for base in kind.__mro__)


@lru_cache(maxsize=64)
def is_derived_block(kind: type) -> bool:
    """Whether a class is an extension's variant of a transformer block: derived from BasicTransformerBlock, or of its
    name without being its Python module's class. Extensions for token merging give such classes to a UNet's blocks."""
    return is_block(kind) and not (kind.__name__ == BLOCK and is_genuine(kind))


def read_ldm(unet: Any) -> UNetLayout:
    """The layout of a UNet of the ldm family. Raises Refusal if the module has options that our forward does not
    compute, is built in another way, or has parameters that our forward would ignore. Extensions' transformer blocks
    are read as plain ones, and named in the layout's `foreign`."""
    refuse_ldm_variants(unet)
    leaves = LeafReader(unet)
    # The Forge family passes an Upsample the size of the skip; A1111 resizes its output instead.
    resizes_before = type(unet).__name__ == FORGES_UNET or package(type(unet).__module__) == "ldm_patched"

    def stage(module: Any) -> Stage:
        return tuple(read_layer(layer, leaves, resizes_before) for layer in module.children())

    time = TimeEmbedding(
        channels=unet.model_channels, cosine_first=True, frequency_shift=0.0, scale=1.0, condition=None,
        first=leaves.linear(unet.time_embed[0]), second=leaves.linear(unet.time_embed[2]),
    )
    layout = UNetLayout(
        input_stages=tuple(map(stage, unet.input_blocks)), middle_stage=stage(unet.middle_block),
        output_stages=tuple(map(stage, unet.output_blocks)), time=time, label=ldm_label(unet, leaves),
        out_norm=leaves.group_norm(unet.out[0]), out_convolution=leaves.convolution(unet.out[2]),
        foreign=tuple(sorted({
            f"{kind.__module__}.{kind.__name__}" for kind in map(type, unet.modules()) if is_derived_block(kind)
        })),
    )
    leaves.refuse_unclaimed()
    return layout


def refuse_ldm_variants(unet: Any) -> None:
    """Raise Refusal if the UNet predicts codebook ids, or its time embedding is not a Sequential of three modules,
    which read_ldm takes for two linear layers with SiLU between them."""
    if getattr(unet, "predict_codebook_ids", False):
        raise unsupported_model("the UNet predicts codebook ids, not noise")
    if not isinstance(unet.time_embed, nn.Sequential) or len(unet.time_embed) != 3:
        raise unsupported_model("the UNet's time embedding is not two linear layers")


def ldm_label(unet: Any, leaves: LeafReader) -> LabelEmbedding | None:
    """The description of the layers that embed y, SDXL's pooled prompt and sizes; None if the UNet takes no y. Raises
    Refusal unless they are two linear layers with SiLU between them."""
    if unet.num_classes is None:
        return None
    label = unet.label_emb
    layers = list(label[0]) if isinstance(label, nn.Sequential) and isinstance(label[0], nn.Sequential) else []
    if [type(layer).__name__ for layer in layers] != ["Linear", "SiLU", "Linear"]:
        raise unsupported_model("the UNet's label embedding is not two linear layers (a class-conditional model?)")
    return LabelEmbedding(leaves.linear(layers[0]), leaves.linear(layers[2]))


def read_layer(layer: Any, leaves: LeafReader, resizes_before: bool) -> Layer:
    """The description of one layer of a stage: a residual block, a spatial transformer, a Downsample, an Upsample or a
    convolution. Raises Refusal for any other, and for one that its reader refuses. resizes_before: becomes
    Upsample.resize_before."""
    kind = leaves.kind(layer)
    if kind == "ResBlock":
        return ldm_residual_block(layer, leaves)
    if kind == "SpatialTransformer":
        return read_transformer(layer, ldm_block, leaves)
    if kind in ("Downsample", "Upsample"):
        leaves.require(layer, use_conv=True, dims=2)
    if kind == "Downsample":
        return Downsample(leaves.convolution(layer.op))
    if kind == "Upsample":
        return Upsample(leaves.convolution(layer.conv), resize_before=resizes_before)
    if isinstance(layer, nn.Conv2d):
        return leaves.convolution(layer)
    raise leaves.unknown(layer)


def ldm_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    """The description of a ResBlock. Raises Refusal for one that changes the image's size, scales by the time embedding
    instead of adding it, takes no time embedding, or exchanges its dimensions; also for layers that LeafReader refuses.
    """
    variants = ("updown", "use_scale_shift_norm", "skip_t_emb", "exchange_temb_dims")
    found = [name for name in variants if getattr(block, name, False)]
    if found:
        raise unsupported_model(f"{leaves.path(block)} is a residual block with {found[0]}")
    identity = isinstance(block.skip_connection, nn.Identity)
    return ResidualBlock(
        in_norm=leaves.group_norm(block.in_layers[0]), in_convolution=leaves.convolution(block.in_layers[2]),
        embedding=leaves.linear(block.emb_layers[1]),
        out_norm=leaves.group_norm(block.out_layers[0]), out_convolution=leaves.convolution(block.out_layers[3]),
        skip=None if identity else leaves.linear(block.skip_connection),
    )


def ldm_block(block: Any, leaves: LeafReader) -> TransformerBlock:
    """The description of a BasicTransformerBlock, or of an extension's class derived from it. Raises Refusal for
    another class, for a block without cross attention, and for one with disable_self_attn or ff_in."""
    path = leaves.path(block)
    if not is_block(type(block)):
        raise leaves.unknown(block)
    if getattr(block, "disable_self_attn", False) or getattr(block, "ff_in", False) or block.attn2 is None:
        raise unsupported_model(
            f"the transformer block {path} lacks an attention, or has an additional feed-forward layer (ff_in)"
        )
    return read_block(block, leaves)
