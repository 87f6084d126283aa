"""The kernels that quantize rows to int8 by the hosts' rule, against torch's operators.

The hosts' rule is how Forge Neo quantizes the input of a layer whose weight is stored in INT8. rule: HOSTS has no
rotation. Before quantizing, BUTTERFLIES and MATRIX rotate the rows in groups of 256 (ConvRot): by sums and differences,
or by matrix units. The reference for a norm or an activation is the rule, in torch, on the output of the kernel that
writes it in the model's dtype.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_operators import hosts_rows, relative_error
from grid import grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.core.layer_weights import LayerWeights, QuantizedWeight
from lib_onediff.core.leaves import AdaptiveNorm, RMSNorm
from lib_onediff.core.operators import Activation, Modulation, QuantizedTokens, Residual
from lib_onediff.devices.cuda.kernels import products, rounding
from lib_onediff.devices.cuda.kernels import tokens as native_tokens
from lib_onediff.devices.cuda.kernels.launch_config import INT8_PRODUCT
from lib_onediff.devices.cuda.kernels.rounding import Rule
from lib_onediff.devices.torch import quantized
from lib_onediff.weights.low_bit import INT8, Kind

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.float16
# Triton's interpreter has no bfloat16 products, and truncates to it instead of rounding.
TYPES = [torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
RULES = [Rule.HOSTS, Rule.BUTTERFLIES, Rule.MATRIX]


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def assert_same(found: QuantizedTokens, rows: Tensor, rule: Rule, moved: float = 2e-3) -> None:
    """Check rows (..., width) that were quantized by a rule against hosts_rows(), which computes it in torch. Sums in
    another order may change an integer by one. moved: the largest mean difference of the integers."""
    matrix = None if rule == Rule.HOSTS else quantized.hadamard(256, rows.device)
    values, scales = hosts_rows(rows.flatten(0, -2), matrix)
    assert torch.allclose(found.scales, scales, rtol=1e-5, atol=0)
    difference = (found.values.int() - values.int()).abs()
    assert int(difference.max()) <= 1
    assert float(difference.double().mean()) <= moved


@grid(rule=RULES, dtype=TYPES, width=[256, 768, 1280], scale=[1.0, 1e-4, 300.0])
def test_rows_are_quantized_by_the_hosts_rule(rule: Rule, dtype: torch.dtype, width: int, scale: float) -> None:
    """The reference is hosts_rows() in torch: the scales are close, and the integers differ by at most one. One row has
    only zeros. scale: multiplies the rows."""
    rows = random(3, 5, width, dtype=dtype) * scale
    rows[0, 1] = 0
    assert_same(rounding.rounded(rows, INT8, rule=rule), rows, rule)


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_small_integers_are_quantized_to_the_same_int8_numbers_as_by_torch(rule: Rule) -> None:
    """Small integers are rotated without a rounding error, so that the kernel and torch must give equal results."""
    rows = torch.randint(-3, 4, (4, 512)).to(DEVICE, HALF)
    rotation = 0 if rule == Rule.HOSTS else 256
    weight = QuantizedWeight(torch.zeros(1, 512, dtype=torch.int8, device=DEVICE), torch.ones(1, 1), rotation)
    values, scales = quantized.rounded_rows(quantized.rotated(rows, weight))
    found = rounding.rounded(rows, INT8, rule=rule)
    assert torch.equal(found.values, values) and torch.allclose(found.scales, scales, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_the_output_of_gelu_is_quantized_by_the_hosts_rule(rule: Rule) -> None:
    rows = random(5, 768)
    written = native_tokens.gelu(rows.clone())
    assert_same(rounding.rounded(rows, INT8, gelu=True, rule=rule), written, rule)


@pytest.mark.parametrize("rule", RULES)
def test_one_kernel_writes_the_output_of_gelu_in_int8_and_in_the_dtype_of_the_model(rule: Rule) -> None:
    """The output in the model's dtype replaces the input. Both outputs equal those of the kernels that write only one
    of them."""
    rows = random(5, 512)
    written, rounded = native_tokens.gelu(rows.clone()), rounding.rounded(rows, INT8, gelu=True, rule=rule)
    found = rounding.gelu_and_rounded(rows, rule)
    assert found.plain is rows and torch.equal(rows, written)
    assert torch.equal(found.values, rounded.values) and torch.equal(found.scales, rounded.scales)


@grid(rule=RULES, dtype=TYPES, width=[256, 1280, 2560])
def test_the_output_of_geglu_is_quantized_by_the_hosts_rule(rule: Rule, dtype: torch.dtype, width: int) -> None:
    hidden = random(2, 5, 2 * width, dtype=dtype)
    assert_same(rounding.geglu(hidden, INT8, rule), native_tokens.geglu(hidden), rule)


@grid(rule=RULES, dtype=TYPES, width=[256, 1280, 768], whole=[True, False])
def test_the_output_of_a_layer_norm_is_quantized_by_the_hosts_rule(
    rule: Rule, dtype: torch.dtype, width: int, whole: bool
) -> None:
    """With is_plain_too, the kernel also writes the output in the model's dtype, and the same int8 rows. whole: whether
    the residual has a deferred bias and a bias."""
    tokens, weight, bias = random(1, 5, width, dtype=dtype), random(width, dtype=dtype), random(width, dtype=dtype)
    residual = Residual(tokens.clone(), random(width, dtype=torch.float32), bias) if whole else Residual(tokens.clone())
    summed, found = rounding.layer_norm(residual, weight, bias, 1e-5, INT8, rule=rule)
    expected, written = native_tokens.layer_norm(residual, weight, bias, 1e-5)
    assert torch.equal(summed.deferred_bias, expected.deferred_bias)
    assert_same(found, written, rule)
    _, both = rounding.layer_norm(residual, weight, bias, 1e-5, INT8, rule=rule, is_plain_too=True)
    assert_both(both, found, both.plain)
    assert relative_error(both.plain, written) < torch.finfo(dtype).eps


@pytest.mark.parametrize("rule", RULES)
def test_the_output_of_an_adaptive_norm_is_quantized_by_the_hosts_rule(rule: Rule) -> None:
    """With is_plain_too, the kernel also writes the output in the model's dtype, and the same int8 rows."""
    tokens, update = random(2, 7, 512, dtype=torch.float32), random(2, 7, 512)
    shift, factor, gate = random(2, 3 * 512).chunk(3, dim=1)
    given: Callable[[], Residual] = lambda: Residual(tokens.clone(), update=update, gate=gate)  # noqa: E731
    how = None, AdaptiveNorm(512, 1e-6), Modulation(factor, shift), HALF
    summed, found = rounding.residual_norm(given(), *how, INT8, rule)
    expected, written = rounding.residual_norm(given(), *how, None)
    assert torch.equal(summed.tokens, expected.tokens)
    assert_same(found, written, rule)
    _, both = rounding.residual_norm(given(), *how, INT8, rule, is_plain_too=True)
    assert_both(both, found, written)


def assert_both(both: QuantizedTokens, found: QuantizedTokens, written: Tensor) -> None:
    """Assert that a kernel which writes rows in int8 and in the model's dtype (both) gives the same numbers as kernels
    that write them in int8 only (found) and in the model's dtype only (written)."""
    assert both.plain is not None and torch.equal(both.plain, written)
    assert torch.equal(both.values, found.values) and torch.equal(both.scales, found.scales)


@grid(rule=RULES, dtype=TYPES, width=[768, 512, 1280], plus_one=[True, False], modulated=[True, False])
def test_the_output_of_a_root_mean_square_norm_is_quantized_by_the_hosts_rule(
    rule: Rule, dtype: torch.dtype, width: int, plus_one: bool, modulated: bool
) -> None:
    """The norm reads a residual to which a normed update is added. With is_plain_too, the kernel also writes the output
    in the model's dtype. plus_one: whether norms multiply by 1 + weight. modulated: whether the output is scaled and
    shifted, and the update gated."""
    tokens, update = random(2, 3, width, dtype=torch.float32), random(2, 3, width, dtype=dtype)
    factor, shift, gate = random(2, 3 * width, dtype=dtype).chunk(3, dim=1)
    norm, layer = RMSNorm("", width, 1e-5, plus_one), LayerWeights(random(width, dtype=dtype), None)
    gate, modulation = (gate, Modulation(factor, shift)) if modulated else (None, None)

    def normed(kind: Kind | None, is_plain_too: bool = False) -> tuple[Residual, Any]:
        residual = Residual(tokens.clone(), update=update, gate=gate, norm=(layer, norm))
        given = residual, layer, norm, modulation, dtype, kind
        return rounding.residual_norm(*given, Rule.OURS if kind is None else rule, is_plain_too)

    summed, found = normed(INT8)
    expected, written = normed(None)
    assert torch.equal(summed.tokens, expected.tokens)
    assert_same(found, written, rule)
    assert_both(normed(INT8, is_plain_too=True)[1], found, written)


@grid(rule=RULES, activation=[Activation.SILU, Activation.SIGMOID, Activation.GELU], width=[512, 768])
def test_gated_rows_are_quantized_by_the_hosts_rule(rule: Rule, activation: Activation, width: int) -> None:
    """numbers * activation(gates) is quantized. Both are slices of a wider product, so that their rows are not
    contiguous."""
    product = random(2, 5, 3 * width + 16)
    numbers, gates = product[..., :width], product[..., 2 * width:3 * width]
    found = rounding.gated(numbers, gates, activation, INT8, rule)
    written = native_tokens.gated(numbers, gates, activation)
    assert_same(found, written, rule)
    assert_both(rounding.gated(numbers, gates, activation, INT8, rule, is_plain_too=True), found, written)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_rows_with_nan_or_infinity_get_a_scale_of_nan(rule: Rule, strange: float) -> None:
    """int8 has neither, so that the scale must carry the error into the output."""
    rows = torch.zeros(3, 768, device=DEVICE, dtype=HALF)
    rows[1, 700] = strange
    for found in (rounding.rounded(rows, INT8, rule=rule), rounding.geglu(rows.repeat(1, 2) + 1, INT8, rule)):
        assert found.scales.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("rotation", [0, 256])
@pytest.mark.parametrize("one_scale", [True, False])
def test_the_product_with_a_quantized_weight_is_close_to_the_one_with_its_decoded_weight(
    rotation: int, one_scale: bool
) -> None:
    """The reference is a product in float64 (see quantized_dense). The bound, 2 %, allows for the rounding of the input
    to int8. rotation: the group size of the weight's rotation; 0: none. one_scale: instead of one for each row."""
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
    """The decoded weight with its rotation undone, in float64."""
    dense = weight.values.double() * weight.scales.double().t()
    if not weight.rotation:
        return dense
    return (dense.unflatten(-1, (-1, 256)) @ quantized.hadamard(256, dense.device).double()).flatten(-2)


def test_the_rule_depends_on_the_rotation_of_the_weight_and_on_who_quantized_it() -> None:
    """given: the group size of the weight's rotation (0: none), and whether the host's file stores the weight
    quantized. Groups that are not 256 wide are rotated by another kernel. A weight that OneDiff quantized has
    Rule.OURS."""
    values, scales = torch.zeros(16, 256, dtype=torch.int8), torch.ones(1, 1)
    rules = [
        rounding.rule_of(QuantizedWeight(values, scales, *given), torch.device("cpu"))
        for given in ((0, True), (64, True), (256, True), (0, False))
    ]
    assert rules == [Rule.HOSTS, Rule.HOSTS, Rule.BUTTERFLIES, Rule.OURS]
