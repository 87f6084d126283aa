"""A product in float8: a feed-forward's first with its GEGLU."""
from __future__ import annotations

import pytest
import torch
from builders import relative_error
from exact_operators import one_scale_of, rounded_rows
from grid import first
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")


from lib_onediff.core.affine import Affine, QuantizedWeight
from lib_onediff.core.operators import QuantizedTokens
from lib_onediff.devices.cuda.low_bit import products
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.weights.low_bit import FP8, gated_scale

if products.TensorDescriptor is None:
    pytest.skip("this Triton has no tensor descriptors", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = (64, 64, 64, 8, 4, 2)


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
def test_it_is_the_geglu_of_the_product(rows: int, width: int, half: int, row_scales: bool, dtype: torch.dtype) -> None:
    norm = Affine(torch.rand(width, device=DEVICE) + 0.5, torch.randn(width, device=DEVICE))
    _, rounded, weight, low_bit = factors(rows, width, half, norm, row_scales)
    bias = torch.randn(2 * half, device=DEVICE).to(dtype)
    found = products.gated_product(rounded, low_bit, bias, gated_scale(weight, bias, norm).view(1, 1), CONFIG)
    assert found.values.shape == (rows, half) and found.unit is None
    assert error_of(found, rounded, low_bit, bias) < 3.5e-2
    found = products.gated_product(rounded, low_bit, None, gated_scale(weight, None, norm).view(1, 1), CONFIG)
    assert error_of(found, rounded, low_bit, None) < 3.5e-2


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
