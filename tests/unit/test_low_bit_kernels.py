"""The kernels that give rows of tokens in float8 against float64: on a GPU compiled, without one under Triton's
interpreter."""
from __future__ import annotations

from itertools import product

import pytest
import torch
from builders import relative_error
from exact_operators import geglu as exact_geglu
from exact_operators import layer_norm as exact_layer_norm
from grid import ends, grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.model.operators import Float8Tokens, Stream
from lib_onediff.ops.quantized import kernels as triton_float8
from lib_onediff.ops.quantized import scaled_mm as float8
from lib_onediff.ops.triton.launch_config import LAYER_NORM

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Half a step of float8's, relative to a value.
HALF_A_STEP = 2.0**-4
# Triton's interpreter halves what it should round up to a power of two; over many values it is off by this.
INTERPRETED = 0.12


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def given_back(rows: Float8Tokens) -> Tensor:
    return (rows.values.double() * rows.scales.double()).view(*rows.shape, -1)


def assert_rounded(rows: Float8Tokens, exact: Tensor) -> None:
    """Every value is at most half a step off; what is small beside the largest of its row, 2**-10 of a scale."""
    back = given_back(rows)
    if DEVICE.type == "cuda":
        allowed = (HALF_A_STEP + 1e-3) * exact.abs() + 2.0**-10 * rows.scales.double().view(*rows.shape, 1)
        assert bool(((back - exact).abs() <= 1.01 * allowed).all())
    assert relative_error(back, exact) < INTERPRETED
    assert torch.allclose(back.abs().amax(-1), exact.abs().amax(-1), rtol=2e-3), "the largest of a row is kept"


@grid(
    kind=list(product([torch.float16, torch.bfloat16, torch.float32], [True, False])),
    shape=[(2, 7, 96), (3, 33), (1, 1, 1280)],
)
def test_a_layer_norm_comes_in_float8(shape: tuple[int, ...], kind: tuple[torch.dtype, bool]) -> None:
    dtype, whole = kind  # whole: with everything that can be owed
    tokens, update, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    deferred_bias, bias = random(shape[-1], dtype=torch.float32), random(shape[-1], dtype=dtype)
    stream = Stream(tokens.clone(), deferred_bias, bias, update) if whole else Stream(tokens.clone())
    total = tokens.double() + update.double() if whole else tokens.double()
    standing, normed = triton_float8.layer_norm(stream, weight, bias if whole else None, 1e-5)
    vectors = deferred_bias.double() + bias.double() if whole else torch.zeros(shape[-1], device=DEVICE)
    assert_rounded(normed, exact_layer_norm(total + vectors, weight, bias if whole else None, 1e-5))
    assert standing.update is None and standing.bias is None
    assert relative_error(standing.tokens, total.to(dtype)) < 1e-2
    assert torch.allclose(standing.deferred_bias, vectors.float(), atol=1e-5)


@pytest.mark.parametrize("config", ends(LAYER_NORM.candidates), ids=str)
def test_every_cut_gives_the_same_rows(config: tuple[int, int]) -> None:
    tokens, weight = random(7, 96), random(96)
    _, normed = triton_float8.layer_norm(Stream(tokens), weight, None, 1e-5, config)
    _, first = triton_float8.layer_norm(Stream(tokens), weight, None, 1e-5)
    assert torch.allclose(normed.scales, first.scales, rtol=1e-5)
    # Sums in another order may move a value over the middle between two of float8's.
    assert float((normed.values.float() == first.values.float()).double().mean()) > 0.99


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_geglu_and_plain_rows_come_in_float8(dtype: torch.dtype) -> None:
    hidden = random(2, 5, 2 * 96, dtype=dtype)
    assert_rounded(triton_float8.geglu(hidden), exact_geglu(hidden))
    rows = random(6, 64, dtype=dtype)
    rounded = triton_float8.empty_rows(rows, 64)
    triton_float8.rounded_rows(rows, rounded.values, rounded.scales)
    assert_rounded(rounded, rows.double())
    assert torch.equal(rounded.scales, float8.rounded_rows(rows)[1])


def test_zeros_stay_zeros_and_a_nan_is_not_hidden() -> None:
    rows = torch.zeros(2, 32, device=DEVICE)
    rows[1, 3] = float("nan")
    rounded = triton_float8.empty_rows(rows, 32)
    triton_float8.rounded_rows(rows, rounded.values, rounded.scales)
    back = given_back(rounded)
    assert bool((back[0] == 0).all())
    if DEVICE.type == "cuda":
        # The interpreter makes a number of it.
        assert bool(back[1].isnan().any())
