"""FP8 by one scale for each factor: as near as with a scale for every row and column, whatever the numbers are.

Rows in eight bits by torch, products by torch's own on a CPU: see low_bit_builders.
"""
from __future__ import annotations

import pytest
import torch
from exact_operators import geglu as exact_geglu
from exact_operators import layer_norm as exact_layer_norm
from exact_operators import relative_error
from grid import grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from backend_names import NATIVE
from low_bit_builders import rounded_rows, use_low_bit

from lib_onediff.model.layout import LayerNorm
from lib_onediff.model.low_bit import FP8, GATED, NORMED, PLAIN, empty_like
from lib_onediff.model.operators import QuantizedTokens, Stream
from lib_onediff.model.weights import Affine
from lib_onediff.ops.quantized import scaled_mm
from lib_onediff.ops.quantized.operators import LowBitOperators, updated
from lib_onediff.runtime.runtime import runtime

ROWS, WIDTH, OUT, EPS = 77, 640, 320, 1e-5
# Than by scales of rows.
WORSE = 1.1


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> LowBitOperators:
    use_low_bit(monkeypatch)
    return runtime.devices.operators(NATIVE)


def affine_of(weight: Tensor, bias: Tensor | None = None) -> Affine:
    room = empty_like(weight, FP8)
    rounded_rows(weight, *room)
    return Affine(weight, bias, (room,))


def by_row_scales(tokens: Tensor, weight: Tensor) -> Tensor:
    """The product of both in float8, each row by its own scale, summed in float64."""
    left, right = (
        values.double() * scales for values, scales in (scaled_mm.rounded_rows(rows, FP8) for rows in (tokens, weight))
    )
    return left @ right.t()


def normed_product(
    operators: LowBitOperators, tokens: Tensor, gamma: Tensor, beta: Tensor | None, affine: Affine
) -> tuple[Tensor, Tensor, Tensor]:
    """What comes of a layer norm and its linear layer: in float8, exactly, and by scales of rows."""
    norm = LayerNorm("norm", tokens.shape[-1], EPS)
    _, rows = operators.layer_norm(Stream(tokens.clone()), Affine(gamma, beta), norm, affine)
    assert isinstance(rows, QuantizedTokens) and rows.scales.numel() == 1
    normed, bias = exact_layer_norm(tokens, gamma, beta, EPS), 0 if affine.bias is None else affine.bias.double()
    expected = normed @ affine.weight.double().t() + bias
    return operators.linear(rows, affine), expected, by_row_scales(normed, affine.weight) + bias


def added_product(
    operators: LowBitOperators, hidden: Tensor, affine: Affine, source: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As normed_product, of what a stream of zeros becomes by an output projection or the end of a feed-forward."""
    gated = source == GATED
    tokens = exact_geglu(hidden) if gated else hidden.double()
    stream = Stream(torch.zeros(*hidden.shape[:-1], len(affine.weight), dtype=hidden.dtype))
    stream = operators.add_linear(stream, operators.geglu(hidden, affine) if gated else hidden, affine)
    assert stream.update is not None and stream.update_scales is not None
    bias = 0 if affine.bias is None else affine.bias.double()
    expected = tokens @ affine.weight.double().t() + bias
    return operators.materialize(stream), expected, by_row_scales(tokens, affine.weight) + bias


def random_product(
    operators: LowBitOperators, source: str, affine: Affine, dtype: torch.dtype = torch.float16, outliers: float = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """outliers: how many times as large a few numbers among the tokens are; their row is the third."""
    tokens = torch.randn(ROWS, (2 if source == GATED else 1) * WIDTH)
    tokens[2, [3, 17]] *= outliers
    if source != NORMED:
        return added_product(operators, tokens.to(dtype), affine, source)
    return normed_product(operators, tokens.to(dtype), torch.rand(WIDTH).to(dtype) + 0.5, torch.randn(WIDTH).to(dtype),
                          affine)


@grid(
    source=[NORMED, GATED, PLAIN], dtype=[torch.float16, torch.bfloat16], with_bias=[True, False], outliers=[1, 1000]
)
def test_one_scale_is_as_near_as_scales_of_rows(
    operators: LowBitOperators, source: str, dtype: torch.dtype, with_bias: bool, outliers: float
) -> None:
    weight, bias = torch.randn(OUT, WIDTH).to(dtype) / 25, torch.randn(OUT).to(dtype) if with_bias else None
    affine = affine_of(weight, bias)
    assert affine.low_bit[0].scales.shape == (1, 1)
    ours, exact, rows = random_product(operators, source, affine, dtype, outliers)
    usual = [row for row in range(ROWS) if row != 2]
    assert relative_error(ours[usual], exact[usual]) < WORSE * relative_error(rows[usual], exact[usual])
    # One or two numbers are all that counts here, of which a scale of their own makes the largest exact.
    assert relative_error(ours[2], exact[2]) < 0.1


@pytest.mark.parametrize("result", [torch.float16, torch.bfloat16])
def test_the_next_norm_and_the_tokens_have_the_same_update(operators: LowBitOperators, result: torch.dtype) -> None:
    affine, vector = affine_of(torch.randn(WIDTH, WIDTH).to(result)), torch.randn(WIDTH).to(result)
    tokens = torch.randn(2, 5, WIDTH).to(result)
    stream = operators.add_linear(Stream(tokens.clone()), torch.randn(2, 5, WIDTH).to(result), affine)
    assert stream.update.shape == tokens.shape and stream.update_scales.shape == (2, 5, 1)
    total = tokens.double() + stream.update.double() * stream.update_scales.double()
    norm = LayerNorm("norm", WIDTH, EPS)
    _, rows = operators.layer_norm(stream._replace(tokens=tokens.clone()), Affine(vector, None), norm, affine)
    back = (rows.values.double() * rows.scales).view(tokens.shape)
    assert relative_error(back, exact_layer_norm(total, vector, None, EPS)) < 0.03
    given = updated(stream)
    assert given.update is None and given.update_scales is None
    assert relative_error(given.tokens, total) < (1e-3 if result == torch.float16 else 5e-3)
