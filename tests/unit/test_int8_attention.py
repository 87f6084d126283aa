"""Attention with scores in int8 against float64: on a GPU compiled, without one under Triton's interpreter."""
from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from builders import relative_error
from grid import grid
from torch import Tensor

from lib_onediff.ops.attention_tuning import random_inputs
from lib_onediff.ops.quantized.int8_attention import attention
from lib_onediff.ops.triton.attention import heads_lie_beside
from lib_onediff.ops.triton.launch_config import LaunchConfig, int8_attention_kernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies bfloat16 by its bits.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float16]
# Of the weights and the output, in a half type.
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Seen: 1.2e-2 of independent numbers with deviation 1.
INT8_ERROR = 2e-2
SMALL: LaunchConfig = (32, 32, 4, 2)
Inputs = tuple[Tensor, Tensor, Tensor]


def inputs_of(queries: int, keys: int, width: int, dtype: torch.dtype = torch.float16, heads: int = 2) -> Inputs:
    given = random_inputs((1, heads, queries, width), (1, heads, keys, width), dtype, DEVICE)
    assert all(map(heads_lie_beside, given))
    return given


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query.double() @ key.double().transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ value.double()


def rounded(tokens: Tensor, block: int) -> Tensor:
    """As int8 with one scale for each block of tokens has them."""
    found = torch.empty_like(tokens)
    for start in range(0, tokens.shape[2], block):
        part = tokens[:, :, start:start + block]
        scale = part.abs().amax((2, 3), keepdim=True).clamp_min(1e-12) / 127
        found[:, :, start:start + block] = torch.floor(part / scale + 0.5) * scale
    return found


def by_definition(given: Inputs, config: LaunchConfig, smoothed: bool = True) -> Tensor:
    """What the kernel is to compute, in float64. smoothed: without the mean of the keys."""
    query, key, value = (tensor.double() for tensor in given)
    key = key - key.mean(2, keepdim=True) if smoothed else key
    query = rounded(query * (query.shape[-1] ** -0.5 * math.log2(math.e)), config[0])
    scores = query @ rounded(key, config[1]).transpose(-1, -2)
    return (scores * math.log(2)).softmax(-1) @ value


@grid(
    shape=[(70, 70, 64), (33, 65, 40), (64, 32, 80), (20, 300, 128), (8, 1100, 160), (5, 1, 64)],
    dtype=DTYPES, cut=[0, 1, -1],
)
def test_scores_are_exact_products_of_what_was_rounded(
    shape: tuple[int, int, int], dtype: torch.dtype, cut: int
) -> None:
    given, config = inputs_of(*shape, dtype), int8_attention_kernel(shape[2]).candidates[cut]
    output = attention(*given, config)
    assert output.shape == given[0].shape and output.dtype == dtype
    assert output.transpose(1, 2).is_contiguous(), "heads can be joined without a copy"
    # Float32's mean and float64's may round a number that lies between two to either side.
    assert relative_error(output.double(), by_definition(given, config)) < 2 * ROUNDING[dtype]
    error = relative_error(output.double(), exact(*given))
    assert error < INT8_ERROR and (error > ROUNDING[dtype] or shape[1] == 1), "lossy, or one key"


def test_keys_with_an_offset_a_thousand_times_as_large_keep_their_digits() -> None:
    query, key, value = inputs_of(40, 90, 64)
    key.add_(1000 * torch.randn(1, 2, 1, 64, device=DEVICE).half())
    given = query, key, value
    assert relative_error(attention(*given, SMALL).double(), exact(*given)) < INT8_ERROR
    assert relative_error(by_definition(given, SMALL, smoothed=False), exact(*given)) > 0.3, "it is the mean"


def test_rows_of_zeros() -> None:
    query, key, value = inputs_of(70, 70, 64)
    query[:, :, 3], key[:, :, 5], query[:, 1] = 0, 0, 0
    output, mean = attention(query, key, value, SMALL).double(), value.double().mean(2, keepdim=True)
    assert torch.allclose(output[:, :, 3], mean[:, :, 0], atol=2e-3), "a query of zeros asks all keys alike"
    assert torch.allclose(output[:, 1], mean[:, 1].expand_as(output[:, 1]), atol=2e-3)
    assert relative_error(output, exact(query, key, value)) < INT8_ERROR
    key.zero_()
    assert torch.allclose(attention(query, key, value, SMALL).double(), mean.expand_as(output), atol=2e-3)


def test_large_scores_do_not_overflow() -> None:
    query, key, value = inputs_of(20, 77, 64)
    given = 60 * query, 60 * key, value
    output = attention(*given, SMALL)
    assert bool(torch.isfinite(output).all())
    assert relative_error(output.double(), by_definition(given, SMALL)) < 2e-2, "a softmax of one key or two"


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_seen(wrong: float) -> None:
    query, key, value = inputs_of(40, 40, 64)
    key[:, 0, 7, 3] = wrong
    output = attention(query, key, value, SMALL)
    assert bool(torch.isnan(output[:, 0]).all()) and bool(torch.isfinite(output[:, 1]).all())


@pytest.mark.parametrize("width", [40, 64, 80, 128, 160])
def test_the_first_cut_fits_into_any_gpu_and_all_can_be_launched(width: int) -> None:
    block = 1 << (width - 1).bit_length()
    candidates = int8_attention_kernel(width).candidates
    queries, keys, _, stages = candidates[0]
    # A processor of an RTX 30 or 40 has this for a program: int8 of queries and keys, and values of two bytes.
    assert queries * block + stages * keys * block * (1 + 2) <= 99 << 10
    for queries, keys, warps, _ in candidates:
        assert all(size & (size - 1) == 0 for size in (queries, keys, warps))
        assert keys >= 32 and queries >= 16, "what the tensor cores take at once"
