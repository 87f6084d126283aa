"""int8 products and products with LoRAs against float64 products of the same factors. The kernels are compiled on a
GPU; without one, Triton's interpreter runs them."""
from __future__ import annotations

import pytest
import torch
from exact_operators import rounded_rows
from grid import grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.core.layer_weights import LowRank, QuantizedWeight
from lib_onediff.core.operators import QuantizedTokens
from lib_onediff.devices.cuda.kernels import products
from lib_onediff.devices.cuda.kernels.launch_config import DOWN_PRODUCT, INT8_PRODUCT, LIBRARY, LaunchConfig
from lib_onediff.weights.low_bit import INT8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Tiles that a CPU computes quickly.
CONFIGS = [(32, 32, 32, 8, 4, 2), (16, 64, 32, 2, 4, 2)]
if DEVICE.type == "cuda":
    CONFIGS = list(INT8_PRODUCT.candidates)


def factors(rows: int, width: int, out: int) -> tuple[QuantizedTokens, QuantizedWeight]:
    """Random tokens (rows, width) and a random weight (out, width), both in int8 with a scale for each row."""
    values, scales = rounded_rows(torch.randn(rows, width, device=DEVICE), INT8)
    weight, weight_scales = rounded_rows(torch.randn(out, width, device=DEVICE), INT8)
    return QuantizedTokens(values, scales, (rows,)), QuantizedWeight(weight, weight_scales.t().contiguous())


def exact(tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """The float64 product of the quantized factors."""
    left = tokens.values.double() * tokens.scales.double()
    right = weight.values.double() * weight.scales.double().t()
    return left @ right.t() + (0 if bias is None else bias.double())


@grid(
    shape=[(64, 64, 64), (1, 16, 16), (33, 80, 48), (100, 48, 112), (7, 32, 320)],
    dtype=[torch.float16, torch.bfloat16],
    with_bias=[True, False],
    config=CONFIGS,
)
def test_an_int8_product_differs_from_the_exact_one_by_one_rounding_of_the_output(
    shape: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, config: LaunchConfig
) -> None:
    """The allowed error is that of this rounding and of float32 sums (1e-5 of the largest output). shape: (rows, width,
    outputs)."""
    rows, width, out = shape
    tokens, weight = factors(rows, width, out)
    bias = torch.randn(out, device=DEVICE, dtype=dtype) if with_bias else None
    output = products.int8_product(tokens, weight, bias, dtype, config)
    expected = exact(tokens, weight, bias)
    assert output.dtype == dtype and output.shape == (rows, out)
    step = torch.finfo(dtype).eps
    largest = float(expected.abs().max())
    assert bool(((output.double() - expected).abs() <= step * expected.abs() + 1e-5 * largest).all())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_row_of_zeros_gives_zeros_and_a_row_a_thousand_times_as_large_is_as_exact(config: LaunchConfig) -> None:
    """The large row and a usual one are compared with float64."""
    rows = torch.randn(40, 64, device=DEVICE)
    rows[3] = 0
    rows[5] = rows[5] * 1000
    values, scales = rounded_rows(rows, INT8)
    tokens = QuantizedTokens(values, scales, (40,))
    _, weight = factors(1, 64, 48)
    output = products.int8_product(tokens, weight, None, torch.float16, config)
    expected = exact(tokens, weight, None)
    assert bool((output[3] == 0).all())
    for row in (0, 5):
        assert float((output[row].double() - expected[row]).norm() / expected[row].norm()) < 1e-3


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_largest_possible_sums_do_not_overflow(config: LaunchConfig) -> None:
    """Each sum has 5120 products of 127 and -127."""
    values = torch.full((16, 5120), 127, dtype=torch.int8, device=DEVICE)
    scales = torch.full((16, 1), 1e-4, device=DEVICE)
    output = products.int8_product(
        QuantizedTokens(values, scales, (16,)), QuantizedWeight(-values, scales.t().contiguous()), None, torch.float16,
        config,
    )
    assert torch.allclose(output.double(), torch.full_like(output, -127 * 127 * 5120 * 1e-8).double(), rtol=1e-3)


@grid(
    shape=[(33, 80, 48), (100, 48, 96), (7, 32, 336)], ranks=[16, 48], layers=[1, 3], with_bias=[True, False],
    config=CONFIGS,
)
def test_loras_are_added_before_the_output_is_rounded(
    shape: tuple[int, int, int], ranks: int, layers: int, with_bias: bool, config: LaunchConfig
) -> None:
    """The error is at most that of rounding the output once, besides float32's error of the sums. shape: (rows, width,
    outputs). layers: how many fused layers the product computes. ranks: the sum of the ranks of each layer's LoRAs.
    hidden: the tokens after the down matrices of all layers; each layer's rows of `up` multiply its own ranks of it
    (block_diag)."""
    rows, width, out = shape
    tokens, weight = factors(rows, width, out)
    bias = torch.randn(out, device=DEVICE).half() if with_bias else None
    hidden = torch.randn(rows, layers * ranks, device=DEVICE).half()
    up = torch.randn(out, ranks, device=DEVICE).half()
    output = products.int8_product(tokens, weight, bias, torch.float16, config, (hidden, up))
    dense = torch.block_diag(*up.double().chunk(layers))
    expected = exact(tokens, weight, bias) + hidden.double() @ dense.t()
    largest = float(expected.abs().max())
    step = torch.finfo(torch.float16).eps
    assert bool(((output.double() - expected).abs() <= step * expected.abs() + 1e-5 * largest).all())


DOWN_CONFIGS: list[LaunchConfig] = [LIBRARY, (16, 16, 32, 4, 2), (32, 32, 64, 4, 2)]
if DEVICE.type == "cuda":
    DOWN_CONFIGS = list(DOWN_PRODUCT.candidates)


# The interpreter has no bfloat16 products.
DOWN_TYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]


@grid(shape=[(33, 80, 48), (64, 64, 16), (7, 48, 96)], dtype=DOWN_TYPES, config=DOWN_CONFIGS)
def test_the_product_with_the_down_matrices_of_loras_is_rounded_once(
    shape: tuple[int, int, int], dtype: torch.dtype, config: LaunchConfig
) -> None:
    """The allowed error is that of this rounding and of float32 sums. shape: (rows, width, ranks)."""
    rows, width, ranks = shape
    tokens, down = (torch.randn(count, width, device=DEVICE).to(dtype) for count in (rows, ranks))
    output = products.down_product(tokens, down, config)
    expected = tokens.double() @ down.double().t()
    assert output.dtype == dtype and output.shape == (rows, ranks)
    largest = float(expected.abs().max())
    assert bool(((output.double() - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-5 * largest).all())


def test_several_loras_become_one_pair_of_matrices_with_the_same_product() -> None:
    """An up matrix is for some rows of the output, and is given with the first of them. The ranks are padded to 16, the
    fewest that kernels multiply."""
    first, second, down = torch.randn(32, 4), torch.randn(16, 5), torch.randn(9, 24)
    joint_down, joint_up = products.joint_loras(LowRank(down, ((0, first), (40, second))), 64)
    assert joint_down.shape == (16, 24) and joint_up.shape == (64, 16)
    expected = torch.zeros(64, 24)
    expected[:32] += first @ down[:4]
    expected[40:56] += second @ down[4:]
    assert torch.allclose(joint_up @ joint_down, expected, atol=1e-5)


def test_adjacent_up_matrices_are_not_copied() -> None:
    """If the up matrices are adjacent parts of one tensor, in the order of memory and with equal numbers of rows, the
    joint one is a view of it. Otherwise they are copied. The down matrix is never copied."""
    whole = torch.randn(64, 16)
    factor = torch.randn(16, 24)
    found = products.joint_loras(LowRank(factor, ((0, whole),)), 64)
    assert [one.data_ptr() for one in found] == [factor.data_ptr(), whole.data_ptr()]
    halves = LowRank(torch.randn(32, 24), ((0, whole[:32]), (32, whole[32:])))
    down, up = products.joint_loras(halves, 64)
    assert down.data_ptr() == halves.down.data_ptr() and up.data_ptr() == whole.data_ptr() and up.shape == (64, 16)
    # Not in the order of memory; and with unequal numbers of rows.
    for ups in (((0, whole[32:]), (32, whole[:32])), ((0, whole[:32]), (48, whole[32:48]))):
        down, up = products.joint_loras(LowRank(torch.randn(32, 24), ups), 64)
        assert up.shape == (64, 32) and torch.equal(up[:32, :16], ups[0][1]) and not up[:32, 16:].any()
