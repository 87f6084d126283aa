"""Read the decoder and the encoder of an AutoencoderKL: the ldm family's (ldm.modules.diffusionmodules.model's, sgm's,
Forge's own) and diffusers'."""
from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

from ...core.leaves import Convolution, GroupNorm, Linear
from ...core.refusal import Refusal
from ..leaf_reader import LeafReader
from ..unet.layout import Downsample, Upsample
from ..unet.read_diffusers import OF_SELF_ATTENTION, is_plain, projections, require_silu
from ..unet.read_diffusers import read_upsample as read_diffusers_upsample
from .layout import DecoderLayout, Layer, PixelAttention, ResidualBlock

# The attributes that hold the blocks on the way up, of a decoder, and down, of an encoder.
LDM_BLOCKS = {"Decoder": "up", "Encoder": "down"}
DIFFUSERS_BLOCKS = {"Decoder": "up_blocks", "Encoder": "down_blocks"}
# ldm's: the same attention, by torch's operators and by xformers'.
ATTENTION_BLOCKS = {"AttnBlock", "MemoryEfficientAttnBlock"}
UP_BLOCKS = {"UpDecoderBlock2D", "AttnUpDecoderBlock2D"}
DOWN_BLOCKS = {"DownEncoderBlock2D", "AttnDownEncoderBlock2D"}


def is_ldm(half: nn.Module) -> bool:
    """Whether a module is a decoder or an encoder of the ldm family."""
    name = type(half).__name__
    return name in LDM_BLOCKS and hasattr(half, LDM_BLOCKS[name]) and hasattr(half, "mid")


def is_diffusers(half: nn.Module) -> bool:
    """Whether a module is a decoder or an encoder of diffusers' AutoencoderKL."""
    name = type(half).__name__
    return name in DIFFUSERS_BLOCKS and hasattr(half, DIFFUSERS_BLOCKS[name]) and hasattr(half, "mid_block")


def read_ldm(half: Any) -> DecoderLayout:
    """The layout of an ldm, sgm or Forge Decoder or Encoder. Raises Refusal with the reason."""
    leaves = LeafReader(half)
    middle = read_ldm_layers((half.mid.block_1, half.mid.attn_1, half.mid.block_2), leaves)
    layers: list[Layer] = []
    if hasattr(half, "up"):
        if half.give_pre_end:
            raise Refusal("it is set to return its last features, not an image (give_pre_end)")
        if half.tanh_out:
            raise Refusal("it ends in a tanh")
        for level in reversed(range(half.num_resolutions)):
            layers += read_ldm_level(half.up[level], half.num_res_blocks + 1, leaves)
            if level != 0:
                layers.append(read_ldm_upsample(half.up[level].upsample, leaves))
        layers = middle + layers
    else:
        for level in range(half.num_resolutions):
            layers += read_ldm_level(half.down[level], half.num_res_blocks, leaves)
            if level != half.num_resolutions - 1:
                layers.append(read_downsample(half.down[level].downsample, "Downsample", leaves))
        layers += middle
    return layout_of(type(half).__module__.partition(".")[0], half, layers, leaves.group_norm(half.norm_out), leaves)


def read_diffusers(half: Any) -> DecoderLayout:
    """The layout of an AutoencoderKL's Decoder or Encoder. Raises Refusal with the reason."""
    leaves = LeafReader(half)
    require_silu(half.conv_act, "the output's activation", leaves)
    middle = read_diffusers_middle(half.mid_block, leaves)
    layers: list[Layer] = []
    if hasattr(half, "up_blocks"):
        for block in half.up_blocks:
            layers += read_diffusers_block(block, UP_BLOCKS, leaves)
            layers += [read_diffusers_upsample(upsampler, leaves) for upsampler in block.upsamplers or ()]
        layers = middle + layers
    else:
        for block in half.down_blocks:
            layers += read_diffusers_block(block, DOWN_BLOCKS, leaves)
            layers += [read_downsample(one, "Downsample2D", leaves) for one in block.downsamplers or ()]
        layers += middle
    return layout_of("diffusers", half, layers, leaves.group_norm(half.conv_norm_out), leaves)


# --- what both have ---------------------------------------------------------------------------------------------------


def layout_of(
    family: str, half: Any, layers: Iterable[Layer], out_norm: GroupNorm, leaves: LeafReader
) -> DecoderLayout:
    layout = DecoderLayout(
        family, leaves.convolution(half.conv_in), tuple(layers), out_norm, leaves.convolution(half.conv_out)
    )
    leaves.refuse_unclaimed()
    return layout


def residual_block(block: Any, skip: Linear | None, leaves: LeafReader) -> ResidualBlock:
    return ResidualBlock(
        in_norm=leaves.group_norm(block.norm1), in_convolution=leaves.convolution(block.conv1),
        out_norm=leaves.group_norm(block.norm2), out_convolution=leaves.convolution(block.conv2), skip=skip,
    )


def read_downsample(layer: Any, kind: str, leaves: LeafReader) -> Downsample:
    """A layer of this kind, which pads an image below and to the right by itself, before its convolution."""
    plain = leaves.kind(layer) == kind and getattr(layer, "norm", None) is None and getattr(layer, "padding", 0) == 0
    if plain and (layer.with_conv if kind == "Downsample" else layer.use_conv):
        convolution: Convolution = leaves.convolution(layer.conv)
        if (convolution.kernel, convolution.stride, convolution.padding) == (3, 2, 0):
            return Downsample(convolution)
    raise Refusal(f"{leaves.path(layer)} is a downsampling layer of another kind")


# --- the ldm family's -------------------------------------------------------------------------------------------------


def read_ldm_level(level: Any, count: int, leaves: LeafReader) -> list[Layer]:
    """The layers of one resolution, in the order of the host's forward. count: of its residual blocks."""
    blocks, attentions = list(level.block), list(level.attn)
    if len(blocks) != count or len(attentions) not in (0, count):
        raise Refusal(f"{leaves.path(level)} has another number of layers than it says")
    return read_ldm_layers(chain(*zip(blocks, attentions, strict=True)) if attentions else blocks, leaves)


def read_ldm_layers(modules: Iterable[Any], leaves: LeafReader) -> list[Layer]:
    layers: list[Layer] = []
    for module in modules:
        kind = leaves.kind(module)
        if kind == "ResnetBlock":
            layers.append(read_ldm_residual_block(module, leaves))
        elif kind in ATTENTION_BLOCKS:
            projected = (leaves.linear(module.q), leaves.linear(module.k), leaves.linear(module.v))
            norm, out = leaves.group_norm(module.norm), leaves.linear(module.proj_out)
            layers.append(PixelAttention(norm, projected, out, heads=1))
        elif not isinstance(module, nn.Identity):  # attn_type "none"
            full = f"{type(module).__module__}.{kind}"
            raise Refusal(f"{leaves.path(module)} is a {full}, which we do not know")
    return layers


def read_ldm_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    changes = block.in_channels != block.out_channels
    if changes and block.use_conv_shortcut:
        raise Refusal(f"{leaves.path(block)} has a 3x3 convolution in its shortcut")
    return residual_block(block, leaves.linear(block.nin_shortcut) if changes else None, leaves)


def read_ldm_upsample(layer: Any, leaves: LeafReader) -> Upsample:
    if leaves.kind(layer) != "Upsample" or not layer.with_conv:
        raise Refusal(f"{leaves.path(layer)} is an upsampling layer of another kind")
    return Upsample(leaves.convolution(layer.conv), resize_before=True)


# --- diffusers' -------------------------------------------------------------------------------------------------------


def read_diffusers_middle(block: Any, leaves: LeafReader) -> list[Layer]:
    """A residual block, then an attention (None in a decoder without) and a residual block, any number of times."""
    if leaves.kind(block) != "UNetMidBlock2D" or len(block.resnets) != len(block.attentions) + 1:
        raise Refusal(f"{leaves.path(block)} is a {leaves.kind(block)} of another kind")
    first, *others = block.resnets
    return read_diffusers_layers((first, *chain(*zip(block.attentions, others, strict=True))), leaves)


def read_diffusers_block(block: Any, known: set[str], leaves: LeafReader) -> list[Layer]:
    """The layers of one resolution, without the one that leads to the next."""
    if leaves.kind(block) not in known:
        raise Refusal(f"{leaves.path(block)} is a {leaves.kind(block)}, which we do not know")
    attentions = list(getattr(block, "attentions", ())) or [None] * len(block.resnets)
    if len(attentions) != len(block.resnets):
        raise Refusal(f"{leaves.path(block)} has another number of attentions than of residual blocks")
    return read_diffusers_layers(chain(*zip(block.resnets, attentions, strict=True)), leaves)


def read_diffusers_layers(modules: Iterable[Any], leaves: LeafReader) -> list[Layer]:
    return [
        read_diffusers_attention(module, leaves) if hasattr(module, "processor")
        else read_diffusers_residual_block(module, leaves)
        for module in modules if module is not None
    ]


def read_diffusers_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    path = leaves.path(block)
    plain = leaves.kind(block) == "ResnetBlock2D" and block.upsample is None and block.downsample is None
    if not plain or block.time_emb_proj is not None or block.output_scale_factor != 1.0:
        raise Refusal(f"{path} is a residual block of another kind")
    require_silu(block.nonlinearity, f"the activation of {path}", leaves)
    return residual_block(block, None if block.conv_shortcut is None else leaves.linear(block.conv_shortcut), leaves)


def read_diffusers_attention(attention: Any, leaves: LeafReader) -> PixelAttention:
    path, processor = leaves.path(attention), type(attention.processor)
    if not is_plain(processor):
        raise Refusal(f"the attention processor {processor.__name__} is set, which may compute something else")
    extras = ("spatial_norm", "norm_q", "norm_k", "norm_cross", "add_k_proj")
    odd = [name for name in extras if getattr(attention, name, None) is not None]
    scaled = attention.rescale_output_factor != 1 or not attention.residual_connection or not attention.scale_qk
    if odd or scaled or attention.group_norm is None:
        raise Refusal(f"{path} is an attention of another kind")
    names = projections(attention, OF_SELF_ATTENTION, leaves)
    return PixelAttention(
        norm=leaves.group_norm(attention.group_norm),
        projections=tuple(leaves.linear(getattr(attention, name)) for name in names),
        out=leaves.linear(attention.to_out[0]), heads=attention.heads,
    )
