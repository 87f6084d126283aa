"""The 8-bit product of a layer is measured with as many rows (tokens of the batch) as the forward multiplies. With
another number, the measurement would not apply, and the layer would stay in 16 bits."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_cosmos
import test_krea2
import test_z_image
import torch
from builders import diffusers_unet
from torch import Tensor

from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.devices.torch import operators
from lib_onediff.families.registry import FAMILIES
from lib_onediff.weights.binding import Binding
from lib_onediff.weights.low_bit import low_bit_products


class Rows:
    """torch's operators. of: the number of rows of each linear layer's input, by the address of the layer's weight."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(operators, name)

    def _note(self, x: Tensor, layer: LayerWeights) -> None:
        self.of[layer.weight.data_ptr()] = x.numel() // x.shape[-1]

    def linear(self, x: Tensor, layer: LayerWeights) -> Tensor:
        self._note(x, layer)
        return operators.linear(x, layer)

    def add_linear(self, residual: Any, x: Tensor, layer: LayerWeights, *others: Any) -> Any:
        self._note(x, layer)
        return operators.add_linear(residual, x, layer, *others)

    def gated_linear(self, x: Tensor, layer: LayerWeights, *others: Any) -> Any:
        self._note(x, layer)
        return operators.gated_linear(x, layer, *others)

    def activated_linear(self, x: Tensor, layer: LayerWeights, *others: Any) -> Any:
        self._note(x, layer)
        return operators.activated_linear(x, layer, *others)


@pytest.mark.parametrize(
    "network", [diffusers_unet, test_cosmos.network, test_z_image.network, test_krea2.network],
    ids=["UNet", "Anima", "Z-Image", "Krea 2"],
)
@torch.no_grad()
def test_the_rows_at_which_products_are_measured_are_those_of_the_forward(network: Callable[[], Any]) -> None:
    """low_bit_products() predicts the rows of each layer for a size, batch and number of tokens; Rows records those of
    the forward."""
    unet = network()
    layout = FAMILIES.read(unet)
    family = FAMILIES.of(layout)
    binding = Binding(unet, layout)
    binding.bind()
    weights = binding.weights()
    for size, batch, tokens in (((8, 12), 1, 77), ((6, 10), 2, 33)):
        call: Any = family.example(layout, size, batch, tokens, torch.randn)
        rows: Any = Rows()
        family.output(layout, weights, rows, call)
        products = low_bit_products(layout, batch, *size, call.tokens, 0, convolutions=False)
        assert len(products) > 4
        for name, product in products.items():
            assert rows.of[weights[name].weight.data_ptr()] == product.rows, name
