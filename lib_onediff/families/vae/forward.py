"""The forward of a decoder or an encoder, written against a set of operators.

The mathematics is that of Decoder and Encoder in CompVis' latent-diffusion, ldm/modules/diffusionmodules/model.py
(Rombach et al., 2022), without the time embedding, which those of an autoencoder do not have.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as functional
from torch import Tensor

from ...core.affine import Affine
from ...core.leaves import Convolution
from ...core.operators import Operators
from ..unet.layers import join_heads, split_heads
from ..unet.layout import Downsample, Upsample
from .layout import DecoderLayout, PixelAttention, ResidualBlock


@dataclass(frozen=True)
class Decoding:
    """What every layer needs besides its image.

    fold_biases: a convolution's bias goes into the norm or the addition that follows. It saves an operator that runs
    both in one a pass over the image, and costs PyTorch's own operators one.
    """

    weights: Mapping[str, Affine]
    ops: Operators
    upcast_attention: bool
    fold_biases: bool

    def run(self, layout: DecoderLayout, latent: Tensor) -> Tensor:
        """The image of a latent, (batch, channels, h, w) -> (batch, colours, factor h, factor w), in its dtype; or
        of an encoder's image what its latent is drawn from, (batch, colours, h, w) -> (batch, 2 channels, ...).

        The latent is what the host hands to its decoder: scaled, and past the 1x1 convolution in front of it.
        """
        image = self._convolution(latent, layout.in_convolution)
        for layer in layout.layers:
            if isinstance(layer, ResidualBlock):
                image = self._residual_block(layer, image)
            elif isinstance(layer, PixelAttention):
                image = self._attention(layer, image)
            elif isinstance(layer, Downsample):
                image = self._downsample(layer, image)
            else:
                image = self._upsample(layer, image)
        image = self.ops.group_norm(image, self.weights[layout.out_norm.path], layout.out_norm, silu=True)
        return self._convolution(image, layout.out_convolution)

    def _residual_block(self, block: ResidualBlock, image: Tensor) -> Tensor:
        ops, weights = self.ops, self.weights
        hidden = ops.group_norm(image, weights[block.in_norm.path], block.in_norm, silu=True)
        hidden, bias = self._unfinished_convolution(hidden, block.in_convolution)
        shift = None if bias is None else bias.expand(image.shape[0], -1).contiguous()
        hidden = ops.group_norm(hidden, weights[block.out_norm.path], block.out_norm, silu=True, shift=shift)
        hidden, bias = self._unfinished_convolution(hidden, block.out_convolution)
        skip = image if block.skip is None else ops.pointwise(image, weights[block.skip.path])
        return ops.residual_add(skip, hidden, bias)

    def _attention(self, attention: PixelAttention, image: Tensor) -> Tensor:
        ops, weights = self.ops, self.weights
        height, width = image.shape[-2:]
        tokens = ops.image_to_tokens(ops.group_norm(image, weights[attention.norm.path], attention.norm, silu=False))
        projected = (ops.linear(tokens, weights[part.path]) for part in attention.projections)
        query, key, value = (split_heads(part, attention.heads) for part in projected)
        mixed = join_heads(ops.attention(query, key, value, self.upcast_attention))
        update = ops.linear(mixed, weights[attention.out.path])
        return ops.residual_add(image, ops.tokens_to_image(update, height, width), None)

    def _upsample(self, layer: Upsample, image: Tensor) -> Tensor:
        image = self.ops.resize(image, image.shape[-2] * 2, image.shape[-1] * 2)
        return self._convolution(image, layer.convolution)

    def _downsample(self, layer: Downsample, image: Tensor) -> Tensor:
        return self._convolution(functional.pad(image, (0, 1, 0, 1)), layer.convolution)

    def _convolution(self, image: Tensor, shape: Convolution) -> Tensor:
        return self.ops.convolution(image, self.weights[shape.path], shape)

    def _unfinished_convolution(self, image: Tensor, shape: Convolution) -> tuple[Tensor, Tensor | None]:
        """A convolution, and the bias that is still to be added to it."""
        if not self.fold_biases:
            return self._convolution(image, shape), None
        weight, bias = self.weights[shape.path][:2]
        return self.ops.convolution(image, Affine(weight, None), shape), bias
