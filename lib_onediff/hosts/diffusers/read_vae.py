"""Reads the decoder and the encoder of diffusers' AutoencoderKL, each into a layout: the description of its structure
and layers by which our forward computes it. `leaves` is the reader of the network, which notes the parameters that are
read."""
from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn

from ...core.refusal import Refusal
from ...families.leaf_reader import LeafReader, is_class
from ...families.registry import DECODERS
from ...families.unet.layout import Downsample
from ...families.vae import HALVES, DecoderLayout, Layer, PixelAttention, ResidualBlock, downsample, layout_of
from ...families.vae import residual_block as residual_block_of
from .read_unet import check_attention, diffusers_upsample, is_plain, modules_of, require_silu

# The Python module of Decoder and Encoder.
VAE = "diffusers.models.autoencoders.vae"
# The classes of blocks, each with the layers of one resolution.
LEVELS = {
    "UNetMidBlock2D", "UpDecoderBlock2D", "AttnUpDecoderBlock2D", "DownEncoderBlock2D", "AttnDownEncoderBlock2D",
}


def is_diffusers(half: nn.Module) -> bool:
    """Whether a module's class is diffusers' own Decoder or Encoder of AutoencoderKL, and not a derived one."""
    return is_class(type(half), VAE, *HALVES)


def read_diffusers(half: Any) -> DecoderLayout:
    """The layout of an AutoencoderKL's Decoder or Encoder (half). Raises Refusal if the module is built in a way that
    our forward does not compute."""
    leaves = LeafReader(half)
    require_silu(half.conv_act, "the output's activation", leaves)
    if hasattr(half, "up_blocks"):
        blocks = [half.mid_block, *half.up_blocks]
    else:
        blocks = [*half.down_blocks, half.mid_block]
    modules = chain.from_iterable(diffusers_level(block, leaves) for block in blocks)
    return layout_of(half, modules, half.conv_norm_out, leaves, READERS)


def diffusers_level(block: Any, leaves: LeafReader) -> list[Any]:
    """The modules of one block, in the order of the host's forward; its up- or downsampler comes last. None stands for
    an attention that the block does not have. Raises Refusal for a block whose class is not in LEVELS."""
    resamplers = getattr(block, "upsamplers", None) or getattr(block, "downsamplers", None) or ()
    return [*chain(*modules_of(block, leaves, LEVELS)), *resamplers]


def diffusers_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    """The layout of a ResnetBlock2D of a VAE. Raises Refusal for one with options that our forward does not compute."""
    leaves.require(block, upsample=None, downsample=None, time_emb_proj=None, output_scale_factor=1.0)
    require_silu(block.nonlinearity, f"the activation of {leaves.path(block)}", leaves)
    return residual_block_of(block, block.conv_shortcut, leaves)


def diffusers_downsample(layer: Any, leaves: LeafReader) -> Downsample:
    """The layout of a VAE's Downsample2D. Raises Refusal unless it pads the image itself, before a convolution that
    families.vae.downsample reads, and has no norm."""
    leaves.require(layer, use_conv=True, norm=None, padding=0)
    return downsample(layer, leaves)


def diffusers_attention(attention: Any, leaves: LeafReader) -> PixelAttention:
    """The layout of a VAE's attention over pixels. Raises Refusal for one that computes anything else than softmax
    attention after a group norm, added to its input."""
    check_attention(attention, leaves, is_residual=True)
    processor = type(attention.processor)
    if not is_plain(processor):
        raise Refusal(f"the attention processor {processor.__name__} is set, which may compute something else")
    projected = tuple(map(leaves.linear, (attention.to_q, attention.to_k, attention.to_v)))
    return PixelAttention(
        leaves.group_norm(attention.group_norm), projected, leaves.linear(attention.to_out[0]), attention.heads
    )


# The function that reads a module of a level, by the name of the module's class.
READERS: dict[str, Callable[[Any, LeafReader], Layer]] = {
    "ResnetBlock2D": diffusers_residual_block, "Attention": diffusers_attention, "Upsample2D": diffusers_upsample,
    "Downsample2D": diffusers_downsample,
}
DECODERS.take_reader((is_diffusers, read_diffusers))
