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


def tune_int8(
    launches: Launches, product: Product, dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> None:
    """Choose how a product is cut, where that was not measured on this GPU. Raises what Triton raises."""
    kernel = int8_mm.kernel_for(device)
    shape_class = int8_mm.shape_class(product.rows, product.out, product.width)
    if launches.chosen(kernel, shape_class, dtype) is None:
        run = partial(int8_mm.product, *factors(product, device), None, dtype)
        launches.choose(kernel, shape_class, dtype, best_cut(Trial(kernel, shape_class, run), time_ms))


def gated_is_known(launches: Launches, product: Product, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is nothing to measure for a feed-forward's first product on this GPU."""
    shape_class = int8_mm.shape_class(product.rows, product.out, product.width)
    return not gated_product.serves(device) or launches.chosen(GATED_PRODUCT, shape_class, dtype) is not None


def tune_gated(
    launches: Launches, product: Product, dtype: torch.dtype, device: torch.device, result: torch.dtype, time_ms: TimeMs
) -> None:
    """Choose how a feed-forward's first product in float8 is done with its GEGLU. result: see scaled_mm.product. Raises
    what Triton raises.
    """
    shape_class = int8_mm.shape_class(product.rows, product.out, product.width)
    random = partial(torch.randn, device=device, dtype=dtype)
    norm, bias = Affine(random(product.width), None), random(product.out)
    tokens = kernels.layer_norm(Stream(random(product.rows, product.width)), norm.weight, None, 1e-5, FP8)[1]
    weight = kernels.rounded_weight(random(product.out, product.width), FP8)
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
    assert product.size is not None
    (height, width), channels = product.size, product.width // KERNEL**2
    batch = product.rows // (height * width)
    shape_class = convolution.shape_class(batch, height, width, channels, product.out)
    if launches.chosen(CONVOLUTION, shape_class, dtype) is None:
        values = torch.randn((batch, height, width, channels), device=device).to(FP8.dtype)
        image = QuantizedImage(values, torch.ones((1, 1), device=device))
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


def factors(product: Product, device: torch.device) -> tuple[QuantizedTokens, QuantizedWeight]:
    """Random ones: a GPU multiplies zeros faster than others."""

    def random(rows: int) -> Tensor:
        return torch.randint(-127, 128, (rows, product.width), device=device, dtype=INT8.dtype)

    tokens = QuantizedTokens(random(product.rows), torch.ones((product.rows, 1), device=device), (product.rows,))
    return tokens, QuantizedWeight(random(product.out), torch.ones((1, product.out), device=device))
