"""Decoders and encoders of Stable Diffusion's VAEs: their layout, the reader of ldm's modules, and their forward.

A layout is a list of layers that says which parameter does what, without holding any parameter. The same list
describes the modules of ldm, sgm, Forge and diffusers. The arithmetic is that of Decoder and Encoder in CompVis'
latent-diffusion, ldm/modules/diffusionmodules/model.py (Rombach et al. 2022), without a time embedding.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.nn.functional as functional
from torch import Tensor, nn

from ..core.family import Layout
from ..core.layer_weights import LayerWeights, Weights
from ..core.leaves import Convolution, GroupNorm, Linear
from ..core.operators import Operators
from ..core.refusal import unsupported_inputs, unsupported_model
from .leaf_reader import LeafReader
from .transformer import TransformerLayers
from .unet.layout import Downsample, Upsample

# Names of ldm's and sgm's classes, the two halves of a VAE.
HALVES = ("Decoder", "Encoder")


@dataclass(frozen=True)
class ResidualBlock:
    """Two convolutions in sequence, each after a group norm with SiLU. The block's input is added to their output.
    skip: a 1x1 convolution, of the block's input, whose output is added instead of the input; None: the input is added
    as it is."""

    in_norm: GroupNorm
    in_convolution: Convolution
    out_norm: GroupNorm
    out_convolution: Convolution
    skip: Linear | None


@dataclass(frozen=True)
class PixelAttention:
    """A self attention among all pixels, after a group norm; the output is added to the image. projections: the linear
    layers of queries, of keys and of values."""

    norm: GroupNorm
    projections: tuple[Linear, ...]
    out: Linear
    heads: int


# A Downsample here pads the image by one row below and one column on the right, with zeros, unlike the UNet's.
Layer = ResidualBlock | PixelAttention | Upsample | Downsample


@dataclass(frozen=True)
class DecoderLayout(Layout):
    """A decoder: a convolution, layers in sequence, a group norm with SiLU, and a convolution.

    An encoder has the same structure: it takes an image, and its output is the mean and the log variance of the latent.
    inner_layers: those between the first convolution and the last norm, in the order of the forward.
    """

    # Where an Upsample resizes makes no difference: no skip follows.
    ignored_fields = Layout.ignored_fields | {"resize_before"}

    in_convolution: Convolution
    inner_layers: tuple[Layer, ...]
    out_norm: GroupNorm
    out_convolution: Convolution

    @property
    def model_name(self) -> str:
        """The name for users: "VAE decoder" or "VAE encoder"."""
        return "VAE encoder" if self.encodes else "VAE decoder"

    @property
    def encodes(self) -> bool:
        """Whether this is an encoder: at least one of its layers is a Downsample."""
        return self.reduction > 1

    @property
    def reduction(self) -> int:
        """The factor by which an encoder divides the image's height and width: 8 for most. Always 1 for a decoder."""
        return 1 << sum(isinstance(layer, Downsample) for layer in self.inner_layers)


# --- reading ----------------------------------------------------------------------------------------------------------


def is_ldm(half: nn.Module) -> bool:
    """Whether a module (half of a VAE) is to be read by read_ldm: a decoder or encoder of the ldm family, by the name
    of its class."""
    return type(half).__name__ in HALVES and hasattr(half, "mid")


def read_ldm(half: Any) -> DecoderLayout:
    """The layout of a VAE's Decoder or Encoder of the ldm family. half: the module; one with `up` is a decoder. Raises
    Refusal for options that our forward does not compute, another structure, or parameters that it would ignore."""
    middle = [half.mid.block_1, half.mid.attn_1, half.mid.block_2]
    last = half.num_resolutions - 1
    modules: list[Any] = []
    if hasattr(half, "up"):
        if half.give_pre_end:
            raise unsupported_model("the VAE's decoder returns its last features, not an image (give_pre_end)")
        if half.tanh_out:
            raise unsupported_model("the VAE's decoder ends in a tanh")
        modules += middle
        for index in range(last, -1, -1):
            modules += ldm_level(half.up[index], half.num_res_blocks + 1)
            if index > 0:
                modules.append(half.up[index].upsample)
    else:
        for index in range(last + 1):
            modules += ldm_level(half.down[index], half.num_res_blocks)
            if index < last:
                modules.append(half.down[index].downsample)
        modules += middle
    return layout_of(half, modules, half.norm_out, LeafReader(half), READERS)


def ldm_level(level: Any, count: int) -> list[Any]:
    """The modules of one resolution, in the order of the host's forward: each residual block, then its attention or
    None.

    level: half.up[i] or half.down[i] of a Decoder or Encoder.
    count: the number of residual blocks according to the module's configuration. Raises Refusal if the resolution has
        another number of them.
    """
    attentions = list(level.attn) or [None] * count
    if not len(level.block) == len(attentions) == count:
        raise unsupported_model("a part of the VAE has more or fewer layers than its configuration says")
    return [*chain(*zip(level.block, attentions, strict=True))]


# --- what every host's readers share ----------------------------------------------------------------------------------


def layout_of(
    half: Any, modules: Iterable[Any], out_norm: Any, leaves: LeafReader,
    readers: Mapping[str, Callable[[Any, LeafReader], Layer]],
) -> DecoderLayout:
    """The layout of a decoder or encoder (half). Raises Refusal for modules of unknown kinds, or if a parameter of
    `half` belongs to none of the modules that were read.

    modules: those between the first convolution and the last norm, in the order of the host's forward.
    out_norm: the last norm's module. leaves: a LeafReader of half.
    readers: for each kind of these modules (LeafReader.kind), the function that returns its description.
    """
    layout = DecoderLayout(
        leaves.convolution(half.conv_in), leaves.layers(readers, modules), leaves.group_norm(out_norm),
        leaves.convolution(half.conv_out),
    )
    leaves.refuse_unclaimed()
    return layout


def residual_block(block: Any, skip: Any, leaves: LeafReader) -> ResidualBlock:
    """The description of a residual block of ldm or of diffusers. skip: the module of the 1x1 convolution over the
    block's input; None if there is none."""
    return ResidualBlock(
        in_norm=leaves.group_norm(block.norm1), in_convolution=leaves.convolution(block.conv1),
        out_norm=leaves.group_norm(block.norm2), out_convolution=leaves.convolution(block.conv2),
        skip=None if skip is None else leaves.linear(skip),
    )


def downsample(layer: Any, leaves: LeafReader) -> Downsample:
    """The description of a host's layer that halves the image: its forward pads the image by a row of zeros below and a
    column on the right, and calls the convolution layer.conv. Raises Refusal unless the convolution is 3x3 with a
    stride of 2 and without padding; its caller makes sure that the layer's forward pads."""
    convolution = leaves.convolution(layer.conv)
    if (convolution.kernel, convolution.stride, convolution.padding) != (3, 2, 0):
        raise leaves.unknown(layer, "expected a 3x3 convolution with a stride of 2 and without padding")
    return Downsample(convolution)


# --- the ldm family's layers ------------------------------------------------------------------------------------------


def ldm_residual_block(block: Any, leaves: LeafReader) -> ResidualBlock:
    """The description of a ResnetBlock. Raises Refusal if its shortcut is a 3x3 convolution."""
    changes = block.in_channels != block.out_channels
    if changes and block.use_conv_shortcut:
        raise unsupported_model(f"{leaves.path(block)} has a 3x3 convolution in its shortcut")
    return residual_block(block, block.nin_shortcut if changes else None, leaves)


def ldm_attention(attention: Any, leaves: LeafReader) -> PixelAttention:
    """The description of an AttnBlock or MemoryEfficientAttnBlock, which have one head."""
    projected = tuple(map(leaves.linear, (attention.q, attention.k, attention.v)))
    return PixelAttention(leaves.group_norm(attention.norm), projected, leaves.linear(attention.proj_out), heads=1)


def ldm_downsample(layer: Any, leaves: LeafReader) -> Downsample:
    """The description of a Downsample. Raises Refusal if it has no convolution."""
    leaves.require(layer, with_conv=True)
    return downsample(layer, leaves)


def ldm_upsample(layer: Any, leaves: LeafReader) -> Upsample:
    """The description of an Upsample. Raises Refusal if it has no convolution."""
    leaves.require(layer, with_conv=True)
    return Upsample(leaves.convolution(layer.conv), resize_before=True)


READERS: dict[str, Callable[[Any, LeafReader], Layer]] = {
    "ResnetBlock": ldm_residual_block, "Upsample": ldm_upsample, "Downsample": ldm_downsample,
    # The same attention, by torch's operators and by xformers'.
    "AttnBlock": ldm_attention, "MemoryEfficientAttnBlock": ldm_attention,
}


# --- the family -------------------------------------------------------------------------------------------------------


class Autoencoders:
    """The family of Stable Diffusion's VAEs, which diffusers calls AutoencoderKL; one object in families.registry.
    Implements core.family.DecoderFamily."""

    layout = DecoderLayout
    readers = ((is_ldm, read_ldm),)

    def refuse_latent(self, layout: DecoderLayout, latent: Tensor) -> None:
        """Raise Refusal unless the latent is (batch, channels, height, width) with as many channels as the decoder's
        first convolution takes. For an encoder's layout, `latent` is an image. Called before each decoding or
        encoding."""
        channels = layout.in_convolution.in_channels
        if latent.dim() != 4 or latent.shape[1] != channels:
            raise unsupported_inputs(
                f"the VAE's input (shape {tuple(latent.shape)}) does not fit this VAE, which takes {channels} channels"
            )

    def output(
        self, layout: DecoderLayout, weights: Weights, ops: Operators, latent: Tensor, upcast_attention: bool = False,
        fold_biases: bool = False,
    ) -> Tensor:
        """The image of a latent, in the latent's dtype; for an encoder's layout, the mean and the log variance of an
        image's latent. See Decoding and Decoding.run, which have the same arguments."""
        return Decoding(weights, ops, upcast_attention, fold_biases).run(layout, latent)


@dataclass(frozen=True)
class Decoding:
    """Computes a decoder or an encoder. Images are (batch, channels, height, width).

    upcast_attention: compute attention scores in float32.
    fold_biases: add a convolution's bias in the norm or the sum that follows it. Our kernels save a pass over the image
        this way; PyTorch's own operators would take one more.
    """

    weights: Weights
    ops: Operators
    upcast_attention: bool
    fold_biases: bool

    def run(self, layout: DecoderLayout, latent: Tensor) -> Tensor:
        """The image of a latent, (batch, channels, h, w) -> (batch, colours, factor * h, factor * w), in the latent's
        dtype. The latent is as the host's decoder module gets it: scaled, and after the 1x1 convolution before the
        decoder.

        With an encoder's layout, `latent` is an image, and the result is the mean and the log variance of its latent:
        (batch, colours, h, w) -> (batch, 2 * channels, h / factor, w / factor).
        """
        image = self._convolution(latent, layout.in_convolution)
        for layer in layout.inner_layers:
            if isinstance(layer, ResidualBlock):
                image = self._residual_block(layer, image)
            elif isinstance(layer, PixelAttention):
                image = self._attention(layer, image)
            elif isinstance(layer, Downsample):
                image = self._convolution(functional.pad(image, (0, 1, 0, 1)), layer.convolution)
            else:
                enlarged = self.ops.resize(image, image.shape[-2] * 2, image.shape[-1] * 2)
                image = self._convolution(enlarged, layer.convolution)
        image = self.ops.group_norm(image, self.weights[layout.out_norm.path], layout.out_norm, silu=True)
        return self._convolution(image, layout.out_convolution)

    def _residual_block(self, block: ResidualBlock, image: Tensor) -> Tensor:
        """The output of a residual block: the second convolution's output plus the image, or plus the image's 1x1
        convolution if the block has one (skip)."""
        ops = self.ops
        weights = self.weights
        hidden = ops.group_norm(image, weights[block.in_norm.path], block.in_norm, silu=True)
        hidden, bias = self._unfinished_convolution(hidden, block.in_convolution)
        shift = None if bias is None else bias.expand(image.shape[0], -1).contiguous()
        hidden = ops.group_norm(hidden, weights[block.out_norm.path], block.out_norm, silu=True, shift=shift)
        hidden, bias = self._unfinished_convolution(hidden, block.out_convolution)
        skip = image if block.skip is None else ops.pointwise(image, weights[block.skip.path])
        return ops.residual_add(skip, hidden, bias)

    def _attention(self, attention: PixelAttention, image: Tensor) -> Tensor:
        """The image plus the output of a self attention among its pixels."""
        ops = self.ops
        weights = self.weights
        height, width = image.shape[-2:]
        tokens = ops.image_to_tokens(ops.group_norm(image, weights[attention.norm.path], attention.norm, silu=False))
        layers = TransformerLayers(weights, ops, self.upcast_attention)
        projected = (layers.linear(tokens, part) for part in attention.projections)
        query, key, value = (layers.heads(part, attention.heads) for part in projected)
        update = layers.linear(layers.attend(query, key, value), attention.out)
        return ops.residual_add(image, ops.tokens_to_image(update, height, width), None)

    def _convolution(self, image: Tensor, shape: Convolution) -> Tensor:
        """The image after a convolution with its bias."""
        return self.ops.convolution(image, self.weights[shape.path], shape)

    def _unfinished_convolution(self, image: Tensor, shape: Convolution) -> tuple[Tensor, Tensor | None]:
        """The image after a convolution, and the bias that the next operator has to add. With fold_biases, that is the
        convolution's bias, or None if the convolution has no bias. Without, the bias is already added, and None is
        returned."""
        if not self.fold_biases:
            return self._convolution(image, shape), None
        weight, bias = self.weights[shape.path][:2]
        return self.ops.convolution(image, LayerWeights(weight, None), shape), bias
