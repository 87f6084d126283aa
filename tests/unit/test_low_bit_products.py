"""Products in float8: a feed-forward's first with its GEGLU, and a convolution with the norm before it."""
from __future__ import annotations

import pytest
import torch
from builders import relative_error
from exact_operators import one_scale_of, rounded_rows
from grid import first
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

import torch.nn.functional as functional

from lib_onediff.core.affine import Affine, QuantizedWeight
from lib_onediff.core.leaves import Convolution, GroupNorm
from lib_onediff.core.operators import QuantizedTokens
from lib_onediff.core.tuning_cache import TuningCache
from lib_onediff.devices.cuda.kernels import products
from lib_onediff.devices.cuda.kernels.launch_config import (
    CONVOLUTION,
    EXACT_GATED_PRODUCT,
    GATED_PRODUCT,
    LIBRARY,
    LaunchConfig,
    Launches,
)
from lib_onediff.devices.cuda.kernels.operators import NativeOperators, VirtualConcatenation
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.weights.low_bit import FP8, as_rows, gated_scale, normed_scale

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# By addresses, and copied by the GPU. On one, only what it can launch.
CONFIGS = [(0, 64, 64, 64, 8, 4, 2), (1, 64, 64, 64, 8, 4, 2)]
CONVOLUTIONS = [(0, 8, 16, 32, 32, 8, 4, 2), (1, 8, 16, 32, 32, 8, 4, 2)]
EXACT = CONFIGS
if DEVICE.type == "cuda":
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    CONFIGS, CONVOLUTIONS, EXACT = (
        [config for config in kernel.candidates if config != LIBRARY and (is_hopper or not config[0])]
        for kernel in (GATED_PRODUCT, CONVOLUTION, EXACT_GATED_PRODUCT)
    )


def factors(
    rows: int, width: int, half: int, norm: Affine, row_scales: bool
) -> tuple[Tensor, QuantizedTokens, Tensor, QuantizedWeight]:
    """Tokens as the norm gives them and a weight, each in float32 and in float8."""
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
    """Relative, against the same rounded factors; of normal numbers, three bits after the point make 2.7e-2."""
    sums = (tokens.values.float() * tokens.scales) @ (weight.values.float() * weight.scales.t()).t()
    expected = torch_ops.geglu(sums if bias is None else sums + bias.float())
    # Triton's interpreter rounds what is just below a power of two to half of it.
    carries = (torch.frexp(expected / found.scales).mantissa.abs() > 0.968) & (DEVICE.type == "cpu")
    number = found.values.float() * found.scales
    return relative_error(torch.where(carries, expected, number), expected)


@pytest.mark.parametrize(("rows", "width", "half", "row_scales", "dtype"), first(2, [
    (70, 80, 48, False, torch.float16), (33, 160, 80, True, torch.bfloat16), (64, 64, 64, False, torch.bfloat16),
    (1, 48, 16, False, torch.float16), (130, 128, 96, True, torch.float16),
]))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_is_the_geglu_of_the_product(
    rows: int, width: int, half: int, row_scales: bool, dtype: torch.dtype, config: LaunchConfig
) -> None:
    norm = Affine(torch.rand(width, device=DEVICE) + 0.5, torch.randn(width, device=DEVICE))
    _, rounded, weight, low_bit = factors(rows, width, half, norm, row_scales)
    bias = torch.randn(2 * half, device=DEVICE).to(dtype)
    found = products.gated_product(rounded, low_bit, bias, gated_scale(weight, bias, norm).view(1, 1), config)
    assert found.values.shape == (rows, half) and found.unit is None
    assert error_of(found, rounded, low_bit, bias) < 3.5e-2


@pytest.mark.parametrize(("rows", "width", "half"), first(2, [(70, 80, 48), (1, 320, 16), (130, 64, 96)]))
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])], ids=str)
@pytest.mark.parametrize("config", EXACT, ids=str)
def test_in_half_precision_it_is_rounded_once(
    rows: int, width: int, half: int, dtype: torch.dtype, config: LaunchConfig
) -> None:
    tokens, weight, bias = (
        torch.randn(shape, device=DEVICE).to(dtype) for shape in ((rows, width), (2 * half, width), (2 * half,))
    )
    found = products.exact_gated_product(tokens, weight, bias, config)
    expected = torch_ops.geglu(functional.linear(tokens.double(), weight.double(), bias.double()))
    error = (found.double() - expected).abs()
    assert bool((error <= 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-5 * expected.abs().max()).all())


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_nothing_is_larger_than_the_scale_says(outlier: float) -> None:
    """The worst tokens that a layer norm can give: along a row of the weight."""
    width, half = 64, 24
    norm = Affine(torch.rand(width) + 0.5, torch.randn(width))
    weight, bias = torch.randn(2 * half, width), torch.randn(2 * half)
    weight[half + 3] = weight[3] * 2
    weight[3] *= outlier
    scale = gated_scale(weight, bias, norm)
    hidden = torch.cat([torch.randn(200, width), weight * norm.weight, 50 * torch.eye(width)])
    tokens = torch.nn.functional.layer_norm(hidden, (width,), norm.weight, norm.bias)
    largest = torch_ops.geglu(torch.nn.functional.linear(tokens, weight, bias)).abs().max() / scale
    assert FP8.largest / 16 < largest * 1.3 <= FP8.largest, "none is cut off, and the range is used"


NORMAL = 2.7e-2
# On a GPU, kernels are there for the types that networks have.
RESULT = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16


def image(batch: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randn(batch, channels, height, width, device=DEVICE).to(memory_format=torch.channels_last)


def rounded_weight(weight: Tensor) -> QuantizedWeight:
    values, scales = rounded_rows(as_rows(weight), FP8)
    return QuantizedWeight(values, scales.t().contiguous())


@pytest.mark.parametrize(("batch", "channels", "out", "height", "width"), first(2, [
    (2, 48, 32, 9, 21), (1, 32, 48, 3, 2), (1, 16, 16, 8, 16), (1, 80, 64, 17, 33), (3, 32, 32, 1, 1),
]))
@pytest.mark.parametrize("config", CONVOLUTIONS, ids=str)
def test_it_is_the_convolution_of_the_rounded_factors(
    batch: int, channels: int, out: int, height: int, width: int, config: LaunchConfig
) -> None:
    """Edges, pixels that fill no tile, and channels that fill no step."""
    given, weight = image(batch, channels, height, width), torch.randn(out, channels, 3, 3, device=DEVICE)
    weight *= torch.logspace(-3, 3, out, device=DEVICE)[:, None, None, None]
    scale = given.abs().max().view(1, 1) / FP8.largest
    rounded = products.QuantizedImage((given.permute(0, 2, 3, 1) / scale).to(FP8.dtype).contiguous(), scale)
    low_bit = rounded_weight(weight)
    found = products.convolution(rounded, low_bit, RESULT, config)
    back = (low_bit.values.float() * low_bit.scales.t()).view(out, 3, 3, channels).permute(0, 3, 1, 2)
    expected = functional.conv2d(rounded.values.float().permute(0, 3, 1, 2) * scale, back, padding=1)
    assert found.is_contiguous(memory_format=torch.channels_last)
    # Each output channel by itself: they differ a million times.
    for one, other in zip(found.unbind(1), expected.unbind(1), strict=True):
        # A GPU sums products of float8 in 22 bits.
        assert relative_error(one, other) < (1e-5 if DEVICE.type == "cpu" else 3e-3)
    assert relative_error(found, functional.conv2d(given, weight, padding=1)) < 5e-2


@pytest.mark.parametrize("beside", [False, True])
def test_the_norm_is_written_in_float8(beside: bool) -> None:
    """With a shift, of one image or two side by side, as group_norm gives it."""
    first_half, second = image(2, 32, 32, 32), 3 + image(2, 16, 32, 32)
    given = VirtualConcatenation(first_half, second) if beside else first_half
    channels = given.shape[1]
    affine = Affine(torch.randn(channels, device=DEVICE), torch.randn(channels, device=DEVICE))
    norm, shift = GroupNorm("norm", channels, 4, 1e-5), torch.randn(2, channels, device=DEVICE)
    weight = torch.randn(16, channels, 3, 3, device=DEVICE) / channels**0.5
    reader = Affine(weight, None, (rounded_weight(weight),), normed_scale=normed_scale(affine).view(1, 1))
    operators = NativeOperators(
        Launches(TuningCache()), torch_ops.attention, lambda *given: torch.float32, lambda *given: FP8
    )
    rounded = operators.group_norm(given, affine, norm, True, shift, reader)
    assert isinstance(rounded, products.QuantizedImage)
    together = torch.cat(given, 1) if isinstance(given, VirtualConcatenation) else given
    expected = torch_ops.group_norm(together, affine, norm, True, shift)
    ratio = expected.permute(0, 2, 3, 1) / rounded.scale
    assert float(ratio.abs().max()) <= FP8.largest
    # Triton's interpreter rounds what is just below a power of two to half of it.
    carries = (torch.frexp(ratio).mantissa.abs() > 0.968) & (DEVICE.type == "cpu")
    assert relative_error(torch.where(carries, ratio, rounded.values.float()), ratio) < 1.2 * NORMAL
    output = operators.convolution(rounded, reader, Convolution("", channels, 16, 3, 1, 1))
    assert output.shape == (2, 16, 32, 32)
    # Small images stay as they are.
    small = operators.group_norm(image(1, 32, 8, 8), Affine(affine.weight[:32], None), norm, True, None, reader)
    assert isinstance(small, Tensor)


@pytest.mark.parametrize("members", [256, 1000, 4096 * 10])
def test_nothing_that_a_norm_can_give_is_too_large(members: int) -> None:
    """One number of a group that is as far from the others as it can be, at the largest weight and bias."""
    affine = Affine(torch.tensor([0.5, 3.0]), torch.tensor([0.0, 7.0]))
    given = torch.zeros(1, 2, members)
    given[:, :, 5] = 100.0
    normed = functional.group_norm(given, 2, affine.weight, affine.bias, 1e-12)
    from lib_onediff.weights.low_bit import deviations

    largest = float((normed / normed_scale(affine) / deviations(members)).max())
    assert FP8.largest / 5 < largest <= FP8.largest
