"""Read the decoder and the encoder of an AutoencoderKL: the ldm family's (ldm.modules.diffusionmodules.model's, sgm's,
Forge's own) and diffusers'."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import nn

from ...core.refusal import Refusal
from ..leaf_reader import LeafReader
from ..unet.layout import Downsample, Upsample
from ..unet.read_diffusers import check_attention, is_plain, read_upsample, require_silu
from .layout import DecoderLayout, Layer, PixelAttention, ResidualBlock

HALVES = ("Decoder", "Encoder")
DIFFUSERS_LEVELS = {"UpDecoderBlock2D", "AttnUpDecoderBlock2D", "DownEncoderBlock2D", "AttnDownEncoderBlock2D"}


def is_ldm(half: nn.Module) -> bool:
    """Whether a module is a decoder or an encoder of the ldm family."""
    return type(half).__name__ in HALVES and hasattr(half, "mid")


def is_diffusers(half: nn.Module) -> bool:
    """Whether a module is a decoder or an encoder of diffusers' AutoencoderKL."""
    return type(half).__name__ in HALVES and hasattr(half, "mid_block")


def read_ldm(half: Any) -> DecoderLayout:
    """The layout of an ldm, sgm or Forge Decoder or Encoder. Raises Refusal with the reason."""
    middle, levels = [half.mid.block_1, half.mid.attn_1, half.mid.block_2], range(half.num_resolutions)
    if hasattr(half, "up"):
        if half.give_pre_end:
            raise Refusal("it is set to return its last features, not an image (give_pre_end)")
        if half.tanh_out:
            raise Refusal("it ends in a tanh")
        up = (ldm_level(half.up[at], half.num_res_blocks + 1, "upsample", at > 0) for at in reversed(levels))
        modules = [*middle, *chain(*up)]
    else:
        down = (ldm_level(half.down[at], half.num_res_blocks, "downsample", at < levels[-1]) for at in levels)
        modules = [*chain(*down), *middle]
    return layout_of(type(half).__module__.partition(".")[0], half, modules, half.norm_out, LeafReader(half))


def ldm_level(level: Any, count: int, resample: str, resamples: bool) -> list[Any]:
    """The modules of one resolution, in the order of the host's forward. count: of its residual blocks."""
    attentions = list(level.attn) or [None] * count
    if not len(level.block) == len(attentions) == count:
        raise Refusal("one of its resolutions has another number of layers than it says")
    return [*chain(*zip(level.block, attentions, strict=True)), *([getattr(level, resample)] if resamples else [])]


def read_diffusers(half: Any) -> DecoderLayout:
    """The layout of an AutoencoderKL's Decoder or Encoder. Raises Refusal with the reason."""
    leaves = LeafReader(half)
    require_silu(half.conv_act, "the output's activation", leaves)
    middle = half.mid_block
    if leaves.kind(middle) != "UNetMidBlock2D":
        raise leaves.unknown(middle)
    first, *others = middle.resnets
    # No attention is None.
    modules = [first, *chain(*zip(middle.attentions, others, strict=True))]
    if hasattr(half, "up_blocks"):
        modules = [*modules, *chain(*(diffusers_level(block, "upsamplers", leaves) for block in half.up_blocks))]
    else:
        modules = [*chain(*(diffusers_level(block, "downsamplers", leaves) for block in half.down_blocks)), *modules]
    return layout_of("diffusers", half, modules, half.conv_norm_out, leaves)


def diffusers_level(block: Any, resamplers: str, leaves: LeafReader) -> list[Any]:
    if leaves.kind(block) not in DIFFUSERS_LEVELS:
        raise leaves.unknown(block)
    attentions = list(getattr(block, "attentions", ())) or [None] * len(block.resnets)
    return [*chain(*zip(block.resnets, attentions, strict=True)), *(getattr(block, resamplers) or ())]


# --- what both have ---------------------------------------------------------------------------------------------------


def layout_of(family: str, half: Any, modules: Iterable[Any], out_norm: Any, leaves: LeafReader) -> DecoderLayout:
    """modules: those that the host calls between the first convolution and the last norm, in this order."""
    layout = DecoderLayout(
        family, leaves.convolution(half.conv_in), leaves.layers(READERS, modules), leaves.group_norm(out_norm),
        leaves.convolution(half.conv_out),
    )
    leaves.refuse_unclaimed()
    return layout


def residual_block(block: Any, skip: Any, leaves: LeafReader) -> ResidualBlock:
    return ResidualBlock(
        in_norm=leaves.group_norm(block.norm1), in_convolution=leaves.convolution(block.conv1),
        out_norm=leaves.group_norm(block.norm2), out_convolution=leaves.convolution(block.conv2),
        skip=None if skip is None else leaves.linear(skip),
    )


def downsample(layer: Any, leaves: LeafReader) -> Downsample:
    """A layer that pads an image below and to the right by itself, before its convolution."""
    convolution = leaves.convolution(layer.conv)
    if (convolution.kernel, convolution.stride, convolution.padding) != (3, 2, 0):
        raise leaves.unknown(layer, "its convolution is of another kind")
    return Downsample(convolution)


# --- the ldm family's layers ------------------------------------------------------------------------------------------


def ldm_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    changes = block.in_channels != block.out_channels
    if changes and block.use_conv_shortcut:
        raise Refusal(f"{leaves.path(block)} has a 3x3 convolution in its shortcut")
    return residual_block(block, block.nin_shortcut if changes else None, leaves)


def ldm_attention(attention: Any, leaves: LeafReader) -> PixelAttention:
    projected = tuple(map(leaves.linear, (attention.q, attention.k, attention.v)))
    return PixelAttention(leaves.group_norm(attention.norm), projected, leaves.linear(attention.proj_out), heads=1)


def ldm_downsample(layer: Any, leaves: LeafReader) -> Downsample:
    leaves.require(layer, with_conv=True)
    return downsample(layer, leaves)


def ldm_upsample(layer: Any, leaves: LeafReader) -> Upsample:
    leaves.require(layer, with_conv=True)
    return Upsample(leaves.convolution(layer.conv), resize_before=True)


# --- diffusers' layers ------------------------------------------------------------------------------------------------


def diffusers_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    leaves.require(block, upsample=None, downsample=None, time_emb_proj=None, output_scale_factor=1.0)
    require_silu(block.nonlinearity, f"the activation of {leaves.path(block)}", leaves)
    return residual_block(block, block.conv_shortcut, leaves)


def diffusers_downsample(layer: Any, leaves: LeafReader) -> Downsample:
    leaves.require(layer, use_conv=True, norm=None, padding=0)
    return downsample(layer, leaves)


def diffusers_attention(attention: Any, leaves: LeafReader) -> PixelAttention:
    check_attention(attention, leaves, is_residual=True)
    processor = type(attention.processor)
    if not is_plain(processor):
        raise Refusal(f"the attention processor {processor.__name__} is set, which may compute something else")
    projected = tuple(map(leaves.linear, (attention.to_q, attention.to_k, attention.to_v)))
    return PixelAttention(
        leaves.group_norm(attention.group_norm), projected, leaves.linear(attention.to_out[0]), attention.heads
    )


READERS: dict[str, Callable[[Any, LeafReader], Layer]] = {
    "ResnetBlock": ldm_residual_block, "Upsample": ldm_upsample, "Downsample": ldm_downsample,
    # The same, by torch's operators and by xformers'.
    "AttnBlock": ldm_attention, "MemoryEfficientAttnBlock": ldm_attention,
    "ResnetBlock2D": diffusers_residual_block, "Attention": diffusers_attention, "Upsample2D": read_upsample,
    "Downsample2D": diffusers_downsample,
}
