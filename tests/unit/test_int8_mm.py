"""Products in int8 against the same in float64: on a GPU compiled, without one under Triton's interpreter."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet
from grid import first, grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.model import low_bit
from lib_onediff.model.bound import BoundUNet
from lib_onediff.model.call import UNetCall
from lib_onediff.model.cuts import compute
from lib_onediff.model.low_bit import INT8
from lib_onediff.model.operators import QuantizedTokens
from lib_onediff.model.weights import QuantizedWeight
from lib_onediff.ops import torch_ops
from lib_onediff.ops.quantized import int8_mm, kernels
from lib_onediff.ops.quantized.gains import Product, products
from lib_onediff.ops.quantized.operators import LowBitOperators
from lib_onediff.ops.quantized.scaled_mm import rounded_rows
from lib_onediff.ops.triton.launch_config import LaunchConfig, Launches
from lib_onediff.ops.tuning_cache import TuningCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Tiles that a CPU does in a moment; the two ways differ in how they load, store and go on.
SMALL = (int8_mm.TILE_BY_TILE, 32, 32, 32, 8, 4, 2, 1)
PERSISTENT = (int8_mm.PERSISTENT, 32, 32, 32, 8, 4, 2, 1), (int8_mm.PERSISTENT, 32, 32, 64, 2, 4, 2, 0)
CONFIGS = [SMALL, (int8_mm.TILE_BY_TILE, 16, 64, 32, 2, 4, 2, 1)]
if DEVICE.type == "cuda":
    CONFIGS = list(int8_mm.kernel_for(DEVICE).candidates)
elif int8_mm.TensorDescriptor is not None:
    CONFIGS += PERSISTENT


def factors(rows: int, width: int, out: int) -> tuple[QuantizedTokens, QuantizedWeight]:
    values, scales = rounded_rows(torch.randn(rows, width, device=DEVICE), INT8)
    weight, weight_scales = rounded_rows(torch.randn(out, width, device=DEVICE), INT8)
    return QuantizedTokens(values, scales, (rows,)), QuantizedWeight(weight, weight_scales.t().contiguous())


def exact(tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    left, right = tokens.values.double() * tokens.scales.double(), weight.values.double() * weight.scales.double().t()
    return left @ right.t() + (0 if bias is None else bias.double())


@grid(
    shape=[(64, 64, 64), (1, 16, 16), (33, 80, 48), (100, 48, 112), (7, 32, 320)],
    dtype=[torch.float16, torch.bfloat16],
    with_bias=[True, False],
    config=CONFIGS,
)
def test_a_product_is_the_exact_one_rounded_once(
    shape: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, config: LaunchConfig
) -> None:
    rows, width, out = shape
    tokens, weight = factors(rows, width, out)
    bias = torch.randn(out, device=DEVICE, dtype=dtype) if with_bias else None
    output = int8_mm.product(tokens, weight, bias, dtype, config)
    expected = exact(tokens, weight, bias)
    assert output.dtype == dtype and output.shape == (rows, out)
    step = torch.finfo(dtype).eps
    largest = float(expected.abs().max())
    assert bool(((output.double() - expected).abs() <= step * expected.abs() + 1e-5 * largest).all())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_of_zeros_and_rows_a_thousand_times_as_large(config: LaunchConfig) -> None:
    rows = torch.randn(40, 64, device=DEVICE)
    rows[3], rows[5] = 0, rows[5] * 1000
    values, scales = rounded_rows(rows, INT8)
    tokens, (_, weight) = QuantizedTokens(values, scales, (40,)), factors(1, 64, 48)
    output = int8_mm.product(tokens, weight, None, torch.float16, config)
    expected = exact(tokens, weight, None)
    assert bool((output[3] == 0).all())
    for row in (0, 5):
        assert float((output[row].double() - expected[row]).norm() / expected[row].norm()) < 1e-3
    # The largest sums that can be.
    values = torch.full((16, 5120), 127, dtype=torch.int8, device=DEVICE)
    scales = torch.full((16, 1), 1e-4, device=DEVICE)
    output = int8_mm.product(
        QuantizedTokens(values, scales, (16,)), QuantizedWeight(-values, scales.t().contiguous()), None, torch.float16,
        config,
    )
    assert torch.allclose(output.double(), torch.full_like(output, -127 * 127 * 5120 * 1e-8).double(), rtol=1e-3)


@pytest.mark.parametrize("alone", first(1, [True, False]), ids=str)
def test_a_whole_unet_by_the_kernels_themselves(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """Every linear layer of the transformer blocks in int8, against the same UNet in float32. alone: nothing else is
    there of their weights, nor of those that read the prompt."""
    monkeypatch.setattr(low_bit, "FEWEST_WEIGHTS", 0)
    unet = diffusers_unet(0, **SMALL_XL).to(DEVICE, torch.float16)
    call = on_device(a_call(diffusers_unet(0, **SMALL_XL), 4, 4, 1, 5))
    bound, wanted = BoundUNet(unet), {}
    bound.refresh(call)
    for name, _ in products(bound.layout, 4, 4, 1):
        wanted[name] = INT8
    if alone:
        wanted |= {attention.key_value.name: INT8 for attention in bound.layout.cross_attentions}
    weights = low_bit.LowBitWeights(bound.layout, kernels.rounded_rows)
    weights.fit(lambda: "now", bound.binding.weights, wanted, bound.binding.device)
    source = low_bit.LowBitBinding(bound.binding, weights, (INT8,), alone=alone)
    asked: list[str] = []

    def choose(product: Product, dtype: torch.dtype, kinds: object) -> low_bit.Kind:
        asked.append(product.source)
        return INT8

    ops = LowBitOperators(Launches(TuningCache()), torch_ops.attention, lambda device, dtype: dtype, choose)
    with torch.no_grad():
        output = compute(bound.layout, source.weights(), ops, call)
    wide = replace(call, **{name: getattr(call, name).float() for name in ("latent", "context", "y")})
    expected = diffusers_output(diffusers_unet(0, **SMALL_XL).to(DEVICE), wide)
    assert all(weight.weight.is_meta is alone for name, weight in source.weights().items() if name in wanted)
    if alone:
        assert asked == [], "there is nothing to choose"
    else:
        assert {low_bit.NORMED, low_bit.GATED, low_bit.PLAIN} == set(asked) and len(asked) == len(wanted)
    error = float((output.double() - expected.double()).norm() / expected.double().norm())
    assert 1e-3 < error < 0.05, error


def on_device(call: UNetCall) -> UNetCall:
    parts = {name: getattr(call, name).to(DEVICE, torch.float16) for name in ("latent", "context", "y")}
    return replace(call, timestep=call.timestep.to(DEVICE), **parts)
