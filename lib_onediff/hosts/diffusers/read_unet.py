"""Reads diffusers' UNet2DConditionModel into a layout: the description of its structure and layers by which our forward
computes it. Also finds what users add to a UNet: attention processors, FreeU and IP-Adapters.

`leaves` is the reader of the network, which notes the parameters that are read.
"""
from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import nn

from ...core.leaves import TimeEmbedding
from ...core.refusal import Refusal, unsupported_model
from ...families.leaf_reader import HOST_LAYERS, LeafReader, is_class
from ...families.registry import FAMILIES
from ...families.unet.layout import (
    Downsample,
    LabelEmbedding,
    Layer,
    ResidualBlock,
    SpatialTransformer,
    TransformerBlock,
    UNetLayout,
    Upsample,
)
from ...families.unet.read import read_block, read_transformer

# The classes of blocks that our forward computes.
MIDDLE_BLOCKS = {"UNetMidBlock2D", "UNetMidBlock2DCrossAttn"}
BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D", *MIDDLE_BLOCKS}
# The attention processors that compute plain softmax attention.
PLAIN_PROCESSORS = {"AttnProcessor", "AttnProcessor2_0"}
# The processor that fuse_qkv_projections() sets, and the layers that it creates. unfuse_qkv_projections() leaves them.
FUSED_PROCESSOR = "FusedAttnProcessor2_0"
FUSED_LAYERS = ("to_qkv", "to_kv")
# The class of an IP-Adapter's projection. Its tokens go to the attention processors, besides the context.
IMAGE_PROJECTION = "MultiIPAdapterImageProjection"
# Returns an attention's processor.
PROCESSOR_OF = attrgetter("processor")
# The attributes of an up block that enable_freeu sets.
FREEU_FACTORS = ("s1", "s2", "b1", "b2")


def is_diffusers_unet(unet: nn.Module) -> bool:
    """Whether a module's class is diffusers' own UNet2DConditionModel, and not a derived one."""
    return is_class(type(unet), "diffusers.models.unets.unet_2d_condition", "UNet2DConditionModel")


def read_diffusers(unet: Any) -> UNetLayout:
    """The layout of a UNet2DConditionModel. layout.foreign names users' additions in words (foreign_parts); each call
    reads the additions themselves (patches.py). Raises Refusal if the module is built in a way that our forward does
    not compute."""
    leaves = LeafReader(unet, reads_loras=True)
    refuse_diffusers_variants(unet, leaves)
    processors = list(map(PROCESSOR_OF, attentions_of(unet).values()))
    down: list[list[Any]] = []
    for block in unet.down_blocks:
        down += [*modules_of(block, leaves), *([downsampler] for downsampler in block.downsamplers or ())]
    up: list[list[Any]] = []
    for block in unet.up_blocks:
        up += modules_of(block, leaves)
        up[-1] += block.upsamplers or ()
    middle: list[Any] = []
    if unet.mid_block is not None:
        first, *others = modules_of(unet.mid_block, leaves)
        middle = [*first, *chain(*others)]

    layout = UNetLayout(
        input_stages=((leaves.convolution(unet.conv_in),), *(leaves.layers(READERS, stage) for stage in down)),
        middle_stage=leaves.layers(READERS, middle),
        output_stages=tuple(leaves.layers(READERS, stage) for stage in up),
        time=diffusers_time(unet, leaves), label=diffusers_label(unet, leaves),
        out_norm=leaves.group_norm(unet.conv_norm_out), out_convolution=leaves.convolution(unet.conv_out),
        foreign=foreign_parts(unet, set(map(type, processors))),
    )
    for part in (unet.encoder_hid_proj, *processors):
        if isinstance(part, nn.Module):
            leaves.mark_unused(part)
    leaves.refuse_unclaimed()
    return layout


def attentions_of(unet: nn.Module) -> dict[str, Any]:
    """The attention modules of a UNet, by path. The attribute processor of each is an object that computes the
    attention, and that users can replace."""
    found = unet.named_modules()
    return {path: module for path, module in found if hasattr(module, "processor") and hasattr(module, "to_q")}


def is_plain(kind: type) -> bool:
    """Whether attention processors of this class compute plain softmax attention: diffusers' own of PLAIN_PROCESSORS.
    """
    return kind.__name__ in PLAIN_PROCESSORS and kind.__module__.partition(".")[0] == "diffusers"


def has_ip_adapter(unet: Any) -> bool:
    """Whether an IP-Adapter is loaded into a UNet, by its projection of image embeddings."""
    return type(unet.encoder_hid_proj).__name__ == IMAGE_PROJECTION


def has_freeu(block: Any) -> bool:
    """Whether FreeU is on for an up block: enable_freeu has set its four factors. As in diffusers, FreeU is off if a
    factor is 0."""
    # enable_freeu sets plain numbers. They are read without getattr, which takes microseconds for a missing attribute.
    return all(vars(block).get(name) for name in FREEU_FACTORS)


def foreign_parts(unet: Any, kinds: Collection[type]) -> tuple[str, ...]:
    """What a UNet computes besides its own layers, in words for the user: image prompts of IP-Adapters, other attention
    processors, FreeU. () if nothing. kinds: the classes of its attention processors."""
    found = ["an IP-Adapter's image prompt"] if has_ip_adapter(unet) else []
    found += sorted(f"attention processor {kind.__name__}" for kind in kinds if not is_plain(kind))
    return (*found, "FreeU") if any(map(has_freeu, unet.up_blocks)) else tuple(found)


def refuse_diffusers_variants(unet: Any, leaves: LeafReader) -> None:
    """Raise Refusal for a UNet with inputs or layers outside of its blocks that our forward does not compute, such as
    class labels."""
    config = unet.config
    text_too = getattr(unet, "text_encoder_hid_proj", None) is not None
    if unet.encoder_hid_proj is not None and (text_too or not has_ip_adapter(unet)):
        kind = type(unet.encoder_hid_proj).__name__
        raise unsupported_model(f"its prompt passes through a projection of an unknown kind ({kind})")
    if unet.class_embedding is not None or config.center_input_sample or unet.time_embed_act is not None:
        raise unsupported_model("it has class labels or prepares its inputs in an unusual way")
    if config.addition_embed_type not in (None, "text_time"):
        raise unsupported_model(f"its extra embedding is of type {config.addition_embed_type}")
    if leaves.kind(unet.time_proj) != "Timesteps" or not isinstance(unet.conv_norm_out, nn.GroupNorm):
        raise unsupported_model("its time projection or output norm is of an unknown kind")
    require_silu(unet.conv_act, "the output's activation", leaves)


def require_silu(activation: Any, where: str, leaves: LeafReader) -> None:
    """Raise Refusal if an activation is not SiLU. where: the activation in words, which begin the reason for the user.
    """
    if leaves.kind(activation) != "SiLU":
        raise unsupported_model(f"{where} is {leaves.kind(activation)} instead of SiLU")


def diffusers_time(unet: Any, leaves: LeafReader) -> TimeEmbedding:
    """The layout of a UNet's timestep embedding: sinusoids, two linear layers, and in LCM a condition. Raises Refusal
    for an embedding with other activations."""
    projection = unet.time_proj
    embedding = unet.time_embedding
    require_silu(embedding.act, "the time embedding's activation", leaves)
    leaves.require(embedding, post_act=None)
    return TimeEmbedding(
        channels=projection.num_channels, cosine_first=projection.flip_sin_to_cos,
        frequency_shift=float(projection.downscale_freq_shift), scale=float(getattr(projection, "scale", 1)),
        condition=None if embedding.cond_proj is None else leaves.linear(embedding.cond_proj),
        first=leaves.linear(embedding.linear_1), second=leaves.linear(embedding.linear_2),
    )


def diffusers_label(unet: Any, leaves: LeafReader) -> LabelEmbedding | None:
    """The layout of an SDXL-like UNet's embedding of the pooled prompt and the sizes; None for UNets without one.
    Raises Refusal if its activation is not SiLU."""
    if unet.config.addition_embed_type is None:
        return None
    embedding = unet.add_embedding
    require_silu(embedding.act, "the extra embedding's activation", leaves)
    return LabelEmbedding(leaves.linear(embedding.linear_1), leaves.linear(embedding.linear_2))


def modules_of(block: Any, leaves: LeafReader, known: Collection[str] = BLOCKS) -> list[list[Any]]:
    """The modules of a down, middle or up block in the order of the host's forward, as one list for each residual
    block. Up- and downsamplers are left out.

    In down and up blocks, each list is [residual block, the attention after it or None]. In a middle block, the first
    list is [residual block], and each further list is [attention or None, residual block]. known: the names of the
    classes of blocks that are allowed. Raises Refusal for another class.
    """
    if leaves.kind(block) not in known:
        raise leaves.unknown(block)
    resnets = list(block.resnets)
    attentions = list(getattr(block, "attentions", None) or ())
    if leaves.kind(block) in MIDDLE_BLOCKS:
        return [[resnets[0]], *map(list, zip(attentions, resnets[1:], strict=True))]
    return list(map(list, zip(resnets, attentions or [None] * len(resnets), strict=True)))


def diffusers_downsample(layer: Any, leaves: LeafReader) -> Downsample:
    """The layout of a UNet's Downsample2D. Raises Refusal unless it is a convolution with a padding of 1, without a
    norm, that LeafReader.convolution reads."""
    leaves.require(layer, use_conv=True, norm=None, padding=1)
    return Downsample(leaves.convolution(layer.conv))


def diffusers_upsample(layer: Any, leaves: LeafReader) -> Upsample:
    """The layout of an Upsample2D, of a UNet or a VAE. Raises Refusal unless it interpolates, and then convolves by a
    layer that LeafReader.convolution reads; also if it has a norm or a transposed convolution."""
    leaves.require(layer, use_conv=True, norm=None, use_conv_transpose=False, interpolate=True)
    return Upsample(leaves.convolution(layer.conv), resize_before=True)


def diffusers_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    """The layout of a UNet's ResnetBlock2D. Raises Refusal for one with options that our forward does not compute."""
    leaves.require(block, upsample=None, downsample=None, time_embedding_norm="default", skip_time_act=False)
    leaves.require(block, output_scale_factor=1.0)
    require_silu(block.nonlinearity, f"the activation of {leaves.path(block)}", leaves)
    return ResidualBlock(
        in_norm=leaves.group_norm(block.norm1), in_convolution=leaves.convolution(block.conv1),
        embedding=leaves.linear(block.time_emb_proj),
        out_norm=leaves.group_norm(block.norm2), out_convolution=leaves.convolution(block.conv2),
        skip=None if block.conv_shortcut is None else leaves.linear(block.conv_shortcut),
    )


def diffusers_transformer(transformer: Any, leaves: LeafReader) -> SpatialTransformer:
    """The layout of a Transformer2DModel with all its blocks. Raises Refusal unless its input is an image (not
    vectorized or patched), and each block can be read by diffusers_block."""
    leaves.require(transformer, is_input_continuous=True)
    return read_transformer(transformer, diffusers_block, leaves)


def diffusers_block(block: Any, leaves: LeafReader) -> TransformerBlock:
    """The layout of a BasicTransformerBlock. Raises Refusal for one with options that our forward does not compute."""
    if leaves.kind(block) != "BasicTransformerBlock" or block.attn2 is None:
        raise leaves.unknown(block)
    leaves.require(block, norm_type="layer_norm", pos_embed=None, only_cross_attention=False)
    leaves.require(block.attn2, is_cross_attention=True)
    for attention in (block.attn1, block.attn2):
        check_attention(attention, leaves)
    return read_block(block, leaves)


def check_attention(attention: Any, leaves: LeafReader, is_residual: bool = False) -> None:
    """Raise Refusal for an Attention that computes more than queries, keys, values, attention and output. Marks the
    parameters that fuse_qkv_projections has left behind as unused.

    is_residual: whether it is a VAE's attention, which also has a group norm and adds its output to its input.
    """
    if type(attention.processor).__name__ == FUSED_PROCESSOR:
        raise Refusal(
            "fuse_qkv_projections() is on: call pipe.unfuse_qkv_projections(), because OneDiff fuses these layers by "
            "itself, without a copy"
        )
    for name in FUSED_LAYERS:
        leaves.mark_unused(getattr(attention, name, None))
    leaves.require(attention, residual_connection=is_residual, rescale_output_factor=1, scale_qk=True)
    extras = ["spatial_norm", "norm_q", "norm_k", "norm_cross", "add_k_proj"]
    if not is_residual:
        extras.append("group_norm")
    odd = [name for name in extras if getattr(attention, name, None) is not None]
    if odd:
        raise leaves.unknown(attention, f"it has a {odd[0]}")


# The function that reads a module of a stage, by the name of the module's class.
READERS: dict[str, Callable[[Any, LeafReader], Layer]] = {
    "ResnetBlock2D": diffusers_residual_block, "Transformer2DModel": diffusers_transformer,
    "Downsample2D": diffusers_downsample, "Upsample2D": diffusers_upsample,
}
# Releases of diffusers without peft have the first two classes. A LoRA in such a layer is a module inside of it, which
# is refused.
HOST_LAYERS.take("diffusers", "LoRACompatibleLinear", "LoRACompatibleConv", "RMSNorm")
FAMILIES.take_reader((is_diffusers_unet, read_diffusers))
