"""The operators of the native backend with the largest matrix products in eight bits; weights/low_bit.py says which."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.affine import Affine, QuantizedWeight
from ....core.leaves import Convolution, GroupNorm, LayerNorm
from ....core.operators import QuantizedImage, QuantizedTokens, Stream
from ....weights.low_bit import (
    FEWEST_PIXELS,
    FP8,
    GATED,
    GROUP_NORMED,
    INT8,
    KERNEL,
    NORMED,
    PLAIN,
    Kind,
    Product,
    deviations,
    kind_of,
)
from ...torch.operators import bias_or_zeros
from ..kernels import launch_config as cuts
from ..kernels import products, rounding
from ..kernels.group_norm import Rounding, large_group_norm
from ..kernels.launch_config import Launches, row_class
from ..kernels.operators import Image, NativeOperators, halves
from . import float8

ResultDtype = Callable[[torch.device, torch.dtype], torch.dtype]
# What a layer norm or a GEGLU makes for a linear layer.
Rows = Tensor | QuantizedTokens
# In which of these kinds a product is done; None: in none.
Choose = Callable[[Product, torch.dtype, Sequence[Kind]], Kind | None]


class LowBitOperators(NativeOperators):
    """See core.operators. What is for a layer whose weight is there in eight bits is made in eight bits where it is
    computed, if that pays. A weight that is there in eight bits alone is on torch's meta device."""

    def __init__(
        self, launches: Launches, attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor],
        result_dtype: ResultDtype, choose: Choose,
    ) -> None:
        """result_dtype: in which type products in float8 come out on a device, for a model of a dtype. choose: in which
        of the kinds that a weight has a product is done, if in any."""
        super().__init__(launches, attention)
        self._result_dtype = result_dtype
        self._choose = choose

    def linear(self, x: Rows, affine: Affine) -> Tensor:
        if not isinstance(x, QuantizedTokens):
            # What reads the prompt is rounded in its weights alone: a text encoder's tokens have values far off.
            return super().linear(x, Affine(dequantized(affine), affine.bias) if affine.weight.is_meta else affine)
        return self._product(x, affine, affine.bias).to(affine.weight.dtype).view(*x.shape, -1)

    def layer_norm(self, stream: Stream, affine: Affine, norm: LayerNorm, reader: Affine) -> tuple[Stream, Rows]:
        kind = self._kind(stream.tokens, reader, NORMED)
        if kind is None:
            return super().layer_norm(updated(stream), affine, norm, reader)
        config = self._launches.of(cuts.LAYER_NORM, row_class(norm.width), stream.tokens.dtype)
        stream = stream._replace(tokens=stream.tokens.contiguous())
        return rounding.layer_norm(stream, affine.weight, affine.bias, norm.eps, kind, config)

    def add_linear(self, stream: Stream, x: Rows, affine: Affine) -> Stream:
        if not isinstance(x, QuantizedTokens):
            kind = self._kind(x, affine, PLAIN)
            if kind is None:
                return super().add_linear(updated(stream), x, affine)
            x = rounding.rounded(x, kind)
        if stream.bias is not None or stream.update is not None:
            stream = Stream(self.materialize(stream))
        # No library adds such a product to what is there: the next norm does, which may scale float8's rows as well.
        update, scales = self._update(x, affine)
        scales = None if scales is None else scales.view(*x.shape, 1)
        return Stream(stream.tokens, stream.deferred_bias, affine.bias, update.view(*x.shape, -1), scales)

    def materialize(self, stream: Stream) -> Tensor:
        return super().materialize(updated(stream))

    def group_norm(
        self, image: Image, affine: Affine, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        reader: Affine | None = None,
    ) -> Any:
        batch, channels, *size = image.shape
        scale = None if reader is None else reader.normed_scale
        if reader is None or scale is None or not self._is_convolved(batch, channels, size, reader):
            return super().group_norm(image, affine, norm, silu, shift)
        first, second = halves(image)
        farthest = deviations(size[0] * size[1] * channels // norm.groups)
        return large_group_norm(
            first, second, affine.weight, bias_or_zeros(affine), norm.groups, norm.eps, silu, shift,
            self._measured(image), self._cut(cuts.STATISTICS, first), self._cut(cuts.APPLICATION, first),
            Rounding(scale, farthest, FP8.dtype),
        )

    def convolution(self, image: Any, affine: Affine, shape: Convolution) -> Tensor:
        if not isinstance(image, QuantizedImage):
            return super().convolution(image, affine, shape)
        shape_class = products.convolution_class(image, shape.out_channels)
        config = self._launches.of(cuts.CONVOLUTION, shape_class, affine.weight.dtype)
        # It is added with the shift, or with the residual.
        assert affine.bias is None
        return products.convolution(image, affine.low_bit[0], affine.weight.dtype, config)

    def _is_convolved(self, batch: int, channels: int, size: Sequence[int], reader: Affine) -> bool:
        """Whether a convolution of such images is done in eight bits."""
        if not reader.low_bit or size[0] * size[1] < FEWEST_PIXELS:
            return False
        rows, width = batch * size[0] * size[1], KERNEL**2 * channels
        product = Product(rows, width, len(reader.weight), GROUP_NORMED, (size[0], size[1]))
        return self._choose(product, reader.weight.dtype, [FP8]) is FP8

    def geglu(self, tokens: Tensor, reader: Affine) -> Rows:
        kind = self._kind(tokens, reader, GATED)
        if kind is None:
            plain: Tensor = super().geglu(tokens, reader)
            return plain
        return rounding.geglu(tokens.contiguous(), kind)

    def gated_linear(self, x: Rows, affine: Affine, reader: Affine) -> Rows:
        scale = affine.gated_scale
        if isinstance(x, QuantizedTokens) and x.values.dtype == FP8.dtype and scale is not None:
            rows, dtype = len(x.values), affine.weight.dtype
            config = self._launches.of(cuts.GATED_PRODUCT, products.product_class(rows, *affine.weight.shape), dtype)
            if config != cuts.LIBRARY and affine.bias is not None and self._kind_of(rows, reader, GATED) is FP8:
                return products.gated_product(x, weight_like(x, affine), affine.bias, scale, config)
        if isinstance(x, QuantizedTokens) or reader.low_bit:
            return self.geglu(self.linear(x, affine), reader)
        return super().gated_linear(x, affine, reader)

    def _kind(self, tokens: Tensor, reader: Affine, source: str) -> Kind | None:
        return self._kind_of(tokens.numel() // tokens.shape[-1], reader, source)

    def _kind_of(self, rows: int, reader: Affine, source: str) -> Kind | None:
        """In which kind that many rows are multiplied with the reader's weight; None: in the model's type."""
        if not reader.low_bit:
            return None
        there = [kind_of(weight.values) for weight in reader.low_bit]
        if reader.weight.is_meta:
            return there[0]
        out, width = reader.weight.shape
        return self._choose(Product(rows, width, out, source), reader.weight.dtype, there)

    def _update(self, x: QuantizedTokens, affine: Affine) -> tuple[Tensor, Tensor | None]:
        """As float8.update."""
        if x.values.dtype == INT8.dtype:
            return self._product(x, affine, None), None
        return float8.update(x, weight_like(x, affine))

    def _product(self, x: QuantizedTokens, affine: Affine, bias: Tensor | None) -> Tensor:
        weight, dtype = weight_like(x, affine), affine.weight.dtype
        if x.values.dtype != INT8.dtype:
            return float8.product(x, weight, bias, self._result_dtype(x.values.device, dtype))
        shape_class = products.product_class(len(x.values), *affine.weight.shape)
        config = self._launches.of(cuts.INT8_PRODUCT, shape_class, dtype)
        return products.int8_product(x, weight, bias, dtype, config)


def dequantized(affine: Affine) -> Tensor:
    """A weight (out, in) in the model's type, of the one in eight bits."""
    values, scales = affine.low_bit[0]
    return values.to(affine.weight.dtype).mul_(scales.t())


def weight_like(x: QuantizedTokens, affine: Affine) -> QuantizedWeight:
    """The weight in the kind of these tokens."""
    return next(weight for weight in affine.low_bit if weight.values.dtype == x.values.dtype)


def updated(stream: Stream) -> Stream:
    """The same stream, its update added to its tokens in place."""
    if stream.update is None:
        return stream
    tokens = stream.tokens.contiguous()
    if stream.update_scales is None:
        tokens.add_(stream.update)
    else:
        tokens.addcmul_(stream.update, stream.update_scales)
    return stream._replace(tokens=tokens, update=None, update_scales=None)
