"""Read the decoder of the ldm family: ldm.modules.diffusionmodules.model.Decoder, sgm's, and Forge's of its own."""
from __future__ import annotations

from typing import Any

from torch import nn

from ..unet.layout import UnsupportedUNet, Upsample
from ..unet.leaves import LeafReader
from .layout import DecoderLayout, Layer, PixelAttention, ResidualBlock

# The same attention, by torch's operators and by xformers'.
ATTENTION_BLOCKS = {"AttnBlock", "MemoryEfficientAttnBlock"}


def is_ldm_decoder(decoder: nn.Module) -> bool:
    return type(decoder).__name__ == "Decoder" and hasattr(decoder, "up") and hasattr(decoder, "mid")


def read_ldm(decoder: Any) -> DecoderLayout:
    """The layout of an ldm, sgm or Forge Decoder. Raises UnsupportedUNet with the reason."""
    refuse_variants(decoder)
    leaves = LeafReader(decoder)
    middle = (decoder.mid.block_1, decoder.mid.attn_1, decoder.mid.block_2)
    layers = [layer for module in middle for layer in read_layer(module, leaves)]
    for level in reversed(range(decoder.num_resolutions)):
        layers += read_level(decoder, level, leaves)
    layout = DecoderLayout(
        family=type(decoder).__module__.partition(".")[0], in_convolution=leaves.convolution(decoder.conv_in),
        layers=tuple(layers),
        out_norm=leaves.group_norm(decoder.norm_out), out_convolution=leaves.convolution(decoder.conv_out),
    )
    leaves.refuse_unclaimed()
    return layout


def refuse_variants(decoder: Any) -> None:
    if decoder.give_pre_end:
        raise UnsupportedUNet("it is set to return its last features, not a picture (give_pre_end)")
    if decoder.tanh_out:
        raise UnsupportedUNet("it ends in a tanh")


def read_level(decoder: Any, level: int, leaves: LeafReader) -> list[Layer]:
    """The layers of one resolution, in the order of Decoder.forward."""
    up = decoder.up[level]
    blocks, attentions = list(up.block), list(up.attn)
    if len(blocks) != decoder.num_res_blocks + 1 or len(attentions) not in (0, len(blocks)):
        raise UnsupportedUNet(f"{leaves.path(up)} has another number of layers than it says")
    layers: list[Layer] = []
    for index, block in enumerate(blocks):
        layers += read_layer(block, leaves)
        if attentions:
            layers += read_layer(attentions[index], leaves)
    if level != 0:
        layers.append(read_upsample(up.upsample, leaves))
    return layers


def read_layer(module: Any, leaves: LeafReader) -> list[Layer]:
    kind = type(module).__name__
    if kind == "ResnetBlock":
        return [read_residual_block(module, leaves)]
    if kind in ATTENTION_BLOCKS:
        return [read_attention(module, leaves)]
    if isinstance(module, nn.Identity):  # attn_type "none"
        return []
    raise UnsupportedUNet(f"{leaves.path(module)} is a {type(module).__module__}.{kind}, which we do not know")


def read_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    changes = block.in_channels != block.out_channels
    if changes and block.use_conv_shortcut:
        raise UnsupportedUNet(f"{leaves.path(block)} has a 3x3 convolution in its shortcut")
    return ResidualBlock(
        in_norm=leaves.group_norm(block.norm1), in_convolution=leaves.convolution(block.conv1),
        out_norm=leaves.group_norm(block.norm2), out_convolution=leaves.convolution(block.conv2),
        skip=leaves.linear(block.nin_shortcut) if changes else None,
    )


def read_attention(block: Any, leaves: LeafReader) -> PixelAttention:
    return PixelAttention(
        norm=leaves.group_norm(block.norm),
        query=leaves.linear(block.q), key=leaves.linear(block.k), value=leaves.linear(block.v),
        out=leaves.linear(block.proj_out), heads=1,
    )


def read_upsample(layer: Any, leaves: LeafReader) -> Upsample:
    if type(layer).__name__ != "Upsample" or not layer.with_conv:
        raise UnsupportedUNet(f"{leaves.path(layer)} is an upsampling layer of another kind")
    return Upsample(leaves.convolution(layer.conv), resize_before=True)
