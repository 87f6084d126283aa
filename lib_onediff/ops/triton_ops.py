"""The operators of the native backend: channels-last images, and our kernels where torch launches several or reads
twice."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..unet.layout import Convolution, GroupNorm, LayerNorm
from ..unet.weights import Affine
from . import torch_ops, triton_group_norm, triton_images, triton_tokens
from .choices import Choices
from .launches import (
    ADDITION,
    APPLICATION,
    GEGLU,
    LAYER_NORM,
    STATISTICS,
    Cut,
    Kernel,
    Launches,
    image_class,
    row_class,
)

# Triton compiles another kernel for a number of channels that is no multiple of this.
ALIGNED_CHANNELS = 16


class Beside(NamedTuple):
    """Two images that are one along the channels, without being copied together."""

    first: Tensor
    second: Tensor

    @property
    def shape(self) -> torch.Size:
        batch, channels, height, width = self.first.shape
        return torch.Size((batch, channels + self.second.shape[1], height, width))


Image = Tensor | Beside


class TritonOperators:
    """See ops.Operators. Images are made channels-last where they are not."""

    def __init__(
        self, launches: Launches | None = None,
        attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = torch_ops.attention,
    ) -> None:
        """launches: how kernels are cut, None for their first choice. attention: as Operators.attention."""
        self._launches = launches or Launches(Choices())
        self._attention = attention

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        return torch_ops.linear(x, affine)

    def pointwise(self, image: Image, affine: Affine) -> Tensor:
        first, second = halves(image)
        weight, channels = affine.weight.flatten(1), first.shape[1]
        if second is None:
            pixels = functional.linear(rows(first), weight, affine.bias)
        else:
            pixels = functional.linear(rows(second), weight[:, channels:], affine.bias)
            pixels.addmm_(rows(first), weight[:, :channels].t())
        batch, _, height, width = first.shape
        return pixels.view(batch, height, width, -1).permute(0, 3, 1, 2)

    def convolution(self, image: Tensor, affine: Affine, shape: Convolution) -> Tensor:
        if affine.bias is None or shape.out_channels % ALIGNED_CHANNELS:
            return torch_ops.convolution(channels_last(image), affine, shape)
        # torch adds a bias in another pass, and a slower one.
        output = torch_ops.convolution(channels_last(image), Affine(affine.weight, None), shape)
        return triton_images.add_bias_(channels_last(output), affine.bias, self._cut(ADDITION, output))

    def group_norm(
        self, image: Image, affine: Affine, norm: GroupNorm, silu: bool, shift: Tensor | None = None
    ) -> Tensor:
        first, second = halves(image)
        return triton_group_norm.group_norm(
            first, second, affine.weight, affine.bias, norm.groups, norm.eps, silu, shift,
            statistics_cut=self._cut(STATISTICS, first), application_cut=self._cut(APPLICATION, first),
        )

    def layer_norm(
        self, tokens: Tensor, affine: Affine, norm: LayerNorm, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        residual = None if residual is None else residual.contiguous()
        cut = self._launches.of(LAYER_NORM, row_class(norm.width), tokens.dtype)
        return triton_tokens.layer_norm(tokens.contiguous(), affine.weight, affine.bias, norm.eps, residual, cut)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool) -> Tensor:
        return self._attention(query, key, value, upcast)

    def geglu(self, tokens: Tensor) -> Tensor:
        cut = self._launches.of(GEGLU, row_class(tokens.shape[-1] // 2), tokens.dtype)
        return triton_tokens.geglu(tokens.contiguous(), cut)

    def silu(self, x: Tensor) -> Tensor:
        return torch_ops.silu(x)

    def residual_add(self, image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        cut = self._cut(ADDITION, update)
        return triton_images.residual_add(channels_last(image), channels_last(update), bias, cut)

    def concatenate(self, image: Tensor, skip: Tensor) -> Beside:
        return Beside(image, skip)

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        return triton_images.resize(channels_last(image), height, width)

    def image_to_tokens(self, image: Tensor) -> Tensor:
        return torch_ops.image_to_tokens(image)

    def tokens_to_image(self, tokens: Tensor, height: int, width: int) -> Tensor:
        return torch_ops.tokens_to_image(tokens, height, width)

    def _cut(self, kernel: Kernel, image: Tensor) -> Cut:
        return self._launches.of(kernel, image_class(image.shape[2] * image.shape[3]), image.dtype)


def halves(image: Image) -> tuple[Tensor, Tensor | None]:
    if isinstance(image, Beside):
        return channels_last(image.first), channels_last(image.second)
    return channels_last(image), None


def channels_last(image: Tensor) -> Tensor:
    """The same image with its pixels' channels side by side in memory; itself if it is so already."""
    return image.contiguous(memory_format=torch.channels_last)


def rows(image: Tensor) -> Tensor:
    """(batch, channels, height, width) -> (batch * height * width, channels), a view of a channels-last image."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)
