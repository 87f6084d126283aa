"""Kernels for the first product of a feed-forward with its GEGLU, in float8 and in half precision; for convolutions in
8 bits or with float16 sums; and for the group norm that quantizes a convolution's input."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from builders import relative_error
from exact_operators import one_scale_of, rounded_rows
from grid import first
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

import torch.nn.functional as functional

from lib_onediff.core.card import TuningCache
from lib_onediff.core.layer_weights import LayerWeights, QuantizedWeight
from lib_onediff.core.leaves import Convolution, GroupNorm
from lib_onediff.core.operators import GEGLU, QuantizedTokens
from lib_onediff.core.precision import HALF_SUMS, SWITCHES, applied
from lib_onediff.devices.cuda.kernels import products
from lib_onediff.devices.cuda.kernels.launch_config import (
    CONVOLUTIONS,
    EXACT_GATED_PRODUCT,
    GATED_PRODUCT,
    LIBRARY,
    LaunchConfig,
    Launches,
)
from lib_onediff.devices.cuda.kernels.operators import NativeOperators, VirtualConcatenation
from lib_onediff.devices.cuda.low_bit.choice import LowBit
from lib_onediff.devices.cuda.tuning import tune_half_sums
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.weights.low_bit import FP8, GROUP_NORMED, INT8, KINDS, Kind, Product, as_rows, gated_scale

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Launch configs that are quick in Triton's interpreter: without and with tiles that the GPU copies by itself. On a GPU,
# all configs that it supports are tested instead. EXACT: of the product in half precision.
CONFIGS = [(0, 64, 64, 64, 8, 4, 2), (1, 64, 64, 64, 8, 4, 2)]
EXACT = CONFIGS
HALF = torch.float16
# The same for convolutions, with the dtype of the factors.
CONVOLVED = [(dtype, (copied, 8, 16, 32, 32, 8, 4, 2)) for dtype in CONVOLUTIONS for copied in (0, 1)]
if DEVICE.type == "cuda":
    CONFIGS, EXACT = (
        [config for config in products.of_card(kernel, DEVICE).candidates if config != LIBRARY]
        for kernel in (GATED_PRODUCT, EXACT_GATED_PRODUCT)
    )
    CONVOLVED = [
        (dtype, config) for dtype, kernel in CONVOLUTIONS.items()
        for config in products.of_card(kernel, DEVICE).candidates if config != LIBRARY
    ]


def factors(
    rows: int, width: int, half: int, norm: LayerWeights, row_scales: bool
) -> tuple[Tensor, QuantizedTokens, Tensor, QuantizedWeight]:
    """(tokens after a layer norm in float32, the same in float8, a weight in float32, the same in float8). half: half
    the number of the weight's rows. row_scales: whether its rows differ by a factor of up to 10,000 and have a scale
    each; otherwise they have one scale."""
    hidden = torch.randn(rows, width, device=DEVICE)
    tokens = torch.nn.functional.layer_norm(hidden, (width,), norm.weight, norm.bias)
    weight = torch.randn(2 * half, width, device=DEVICE) / width**0.5
    if row_scales:
        weight *= torch.logspace(-4, 0, 2 * half, device=DEVICE)[:, None]
    one = one_scale_of(tokens, FP8)
    values, scales = rounded_rows(weight, FP8, None if row_scales else one_scale_of(weight, FP8))
    rounded = QuantizedTokens((tokens / one).to(FP8.dtype), one, (rows,))
    return tokens, rounded, weight, QuantizedWeight(values, scales.t().contiguous())


def error_of(found: QuantizedTokens, tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None) -> float:
    """The relative error against product and GEGLU of the same float8 factors. For normally distributed numbers,
    float8, with three bits of mantissa, has an error of 2.7e-2."""
    sums = (tokens.values.float() * tokens.scales) @ (weight.values.float() * weight.scales.t()).t()
    expected = torch_ops.gated(sums if bias is None else sums + bias.float(), GEGLU)
    # Triton's interpreter halves values just below a power of two.
    carries = (torch.frexp(expected / found.scales).mantissa.abs() > 0.968) & (DEVICE.type == "cpu")
    number = found.values.float() * found.scales
    return relative_error(torch.where(carries, expected, number), expected)


@pytest.mark.parametrize(("rows", "width", "half", "row_scales", "dtype"), first(2, [
    (70, 80, 48, False, torch.float16), (33, 160, 80, True, torch.bfloat16), (64, 64, 64, False, torch.bfloat16),
    (1, 48, 16, False, torch.float16), (130, 128, 96, True, torch.float16),
]))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_float8_product_with_geglu_is_close_to_the_exact_result_of_the_same_float8_factors(
    rows: int, width: int, half: int, row_scales: bool, dtype: torch.dtype, config: LaunchConfig
) -> None:
    """The allowed error is that of rounding the output to float8. half, row_scales: see factors. dtype: the dtype of
    the bias."""
    norm = LayerWeights(torch.rand(width, device=DEVICE) + 0.5, torch.randn(width, device=DEVICE))
    _, rounded, weight, low_bit = factors(rows, width, half, norm, row_scales)
    bias = torch.randn(2 * half, device=DEVICE).to(dtype)
    found = products.gated_product(rounded, low_bit, bias, gated_scale(weight, bias, norm).view(1, 1), config)
    assert found.values.shape == (rows, half) and found.unit is None
    assert error_of(found, rounded, low_bit, bias) < 3.5e-2


@pytest.mark.parametrize(("rows", "width", "half"), first(2, [(70, 80, 48), (1, 320, 16), (130, 64, 96)]))
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])], ids=str)
@pytest.mark.parametrize("config", EXACT, ids=str)
def test_a_gated_product_in_half_precision_rounds_only_its_output(
    rows: int, width: int, half: int, dtype: torch.dtype, config: LaunchConfig
) -> None:
    """The output differs from float64's, for the same factors, by rounding it once, besides float32's error of the
    sums. half: the number of outputs."""
    tokens, weight, bias = (
        torch.randn(shape, device=DEVICE).to(dtype) for shape in ((rows, width), (2 * half, width), (2 * half,))
    )
    found = products.exact_gated_product(tokens, weight, bias, config)
    expected = torch_ops.gated(functional.linear(tokens.double(), weight.double(), bias.double()), GEGLU)
    error = (found.double() - expected).abs()
    assert bool((error <= 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-5 * expected.abs().max()).all())


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_no_output_of_a_geglu_overflows_in_float8_with_the_scale_that_its_weights_give(outlier: float) -> None:
    """gated_scale() makes the scale from weights alone. Among the tokens after a layer norm are those with the largest
    possible outputs: parallel to a row of the weight. The largest output, with a margin of 1.3 for rounding, is at
    least a sixteenth of float8's largest number, and not above it. outlier: a factor of one row of the weight."""
    width = 64
    half = 24
    norm = LayerWeights(torch.rand(width) + 0.5, torch.randn(width))
    weight = torch.randn(2 * half, width)
    bias = torch.randn(2 * half)
    weight[half + 3] = weight[3] * 2
    weight[3] *= outlier
    scale = gated_scale(weight, bias, norm)
    hidden = torch.cat([torch.randn(200, width), weight * norm.weight, 50 * torch.eye(width)])
    tokens = torch.nn.functional.layer_norm(hidden, (width,), norm.weight, norm.bias)
    largest = torch_ops.gated(torch.nn.functional.linear(tokens, weight, bias), GEGLU).abs().max() / scale
    assert FP8.largest / 16 < largest * 1.3 <= FP8.largest, "none is cut off, and the range is used"


# On a GPU, there are kernels for the dtypes of networks.
RESULT = torch.float32 if DEVICE.type == "cpu" else torch.float16


def image(batch: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, channels, height, width, device=DEVICE).to(RESULT, memory_format=torch.channels_last)


def rounded_weight(weight: Tensor, kind: Kind) -> QuantizedWeight:
    values, scales = rounded_rows(as_rows(weight), kind)
    return QuantizedWeight(values, scales.t().contiguous())


@pytest.mark.parametrize(("batch", "channels", "out", "height", "width"), first(2, [
    (2, 48, 32, 9, 21), (1, 32, 48, 3, 2), (1, 16, 16, 8, 16), (1, 80, 64, 17, 33), (3, 32, 32, 1, 1),
]))
@pytest.mark.parametrize(("dtype", "config"), CONVOLVED, ids=str)
def test_a_convolution_in_8_bits_or_with_float16_sums_is_close_to_float64_on_its_factors(
    batch: int, channels: int, out: int, height: int, width: int, dtype: torch.dtype, config: LaunchConfig
) -> None:
    """dtype: the dtype of the factors; float16 ones are summed in float16. Each image of a batch has its own scale. The
    sizes have edges, pixels that do not fill a tile, and channels that do not fill the depth of a tile. At last, the
    output is compared with that of the factors before rounding."""
    given = image(batch, channels, height, width)
    weight = torch.randn(out, channels, 3, 3, device=DEVICE)
    weight *= torch.logspace(-1, 1, out, device=DEVICE)[:, None, None, None]
    given *= torch.logspace(-1, 1, batch, device=DEVICE)[:, None, None, None]
    if dtype == HALF:
        factors = given.to(HALF), weight.to(HALF).to(memory_format=torch.channels_last)
        found = products.half_sums_convolution(*factors, config)
        allowed = 1e-3
        back = factors[1].float()
        of_image = factors[0].float()
    else:
        kind = next(kind for kind in KINDS if kind.dtype == dtype)
        values, scales = rounded_rows(given.permute(0, 2, 3, 1).flatten(1), kind)
        values = values.view(batch, height, width, channels)
        low_bit = rounded_weight(weight, kind)
        # A GPU sums float8 products with 22 bits, and a single number may be small by chance.
        allowed = 1e-5 if DEVICE.type == "cpu" else 5e-2
        found = products.convolution(products.QuantizedImage(values, scales), low_bit, RESULT, config)
        back = (low_bit.values.float() * low_bit.scales.t()).view(out, 3, 3, channels).permute(0, 3, 1, 2)
        of_image = values.float().permute(0, 3, 1, 2) * scales[:, :, None, None]
    expected = functional.conv2d(of_image.double(), back.double(), padding=1)
    assert found.is_contiguous(memory_format=torch.channels_last)
    # Each output channel of each image is compared separately, because they differ by a factor of a hundred.
    for one, other in zip(found.double().flatten(0, 1), expected.flatten(0, 1), strict=True):
        assert relative_error(one, other) < allowed
    assert relative_error(found.double(), functional.conv2d(given.double(), weight.double(), padding=1)) < 5e-2


@pytest.mark.parametrize(("kind", "beside"), [(FP8, False), (INT8, False), (INT8, True)], ids=str)
def test_a_quantized_group_norm_uses_the_whole_range_of_the_format_and_keeps_nan(kind: Kind, beside: bool) -> None:
    """The largest value of each image of the batch becomes the format's largest number, and the others are rounded to
    the nearest. The result is the input of a convolution. Small feature maps are not quantized. An image with NaN gives
    an output of NaN. beside: whether the norm is that of two concatenated images."""
    first_half = image(2, 32, 32, 32)
    second = 3 + image(2, 16, 32, 32)
    first_half[1] *= torch.linspace(0.1, 10, 32, device=DEVICE)[:, None, None]
    given = VirtualConcatenation(first_half, second) if beside else first_half
    channels = given.shape[1]
    weight, *vectors, shift = (
        torch.randn(shape, device=DEVICE).to(RESULT)
        for shape in ((16, channels, 3, 3), (channels,), (channels,), (2, channels))
    )
    layer = LayerWeights(vectors[0], vectors[1])
    norm = GroupNorm("norm", channels, 4, 1e-5)
    consumer = LayerWeights(weight, None, (rounded_weight(weight, kind),))
    operators = NativeOperators(
        Launches(TuningCache()), torch_ops.attention, lambda *given: torch.float32, lambda *given: kind
    )
    rounded = operators.group_norm(given, layer, norm, True, shift, consumer)
    assert isinstance(rounded, products.QuantizedImage)
    together = torch.cat(given, 1) if isinstance(given, VirtualConcatenation) else given
    wide = LayerWeights(*(vector.float() for vector in vectors))
    expected = torch_ops.group_norm(together.float(), wide, norm, True, shift.float())
    ratio = expected.permute(0, 2, 3, 1) / rounded.scales[:, :, None, None]
    largest = ratio.abs().amax((1, 2, 3)) / kind.largest
    assert bool((largest < 1.0001).all() and (largest > 0.98).all()), "none is cut off, and the range is used"
    if kind is INT8:
        assert float((rounded.values - ratio).abs().max()) < 0.501, "to the nearest"
    else:
        # Triton's interpreter halves values just below a power of two.
        carries = (torch.frexp(ratio).mantissa.abs() > 0.968) & (DEVICE.type == "cpu")
        assert relative_error(torch.where(carries, ratio, rounded.values.float()), ratio) < 3.2e-2
    output = operators.convolution(rounded, consumer, Convolution("", channels, 16, 3, 1, 1))
    assert output.shape == (2, 16, 32, 32)
    # Small feature maps are not quantized.
    small = operators.group_norm(image(1, 32, 8, 8), LayerWeights(layer.weight[:32], None), norm, True, None, consumer)
    assert isinstance(small, Tensor)
    first_half[0, 3, 5, 7] = float("nan")
    output = operators.convolution(
        operators.group_norm(given, layer, norm, True, None, consumer), consumer, Convolution("", channels, 16, 3, 1, 1)
    )
    assert bool(output[0].isnan().all() and output[1].isfinite().all()), "eight bits hide no NaN"


def test_an_int8_convolution_is_timed_with_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """choice.measure() passes to time_ms: the convolution, to choose its launch config; norm and convolution in the
    model's dtype; and both in INT8. The fake times fall with each call, so INT8 is the best choice."""
    config = next(config for dtype, config in CONVOLVED if dtype == INT8.dtype)
    outputs = []
    monkeypatch.setitem(CONVOLUTIONS, INT8.dtype, replace(CONVOLUTIONS[INT8.dtype], candidates=(config,)))
    product = Product(2048, 9 * 32, 16, GROUP_NORMED, (32, 32))
    tuning_cache = TuningCache()
    choice = LowBit(tuning_cache, Launches(tuning_cache))

    def time_ms(work: Callable[[], Tensor]) -> float:
        outputs.append(work())
        return 1.0 / len(outputs)

    choice.measure(product, HALF, DEVICE, INT8, time_ms)
    _, exact, rounded = outputs
    assert 5e-3 < relative_error(rounded, exact) < 4e-2 and rounded.shape == (2, 16, 32, 32)
    assert choice.measured(product, HALF, INT8) == (1 / 2, 1 / 3) and choice.best(product, HALF, KINDS) is INT8


@pytest.mark.skipif(SWITCHES[HALF_SUMS].read() is None, reason="needs torch 2.7")
@pytest.mark.skipif(DEVICE.type == "cuda", reason="its kernel's tile is small, and there is none for Hopper")
@pytest.mark.parametrize(("ours_ms", "factor", "is_used"), [(0.5, 1.0, True), (0.99, 1.0, False), (0.5, 1.1, False)])
def test_float16_sums_are_used_if_they_are_allowed_and_correct_and_faster(
    monkeypatch: pytest.MonkeyPatch, ours_ms: float, factor: float, is_used: bool
) -> None:
    """Only within applied(HALF_SUMS) are they allowed; outside, the output is the library's bit for bit. ours_ms: the
    time of our convolution, against 1.0 ms of the library's; a gain of 1 % is not enough. factor: our convolution's
    output is multiplied by it; with 1.1, the output is wrong."""
    launches = Launches(TuningCache())
    kernel = CONVOLUTIONS[HALF]
    real = products.half_sums_convolution
    small = CONVOLVED[-1][1]
    monkeypatch.setitem(CONVOLUTIONS, HALF, replace(kernel, candidates=(LIBRARY, small)))
    monkeypatch.setattr(products, "half_sums_convolution", lambda *given: factor * real(*given))
    operators = NativeOperators(launches)
    given = image(1, 32, 5, 7).to(HALF)
    weight = torch.randn(32, 32, 3, 3, device=DEVICE).to(HALF, memory_format=torch.channels_last)
    convolve = lambda: operators.convolution(given, LayerWeights(weight, None), Convolution("", 32, 32, 3, 1, 1))  # noqa: E731
    exact = convolve()
    assert not launches.convolutions, "in full precision none is looked for"
    with applied(((HALF_SUMS, True),)):
        assert torch.equal(convolve(), exact), "nothing was measured yet"
        [size] = launches.convolutions
        assert tune_half_sums(launches, size, DEVICE, lambda work: 1.0 if work.args[0] == LIBRARY else ours_ms)
        found = convolve()
    assert torch.equal(found, exact) is not is_used and relative_error(found, exact) < 1e-3
    assert torch.equal(convolve(), exact)
