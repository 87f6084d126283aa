"""FP8 by one scale for each factor on a real GPU: as near as float8 with a scale for every row and column."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from exact_operators import geglu as exact_geglu
from exact_operators import layer_norm as exact_layer_norm
from exact_operators import relative_error, rounded_rows
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.core.affine import Affine
from lib_onediff.core.leaves import LayerNorm
from lib_onediff.core.operators import QuantizedTokens, Stream
from lib_onediff.core.tuning_cache import TuningCache
from lib_onediff.devices.cuda.kernels.launch_config import Launches
from lib_onediff.devices.cuda.low_bit import kernels
from lib_onediff.devices.cuda.low_bit.float8 import float8_support
from lib_onediff.devices.cuda.low_bit.gains import Product
from lib_onediff.devices.cuda.low_bit.operators import LowBitOperators
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.low_bit import FP8, GATED, NORMED, PLAIN

pytestmark = pytest.mark.gpu
DEVICE, EPS = torch.device("cuda"), 1e-5
# Than by scales of rows.
WORSE = 1.1
# SDXL's at 1024x1024 with guidance, and rows that are no multiple of anything.
PRODUCTS = [
    Product(2048, 1280, 10240, NORMED), Product(2048, 1280, 3840, NORMED), Product(2048, 1280, 1280, NORMED),
    Product(8192, 640, 5120, NORMED), Product(2048, 5120, 1280, GATED), Product(8192, 2560, 640, GATED),
    Product(2048, 1280, 1280, PLAIN), Product(333, 640, 1920, NORMED), Product(333, 2560, 640, GATED),
]


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    lack = runtime.devices.lossy.low_bit.why_not("fp8", DEVICE, request.param)
    if lack:
        pytest.skip(lack)
    return request.param


def operators_of(dtype: torch.dtype) -> LowBitOperators:
    result = float8_support(DEVICE, dtype).result
    return LowBitOperators(
        Launches(TuningCache()), functional.scaled_dot_product_attention, lambda *given: result, lambda *given: FP8
    )


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def by_row_scales(tokens: Tensor, weight: Tensor) -> Tensor:
    """The product of both in float8, each row by its own scale."""
    (values, scales), (others, columns) = (rounded_rows(rows, FP8) for rows in (tokens, weight))
    return (values.double() * scales) @ (others.double() * columns).t()


@torch.no_grad()
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: "x".join(map(str, product)))
def test_one_scale_is_as_near_as_scales_of_rows(product: Product, dtype: torch.dtype) -> None:
    ops, norm = operators_of(dtype), LayerNorm("norm", product.width, EPS)
    weight = random(product.out, product.width, dtype=dtype) / 32
    affine = Affine(weight, None, (kernels.rounded_weight(weight, FP8),))
    vector, tokens = random(product.width, dtype=dtype), random(product.rows, product.width, dtype=dtype)
    stream = Stream(torch.zeros(product.rows, product.out, device=DEVICE, dtype=dtype))
    if product.source == NORMED:
        _, rows = ops.layer_norm(Stream(tokens), Affine(vector, None), norm, affine)
        given = exact_layer_norm(tokens, vector, None, EPS)
        output = ops.linear(rows, affine)
    else:
        hidden = torch.cat([tokens, tokens.flip(0)], -1)
        rows = ops.geglu(hidden, affine) if product.source == GATED else kernels.rounded(tokens, FP8)
        given = exact_geglu(hidden) if product.source == GATED else tokens.double()
        output = ops.materialize(ops.add_linear(stream, rows, affine))
    assert isinstance(rows, QuantizedTokens)
    exact = given @ weight.double().t()
    assert relative_error(output, exact) < WORSE * relative_error(by_row_scales(given, weight), exact)


@torch.no_grad()
def test_the_compiled_norm_neither_saturates_nor_hides_a_nan(dtype: torch.dtype) -> None:
    ops, width = operators_of(dtype), 640
    norm, weight = LayerNorm("norm", width, EPS), torch.eye(width, device=DEVICE).to(dtype)
    affine = Affine(weight, None, (kernels.rounded_weight(weight, FP8),))
    gamma, beta = 8 * random(width, dtype=dtype), random(width, dtype=dtype)
    tokens = torch.eye(width, device=DEVICE).to(dtype) * 100
    exact = exact_layer_norm(tokens, gamma, beta, EPS)
    tokens[5, 7], exact[5] = float("nan"), float("nan")
    _, rows = ops.layer_norm(Stream(tokens), Affine(gamma, beta), norm, affine)
    assert isinstance(rows, QuantizedTokens) and rows.scales.shape == (1, 1)
    back = rows.values.double() * rows.scales.double()
    usual = [row for row in range(width) if row != 5]
    off = (back - exact).abs().diagonal()[usual]
    allowed = (2.0**-4 + 1e-3) * exact.abs().diagonal()[usual] + 2.0**-10 * rows.scales[0]
    assert bool((off <= allowed).all()), (off - allowed).max()
    output = ops.linear(rows, affine)
    assert bool(output[5].isnan().all()) and bool(output[usual].isfinite().all())
    for hidden in (tokens, tokens.repeat(1, 2)):
        given = ops.geglu(hidden, affine) if hidden.shape[1] > width else hidden
        added = ops.materialize(ops.add_linear(Stream(torch.zeros_like(tokens)), given, affine))
        assert bool(added[5].isnan().all()) and bool(added[usual].isfinite().all())
