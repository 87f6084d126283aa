"""A product in its place, with what makes its tokens and what reads it, to be timed by any operators."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....core.affine import Affine
from ....core.leaves import Convolution, GroupNorm, LayerNorm
from ....core.operators import Operators, Stream
from ....weights.low_bit import FP8, GATED, KERNEL, NORMED, PADDING, STRIDE, Kind, as_rows, gated_scale, normed_scale
from .gains import Product

Way = Callable[[Operators], object]
EPS, GROUPS = 1e-5, 32


def way_of(product: Product, dtype: torch.dtype, device: torch.device, kinds: Sequence[Kind]) -> Way:
    """What computes a product by any operators, with what makes its tokens and the norm after it; the weights are there
    in these kinds too. Of a GEGLU's reader, what makes its tokens begins at the norm before."""
    if product.size is not None:
        return way_of_convolution(product, dtype, device)
    # Without Triton there are none, and this module is imported all the same.
    from .kernels import layer_norm, rounded_weight

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    weight = random(product.out, product.width)
    affine = Affine(weight, None, tuple(rounded_weight(weight, kind) for kind in kinds))
    if product.source == NORMED:
        tokens, parameters = random(product.rows, product.width), Affine(random(product.width), None)
        norm = LayerNorm("norm", product.width, EPS)
        return lambda ops: ops.linear(ops.layer_norm(Stream(tokens), parameters, norm, affine)[1], affine)
    stream, vector = Stream(random(product.rows, product.out)), random(product.out)
    if product.source == GATED:
        # A feed-forward from norm to norm: its first product may make what this one reads.
        parameters, norm = Affine(vector, None), LayerNorm("norm", product.out, EPS)
        matrix, bias = random(2 * product.width, product.out), random(2 * product.width)
        rounded = tuple(rounded_weight(matrix, kind) for kind in kinds)
        into = Affine(matrix, bias, rounded, gated_scale=gated_scale(matrix, bias, parameters).view(1, 1))

        def fed_forward(ops: Operators) -> object:
            now, normed = ops.layer_norm(stream, parameters, norm, into)
            return layer_norm(
                ops.add_linear(now, ops.gated_linear(normed, into, affine), affine), vector, None, EPS, kinds[0]
            )

        return fed_forward
    hidden = random(product.rows, product.width)
    return lambda ops: layer_norm(ops.add_linear(stream, hidden, affine), vector, None, EPS, kinds[0])


def way_of_convolution(product: Product, dtype: torch.dtype, device: torch.device) -> Way:
    """As way_of, in float8, with the group norm before it."""
    from .kernels import rounded_weight

    assert product.size is not None
    pixels, channels = product.size, product.width // KERNEL**2
    batch = product.rows // (pixels[0] * pixels[1])

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    image = random(batch, channels, *pixels).to(memory_format=torch.channels_last)
    weight = random(product.out, channels, KERNEL, KERNEL).to(memory_format=torch.channels_last)
    parameters = Affine(random(channels), random(channels))
    affine = Affine(
        weight, None, (rounded_weight(as_rows(weight), FP8),), normed_scale=normed_scale(parameters).view(1, 1)
    )
    norm = GroupNorm("norm", channels, GROUPS, EPS)
    shape = Convolution("convolution", channels, product.out, KERNEL, STRIDE, PADDING)
    return lambda ops: ops.convolution(ops.group_norm(image, parameters, norm, True, None, affine), affine, shape)
