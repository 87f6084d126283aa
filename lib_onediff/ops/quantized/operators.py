"""The operators of the native backend with the largest matrix products in float8: see model/float8.py for which."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...model.layout import LayerNorm
from ...model.operators import Float8Tokens, Stream
from ...model.weights import Affine
from ..triton.launch_config import LAYER_NORM, Launches, row_class
from ..triton.operators import TritonOperators
from . import kernels as triton_float8
from .gains import Product
from .scaled_mm import product

ResultDtype = Callable[[torch.device, torch.dtype], torch.dtype]
# What a layer norm or a GEGLU makes for a linear layer.
Rows = Tensor | Float8Tokens
Pays = Callable[[Product, torch.dtype], bool]


class Float8Operators(TritonOperators):
    """See ops.Operators. What is for a layer whose weight is in float8 is made in float8 where it is computed, if that
    pays."""

    def __init__(
        self, launches: Launches, attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor],
        result_dtype: ResultDtype, pays: Pays,
    ) -> None:
        """result_dtype: in which type products come out on a device, for a model of a dtype. pays: whether a product
        is done in float8."""
        super().__init__(launches, attention)
        self._result_dtype = result_dtype
        self._pays = pays

    def linear(self, x: Rows, affine: Affine) -> Tensor:
        if not isinstance(x, Float8Tokens):
            return super().linear(x, affine)
        return self._product(x, affine, affine.bias).to(affine.weight.dtype).view(*x.shape, -1)

    def layer_norm(self, stream: Stream, affine: Affine, norm: LayerNorm, reader: Affine) -> tuple[Stream, Rows]:
        if not self._reads_float8(stream.tokens, reader, gated=False):
            return super().layer_norm(updated(stream), affine, norm, reader)
        config = self._launches.of(LAYER_NORM, row_class(norm.width), stream.tokens.dtype)
        stream = stream._replace(tokens=stream.tokens.contiguous())
        return triton_float8.layer_norm(stream, affine.weight, affine.bias, norm.eps, config)

    def add_linear(self, stream: Stream, x: Rows, affine: Affine) -> Stream:
        if not isinstance(x, Float8Tokens):
            return super().add_linear(updated(stream), x, affine)
        if stream.bias is not None or stream.update is not None:
            stream = Stream(self.materialize(stream))
        # No library adds such a product to what is there: the next norm does.
        update = self._product(x, affine, None).view(*x.shape, -1)
        return Stream(stream.tokens, stream.deferred_bias, affine.bias, update)

    def materialize(self, stream: Stream) -> Tensor:
        return super().materialize(updated(stream))

    def geglu(self, tokens: Tensor, reader: Affine) -> Rows:
        if not self._reads_float8(tokens, reader, gated=True):
            plain: Tensor = super().geglu(tokens, reader)
            return plain
        return triton_float8.geglu(tokens.contiguous())

    def _reads_float8(self, tokens: Tensor, reader: Affine, gated: bool) -> bool:
        if reader.float8 is None:
            return False
        return self._pays(Product.of(tokens, reader.weight, gated), reader.weight.dtype)

    def _product(self, x: Float8Tokens, affine: Affine, bias: Tensor | None) -> Tensor:
        assert affine.float8 is not None, "tokens are in float8 only for such a weight"
        return product(x, affine.float8, bias, self._result_dtype(x.values.device, affine.weight.dtype))


def updated(stream: Stream) -> Stream:
    """The same stream, its update added to its tokens in place."""
    if stream.update is None:
        return stream
    return stream._replace(tokens=stream.tokens.contiguous().add_(stream.update), update=None)
