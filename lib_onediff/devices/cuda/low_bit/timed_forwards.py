"""Short forwards around one matrix product, which are timed with the product in 16 and in eight bits.

The format of a product also changes the time of its neighbours: the operator before it quantizes its input, and the
norm after it applies scales. So each forward includes the operators before and after the product that depend on its
format:

- a product after a norm: the norm and the product;
- a convolution: its group norm and the convolution;
- a feed-forward's second product: the whole feed-forward, from norm to norm, because the first product may write the
  second one's input in eight bits;
- any other product: the product and the norm after it.

A norm after the product writes eight bits in both measurements.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....core.layer_weights import LayerWeights
from ....core.leaves import GATED, NORMED, Convolution, GroupNorm, LayerNorm, RMSNorm
from ....core.operators import GEGLU, SWIGLU, Modulation, Operators, Residual
from ....weights import low_bit
from ....weights.low_bit import KERNEL, Kind, Product
from ..kernels import rounding
from ..kernels.launch_config import random_on
from ..tuning import EPS, GROUPS, is_single_stream

# A forward is timed twice, with operators that compute the product in 16 and in eight bits. Its result is not used.
Forward = Callable[[Operators], object]


def product_forward(product: Product, dtype: torch.dtype, device: torch.device, kind: Kind) -> Forward:
    """A function that computes a product together with the operators around it (see the top of this file), as one call
    of a network would. Its inputs and weights are random, of the product's sizes, and are allocated here. The weights
    exist in `dtype`, which is the model's, and in the 8-bit format `kind`; the operators that the function is given
    decide which weights are used."""
    random = random_on(device, dtype)
    if product.size is not None:
        return convolution_forward(product, product.size, random, kind)
    weight = random(product.out, product.width)
    layer = LayerWeights(weight, None, (rounding.rounded_weight(weight, kind),))
    if is_single_stream(product.width if product.source == NORMED else product.out):
        return single_stream_forward(product, layer, random, kind)
    if product.source == NORMED:
        tokens = random(product.rows, product.width)
        parameters = LayerWeights(random(product.width), None)
        norm = LayerNorm("norm", product.width, EPS)
        return lambda ops: ops.linear(ops.residual_norm(Residual(tokens), parameters, norm, layer)[1], layer)
    residual = Residual(random(product.rows, product.out))
    vector = random(product.out)
    if product.source == GATED:
        parameters = LayerWeights(vector, None)
        norm = LayerNorm("norm", product.out, EPS)
        matrix = random(2 * product.width, product.out)
        bias = random(2 * product.width)
        rounded = rounding.rounded_weight(matrix, kind)
        scale = low_bit.gated_scale(matrix, bias, parameters).view(1, 1)
        into = LayerWeights(matrix, bias, (rounded,), gated_scale=scale)

        def fed_forward(ops: Operators) -> object:
            now, normed = ops.residual_norm(residual, parameters, norm, into)
            return rounding.layer_norm(
                ops.add_linear(now, ops.gated_linear(normed, into, GEGLU, layer), layer), vector, None, EPS, kind
            )

        return fed_forward
    hidden = random(product.rows, product.width)
    return lambda ops: rounding.layer_norm(ops.add_linear(residual, hidden, layer), vector, None, EPS, kind)


def single_stream_forward(
    product: Product, layer: LayerWeights, random: Callable[..., Tensor], kind: Kind
) -> Forward:
    """As product_forward, with the RMS norms, gates and modulations of a single-stream transformer. layer: the weights
    of the product. random: random(*shape) returns a tensor of random numbers."""
    dtype = layer.weight.dtype

    def norm_of(width: int) -> tuple[LayerWeights, RMSNorm, Modulation]:
        return LayerWeights(random(width), None), RMSNorm("norm", width, EPS), Modulation(random(1, width))

    def residual_of_width(width: int) -> Residual:
        tokens = random(1, product.rows, width)
        return Residual(tokens.float() if dtype == torch.float16 else tokens)

    if product.source == NORMED:
        residual = residual_of_width(product.width)
        parameters, norm, modulation = norm_of(product.width)
        return lambda ops: ops.linear(ops.residual_norm(residual, parameters, norm, layer, modulation)[1], layer)
    residual = residual_of_width(product.out)
    parameters, norm, modulation = norm_of(product.out)
    gate = modulation.scale

    def added(ops: Operators, rows: Any) -> object:
        now = ops.add_linear(residual, rows, layer, gate)
        return rounding.residual_norm(now, parameters, norm, modulation, dtype, kind)

    if product.source == GATED:
        matrix = random(2 * product.width, product.out)
        into = LayerWeights(matrix, None, (rounding.rounded_weight(matrix, kind),))

        def fed_forward(ops: Operators) -> object:
            _, normed = ops.residual_norm(residual, parameters, norm, into, modulation)
            return added(ops, ops.gated_linear(normed, into, SWIGLU, layer))

        return fed_forward
    hidden = random(1, product.rows, product.width)
    return lambda ops: added(ops, hidden)


def convolution_forward(
    product: Product, size: tuple[int, int], random: Callable[..., Tensor], kind: Kind
) -> Forward:
    """As product_forward, for a convolution. size: (height, width) of its feature map. random: random(*shape) returns a
    tensor of random numbers."""
    channels = product.width // KERNEL**2
    batch = product.rows // (size[0] * size[1])
    image = random(batch, channels, *size).to(memory_format=torch.channels_last)
    weight = random(product.out, channels, KERNEL, KERNEL).to(memory_format=torch.channels_last)
    parameters = LayerWeights(random(channels), random(channels))
    layer = LayerWeights(weight, None, (rounding.rounded_weight(low_bit.as_rows(weight), kind),))
    norm = GroupNorm("norm", channels, GROUPS, EPS)
    shape = Convolution("convolution", channels, product.out, KERNEL, low_bit.STRIDE, low_bit.PADDING)
    return lambda ops: ops.convolution(ops.group_norm(image, parameters, norm, True, None, layer), layer, shape)
