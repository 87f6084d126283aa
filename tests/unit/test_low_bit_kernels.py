"""The kernels that produce 8-bit rows of tokens, compared with float64; and residuals after 8-bit products."""
from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from exact_operators import geglu as exact_geglu
from exact_operators import layer_norm as exact_layer_norm
from grid import ends, grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from exact_operators import one_scale_of, relative_error
from exact_operators import rms_norm as exact_rms_norm
from exact_operators import rounded_rows as exact_rows
from ladder_builders import NATIVE
from low_bit_builders import norm_scale, rounded_rows, use_low_bit

from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.core.leaves import AdaptiveNorm, LayerNorm, RMSNorm
from lib_onediff.core.operators import SWIGLU, Activation, Modulation, QuantizedTokens, Residual
from lib_onediff.devices.cuda.kernels import rounding
from lib_onediff.devices.cuda.kernels.launch_config import LAYER_NORM
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.devices.cuda.kernels.residuals import updated
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.low_bit import FP8, INT8, KINDS, Kind, empty_like

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Half a step of float8, relative to the value.
HALF_A_STEP = 2.0**-4
# Triton's interpreter halves values that should be rounded up to a power of two. This is the relative error over many
# values that follows.
INTERPRETED = 0.16


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def given_back(rows: QuantizedTokens) -> Tensor:
    """The rows in float64, multiplied by their scales."""
    return (rows.values.double() * rows.scales.double()).view(*rows.shape, -1)


def assert_rounded(rows: QuantizedTokens, exact: Tensor) -> None:
    """Check rows in eight bits against the exact ones (..., width): every value differs by at most half a quantization
    step; in float8, small values by at most 2**-10 of the scale, and only on a GPU. With one scale for each row, the
    scale fits the row's largest magnitude."""
    back = given_back(rows)
    one_scale = rows.scales.numel() == 1
    scales = rows.scales.double() if one_scale else rows.scales.double().view(*rows.shape, 1)
    if rows.values.dtype == INT8.dtype:
        # Rounding of float32 itself, besides the half step.
        assert bool(((back - exact).abs() <= 0.5 * scales + 1e-4 * exact.abs().amax(-1, keepdim=True)).all())
    elif DEVICE.type == "cuda":
        allowed = (HALF_A_STEP + 1e-3) * exact.abs() + 2.0**-10 * scales
        assert bool(((back - exact).abs() <= 1.01 * allowed).all())
    assert relative_error(back, exact) < (0.02 if rows.values.dtype == INT8.dtype else INTERPRETED)
    if not one_scale:
        assert torch.allclose(back.abs().amax(-1), exact.abs().amax(-1), rtol=2e-3), "the largest of a row is kept"


@grid(
    residual_of=list(product([torch.float16, torch.bfloat16, torch.float32], [True, False])),
    shape=[(2, 7, 96), (3, 33), (1, 1, 1280)],
    kind=KINDS,
    scaled=[True, False],
)
def test_an_8_bit_layer_norm_of_a_residual_is_exact_to_half_a_quantization_step(
    shape: tuple[int, ...], residual_of: tuple[torch.dtype, bool], kind: Kind, scaled: bool
) -> None:
    """residual_of: the dtype of its tokens, and whether it has every field, as after float8 products: two biases, and
    an update. scaled: the update is in bfloat16, and its rows are not multiplied by their scales yet. The sum of tokens
    and update is written back to the residual."""
    dtype, whole = residual_of
    tokens = random(*shape, dtype=dtype)
    weight = random(shape[-1], dtype=dtype)
    # As after float8 products: in bfloat16, with rows that are not scaled yet.
    update = random(*shape, dtype=torch.bfloat16 if scaled else dtype)
    scales = random(*shape[:-1], 1, dtype=torch.float32) if scaled else None
    deferred_bias = random(shape[-1], dtype=torch.float32)
    bias = random(shape[-1], dtype=dtype)
    residual = Residual(tokens.clone(), deferred_bias, bias, update, scales) if whole else Residual(tokens.clone())
    added = update.double() if scales is None else update.double() * scales.double()
    total = tokens.double() + added if whole else tokens.double()
    summed, normed = rounding.layer_norm(residual, weight, bias if whole else None, 1e-5, kind)
    assert normed.scales.shape == ((1, 1) if kind is FP8 else (tokens.numel() // shape[-1], 1))
    if kind is FP8:
        assert torch.equal(normed.scales, norm_scale(weight, bias if whole else None))
    vectors = deferred_bias.double() + bias.double() if whole else torch.zeros(shape[-1], device=DEVICE)
    assert_rounded(normed, exact_layer_norm(total + vectors, weight, bias if whole else None, 1e-5))
    assert summed.update is None and summed.update_scales is None and summed.bias is None
    assert relative_error(summed.tokens, total.to(dtype)) < 1e-2
    assert torch.allclose(summed.deferred_bias, vectors.float(), atol=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: kind and kind.name)
def test_an_8_bit_adaptive_norm_applies_the_modulation_of_each_image(kind: Kind | None, scaled: bool) -> None:
    """kind: the 8-bit format; None: the output is float16. scaled: the update's rows are not multiplied by their scales
    yet. float8 has one scale for both images, the larger of theirs."""
    tokens = random(2, 7, 96, dtype=torch.float32)
    update = random(2, 7, 96)
    scales = random(2, 7, 1, dtype=torch.float32) if scaled else None
    shift, factor, gate = random(2, 288).chunk(3, dim=1)
    added = update.double() * gate.double()[:, None] * (1 if scales is None else scales.double())
    residual = Residual(tokens.clone(), update=update, update_scales=scales, gate=gate)
    norm, modulation = AdaptiveNorm(96, 1e-6), Modulation(factor, shift)
    summed, normed = rounding.residual_norm(residual, None, norm, modulation, torch.float16, kind)
    assert relative_error(summed.tokens, tokens + added) < 1e-6
    each = [exact_layer_norm(total, factor[image], shift[image], 1e-6) for image, total in enumerate(tokens + added)]
    if not isinstance(normed, QuantizedTokens):
        assert kind is None and relative_error(normed, torch.stack(each)) < 1e-3
        return
    assert_rounded(normed, torch.stack(each))
    if kind is FP8:
        assert torch.equal(normed.scales, torch.maximum(*map(norm_scale, factor, shift)))


@grid(
    kind=[*KINDS, None], has_update_norm=[True, False], gated=[True, False], vectors=[0, 1, 2], plus_one=[True, False],
    weights=[torch.float16, torch.float32],
)
def test_an_rms_norm_kernel_adds_the_update_of_the_residual_with_its_norm_and_gate(
    kind: Kind | None, has_update_norm: bool, gated: bool, vectors: int, plus_one: bool, weights: torch.dtype
) -> None:
    """kind None: the output is float16. has_update_norm, gated: the update is normed, and multiplied by a gate.
    vectors: 1: the modulation is a factor; 2: and a shift. plus_one: the norm multiplies by weight + 1, and the
    update's norm by weight; or the reverse. weights: the dtype of the norms' weights. float8's scale is a power of two
    that holds the largest possible output."""
    width = 96
    tokens, update, scales = random(2, 7, width, dtype=torch.float32), random(2, 7, width), random(2, 7, 1).float()
    factor, shift, gate = random(2, 3 * width).chunk(3, dim=1)
    weight, update_weight = random(width, dtype=weights), random(width, dtype=weights)
    norm = RMSNorm("", width, 1e-5, plus_one)
    update_norm = LayerWeights(update_weight, None), RMSNorm("", width, 1e-2, not plus_one)
    residual = Residual(
        tokens.clone(), None, None, update, scales, gate if gated else None, update_norm if has_update_norm else None
    )
    added = update.double() * scales.double()
    if has_update_norm:
        added = exact_rms_norm(added, update_weight.double() + (not plus_one), 1e-2)
    if gated:
        added = added * gate.double()[:, None]
    total = tokens.double() + added
    expected = exact_rms_norm(total, weight.double() + plus_one, 1e-5)
    if vectors:
        expected = expected * factor.double()[:, None]
    if vectors == 2:
        expected = expected + shift.double()[:, None]
    modulation = [None, Modulation(factor), Modulation(factor, shift)][vectors]
    layer = LayerWeights(weight, None)
    assert rounding.has_norm_kernel(residual, layer, norm, modulation, torch.float16)
    summed, normed = rounding.residual_norm(residual, layer, norm, modulation, torch.float16, kind)
    assert relative_error(summed.tokens, total) < 1e-6 and summed.update is None and summed.norm is None
    if not isinstance(normed, QuantizedTokens):
        assert kind is None and normed.dtype == torch.float16 and relative_error(normed, expected) < 1e-3
        return
    assert_rounded(normed, expected)
    if kind is FP8:
        factors = weight.double() + plus_one if not vectors else (weight.double() + plus_one) * factor.double()
        largest = width**0.5 * factors.abs() + (shift.double().abs() if vectors == 2 else 0)
        _, exponent = torch.frexp((largest.amax() / FP8.largest).float())
        assert torch.equal(normed.scales, torch.exp2(exponent.float()).view(1, 1))


def test_the_norm_after_a_layer_and_the_next_norm_take_one_launch_besides_the_product(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each of two layers, one kernel norms its output, multiplies it by a gate, adds it to the residual, and norms
    the sum."""
    launched: list[str] = []
    launch = rounding.launch

    def noted(kernel: str, *given: Any, **how: Any) -> None:
        launched.append(kernel)
        launch(kernel, *given, **how)

    monkeypatch.setattr(rounding, "launch", noted)
    width = 96
    norm, layer = RMSNorm("", width, 1e-5), LayerWeights(random(width), None)
    out = LayerWeights(random(width, width), None)
    gate, scale = random(2, 2 * width).chunk(2, dim=1)
    ops = NativeOperators()
    residual = Residual(random(2, 5, width, dtype=torch.float32))
    for _ in range(2):
        residual = ops.add_linear(residual, random(2, 5, width), out, gate, (layer, norm))
        residual, _ = ops.residual_norm(residual, layer, norm, out, Modulation(scale))
    assert launched == ["rounding.norm_row"] * 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.SIGMOID])
def test_the_8_bit_output_of_a_gated_unit_is_exact_to_half_a_quantization_step(
    activation: Activation, kind: Kind
) -> None:
    """A gated unit (as in SwiGLU) multiplies one half of its input by the activation of the other."""
    numbers, gates = random(2, 5, 2 * 130).chunk(2, dim=-1)
    factor = gates.double().sigmoid() * (gates.double() if activation is Activation.SILU else 1)
    assert_rounded(rounding.gated(numbers, gates, activation, kind), numbers.double() * factor)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_8_bit_output_of_a_gelu_is_exact_to_half_a_quantization_step(kind: Kind) -> None:
    tokens = random(3, 5, 130)
    assert_rounded(rounding.rounded(tokens, kind, gelu=True), torch.nn.functional.gelu(tokens.double()))


@pytest.mark.parametrize("config", ends(LAYER_NORM.candidates), ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_launch_config_gives_almost_the_same_8_bit_rows(config: tuple[int, int], kind: Kind) -> None:
    """Over 99 % of the values equal those of the default launch config."""
    tokens = random(7, 96)
    weight = random(96)
    _, normed = rounding.layer_norm(Residual(tokens), weight, None, 1e-5, kind, config)
    _, first = rounding.layer_norm(Residual(tokens), weight, None, 1e-5, kind)
    assert torch.allclose(normed.scales, first.scales, rtol=1e-5)
    # Sums in another order may move a value across the middle between two steps.
    assert float((normed.values.float() == first.values.float()).double().mean()) > 0.99


@grid(dtype=[torch.float16, torch.bfloat16, torch.float32], kind=KINDS)
def test_8_bit_rows_of_geglu_and_without_an_operation_are_exact_to_half_a_quantization_step(
    dtype: torch.dtype, kind: Kind
) -> None:
    """float8 rows with a scale each also have `unit`, a tensor with the number one, by which a product may multiply in
    place of the scales."""
    hidden = random(2, 5, 2 * 96, dtype=dtype)
    gated = rounding.geglu(hidden, kind)
    assert_rounded(gated, exact_geglu(hidden))
    rows = random(6, 64, dtype=dtype)
    rounded = rounding.rounded(rows, kind)
    assert_rounded(rounded, rows.double())
    values, scales = exact_rows(rows, kind)
    assert torch.allclose(rounded.scales, scales, rtol=1e-6)
    units = [given.unit if given.unit is None else given.unit.item() for given in (rounded, gated)]
    assert units == ([1.0, 1.0] if kind is FP8 else [None, None])
    if kind is INT8:
        # A value in the middle between two steps may be rounded either way.
        assert int((rounded.values.int() - values.int()).abs().max()) <= 1


@grid(dtype=[torch.float16, torch.bfloat16], factor=[1.0, 1000.0, 1e5])
def test_the_scales_of_a_weight_fit_its_largest_values(dtype: torch.dtype, factor: float) -> None:
    """factor: one row is this many times larger. float8 has one scale for the weight, unless its rows differ by a
    factor of more than 1000; int8 has one for each row."""
    weight = random(48, 96, dtype=torch.bfloat16)
    weight[3] *= factor
    weight = weight.clamp(-6e4, 6e4).to(dtype)
    far = factor > 1000
    rounded = rounding.rounded_weight(weight, FP8)
    values = rounded.values
    scales = rounded.scales
    assert scales.shape == ((1, 48) if far else (1, 1))
    expected = exact_rows(weight, FP8)[1].t() if far else one_scale_of(weight, FP8)
    assert torch.allclose(scales, expected, rtol=1e-6)
    assert relative_error(values.double() * scales.double().t(), weight.double()) < INTERPRETED
    assert rounding.rounded_weight(weight, INT8).scales.shape == (1, 48)
    assert rounding.rounded_weight(torch.zeros_like(weight), FP8).values.float().abs().max() == 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_quantized_zeros_are_zeros_and_a_nan_is_nan(kind: Kind) -> None:
    rows = torch.zeros(2, 32, device=DEVICE)
    rows[1, 3] = float("nan")
    back = given_back(rounding.rounded(rows, kind))
    assert bool((back[0] == 0).all())
    if DEVICE.type == "cuda" or kind is INT8:
        # The interpreter's own rounding to float8.
        assert bool(back[1].isnan().any())


WIDTH = 640
EPS = 1e-5


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> NativeOperators:
    """The native backend's operators, with 8-bit products (use_low_bit)."""
    use_low_bit(monkeypatch)
    return runtime.devices.operators(NATIVE)


def weights_of(weight: Tensor, bias: Tensor | None = None, kind: Kind = FP8) -> LayerWeights:
    """A layer whose weight exists in its own dtype and, quantized by the kernel, in this 8-bit format."""
    quantized = empty_like(weight, kind)
    rounded_rows(weight, quantized.values, quantized.scales)
    return LayerWeights(weight, bias, (quantized,))


@pytest.mark.parametrize("result", [torch.float16, torch.bfloat16])
def test_the_next_norm_and_updated_add_the_update_of_an_8_bit_product(
    operators: NativeOperators, result: torch.dtype
) -> None:
    """After an 8-bit product, the residual has the product's rows and their scales as an update that is not added yet.
    Both ways to add it, the next norm and updated(), are compared with float64. result: the dtype of weights and
    tokens."""
    layer = weights_of(torch.randn(WIDTH, WIDTH).to(result))
    vector = torch.randn(WIDTH).to(result)
    tokens = torch.randn(2, 5, WIDTH).to(result)
    residual = operators.add_linear(Residual(tokens.clone()), torch.randn(2, 5, WIDTH).to(result), layer)
    assert residual.update.shape == tokens.shape and residual.update_scales.shape == (2, 5, 1)
    total = tokens.double() + residual.update.double() * residual.update_scales.double()
    norm = LayerNorm("norm", WIDTH, EPS)
    whole = residual._replace(tokens=tokens.clone())
    _, rows = operators.residual_norm(whole, LayerWeights(vector, None), norm, layer)
    back = (rows.values.double() * rows.scales).view(tokens.shape)
    assert relative_error(back, exact_layer_norm(total, vector, None, EPS)) < 0.03
    given = updated(residual)
    assert given.update is None and given.update_scales is None
    assert relative_error(given.tokens, total) < (1e-3 if result == torch.float16 else 5e-3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.float16])
def test_a_transformer_feed_forward_in_eight_bits_is_close_to_float64(
    operators: NativeOperators, kind: Kind, residual_dtype: torch.dtype
) -> None:
    """It has RMS norms before and after a layer, SwiGLU, and a bias that is multiplied by a gate. For a residual in
    float16 there is no norm kernel: torch's operators compute the norm, and its output is then quantized."""
    into = torch.randn(2 * WIDTH, WIDTH).half() / 8
    out = torch.randn(WIDTH, WIDTH).half() / 8
    bias = torch.randn(WIDTH).half()
    gate = torch.randn(2, WIDTH).half()
    vector = torch.randn(WIDTH).half()
    first = weights_of(into, None, kind)
    second = weights_of(out, bias, kind)
    tokens = torch.randn(2, 5, WIDTH).to(residual_dtype)
    scale = torch.randn(2, WIDTH).half()
    norm = RMSNorm("norm", WIDTH, EPS)
    layer = LayerWeights(vector, None)
    given = Residual(tokens.clone()), layer, norm, first, Modulation(scale)
    residual, rows = operators.residual_norm(*given)
    hidden = operators.gated_linear(rows, first, SWIGLU, second)
    assert isinstance(rows, QuantizedTokens) and isinstance(hidden, QuantizedTokens)
    expected = exact_rms_norm(tokens, vector, EPS) * scale.double()[:, None]
    value = expected @ into.double().t()
    update = torch.nn.functional.silu(value[..., :WIDTH]) * value[..., WIDTH:] @ out.double().t() + bias.double()
    for update_norm in (None, (layer, norm)):
        wanted = update if update_norm is None else exact_rms_norm(update, vector, EPS)
        added = operators.add_linear(Residual(tokens.clone()), hidden, second, gate, update_norm)
        wanted = tokens.double() + gate.double()[:, None] * wanted
        assert relative_error(operators.materialize(added), wanted) < 0.1
    assert torch.equal(operators.materialize(residual), tokens)
