"""FP8 on a real GPU. A product with one scale for each factor is as exact as with one for each row. Our kernels, for
the first product of a feed-forward with its GEGLU (FP8) and for convolutions (FP8, INT8, or float16 sums), are close to
float64 with every launch config."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from exact_operators import geglu as exact_geglu
from exact_operators import layer_norm as exact_layer_norm
from exact_operators import one_scale_of, relative_error, rounded_rows
from torch import Tensor

from lib_onediff.core.card import TuningCache
from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.core.leaves import GATED, NORMED, PLAIN_INPUT, LayerNorm
from lib_onediff.core.operators import GEGLU, QuantizedImage, QuantizedTokens, Residual
from lib_onediff.devices.cuda.kernels import products, rounding
from lib_onediff.devices.cuda.kernels.launch_config import (
    CONVOLUTIONS,
    GATED_PRODUCT,
    LIBRARY,
    Kernel,
    LaunchConfig,
    Launches,
)
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.devices.cuda.low_bit.float8 import float8_support
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.low_bit import FP8, KINDS, Product, as_rows, gated_scale

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# Whether this GPU copies tiles by itself (Hopper's Tensor Memory Accelerator).
COPIES = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# Relative errors: of normally distributed numbers that are rounded to float8, which has three bits of mantissa; and of
# a GPU's float8 sums, which have 22 bits and lose more of them with more terms (2.5e-3 at 11,520).
ROUNDED = 3e-2
SUMMED = 5e-3


def on_this_gpu(kernel: Kernel) -> list[LaunchConfig]:
    """The launch configs of our own kernel (not LIBRARY) for this GPU. The first number of a config is 1 if the GPU
    copies tiles by itself, else 0."""
    return [config for config in kernel.candidates if config != LIBRARY and bool(config[0]) == COPIES]


@pytest.fixture(autouse=True)
def needs_the_units(request: pytest.FixtureRequest) -> None:
    """Skip tests of float8 on GPUs whose matrix units do not support it. Tests with another `kind` run."""
    kind = request.node.callspec.params.get("kind", FP8.dtype)
    if kind == FP8.dtype and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")


def rounded(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens in float8, the one scale of all of them)."""
    scale = one_scale_of(tokens.flatten(0, -2), FP8)
    return (tokens / scale).to(FP8.dtype).contiguous(), scale


@pytest.mark.parametrize("config", on_this_gpu(GATED_PRODUCT), ids=str)
@pytest.mark.parametrize(("rows", "width", "half"), [(2048, 1280, 5120), (4095, 640, 2560), (77, 336, 1360)], ids=str)
def test_a_float8_product_with_geglu_is_close_to_the_float64_result_of_the_same_float8_factors(
    config: LaunchConfig, rows: int, width: int, half: int
) -> None:
    """The kernel's output is in float8, so an error of ROUNDED is allowed. rows, width: the shape of the tokens. half:
    the number of outputs of the GEGLU; the product has twice as many."""
    norm = LayerWeights(torch.rand(width, device=GPU) + 0.5, torch.randn(width, device=GPU))
    tokens = functional.layer_norm(torch.randn(rows, width, device=GPU), (width,), norm.weight, norm.bias)
    weight = torch.randn(2 * half, width, device=GPU, dtype=torch.float16) / width**0.5
    bias = torch.randn(2 * half, device=GPU, dtype=torch.float16)
    values, scale = rounded(tokens)
    low_bit = rounding.rounded_weight(weight, FP8)
    output_scale = gated_scale(weight, bias, norm).view(1, 1)
    found = products.gated_product(QuantizedTokens(values, scale, (rows,)), low_bit, bias, output_scale, config)
    sums = (values.double() * scale) @ (low_bit.values.double() * low_bit.scales.t()).t() + bias
    value, gate = sums.chunk(2, dim=1)
    expected = value * functional.gelu(gate)
    assert relative_error(found.values.double() * found.scales, expected) < ROUNDED


@pytest.mark.parametrize(("kind", "config"), [
    (dtype, config) for dtype, kernel in CONVOLUTIONS.items() for config in on_this_gpu(kernel)
], ids=str)
@pytest.mark.parametrize(("batch", "channels", "out", "size"), [
    (2, 320, 320, (128, 128)), (2, 1280, 1280, (32, 32)), (1, 960, 336, (45, 61)), (3, 48, 80, (33, 40)),
], ids=str)
def test_a_convolution_is_close_to_the_float64_convolution_of_the_same_factors(
    kind: torch.dtype, config: LaunchConfig, batch: int, channels: int, out: int, size: tuple[int, int]
) -> None:
    """kind: the dtype of image and weight. In 8 bits, float64 convolves the rounded image and weight. In float16, our
    kernel sums in float16. channels, out: the numbers of channels of the image and of the output."""
    image = torch.randn(batch, channels, *size, device=GPU, dtype=torch.float16)
    image, weight = (
        tensor.to(memory_format=torch.channels_last)
        for tensor in (image, torch.randn(out, channels, 3, 3, device=GPU, dtype=torch.float16) / channels**0.5)
    )
    if kind == torch.float16:
        found = products.half_sums_convolution(image, weight, config)
        allowed = 1e-3
    else:
        eight = next(one for one in KINDS if one.dtype == kind)
        low_bit = rounding.rounded_weight(as_rows(weight), eight)
        values, scales = rounded_rows(image.permute(0, 2, 3, 1).flatten(1), eight)
        values = values.view(batch, *size, channels)
        found = products.convolution(QuantizedImage(values, scales), low_bit, torch.bfloat16, config)
        weight = (low_bit.values.float() * low_bit.scales.t()).view(out, 3, 3, channels).permute(0, 3, 1, 2)
        image = values.permute(0, 3, 1, 2).float() * scales[:, :, None, None]
        allowed = SUMMED
    expected = functional.conv2d(image.double(), weight.double(), padding=1)
    assert relative_error(found.double(), expected) < allowed


# --- one scale for each factor ----------------------------------------------------------------------------------------

EPS = 1e-5
# The largest ratio of the error with one scale for each factor to the error with one for each row.
WORSE = 1.1
# SDXL's shapes at 1024x1024 with CFG, and numbers of rows that are not multiples of anything.
PRODUCTS = [
    Product(2048, 1280, 10240, NORMED), Product(2048, 1280, 3840, NORMED), Product(2048, 1280, 1280, NORMED),
    Product(8192, 640, 5120, NORMED), Product(2048, 5120, 1280, GATED), Product(8192, 2560, 640, GATED),
    Product(2048, 1280, 1280, PLAIN_INPUT), Product(333, 640, 1920, NORMED), Product(333, 2560, 640, GATED),
]


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The model's dtype. Skips the test if FP8 cannot be used with it on this GPU."""
    lack = runtime.devices.lossy.low_bit.why_not("fp8", GPU, request.param)
    if lack:
        pytest.skip(lack)
    return request.param


def operators_of(dtype: torch.dtype) -> NativeOperators:
    """The native operators without measurements, which compute every layer with an 8-bit weight in float8."""
    result = float8_support(GPU, dtype).result
    return NativeOperators(
        Launches(TuningCache()), functional.scaled_dot_product_attention, lambda *given: result, lambda *given: FP8
    )


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=GPU).to(dtype)


def by_row_scales(tokens: Tensor, weight: Tensor) -> Tensor:
    """The product of tokens and weight in float64, after each was rounded to float8 with a scale for each row."""
    (values, scales), (others, columns) = (rounded_rows(rows, FP8) for rows in (tokens, weight))
    return (values.double() * scales) @ (others.double() * columns).t()


@torch.no_grad()
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: "x".join(map(str, product)))
def test_a_product_with_one_scale_for_each_factor_is_as_exact_as_with_one_for_each_row(
    product: Product, dtype: torch.dtype
) -> None:
    """Both errors are against the float64 product of the factors before rounding; that of our kernels, which use one
    scale for each factor, may be a tenth larger than that of by_row_scales(). product.source: whether the input is the
    result of a norm (NORMED), of a GEGLU (GATED), or neither (PLAIN_INPUT)."""
    ops = operators_of(dtype)
    norm = LayerNorm("norm", product.width, EPS)
    weight = random(product.out, product.width, dtype=dtype) / 32
    layer = LayerWeights(weight, None, (rounding.rounded_weight(weight, FP8),))
    vector = random(product.width, dtype=dtype)
    tokens = random(product.rows, product.width, dtype=dtype)
    residual = Residual(torch.zeros(product.rows, product.out, device=GPU, dtype=dtype))
    if product.source == NORMED:
        _, rows = ops.residual_norm(Residual(tokens), LayerWeights(vector, None), norm, layer)
        given = exact_layer_norm(tokens, vector, None, EPS)
        output = ops.linear(rows, layer)
    else:
        hidden = torch.cat([tokens, tokens.flip(0)], -1)
        rows = ops.gated(hidden, GEGLU, layer) if product.source == GATED else rounding.rounded(tokens, FP8)
        given = exact_geglu(hidden) if product.source == GATED else tokens.double()
        output = ops.materialize(ops.add_linear(residual, rows, layer))
    assert isinstance(rows, QuantizedTokens)
    exact = given @ weight.double().t()
    assert relative_error(output, exact) < WORSE * relative_error(by_row_scales(given, weight), exact)


@torch.no_grad()
def test_a_float8_norm_neither_saturates_nor_hides_nan(dtype: torch.dtype) -> None:
    """Each row has a single number that is not 0, which the norm turns into the largest possible result; float8 must
    round it and not clip it. Row 5 has a NaN: in the results of all layers after the norm, row 5 must be NaN and all
    other rows finite."""
    ops = operators_of(dtype)
    width = 1280
    norm = LayerNorm("norm", width, EPS)
    weight = torch.eye(width, device=GPU).to(dtype)
    layer = LayerWeights(weight, None, (rounding.rounded_weight(weight, FP8),))
    gamma = 8 * random(width, dtype=dtype)
    beta = random(width, dtype=dtype)
    tokens = torch.eye(width, device=GPU).to(dtype) * 100
    exact = exact_layer_norm(tokens, gamma, beta, EPS)
    tokens[5, 7], exact[5] = float("nan"), float("nan")
    _, rows = ops.residual_norm(Residual(tokens), LayerWeights(gamma, beta), norm, layer)
    assert isinstance(rows, QuantizedTokens) and rows.scales.shape == (1, 1)
    back = rows.values.double() * rows.scales.double()
    usual = [row for row in range(width) if row != 5]
    off = (back - exact).abs().diagonal()[usual]
    allowed = (2.0**-4 + 1e-3) * exact.abs().diagonal()[usual] + 2.0**-10 * rows.scales[0]
    assert bool((off <= allowed).all()), (off - allowed).max()
    output = ops.linear(rows, layer)
    assert bool(output[5].isnan().all()) and bool(output[usual].isfinite().all())
    for hidden in (tokens, tokens.repeat(1, 2)):
        given = ops.gated(hidden, GEGLU, layer) if hidden.shape[1] > width else hidden
        added = ops.materialize(ops.add_linear(Residual(torch.zeros_like(tokens)), given, layer))
        assert bool(added[5].isnan().all()) and bool(added[usual].isfinite().all())
