"""The operators of the native backend: channels-last images, and our kernels where torch launches several or reads
twice."""
from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ....core.affine import Affine, LowRank
from ....core.leaves import Convolution, GroupNorm, LayerNorm
from ....core.operators import Rows, Stream
from ....core.tuning_cache import TuningCache
from ...torch import operators as torch_ops
from ...torch.attention import FEW_KEYS
from ...torch.operators import bias_or_zeros, channels_last
from . import attention as native_attention
from . import group_norm as native_group_norm
from . import images as native_images
from . import launch_config as cuts
from . import products
from . import tokens as native_tokens
from .launch_config import Kernel, LaunchConfig, Launches, attention_kernel, image_class, row_class
from .launching import ALIGNED


class VirtualConcatenation(NamedTuple):
    """Two images that are one along the channels, without being copied together."""

    first: Tensor
    second: Tensor

    @property
    def shape(self) -> torch.Size:
        batch, channels, height, width = self.first.shape
        return torch.Size((batch, channels + self.second.shape[1], height, width))


Image = Tensor | VirtualConcatenation


class NativeOperators:
    """See core.operators. Images are made channels-last where they are not."""

    def __init__(
        self, launches: Launches | None = None,
        attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = torch_ops.attention,
    ) -> None:
        """launches: how kernels are launched, None for their first choice. attention: as Operators.attention."""
        self._launches = launches or Launches(TuningCache())
        self._attention = attention
        # Of images that were made by an addition, as long as they live.
        self._strips: MutableMapping[Tensor, native_images.PartialStatistics] = WeakIdKeyDictionary()

    # What torch does in one launch.
    sinusoids = staticmethod(torch_ops.sinusoids)
    join = staticmethod(torch_ops.join)
    silu = staticmethod(torch_ops.silu)
    image_to_tokens = staticmethod(torch_ops.image_to_tokens)
    tokens_to_image = staticmethod(torch_ops.tokens_to_image)

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
        if affine.low_rank is not None:
            down, ups = affine.low_rank.down.flatten(1), affine.low_rank.ups
            torch_ops.add_low_rank(pixels, rows(first), LowRank(down[:, :channels], ups))
            if second is not None:
                torch_ops.add_low_rank(pixels, rows(second), LowRank(down[:, channels:], ups))
        batch, _, height, width = first.shape
        return pixels.view(batch, height, width, -1).permute(0, 3, 1, 2)

    def convolution(self, image: Tensor, affine: Affine, shape: Convolution) -> Tensor:
        if affine.bias is None or shape.out_channels % ALIGNED:
            return torch_ops.convolution(channels_last(image), affine, shape)
        # torch adds a bias in another pass, and a slower one.
        output = channels_last(torch_ops.convolution(channels_last(image), affine._replace(bias=None), shape))
        self._add(None, output, affine.bias, output)
        return output

    def group_norm(
        self, image: Image, affine: Affine, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        reader: Affine | None = None,
    ) -> Any:
        first, second = halves(image)
        return native_group_norm.group_norm(
            first, second, affine.weight, bias_or_zeros(affine), norm.groups, norm.eps, silu, shift,
            self._measured(image),
            statistics_cut=self._cut(cuts.STATISTICS, first), application_cut=self._cut(cuts.APPLICATION, first),
        )

    def layer_norm(self, stream: Stream, affine: Affine, norm: LayerNorm, reader: Affine) -> tuple[Stream, Rows]:
        config = self._launches.of(cuts.LAYER_NORM, row_class(norm.width), stream.tokens.dtype)
        stream = stream._replace(tokens=stream.tokens.contiguous())
        return native_tokens.layer_norm(stream, affine.weight, affine.bias, norm.eps, config)

    def add_linear(self, stream: Stream, x: Tensor, affine: Affine) -> Stream:
        # A GEMM adds to its output for nothing; with a bias too it would need another pass.
        if stream.bias is not None:
            stream = Stream(self.materialize(stream))
        tokens = stream.tokens.contiguous()
        tokens.view(-1, tokens.shape[-1]).addmm_(x.flatten(0, -2), affine.weight.t())
        if affine.low_rank is not None:
            torch_ops.add_low_rank(tokens, x, affine.low_rank)
        return Stream(tokens, stream.deferred_bias, affine.bias)

    def materialize(self, stream: Stream) -> Tensor:
        config = self._launches.of(cuts.LAYER_NORM, row_class(stream.tokens.shape[-1]), stream.tokens.dtype)
        return native_tokens.materialize(stream, config)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool) -> Tensor:
        given = query, key, value
        width, few = query.shape[3], key.shape[2] <= FEW_KEYS and query.dtype in native_attention.DTYPES and not upcast
        if few and width in native_attention.WIDTHS and all(map(native_attention.heads_lie_beside, given)):
            config = self._launches.of(attention_kernel(width), str(width), query.dtype)
            if config != cuts.LIBRARY:
                return native_attention.attention(*given, config)
        return self._attention(query, key, value, upcast)

    def geglu(self, tokens: Tensor, reader: Affine) -> Rows:
        config = self._launches.of(cuts.GEGLU, row_class(tokens.shape[-1] // 2), tokens.dtype)
        return native_tokens.geglu(tokens.contiguous(), config)

    def gated_linear(self, x: Rows, affine: Affine, reader: Affine) -> Rows:
        width = x.shape[-1]
        shape_class = products.product_class(x.numel() // width, *affine.weight.shape)
        config = self._launches.of(cuts.EXACT_GATED_PRODUCT, shape_class, affine.weight.dtype)
        if config != cuts.LIBRARY and affine.bias is not None and affine.low_rank is None:
            tokens = x.contiguous().view(-1, width)
            return products.exact_gated_product(tokens, affine.weight, affine.bias, config).view(*x.shape[:-1], -1)
        return self.geglu(self.linear(x, affine), reader)

    def residual_add(self, image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        update = channels_last(update)
        output = torch.empty_like(update, memory_format=torch.channels_last)
        self._add(channels_last(image), update, bias, output)
        return output

    def concatenate(self, image: Tensor, skip: Tensor) -> VirtualConcatenation:
        return VirtualConcatenation(image, skip)

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        return native_images.resize(channels_last(image), height, width)

    def _add(self, image: Tensor | None, update: Tensor, bias: Tensor | None, output: Tensor) -> None:
        """output = image + update + bias, measured on the way, where a norm that follows will want to know."""
        config = self._cut(cuts.ADDITION, output)
        measured = native_images.add_and_measure(image, update, bias, output, config)
        if output.shape[2] * output.shape[3] > native_group_norm.SMALL_IMAGE_PIXELS:
            self._strips[output] = measured

    def _measured(
        self, image: Image
    ) -> tuple[native_images.PartialStatistics | None, native_images.PartialStatistics | None]:
        """The statistics of its two halves, where they were measured on the way."""
        first, second = halves(image)
        return self._strips.get(first), None if second is None else self._strips.get(second)

    def _cut(self, kernel: Kernel, image: Tensor) -> LaunchConfig:
        return self._launches.of(kernel, image_class(image.shape[2] * image.shape[3]), image.dtype)


def halves(image: Image) -> tuple[Tensor, Tensor | None]:
    if isinstance(image, VirtualConcatenation):
        return channels_last(image.first), channels_last(image.second)
    return channels_last(image), None


def rows(image: Tensor) -> Tensor:
    """(batch, channels, height, width) -> (batch * height * width, channels), a view of a channels-last image."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)

