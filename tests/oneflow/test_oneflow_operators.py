"""OneFlow's operators for transformers, against float64 or PyTorch's operators. OneFlow computes no transformer yet, so
that only these tests run them."""
from __future__ import annotations

import pytest
import torch
from exact_operators import attention as exact_attention
from exact_operators import relative_error
from torch import Tensor

from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.core.operators import Activation, GatedUnit
from lib_onediff.devices.torch import operators as torch_ops

CLOSE = 1e-6


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("key_heads", [6, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_masked_and_grouped_query_attention_is_close_to_attention_in_float64(key_heads: int, masked: bool) -> None:
    """There are 6 query heads. masked: with a mask, by which one query of the first image, and all of the second, may
    attend to no key."""
    from oneflow.utils.tensor import from_torch, to_torch

    from lib_onediff.devices.oneflow.operators import OneFlowOperators

    query = random(2, 6, 7, 16)
    key = random(2, key_heads, 11, 16)
    value = random(2, key_heads, 11, 16) / 2
    mask = random(2, 6, 7, 11) > 0
    # One query of the first image, and all of the second, may attend to no key.
    mask[0, 2, 3] = False
    mask[1] = False
    given = from_torch(mask.to(torch.uint8)) > 0 if masked else None
    output = to_torch(OneFlowOperators().attention(*map(from_torch, (query, key, value)), False, given))
    assert relative_error(output, exact_attention(query, key, value, mask if masked else None)) < CLOSE


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_linear_units_are_close_to_those_of_pytorch(activation: Activation, gate_first: bool) -> None:
    """gate_first: whether the gate is the first half of the input's channels, or the second."""
    from oneflow.utils.tensor import from_torch, to_torch

    from lib_onediff.devices.oneflow.operators import OneFlowOperators

    tokens = random(3, 10)
    unit = GatedUnit(activation, gate_first)
    consumer = LayerWeights(random(5, 5), None)
    output = to_torch(OneFlowOperators().gated(from_torch(tokens), unit, consumer))
    assert relative_error(output, torch_ops.gated(tokens, unit)) < CLOSE
