"""The kernels that round rows of int8 as hosts do, and rotate them, against torch's: the same integers."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact_operators import hosts_rows, relative_error
from grid import grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.core.layer_weights import QuantizedWeight
from lib_onediff.core.operators import Modulation, QuantizedTokens, Residual
from lib_onediff.devices.cuda.kernels import products, rounding
from lib_onediff.devices.cuda.kernels import tokens as native_tokens
from lib_onediff.devices.cuda.kernels.launch_config import INT8_PRODUCT
from lib_onediff.devices.cuda.kernels.rounding import Rule
from lib_onediff.devices.torch import quantized
from lib_onediff.weights.low_bit import INT8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.float16
# Triton's interpreter multiplies no bfloat16, and rounds to it by cutting off.
TYPES = [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
RULES = [Rule.HOSTS, Rule.BUTTERFLIES, Rule.MATRIX]


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def assert_same(found: QuantizedTokens, rows: Tensor, rule: Rule, moved: float = 2e-3) -> None:
    """moved: the share of integers that sums in another order may move to the next one."""
    matrix = None if rule == Rule.HOSTS else quantized.hadamard(256, rows.device)
    values, scales = hosts_rows(rows.flatten(0, -2), matrix)
    assert torch.allclose(found.scales, scales, rtol=1e-5, atol=0)
    difference = (found.values.int() - values.int()).abs()
    assert int(difference.max()) <= 1
    assert float(difference.double().mean()) <= moved


@grid(rule=RULES, dtype=TYPES, width=[256, 768, 1280], scale=[1.0, 1e-4, 300.0])
def test_plain_rows(rule: Rule, dtype: torch.dtype, width: int, scale: float) -> None:
    rows = random(3, 5, width, dtype=dtype) * scale
    rows[0, 1] = 0
    assert_same(rounding.rounded(rows, INT8, rule=rule), rows, rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_has_what_torchs_operators_give(rule: Rule) -> None:
    """Of numbers that both rotate without an error: small integers."""
    rows = torch.randint(-3, 4, (4, 512)).to(DEVICE, HALF)
    rotation = 0 if rule == Rule.HOSTS else 256
    weight = QuantizedWeight(torch.zeros(1, 512, dtype=torch.int8, device=DEVICE), torch.ones(1, 1), rotation)
    values, scales = quantized.rounded_rows(quantized.rotated(rows, weight))
    found = rounding.rounded(rows, INT8, rule=rule)
    assert torch.equal(found.values, values) and torch.allclose(found.scales, scales, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_gelu(rule: Rule) -> None:
    rows = random(5, 768)
    written = native_tokens.gelu(rows.clone())
    assert_same(rounding.rounded(rows, INT8, gelu=True, rule=rule), written, rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_gelu_is_written_as_it_is_too(rule: Rule) -> None:
    rows = random(5, 512)
    written, rounded = native_tokens.gelu(rows.clone()), rounding.rounded(rows, INT8, gelu=True, rule=rule)
    found = rounding.gelu_and_rounded(rows, rule)
    assert found.plain is rows and torch.equal(rows, written)
    assert torch.equal(found.values, rounded.values) and torch.equal(found.scales, rounded.scales)


@grid(rule=RULES, dtype=TYPES, width=[256, 1280, 2560])
def test_geglu(rule: Rule, dtype: torch.dtype, width: int) -> None:
    hidden = random(2, 5, 2 * width, dtype=dtype)
    assert_same(rounding.geglu(hidden, INT8, rule), native_tokens.geglu(hidden), rule)


@grid(rule=RULES, dtype=TYPES, width=[256, 1280, 768], whole=[True, False])
def test_a_layer_norm(rule: Rule, dtype: torch.dtype, width: int, whole: bool) -> None:
    tokens, weight, bias = random(1, 5, width, dtype=dtype), random(width, dtype=dtype), random(width, dtype=dtype)
    residual = Residual(tokens.clone(), random(width, dtype=torch.float32), bias) if whole else Residual(tokens.clone())
    standing, found = rounding.layer_norm(residual, weight, bias, 1e-5, INT8, rule=rule)
    expected, written = native_tokens.layer_norm(residual, weight, bias, 1e-5)
    assert torch.equal(standing.deferred_bias, expected.deferred_bias)
    assert_same(found, written, rule)


@pytest.mark.parametrize("rule", RULES)
def test_an_adaptive_norm(rule: Rule) -> None:
    tokens, update = random(2, 7, 512, dtype=torch.float32), random(2, 7, 512)
    shift, factor, gate = random(2, 3 * 512).chunk(3, dim=1)
    given: Callable[[], Residual] = lambda: Residual(tokens.clone(), update=update, gate=gate)  # noqa: E731
    standing, found = rounding.adaptive_norm(given(), Modulation(factor, shift), 1e-6, HALF, INT8, rule)
    expected, written = rounding.adaptive_norm(given(), Modulation(factor, shift), 1e-6, HALF, None)
    assert torch.equal(standing.tokens, expected.tokens)
    assert_same(found, written, rule)
    _, both = rounding.adaptive_norm(given(), Modulation(factor, shift), 1e-6, HALF, INT8, rule, is_plain_too=True)
    assert torch.equal(both.plain, written)
    assert torch.equal(both.values, found.values) and torch.equal(both.scales, found.scales)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(rule: Rule, strange: float) -> None:
    rows = torch.zeros(3, 768, device=DEVICE, dtype=HALF)
    rows[1, 700] = strange
    for found in (rounding.rounded(rows, INT8, rule=rule), rounding.geglu(rows.repeat(1, 2) + 1, INT8, rule)):
        assert found.scales.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("rotation", [0, 256])
@pytest.mark.parametrize("one_scale", [True, False])
def test_rows_times_a_stored_weight_are_the_hosts_product(rotation: int, one_scale: bool) -> None:
    rows, width, out = 20, 512, 48
    values = torch.randint(-128, 128, (out, width), device=DEVICE).to(torch.int8)
    scales = torch.rand(1, 1 if one_scale else out, device=DEVICE) / 1000
    weight = QuantizedWeight(values, scales, rotation)
    x, bias = random(rows, width), random(out)
    rounded = rounding.rounded(x, INT8, rule=rounding.rule_of(weight, DEVICE))
    config = (32, 32, 32, 8, 4, 2) if DEVICE.type == "cpu" else INT8_PRODUCT.candidates[0]
    found = products.int8_product(rounded, weight, bias, HALF, config)
    sums = x.double() @ quantized_dense(weight).t() + bias.double()
    assert relative_error(found, sums) < 0.02


def quantized_dense(weight: QuantizedWeight) -> Tensor:
    """The weight in the basis of the input, in float64."""
    dense = weight.values.double() * weight.scales.double().t()
    if not weight.rotation:
        return dense
    return (dense.unflatten(-1, (-1, 256)) @ quantized.hadamard(256, dense.device).double()).flatten(-2)


def test_the_rule_follows_the_weight() -> None:
    values, scales = torch.zeros(16, 256, dtype=torch.int8), torch.ones(1, 1)
    rules = {
        rounding.rule_of(QuantizedWeight(values, scales, *given), torch.device("cpu"))
        for given in ((0, True), (64, True), (256, True), (0, False))
    }
    assert rules == {Rule.HOSTS, Rule.BUTTERFLIES, Rule.OURS}
