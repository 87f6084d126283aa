"""Read the decoder and the encoder of the ldm family: ldm.modules.diffusionmodules.model's, sgm's, and Forge's own."""
from __future__ import annotations

from typing import Any

from torch import nn

from ...core.leaves import Convolution
from ...core.refusal import Refusal
from ..leaf_reader import LeafReader
from ..unet.layout import Upsample
from .layout import DecoderLayout, Layer, PaddedDownsample, PixelAttention, ResidualBlock

# The same attention, by torch's operators and by xformers'.
ATTENTION_BLOCKS = {"AttnBlock", "MemoryEfficientAttnBlock"}


def is_ldm_decoder(decoder: nn.Module) -> bool:
    return type(decoder).__name__ == "Decoder" and hasattr(decoder, "up") and hasattr(decoder, "mid")


def read_ldm(decoder: Any) -> DecoderLayout:
    """The layout of an ldm, sgm or Forge Decoder. Raises Refusal with the reason."""
    refuse_variants(decoder)
    leaves = LeafReader(decoder)
    layers = read_middle(decoder, leaves)
    for level in reversed(range(decoder.num_resolutions)):
        up = decoder.up[level]
        layers += read_level(up, decoder.num_res_blocks + 1, leaves)
        if level != 0:
            layers.append(read_upsample(up.upsample, leaves))
    return with_ends(decoder, layers, leaves)


def is_ldm_encoder(encoder: nn.Module) -> bool:
    return type(encoder).__name__ == "Encoder" and hasattr(encoder, "down") and hasattr(encoder, "mid")


def read_ldm_encoder(encoder: Any) -> DecoderLayout:
    """The layout of an ldm, sgm or Forge Encoder. Raises Refusal with the reason."""
    leaves = LeafReader(encoder)
    layers: list[Layer] = []
    for level in range(encoder.num_resolutions):
        down = encoder.down[level]
        layers += read_level(down, encoder.num_res_blocks, leaves)
        if level != encoder.num_resolutions - 1:
            layers.append(read_downsample(down.downsample, leaves))
    return with_ends(encoder, layers + read_middle(encoder, leaves), leaves)


def read_middle(half: Any, leaves: LeafReader) -> list[Layer]:
    middle = (half.mid.block_1, half.mid.attn_1, half.mid.block_2)
    return [layer for module in middle for layer in read_layer(module, leaves)]


def with_ends(half: Any, layers: list[Layer], leaves: LeafReader) -> DecoderLayout:
    layout = DecoderLayout(
        family=type(half).__module__.partition(".")[0], in_convolution=leaves.convolution(half.conv_in),
        layers=tuple(layers),
        out_norm=leaves.group_norm(half.norm_out), out_convolution=leaves.convolution(half.conv_out),
    )
    leaves.refuse_unclaimed()
    return layout


def refuse_variants(decoder: Any) -> None:
    if decoder.give_pre_end:
        raise Refusal("it is set to return its last features, not an image (give_pre_end)")
    if decoder.tanh_out:
        raise Refusal("it ends in a tanh")


def read_level(level: Any, count: int, leaves: LeafReader) -> list[Layer]:
    """The layers of one resolution, in the order of the host's forward. count: of its residual blocks."""
    blocks, attentions = list(level.block), list(level.attn)
    if len(blocks) != count or len(attentions) not in (0, count):
        raise Refusal(f"{leaves.path(level)} has another number of layers than it says")
    layers: list[Layer] = []
    for index, block in enumerate(blocks):
        layers += read_layer(block, leaves)
        if attentions:
            layers += read_layer(attentions[index], leaves)
    return layers


def read_layer(module: Any, leaves: LeafReader) -> list[Layer]:
    kind = leaves.kind(module)
    if kind == "ResnetBlock":
        return [read_residual_block(module, leaves)]
    if kind in ATTENTION_BLOCKS:
        return [read_attention(module, leaves)]
    if isinstance(module, nn.Identity):  # attn_type "none"
        return []
    raise Refusal(f"{leaves.path(module)} is a {type(module).__module__}.{kind}, which we do not know")


def read_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    changes = block.in_channels != block.out_channels
    if changes and block.use_conv_shortcut:
        raise Refusal(f"{leaves.path(block)} has a 3x3 convolution in its shortcut")
    return ResidualBlock(
        in_norm=leaves.group_norm(block.norm1), in_convolution=leaves.convolution(block.conv1),
        out_norm=leaves.group_norm(block.norm2), out_convolution=leaves.convolution(block.conv2),
        skip=leaves.linear(block.nin_shortcut) if changes else None,
    )


def read_attention(block: Any, leaves: LeafReader) -> PixelAttention:
    return PixelAttention(
        norm=leaves.group_norm(block.norm),
        projections=(leaves.linear(block.q), leaves.linear(block.k), leaves.linear(block.v)),
        out=leaves.linear(block.proj_out), heads=1,
    )


def read_upsample(layer: Any, leaves: LeafReader) -> Upsample:
    if leaves.kind(layer) != "Upsample" or not layer.with_conv:
        raise Refusal(f"{leaves.path(layer)} is an upsampling layer of another kind")
    return Upsample(leaves.convolution(layer.conv), resize_before=True)


def read_downsample(layer: Any, leaves: LeafReader) -> PaddedDownsample:
    if leaves.kind(layer) != "Downsample" or not layer.with_conv:
        raise Refusal(f"{leaves.path(layer)} is a downsampling layer of another kind")
    return padded(leaves.convolution(layer.conv), leaves.path(layer))


def padded(convolution: Convolution, path: str) -> PaddedDownsample:
    """Raises Refusal if the layer at path cannot be one."""
    if (convolution.kernel, convolution.stride, convolution.padding) != (3, 2, 0):
        raise Refusal(f"{path} is a downsampling layer of another kind")
    return PaddedDownsample(convolution)
