"""Our forward of a network, without the runtime."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lib_onediff.core.call import Call
from lib_onediff.core.layer_weights import LayerWeights, Weights
from lib_onediff.devices.torch import operators
from lib_onediff.families.registry import FAMILIES
from lib_onediff.weights.binding import Binding


class RecordedWeights(dict[str, LayerWeights]):
    """A dict of weights that records each read. names: the names that were read, in order."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> LayerWeights:
        self.names.append(name)
        return super().__getitem__(name)


class BoundNetwork:
    """A network's layout and family, with our forward bound to its parameters. read: the names of the weights that the
    last output() read, in order."""

    def __init__(self, network: nn.Module) -> None:
        self.layout = FAMILIES.read(network)
        self.family: Any = FAMILIES.of(self.layout)
        self.binding = Binding(network, self.layout)
        self.binding.bind()
        self.read: list[str] = []

    def example(self, size: tuple[int, int] = (8, 8), batch: int = 2, tokens: int = 77) -> Any:
        """A call with random inputs. size: height and width of the latent."""
        return self.family.example(self.layout, size, batch, tokens, torch.randn)

    @torch.no_grad()
    def output(self, call: Call, ops: Any = operators) -> Tensor:
        weights = RecordedWeights(self.binding.weights())
        output: Tensor = self.family.output(self.layout, weights, ops, call)
        self.read = weights.names
        return output

    def check_reads(self, call: Call) -> None:
        """Assert that the last output(), computed for this call, read exactly the weights that Family.units() lists,
        one unit (a group of layers) after the other."""
        units = self.family.units(self.layout, call)
        unit_of = {name: number for number, names in enumerate(units) for name in names}
        assert set(self.read) == set(unit_of)
        order = [unit_of[name] for name in self.read]
        assert order == sorted(order)
