"""The kernels of single-stream transformers on a real GPU, at the widths of Z-Image and Krea 2: norms that also add the
residual's update, gated units, and heads. Their errors against float64 are compared with those of torch's operators."""
from __future__ import annotations

from typing import Any

import exact_operators as exact
import pytest
import torch
from exact_operators import hosts_rows, relative_error
from torch import Tensor

from lib_onediff.core.card import TuningCache
from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.core.leaves import AdaptiveNorm, RMSNorm
from lib_onediff.core.operators import (
    SWIGLU,
    Activation,
    Heads,
    Modulation,
    QuantizedTokens,
    Residual,
    Rotary,
)
from lib_onediff.devices.cuda.kernels import rounding
from lib_onediff.devices.cuda.kernels import tokens as native_tokens
from lib_onediff.devices.cuda.kernels.launch_config import Launches
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.devices.cuda.low_bit.float8 import unmet_requirement
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.devices.torch.attention import Attention
from lib_onediff.devices.torch.quantized import hadamard
from lib_onediff.weights.low_bit import FP8, INT8

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
WIDTHS = pytest.mark.parametrize("width", [2560, 3840, 6144])
# The largest ratio of our error to that of torch, which rounds after each operator.
WORST_RATIO = 1.1
# How much larger than torch's own error ours may be, because of the order of float32 sums.
FLOAT32_ROUNDING = 4 * torch.finfo(torch.float32).eps
EPS = 1e-5
BATCH, TOKENS = 2, 333


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops() -> NativeOperators:
    """The native operators without measurements, with torch's attention."""
    return NativeOperators(Launches(TuningCache()), torch_ops.attention)


def random(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device=GPU) + mean).to(dtype)


def assert_as_good(ours: Tensor, torchs: Tensor, expected: Tensor) -> None:
    """Check that our error against float64 (expected) is at most WORST_RATIO times torch's, plus FLOAT32_ROUNDING."""
    assert ours.dtype == torchs.dtype
    assert relative_error(ours, expected) <= WORST_RATIO * relative_error(torchs, expected) + FLOAT32_ROUNDING


def a_residual(width: int, dtype: torch.dtype, update_norm: Any, gate: Tensor | None) -> Residual:
    """A residual of BATCH images with TOKENS tokens each, and a random update that is not added yet. update_norm: the
    update's norm, as Residual.norm; None: no norm. gate: the update's gate, or None."""
    tokens = random(BATCH, TOKENS, width, dtype=torch.float32 if dtype == torch.float16 else dtype)
    return Residual(tokens, update=random(BATCH, TOKENS, width, dtype=dtype), gate=gate, norm=update_norm)


def copied(residual: Residual) -> Residual:
    """The same residual with a copy of its tokens, because operators add the update to the tokens in place."""
    return residual._replace(tokens=residual.tokens.clone())


def wide(given: Any) -> Any:
    """A tensor in float64; or a tuple, in which all tensors are in float64. Anything else is returned as it is."""
    if isinstance(given, Tensor):
        return given.double()
    if isinstance(given, tuple) and hasattr(given, "_make"):
        return given._make(map(wide, given))
    return tuple(map(wide, given)) if isinstance(given, tuple) else given


def exact_sum(residual: Residual) -> Tensor:
    """The residual's tokens with its update added, in float64."""
    update = residual.update.double()
    if residual.norm is not None:
        layer, norm = residual.norm
        update = exact.rms_norm(update, layer.weight.double() + norm.plus_one, norm.eps)
    if residual.gate is not None:
        update = update * residual.gate.double()[:, None]
    return residual.tokens.double() + update


@DTYPES
@WIDTHS
@pytest.mark.parametrize("plus_one", [True, False])
@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("vectors", [0, 1, 2])
@pytest.mark.parametrize("weights", ["the model's", "float32"])
def test_an_rms_norm_that_adds_an_update_to_the_residual_is_as_accurate_as_torch(
    ops: NativeOperators, width: int, dtype: torch.dtype, plus_one: bool, behind: bool, vectors: int, weights: str
) -> None:
    """This holds for both results, the new residual and its norm. plus_one: the norm multiplies by 1 + weight. behind:
    the update is normed before it is added. vectors: the modulation of the result; 0: none, 1: by a scale, 2: by a
    scale and a shift. weights: the dtype of the norm's weights."""
    of_weights = torch.float32 if weights == "float32" else dtype
    layer = LayerWeights(random(width, dtype=of_weights), None)
    norm = RMSNorm("", width, EPS, plus_one)
    scale, shift, gate = random(BATCH, 3 * width, dtype=dtype).chunk(3, dim=1)
    modulation = [None, Modulation(scale), Modulation(scale, shift)][vectors]
    residual = a_residual(width, dtype, (layer, norm) if behind else None, gate if vectors else None)
    consumer = LayerWeights(random(16, width, dtype=dtype), None)
    assert rounding.has_norm_kernel(residual, layer, norm, modulation, dtype)
    whole_residual, normed = ops.residual_norm(copied(residual), layer, norm, consumer, modulation)
    torchs, rounded = torch_ops.residual_norm(copied(residual), layer, norm, consumer, modulation)
    total = exact_sum(residual)
    expected = exact.rms_norm(total, layer.weight.double() + plus_one, EPS)
    if modulation is not None:
        expected = expected * scale.double()[:, None]
    if vectors == 2:
        expected = expected + shift.double()[:, None]
    assert_as_good(whole_residual.tokens, torchs.tokens, total)
    assert_as_good(normed, rounded, expected)
    if behind:
        assert_as_good(ops.materialize(copied(residual)), torch_ops.materialize(residual), total)


@DTYPES
def test_an_adaptive_norm_with_a_scale_and_no_shift_is_as_accurate_as_torch(
    ops: NativeOperators, dtype: torch.dtype
) -> None:
    """Z-Image ends with such a norm: a layer norm without weights, which adds an update to the residual first."""
    width = 3840
    norm = AdaptiveNorm(width, 1e-6)
    behind = LayerWeights(random(width, dtype=dtype), None), RMSNorm("", width, EPS)
    residual = a_residual(width, dtype, behind, random(BATCH, width, dtype=dtype))
    modulation = Modulation(random(BATCH, width, dtype=dtype))
    consumer = LayerWeights(random(16, width, dtype=dtype), None)
    _, normed = ops.residual_norm(copied(residual), None, norm, consumer, modulation)
    _, rounded = torch_ops.residual_norm(copied(residual), None, norm, consumer, modulation)
    expected = exact.layer_norm(exact_sum(residual), torch.ones(width, device=GPU), None, 1e-6)
    assert_as_good(normed, rounded, expected * modulation.scale.double()[:, None])


@DTYPES
@WIDTHS
@pytest.mark.parametrize("rotation", [None, 0, 256], ids=["our rule", "the hosts'", "rotated"])
def test_int8_rows_of_a_norm_kernel_match_its_result_in_half_precision(
    width: int, dtype: torch.dtype, rotation: int | None
) -> None:
    """written: the result in the model's dtype. With the hosts' rule, the kernel can also return it beside the int8
    rows (is_plain_too). rotation: the rule of rounding, see assert_rows."""
    lack = unmet_requirement(INT8, GPU, dtype)
    if lack:
        pytest.skip(lack)
    layer, norm = LayerWeights(random(width, dtype=dtype), None), RMSNorm("", width, EPS)
    scale, gate = random(BATCH, 2 * width, dtype=dtype).chunk(2, dim=1)
    residual = a_residual(width, dtype, (layer, norm), gate)
    modulated = layer, norm, Modulation(scale), dtype
    rule = rounding.Rule.OURS if rotation is None else rounding.hosts_rule(rotation, GPU)
    whole_residual, found = rounding.residual_norm(copied(residual), *modulated, INT8, rule)
    expected, written = rounding.residual_norm(copied(residual), *modulated, None)
    # Each variant of the kernel sums a row in an order of its own.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(whole_residual.tokens, expected.tokens, rtol=unit, atol=unit)
    assert_rows(found, written, rotation)
    if rotation is not None:
        _, both = rounding.residual_norm(copied(residual), *modulated, INT8, rule, is_plain_too=True)
        assert torch.allclose(both.plain, written, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
        assert_rows(both, written, rotation)


@DTYPES
@pytest.mark.parametrize(("width", "activation"), [
    (6912, Activation.SILU), (10240, Activation.SILU), (16384, Activation.SILU), (2560, Activation.SIGMOID),
    (6144, Activation.SIGMOID),
])
def test_a_gated_unit_is_as_accurate_as_torch_and_rounds_its_rows_to_int8_and_float8(
    ops: NativeOperators, width: int, activation: Activation, dtype: torch.dtype
) -> None:
    """The unit returns numbers * activation(gates), of which both are columns of one product; with SiLU it is a SwiGLU.
    The int8 rows are compared with the result in the model's dtype by each rule of assert_rows, the float8 rows with
    float64."""
    product = random(BATCH, TOKENS, 2 * width + 512, dtype=dtype)
    gates, numbers = product[..., :width], product[..., width:2 * width]
    consumer = LayerWeights(random(16, width, dtype=dtype), None)
    if activation is Activation.SILU:
        whole = product[..., :2 * width].contiguous()
        found, torchs = ops.gated(whole, SWIGLU, consumer), torch_ops.gated(whole, SWIGLU)
        factor = gates.double() * gates.double().sigmoid()
    else:
        found, torchs = ops.sigmoid_gated(numbers, gates, consumer), torch_ops.sigmoid_gated(numbers, gates)
        factor = gates.double().sigmoid()
    assert_as_good(found, torchs, numbers.double() * factor)
    if unmet_requirement(INT8, GPU, dtype) is None:
        for rotation in (None, 0, 256):
            rule = rounding.Rule.OURS if rotation is None else rounding.hosts_rule(rotation, GPU)
            both = rotation is not None
            rows = rounding.gated(numbers, gates, activation, INT8, rule, is_plain_too=both)
            assert_rows(rows, found, rotation)
            assert not both or torch.allclose(rows.plain, found, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    if unmet_requirement(FP8, GPU, dtype) is None:
        rows = rounding.gated(numbers, gates, activation, FP8)
        back = (rows.values.float() * rows.scales).view(found.shape)
        assert relative_error(back, numbers.double() * factor) < 0.04


def assert_rows(found: QuantizedTokens, written: Tensor, rotation: int | None) -> None:
    """Check int8 rows against the same rows in the model's dtype (written). rotation: None if they are rounded by our
    own rule; otherwise by the hosts' rule, after a Hadamard rotation in groups of this size, or without one (0)."""
    if rotation is None:
        back = (found.values.float() * found.scales).view(written.shape)
        assert float(((back - written.float()).abs() / found.scales.view(*found.shape, 1)).max()) < 1.1
        return
    values, scales = hosts_rows(written.flatten(0, -2), hadamard(rotation, GPU) if rotation else None)
    assert torch.allclose(found.scales, scales, rtol=torch.finfo(written.dtype).eps, atol=0)
    difference = (found.values.int() - values.int()).abs()
    assert int(difference.max()) <= 2 and float(difference.double().mean()) <= 5e-3


@DTYPES
@pytest.mark.parametrize(("heads", "key_heads"), [(30, 30), (48, 12), (20, 20)])
@pytest.mark.parametrize("plus_one", [True, False])
@pytest.mark.parametrize("rotation", ["the same", "one for each row", "none"])
@pytest.mark.parametrize("other_columns", [0, 6144])
def test_heads_are_normed_and_rotated_as_accurately_as_by_torch(
    ops: NativeOperators, heads: int, key_heads: int, plus_one: bool, rotation: str, other_columns: int,
    dtype: torch.dtype
) -> None:
    """Heads of queries, keys and values are columns of one product. The kernel norms queries and keys and applies the
    rotary embedding in place. plus_one: the norm multiplies by 1 + weight. rotation: whether all images of the batch
    have the same rotary embedding, each has its own, or there is none. other_columns: how many columns of the product
    are no heads; they must keep their values."""
    head = 128
    angles = random(*((BATCH,) if rotation == "one for each row" else ()), TOKENS, head // 2, dtype=torch.float32)
    rotary = None if rotation == "none" else Rotary(angles.cos(), angles.sin(), interleaved=True)
    kind = torch.float32 if plus_one else dtype
    query_norm, key_norm = (
        (LayerWeights(random(head, dtype=kind), None), RMSNorm("", head, EPS, plus_one)) for _ in range(2)
    )
    parts = Heads(heads, query_norm, rotary), Heads(key_heads, key_norm, rotary), Heads(key_heads)
    product = random(BATCH, TOKENS, (heads + 2 * key_heads) * head + other_columns, dtype=dtype)
    projected = product[..., :(heads + 2 * key_heads) * head]
    assert native_tokens.has_heads_kernel(projected, parts)
    torchs = torch_ops.split_heads(projected.clone(), parts)
    expected = torch_ops.split_heads(projected.double(), wide(parts))
    given = product.clone()
    found = ops.split_heads(given[..., :projected.shape[-1]], parts)
    for ours, theirs, reference in zip(found, torchs, expected, strict=True):
        assert_as_good(ours, theirs, reference)
    others = slice(projected.shape[-1], None)
    assert torch.equal(given[..., others], product[..., others]), "the other columns are not written to"


@DTYPES
def test_attention_with_fewer_key_heads_repeats_no_keys(dtype: torch.dtype) -> None:
    """With 48 query heads and 12 key heads, attention takes less memory than repeated keys and values would take. A
    part of the output is compared with float64."""
    if not torch_ops.HAS_GQA:
        pytest.skip("needs torch 2.5")
    tokens = 4096
    product = random(1, tokens, 72 * 128, dtype=dtype)
    query, key, value = torch_ops.split_heads(product, (Heads(48), Heads(12), Heads(12)))
    attention = Attention(Launches(TuningCache()))
    attention(query, key, value)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = attention(query, key, value)
    torch.cuda.synchronize()
    spent = torch.cuda.max_memory_allocated() - before
    assert spent < 1.5 * output.nbytes, "repeated keys and values would take twice as much memory as the output"
    # Some queries are enough to compare.
    some = query[:, ::16, :64]
    expected = exact.attention(some, key[:, ::4], value[:, ::4])
    assert relative_error(output[:, ::16, :64], expected) < (2e-3 if dtype == torch.float16 else 1.6e-2)
