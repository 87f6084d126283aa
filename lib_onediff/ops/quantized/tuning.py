"""Measure how our products and attentions in eight bits are best cut on this GPU."""
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...model.low_bit import FP8, INT8, KERNEL, gated_scale
from ...model.operators import QuantizedImage, QuantizedTokens, Stream
from ...model.weights import Affine, QuantizedWeight
from ..triton.launch_config import (
    CONVOLUTION,
    GATED_PRODUCT,
    LIBRARY,
    LaunchConfig,
    Launches,
    int8_attention_kernel,
)
from ..triton.tuning import TimeMs, Trial, best_cut
from . import attention_gains, convolution, gated_product, int8_attention, int8_mm, kernels, scaled_mm
from .gains import Product
from .ways import EPS


def tune_int8(
    launches: Launches, product: Product, dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> None:
    """Choose how a product is cut, where that was not measured on this GPU. Raises what Triton raises."""
    kernel = int8_mm.kernel_for(device)
    shape_class = int8_mm.shape_class(product.rows, product.out, product.width)
    if launches.chosen(kernel, shape_class, dtype) is None:
        run = partial(int8_mm.product, *factors(product, device), None, dtype)
        launches.choose(kernel, shape_class, dtype, best_cut(Trial(kernel, shape_class, run), time_ms))


def tune_gated(
    launches: Launches, product: Product, dtype: torch.dtype, device: torch.device, result: torch.dtype, time_ms: TimeMs
) -> None:
    """Choose how what a feed-forward's second product reads is made in float8, by its first one and a GEGLU: where that
    was not measured on this GPU. result: see scaled_mm.product. Raises what Triton raises.
    """
    rows, half, width = product[:3]
    shape_class = int8_mm.shape_class(rows, 2 * half, width)
    if not gated_product.serves(device) or launches.chosen(GATED_PRODUCT, shape_class, dtype) is not None:
        return
    random = partial(torch.randn, device=device, dtype=dtype)
    norm, bias = Affine(random(width), None), random(2 * half)
    tokens = kernels.layer_norm(Stream(random(rows, width)), norm.weight, None, EPS, FP8)[1]
    weight = kernels.rounded_weight(random(2 * half, width), FP8)
    output_scale = gated_scale(weight.values, bias, norm).view(1, 1)

    def run(config: LaunchConfig) -> object:
        if config == LIBRARY:
            return kernels.geglu(scaled_mm.product(tokens, weight, bias, result), FP8)
        return gated_product.product(tokens, weight, bias, output_scale, config)

    launches.choose(GATED_PRODUCT, shape_class, dtype, best_cut(Trial(GATED_PRODUCT, shape_class, run), time_ms))


def tune_convolution(
    launches: Launches, product: Product, dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> None:
    """Choose how a convolution in float8 is cut, where that was not measured on this GPU. Raises what Triton raises."""
    image = image_of(product, device)
    shape_class = convolution.shape_class(image, product.out)
    if launches.chosen(CONVOLUTION, shape_class, dtype) is None:
        weight = kernels.rounded_weight(torch.randn((product.out, product.width), device=device, dtype=dtype), FP8)
        run = partial(convolution.convolution, image, weight, dtype)
        launches.choose(CONVOLUTION, shape_class, dtype, best_cut(Trial(CONVOLUTION, shape_class, run), time_ms))


def tune_int8_attention(launches: Launches, inputs: tuple[Tensor, Tensor, Tensor], time_ms: TimeMs) -> None:
    """As tune_int8, for attention in int8, with what it makes of this query, key and value first."""
    shape, dtype = inputs[0].shape, inputs[0].dtype
    kernel, shape_class = int8_attention_kernel(shape[3]), attention_gains.shape_class(shape)
    if launches.chosen(kernel, shape_class, dtype) is None:
        run = partial(int8_attention.attention, *inputs)
        launches.choose(kernel, shape_class, dtype, best_cut(Trial(kernel, shape_class, run), time_ms))


def image_of(product: Product, device: torch.device) -> QuantizedImage:
    """A random one that a convolution takes."""
    assert product.size is not None
    height, width = product.size
    shape = product.rows // (height * width), height, width, product.width // KERNEL**2
    return QuantizedImage(torch.randn(shape, device=device).to(FP8.dtype), torch.ones((1, 1), device=device))


def factors(product: Product, device: torch.device) -> tuple[QuantizedTokens, QuantizedWeight]:
    """Random ones: a GPU multiplies zeros faster than others."""

    def random(rows: int) -> Tensor:
        return torch.randint(-127, 128, (rows, product.width), device=device, dtype=INT8.dtype)

    tokens = QuantizedTokens(random(product.rows), torch.ones((product.rows, 1), device=device), (product.rows,))
    return tokens, QuantizedWeight(random(product.out), torch.ones((1, product.out), device=device))
