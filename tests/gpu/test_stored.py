"""Layers that a checkpoint stores in INT8, rotated INT8 or FP8, on a real GPU. First the rows that our kernels
quantize, by themselves or after a norm or an activation, against the rule of the hosts' kernels; then layers of each
format, with and without LoRAs, at the widths of Anima and SDXL, against float64.

rotation: the size of the groups of ConvRot's Hadamard rotation; 0: no rotation.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_operators import hosts_rows, relative_error, stored_layer
from torch import Tensor

from lib_onediff.core.card import TuningCache
from lib_onediff.core.layer_weights import LayerWeights, LowRank, QuantizedWeight
from lib_onediff.core.leaves import AdaptiveNorm, LayerNorm
from lib_onediff.core.operators import GEGLU, Activation, Modulation, QuantizedTokens, Residual
from lib_onediff.devices.cuda.kernels import products, rounding
from lib_onediff.devices.cuda.kernels import tokens as native_tokens
from lib_onediff.devices.cuda.kernels.launch_config import DOWN_PRODUCT, INT8_PRODUCT, Launches
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.devices.cuda.kernels.rounding import Rule
from lib_onediff.devices.cuda.low_bit.float8 import float8_support, unmet_requirement
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.devices.torch.quantized import hadamard
from lib_onediff.weights.low_bit import INT8

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
EPS = 1e-6
FLOAT8, INTEGERS = torch.float8_e4m3fn, torch.int8
ROTATIONS = pytest.mark.parametrize("rotation", [0, 256])
# The part of the integers that may differ, because sums are computed in another order, and because numbers may be in
# the middle between two numbers of bfloat16.
MOVED = 5e-3


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The model's dtype. Skips the test if this GPU has no INT8 products for it."""
    torch.manual_seed(0)
    lack = unmet_requirement(INT8, GPU, request.param)
    if lack:
        pytest.skip(lack)
    return request.param


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=GPU).to(dtype)


def rule_for(rotation: int) -> Rule:
    """The hosts' rule on this GPU for a weight with this rotation; 0: no rotation."""
    return rounding.hosts_rule(rotation, GPU)


def assert_quantized_as_by_hosts(found: QuantizedTokens, rows: Tensor, rotation: int) -> None:
    """Check that the rows (..., width) were quantized by the hosts' rule with this rotation, against hosts_rows in
    torch. A few integers may differ, by at most 2."""
    values, scales = hosts_rows(rows.flatten(0, -2), hadamard(rotation, GPU) if rotation else None)
    # The largest number of a row may be in the middle between two of its dtype.
    assert torch.allclose(found.scales, scales, rtol=torch.finfo(rows.dtype).eps, atol=0)
    difference = (found.values.int() - values.int()).abs()
    # In bfloat16, sums in another order may change a number and its quotient by one step each.
    assert int(difference.max()) <= 2
    assert float(difference.double().mean()) <= MOVED


# --- rows -------------------------------------------------------------------------------------------------------------


@ROTATIONS
@pytest.mark.parametrize("width", [256, 768, 1280, 2048, 3072, 8192, 16384])
@pytest.mark.parametrize("factor", [1.0, 1e-2, 300.0])
def test_plain_rows_are_quantized_by_the_rule_of_the_hosts(
    rotation: int, width: int, factor: float, dtype: torch.dtype
) -> None:
    """Reference: the hosts' rule in torch (hosts_rows). factor: makes the rows' numbers small or large. One row is
    zero."""
    rows = random(3, 171, width, dtype=dtype) * factor
    rows[0, 1] = 0
    assert_quantized_as_by_hosts(rounding.rounded(rows, INT8, rule=rule_for(rotation)), rows, rotation)


@ROTATIONS
@pytest.mark.parametrize("width", [1280, 5120, 8192])
def test_rows_after_a_gelu_or_a_geglu_are_quantized_by_the_rule_of_the_hosts(
    rotation: int, width: int, dtype: torch.dtype
) -> None:
    """Reference: the hosts' rule for the activation's result in the model's dtype, which the kernel without
    quantization returns (written). Also for the kernels that return this result besides the quantized rows, for a LoRA
    (both)."""
    rows, hidden = random(2, 99, 8192, dtype=dtype), random(2, 99, 2 * width, dtype=dtype)
    rule = rule_for(rotation)
    found = rounding.rounded(rows, INT8, gelu=True, rule=rule)
    assert_quantized_as_by_hosts(found, native_tokens.gelu(rows.clone()), rotation)
    both, written = rounding.gelu_and_rounded(rows.clone(), rule), native_tokens.gelu(rows.clone())
    assert torch.equal(both.plain, written)
    assert_quantized_as_by_hosts(both, written, rotation)
    if width != 8192:
        written = native_tokens.geglu(hidden)
        assert_quantized_as_by_hosts(rounding.geglu(hidden, INT8, rule), written, rotation)
        both = rounding.geglu(hidden, INT8, rule, is_plain_too=True)
        assert torch.allclose(both.plain, written, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
        assert_quantized_as_by_hosts(both, written, rotation)


@ROTATIONS
@pytest.mark.parametrize("width", [768, 1280])
def test_rows_of_a_layer_norm_are_quantized_by_the_rule_of_the_hosts(
    rotation: int, width: int, dtype: torch.dtype
) -> None:
    """Reference: the hosts' rule for the norm's result in the model's dtype, which the kernel without quantization
    returns (written). Also for the kernel that returns this result besides the quantized rows, for a LoRA (both)."""
    weight, bias = random(width, dtype=dtype), random(width, dtype=dtype)
    residual = Residual(random(2, 777, width, dtype=dtype), random(width, dtype=torch.float32), bias)
    whole, found = rounding.layer_norm(residual, weight, bias, EPS, INT8, rule=rule_for(rotation))
    expected, written = native_tokens.layer_norm(residual, weight, bias, EPS)
    assert torch.equal(whole.deferred_bias, expected.deferred_bias)
    assert_quantized_as_by_hosts(found, written, rotation)
    _, both = rounding.layer_norm(residual, weight, bias, EPS, INT8, rule=rule_for(rotation), is_plain_too=True)
    assert torch.allclose(both.plain, written, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    assert_quantized_as_by_hosts(both, written, rotation)


@ROTATIONS
def test_rows_of_an_adaptive_norm_are_quantized_by_the_rule_of_the_hosts(rotation: int, dtype: torch.dtype) -> None:
    """The kernel adds the gated update to the residual before the norm. Reference: the hosts' rule for the norm's
    result in the model's dtype (written). Also for the kernel that returns this result besides the quantized rows, for
    a LoRA (both)."""
    tokens = random(2, 777, 2048, dtype=torch.float32 if dtype == torch.float16 else dtype)
    update = random(2, 777, 2048, dtype=dtype)
    shift, factor, gate = random(2, 3 * 2048, dtype=dtype).chunk(3, dim=1)

    def given() -> Residual:
        return Residual(tokens.clone(), update=update, gate=gate)

    rule = rule_for(rotation)
    norm = None, AdaptiveNorm(2048, EPS), Modulation(factor, shift), dtype
    whole, found = rounding.residual_norm(given(), *norm, INT8, rule)
    expected, written = rounding.residual_norm(given(), *norm, None)
    assert torch.equal(whole.tokens, expected.tokens)
    assert_quantized_as_by_hosts(found, written, rotation)
    _, both = rounding.residual_norm(given(), *norm, INT8, rule, is_plain_too=True)
    # The same numbers, except the last digit: two kernels may contract products and sums differently.
    assert torch.allclose(both.plain, written, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    assert_quantized_as_by_hosts(both, written, rotation)


@ROTATIONS
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_the_scale_of_a_row_with_nan_or_infinity_is_nan(rotation: int, strange: float, dtype: torch.dtype) -> None:
    """Integers cannot be NaN. With a scale that is NaN, the layer's output for this row is NaN too, instead of an
    ordinary number."""
    rows = torch.ones(3, 1280, device=GPU, dtype=dtype)
    rows[1, 1200] = strange
    rule = rule_for(rotation)
    for found in (rounding.rounded(rows, INT8, rule=rule), rounding.geglu(rows.repeat(1, 2), INT8, rule)):
        assert found.scales.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("config", INT8_PRODUCT.candidates, ids=str)
@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize(("layers", "ranks"), [(1, 0), (1, 16), (1, 48), (3, 32)])
def test_an_int8_product_with_loras_is_exact_but_for_rounding_its_result(
    config: Any, one_scale: bool, layers: int, ranks: int, dtype: torch.dtype
) -> None:
    """Reference: the product of the same integers and scales in float64, with the LoRAs. config: how the kernel is
    launched. one_scale: one scale for the whole weight, or one for each of its columns. layers: how many layers of
    equal sizes are fused into one. ranks: the sum of the ranks of each layer's LoRAs; 0: no LoRAs."""
    values, scales = hosts_rows(random(333, 512, dtype=dtype))
    weight = torch.randint(-128, 128, (336, 512), device=GPU).to(torch.int8)
    columns = torch.rand(1, 1 if one_scale else 336, device=GPU) / 1000
    hidden, up = random(333, layers * ranks, dtype=dtype), random(336, ranks, dtype=dtype)
    found = products.int8_product(
        QuantizedTokens(values, scales, (333,)), QuantizedWeight(weight, columns), None, dtype, config,
        (hidden, up) if ranks else None,
    )
    exact = (values.double() * scales) @ (weight.double() * columns.t()).t()
    exact += hidden.double() @ torch.block_diag(*up.double().chunk(layers)).t()
    assert relative_error(found, exact) < torch.finfo(dtype).eps


@pytest.mark.parametrize("config", DOWN_PRODUCT.candidates, ids=str)
@pytest.mark.parametrize("shape", [(8192, 2048, 32), (333, 8192, 96), (77, 1024, 16)], ids=str)
def test_the_product_with_the_down_matrices_of_loras_is_exact_but_for_rounding_its_result(
    config: Any, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Reference: the same product in float64. config: how the kernel is launched. shape: (rows, width, ranks)."""
    rows, width, ranks = shape
    tokens, down = random(rows, width, dtype=dtype), random(ranks, width, dtype=dtype)
    found = products.down_product(tokens, down, config)
    assert relative_error(found, tokens.double() @ down.double().t()) < torch.finfo(dtype).eps


# --- layers -----------------------------------------------------------------------------------------------------------


def operators(dtype: torch.dtype) -> NativeOperators:
    """The native operators without measurements, with torch's attention, and with float8 products if this GPU has them.
    """
    result = float8_support(GPU, dtype).result
    return NativeOperators(Launches(TuningCache()), torch_ops.attention, lambda *given: result)


def layer_in_eight_bits(
    out: int, width: int, values: torch.dtype, rotation: int, dtype: torch.dtype, lora: bool
) -> LayerWeights:
    """A layer whose weight exists in 8 bits alone, as a host stores it. Its scales are such that the layer's output is
    about as large as its input. values: the 8-bit dtype. rotation: see QuantizedWeight. lora: with a LoRA of 16
    ranks."""
    if values == INTEGERS:
        weight = torch.randint(-128, 128, (out, width), device=GPU).to(values)
        scales = (torch.rand(1, out, device=GPU) + 0.5) / 74 / width**0.5
    else:
        weight, scales = random(out, width, dtype=dtype).to(values), torch.full((1, 1), width**-0.5, device=GPU)
    layer = LayerWeights(
        torch.empty(out, width, dtype=dtype, device="meta"), random(out, dtype=dtype),
        (QuantizedWeight(weight, scales, rotation),),
    )
    if not lora:
        return layer
    down, up = random(16, width, dtype=dtype) / width**0.5, random(out, 16, dtype=dtype) / 4
    return layer._replace(low_rank=LowRank(down, ((0, up),)))


def check_error(work: Callable[..., Tensor], dtype: torch.dtype, *layers: LayerWeights) -> None:
    """Check the error of our operators against float64. work: a function of operators, a dtype, and these layers.

    In INT8, the error may be 1.15 times that of torch's operators, which follow the hosts' rule. The latter is measured
    without LoRAs, because with LoRAs torch's operators do not round the input. In FP8, the error may be 0.07, that of
    three bits of mantissa in two layers.
    """
    torch.manual_seed(1)
    with torch.no_grad():
        ours = work(operators(dtype), dtype, *layers)
        torch.manual_seed(1)
        exact = work(torch_ops, torch.float64, *map(stored_layer, layers))
        plain = [layer._replace(low_rank=None) for layer in layers]
        torch.manual_seed(1)
        torchs = work(torch_ops, dtype, *plain)
        torch.manual_seed(1)
        without = work(torch_ops, torch.float64, *map(stored_layer, plain))
    is_int8 = layers[-1].low_bit[0].values.dtype == INTEGERS
    assert relative_error(ours, exact) < (1.15 * relative_error(torchs, without) if is_int8 else 7e-2)


def rounded_random(dtype: torch.dtype, rounded_to: torch.dtype, *shape: int) -> Tensor:
    """Random numbers in a dtype, after they were rounded to another one."""
    return torch.randn(shape, device=GPU).to(rounded_to).to(dtype)


# The 8-bit dtype of the weights, and their rotation.
KINDS = pytest.mark.parametrize(("values", "rotation"), [(INTEGERS, 0), (INTEGERS, 64), (INTEGERS, 256), (FLOAT8, 0)])
LORA = pytest.mark.parametrize("lora", [False, True])


@pytest.fixture(autouse=True)
def needs_the_units(request: pytest.FixtureRequest) -> None:
    """Skip the float8 cases on a GPU that does not multiply float8."""
    callspec = getattr(request.node, "callspec", None)
    values = None if callspec is None else callspec.params.get("values")
    if values == FLOAT8 and float8_support(GPU, torch.float16).result is None:
        pytest.skip("needs a GPU that multiplies float8")


@KINDS
@LORA
@pytest.mark.parametrize("rows", [1, 77, 1024])
def test_the_error_of_a_linear_layer_is_that_of_rounding_its_input(
    values: torch.dtype, rotation: int, lora: bool, rows: int, dtype: torch.dtype
) -> None:
    """The weight is stored in 8 bits (values: their dtype). The error against float64 is within the limit of
    check_error(). rows: the tokens of each of two images."""
    layer = layer_in_eight_bits(3072, 1024, values, rotation, dtype, lora)
    check_error(lambda ops, of, layer: ops.linear(rounded_random(of, dtype, 2, rows, 1024), layer), dtype, layer)


@KINDS
@LORA
@pytest.mark.parametrize("bias", [True, False])
def test_the_error_of_layers_after_an_adaptive_norm_is_that_of_rounding_their_input(
    values: torch.dtype, rotation: int, lora: bool, bias: bool, dtype: torch.dtype
) -> None:
    """Each of two layers follows an adaptive norm of the residual, to which its output is then added. The error against
    float64 is within the limit of check_error()."""
    layer = layer_in_eight_bits(2048, 2048, values, rotation, dtype, lora)
    layer = layer if bias else layer._replace(bias=None)

    def work(ops: Any, of: torch.dtype, layer: LayerWeights) -> Tensor:
        tokens = rounded_random(of, dtype, 2, 1000, 2048)
        # In float16, residuals are in float32.
        residual = Residual(tokens.float() if of == torch.float16 else tokens)
        shift, factor, gate = rounded_random(of, dtype, 2, 3 * 2048).chunk(3, dim=1)
        # In place: the kernel reads vectors that are adjacent in memory.
        factor += 3
        norm, modulation = AdaptiveNorm(2048, EPS), Modulation(factor, shift)
        for _ in range(2):
            residual, rows = ops.residual_norm(residual, None, norm, layer, modulation)
            residual = ops.add_linear(residual, rows, layer, gate)
        return ops.materialize(residual)

    check_error(work, dtype, layer)


@KINDS
@LORA
def test_the_error_of_the_feed_forward_of_a_unet_is_that_of_rounding_its_inputs(
    values: torch.dtype, rotation: int, lora: bool, dtype: torch.dtype
) -> None:
    """Two layer norms, and a GEGLU between two linear layers, at SDXL's widths. The error against float64 is within the
    limit of check_error()."""
    into = layer_in_eight_bits(10240, 1280, values, rotation, dtype, lora)
    out = layer_in_eight_bits(1280, 5120, values, rotation, dtype, lora)

    def work(ops: Any, of: torch.dtype, into: LayerWeights, out: LayerWeights) -> Tensor:
        residual = Residual(rounded_random(of, dtype, 2, 1024, 1280), None, rounded_random(of, dtype, 1280))
        vectors = LayerWeights(rounded_random(of, dtype, 1280), rounded_random(of, dtype, 1280))
        norm = LayerNorm("", 1280, EPS)
        residual, rows = ops.residual_norm(residual, vectors, norm, into)
        residual = ops.add_linear(residual, ops.gated_linear(rows, into, GEGLU, out), out)
        residual, rows = ops.residual_norm(residual, vectors, norm, into)
        return ops.materialize(residual) + ops.linear(rows, into)[..., :1280]

    check_error(work, dtype, into, out)


@KINDS
@LORA
def test_the_error_of_the_feed_forward_of_anima_is_that_of_rounding_its_inputs(
    values: torch.dtype, rotation: int, lora: bool, dtype: torch.dtype
) -> None:
    """A GELU between two linear layers, at Anima's widths. The error against float64 is within the limit of
    check_error()."""
    into, out = (layer_in_eight_bits(*shape, values, rotation, dtype, lora) for shape in ((8192, 2048), (2048, 8192)))

    def work(ops: Any, of: torch.dtype, into: LayerWeights, out: LayerWeights) -> Tensor:
        rows = ops.activated_linear(rounded_random(of, dtype, 2, 333, 2048), into, Activation.GELU, out)
        return ops.linear(rows, out)

    check_error(work, dtype, into, out)


@ROTATIONS
def test_a_replayed_graph_of_int8_layers_equals_launching_their_kernels_one_by_one(
    rotation: int, dtype: torch.dtype
) -> None:
    """The output is equal to the bit. One layer has a LoRA, the other has none."""
    layer = layer_in_eight_bits(2048, 2048, INTEGERS, rotation, dtype, lora=True)
    plain, ops, x = layer._replace(low_rank=None), operators(dtype), random(2, 500, 2048, dtype=dtype)

    def work() -> Tensor:
        return ops.linear(x, layer) + ops.linear(x, plain)

    with torch.no_grad():
        expected = work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = work()
        found.zero_()
        graph.replay()
    assert torch.equal(found, expected)
