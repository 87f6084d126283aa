"""Measure how our products in eight bits are best cut on this GPU."""
from __future__ import annotations

from functools import partial

import torch

from ....core.affine import Affine, QuantizedWeight
from ....core.operators import QuantizedImage, QuantizedTokens, Stream
from ....weights.low_bit import FP8, GATED, INT8, KERNEL, Kind, gated_scale
from ..kernels.launch_config import CONVOLUTION, GATED_PRODUCT, LIBRARY, LaunchConfig, Launches
from ..kernels.tuning import TimeMs, Trial, best_cut
from . import convolution, gated_product, int8_mm, kernels, scaled_mm
from .gains import Product
from .ways import EPS


def tune_product(
    launches: Launches, product: Product, dtype: torch.dtype, device: torch.device, kind: Kind, result: torch.dtype,
    time_ms: TimeMs,
) -> None:
    """Choose how a product is cut, where it is one of our own and that was not measured on this GPU. result: see
    scaled_mm.product. Raises what Triton raises."""
    if kind is INT8:
        trial = int8_trial(product, dtype, device)
    elif product.size is not None:
        trial = convolution_trial(product, dtype, device)
    elif product.source == GATED and int8_mm.copies_tiles(device):
        trial = gated_trial(product, dtype, device, result)
    else:
        return
    if launches.chosen(trial.kernel, trial.shape_class, dtype) is None:
        launches.choose(trial.kernel, trial.shape_class, dtype, best_cut(trial, time_ms))


def int8_trial(product: Product, dtype: torch.dtype, device: torch.device) -> Trial:
    shape_class = int8_mm.shape_class(product.rows, product.out, product.width)
    run = partial(int8_mm.product, *factors(product, device), None, dtype)
    return Trial(int8_mm.kernel_for(device), shape_class, run)


def gated_trial(product: Product, dtype: torch.dtype, device: torch.device, result: torch.dtype) -> Trial:
    """How what a feed-forward's second product reads is made in float8, by its first one and a GEGLU."""
    rows, half, width = product[:3]
    random = partial(torch.randn, device=device, dtype=dtype)
    norm, bias = Affine(random(width), None), random(2 * half)
    tokens = kernels.layer_norm(Stream(random(rows, width)), norm.weight, None, EPS, FP8)[1]
    weight = kernels.rounded_weight(random(2 * half, width), FP8)
    output_scale = gated_scale(weight.values, bias, norm).view(1, 1)

    def run(config: LaunchConfig) -> object:
        if config == LIBRARY:
            return kernels.geglu(scaled_mm.product(tokens, weight, bias, result), FP8)
        return gated_product.product(tokens, weight, bias, output_scale, config)

    return Trial(GATED_PRODUCT, int8_mm.shape_class(rows, 2 * half, width), run)


def convolution_trial(product: Product, dtype: torch.dtype, device: torch.device) -> Trial:
    image = image_of(product, device)
    weight = kernels.rounded_weight(torch.randn((product.out, product.width), device=device, dtype=dtype), FP8)
    run = partial(convolution.convolution, image, weight, dtype)
    return Trial(CONVOLUTION, convolution.shape_class(image, product.out), run)


def image_of(product: Product, device: torch.device) -> QuantizedImage:
    """A random one that a convolution takes."""
    assert product.size is not None
    height, width = product.size
    shape = product.rows // (height * width), height, width, product.width // KERNEL**2
    return QuantizedImage(torch.randn(shape, device=device).to(FP8.dtype), torch.ones((1, 1), device=device))


def factors(product: Product, device: torch.device) -> tuple[QuantizedTokens, QuantizedWeight]:
    """Random ones: a GPU multiplies zeros faster than others."""

    def random(rows: int) -> torch.Tensor:
        return torch.randint(-127, 128, (rows, product.width), device=device, dtype=INT8.dtype)

    tokens = QuantizedTokens(random(product.rows), torch.ones((product.rows, 1), device=device), (product.rows,))
    return tokens, QuantizedWeight(random(product.out), torch.ones((1, product.out), device=device))
