"""Measure which matrix products gain by float8, with what makes their tokens and takes their results."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..unet.layout import LayerNorm
from ..unet.weights import Affine, Float8Weight
from . import Operators, Stream, triton_float8
from .float8 import rounded_rows
from .float8_choice import Product

EPS = 1e-5


def both_ways(
    product: Product, dtype: torch.dtype, device: torch.device, native: Operators, always: Operators
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A product by the native operators, and by those that do it in float8, with what makes its tokens and the norm
    after it.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    weight = random(product.out, product.width)
    values, scales = rounded_rows(weight)
    affine = Affine(weight, None, Float8Weight(values, scales.t().contiguous()))
    if product.gated:
        hidden, stream = random(product.rows, 2 * product.width), Stream(random(product.rows, product.out))
        vector = random(product.out)

        def gated(ops: Operators) -> object:
            added = ops.add_linear(stream, ops.geglu(hidden, affine), affine)
            return triton_float8.layer_norm(added, vector, None, EPS)

        return lambda: gated(native), lambda: gated(always)
    tokens, parameters = random(product.rows, product.width), Affine(random(product.width), None)
    norm = LayerNorm("norm", product.width, EPS)

    def normed(ops: Operators) -> object:
        return ops.linear(ops.layer_norm(Stream(tokens), parameters, norm, affine)[1], affine)

    return lambda: normed(native), lambda: normed(always)
