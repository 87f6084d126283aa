"""Read the decoder and the encoder of diffusers' AutoencoderKL."""
from __future__ import annotations

from typing import Any

from torch import nn

from ...core.refusal import Refusal
from ..leaf_reader import LeafReader
from ..unet.read_diffusers import OF_SELF_ATTENTION, is_plain, projections, read_upsample, require_silu
from .layout import DecoderLayout, Layer, PaddedDownsample, PixelAttention, ResidualBlock
from .read_ldm import padded

UP_BLOCKS = {"UpDecoderBlock2D", "AttnUpDecoderBlock2D"}
DOWN_BLOCKS = {"DownEncoderBlock2D", "AttnDownEncoderBlock2D"}


def is_diffusers_decoder(decoder: nn.Module) -> bool:
    return type(decoder).__name__ == "Decoder" and hasattr(decoder, "up_blocks") and hasattr(decoder, "mid_block")


def read_diffusers(decoder: Any) -> DecoderLayout:
    """The layout of an AutoencoderKL's Decoder. Raises Refusal with the reason."""
    leaves = LeafReader(decoder)
    layers = read_middle(decoder.mid_block, leaves)
    for block in decoder.up_blocks:
        layers += read_block(block, UP_BLOCKS, leaves)
        layers += [read_upsample(upsampler, leaves) for upsampler in block.upsamplers or ()]
    return with_ends(decoder, layers, leaves)


def is_diffusers_encoder(encoder: nn.Module) -> bool:
    return type(encoder).__name__ == "Encoder" and hasattr(encoder, "down_blocks") and hasattr(encoder, "mid_block")


def read_diffusers_encoder(encoder: Any) -> DecoderLayout:
    """The layout of an AutoencoderKL's Encoder. Raises Refusal with the reason."""
    leaves = LeafReader(encoder)
    layers: list[Layer] = []
    for block in encoder.down_blocks:
        layers += read_block(block, DOWN_BLOCKS, leaves)
        layers += [read_downsample(downsampler, leaves) for downsampler in block.downsamplers or ()]
    return with_ends(encoder, layers + read_middle(encoder.mid_block, leaves), leaves)


def with_ends(half: Any, layers: list[Layer], leaves: LeafReader) -> DecoderLayout:
    require_silu(half.conv_act, "the output's activation", leaves)
    layout = DecoderLayout(
        family="diffusers", in_convolution=leaves.convolution(half.conv_in), layers=tuple(layers),
        out_norm=leaves.group_norm(half.conv_norm_out), out_convolution=leaves.convolution(half.conv_out),
    )
    leaves.refuse_unclaimed()
    return layout


def read_middle(block: Any, leaves: LeafReader) -> list[Layer]:
    """A residual block, then an attention (None in a decoder without) and a residual block, any number of times."""
    if leaves.kind(block) != "UNetMidBlock2D" or len(block.resnets) != len(block.attentions) + 1:
        raise Refusal(f"{leaves.path(block)} is a {leaves.kind(block)} of another kind")
    layers: list[Layer] = [read_residual_block(block.resnets[0], leaves)]
    for attention, resnet in zip(block.attentions, list(block.resnets)[1:], strict=True):
        if attention is not None:
            layers.append(read_attention(attention, leaves))
        layers.append(read_residual_block(resnet, leaves))
    return layers


def read_block(block: Any, known: set[str], leaves: LeafReader) -> list[Layer]:
    """The layers of one resolution, without the one that leads to the next."""
    if leaves.kind(block) not in known:
        raise Refusal(f"{leaves.path(block)} is a {leaves.kind(block)}, which we do not know")
    attentions = list(getattr(block, "attentions", ()))
    if len(attentions) not in (0, len(block.resnets)):
        raise Refusal(f"{leaves.path(block)} has another number of attentions than of residual blocks")
    layers: list[Layer] = []
    for index, resnet in enumerate(block.resnets):
        layers.append(read_residual_block(resnet, leaves))
        if attentions:
            layers.append(read_attention(attentions[index], leaves))
    return layers


def read_downsample(layer: Any, leaves: LeafReader) -> PaddedDownsample:
    path = leaves.path(layer)
    if leaves.kind(layer) != "Downsample2D" or not layer.use_conv or layer.norm is not None or layer.padding != 0:
        raise Refusal(f"{path} is a downsampling layer of another kind")
    return padded(leaves.convolution(layer.conv), path)


def read_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    path = leaves.path(block)
    plain = leaves.kind(block) == "ResnetBlock2D" and block.upsample is None and block.downsample is None
    if not plain or block.time_emb_proj is not None or block.output_scale_factor != 1.0:
        raise Refusal(f"{path} is a residual block of another kind")
    require_silu(block.nonlinearity, f"the activation of {path}", leaves)
    return ResidualBlock(
        in_norm=leaves.group_norm(block.norm1), in_convolution=leaves.convolution(block.conv1),
        out_norm=leaves.group_norm(block.norm2), out_convolution=leaves.convolution(block.conv2),
        skip=None if block.conv_shortcut is None else leaves.linear(block.conv_shortcut),
    )


def read_attention(attention: Any, leaves: LeafReader) -> PixelAttention:
    path, processor = leaves.path(attention), type(attention.processor)
    if not is_plain(processor):
        raise Refusal(f"the attention processor {processor.__name__} is set, which may compute something else")
    extras = ("spatial_norm", "norm_q", "norm_k", "norm_cross", "add_k_proj")
    odd = [name for name in extras if getattr(attention, name, None) is not None]
    scaled = attention.rescale_output_factor != 1 or not attention.residual_connection or not attention.scale_qk
    if odd or scaled or attention.group_norm is None:
        raise Refusal(f"{path} is an attention of another kind")
    return PixelAttention(
        norm=leaves.group_norm(attention.group_norm),
        projections=tuple(
            leaves.linear(getattr(attention, name)) for name in projections(attention, OF_SELF_ATTENTION, leaves)
        ),
        out=leaves.linear(attention.to_out[0]), heads=attention.heads,
    )
