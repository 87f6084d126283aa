"""Parameters that belong to no layer, and norms whose weight is never cast, are read, bound and copied."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib_onediff.core.family import Layout
from lib_onediff.core.leaves import FreeParameter, Linear, RMSNorm
from lib_onediff.core.refusal import Refusal
from lib_onediff.families.leaf_reader import LeafReader
from lib_onediff.weights.binding import Binding
from lib_onediff.weights.mirror import empty_copy
from lib_onediff.weights.on_the_fly import OnTheFly
from lib_onediff.weights.scan import Casts

WIDTH = 4


class ShiftedNorm(nn.Module):
    eps = 1e-5

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))


class Network(nn.Module):
    """A network with two free parameters, a submodule with one, a norm of the network's own class, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first_token = nn.Parameter(torch.randn(1, WIDTH))
        self.second_token = nn.Parameter(torch.randn(1, WIDTH))
        self.norm = ShiftedNorm()
        self.block = nn.Module()
        self.block.table = nn.Parameter(torch.randn(2 * WIDTH))
        self.block.layer = nn.Linear(WIDTH, WIDTH)


@dataclass(frozen=True)
class SomeLayout(Layout):
    layer: Linear
    norm: RMSNorm
    parameters: tuple[FreeParameter, ...]


def layout_of(network: Any) -> SomeLayout:
    leaves = LeafReader(network)
    layout = SomeLayout(leaves.linear(network.block.layer), leaves.shifted_norm(network.norm, "scale"), (
        leaves.parameter(network, "first_token"), leaves.parameter(network, "second_token"),
        leaves.parameter(network.block, "table"),
    ))
    leaves.refuse_unclaimed()
    return layout


def addresses(tensors: list[Tensor]) -> list[int]:
    return sorted(tensor.data_ptr() for tensor in tensors)


def test_free_parameters_are_bound_once_and_edits_are_seen() -> None:
    """The bound parameters have the network's own memory, each once, so that an edit in place needs no copy."""
    network = Network()
    binding = Binding(network, layout_of(network))
    binding.bind()
    assert addresses(binding.layers.parameters()) == addresses(list(network.parameters()))
    weights = binding.weights()
    assert weights["second_token"].weight.data_ptr() == network.second_token.data_ptr()
    with torch.no_grad():
        network.block.table.mul_(2)
    assert torch.equal(binding.weights()["block.table"].weight, network.block.table)
    assert torch.equal(binding.weights()["norm.scale"].weight, network.norm.scale)
    assert binding.follow(network, layout_of(network))


def test_an_empty_copy_has_every_free_parameter() -> None:
    """The copy is for a second GPU: the same layout can be bound to it."""
    network = Network()
    layout = layout_of(network)
    copy = empty_copy(Binding(network, layout), torch.device("cpu"))
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    assert {name: parameter.shape for name, parameter in copy.named_parameters()} == shapes
    assert Binding(copy, layout).bind() == 0


def test_a_parameter_that_the_layout_does_not_have_is_refused() -> None:
    """A network with an unknown parameter may compute something else. So is a layout with a parameter that the network
    lacks."""
    network = Network()
    network.third_token = nn.Parameter(torch.zeros(1))
    with pytest.raises(Refusal, match="third_token"):
        layout_of(network)
    with pytest.raises(Refusal, match="no fourth_token"):
        LeafReader(network).parameter(network, "fourth_token")


def test_a_norm_that_the_host_never_casts_may_be_of_another_type() -> None:
    """A float32 norm in a bfloat16 network is bound. Any other parameter of another type is refused as mixed."""
    network = Network().bfloat16()
    network.norm.float()
    Binding(network, layout_of(network)).bind()
    network.block.table.data = network.block.table.data.float()
    with pytest.raises(Refusal, match="mixed"):
        Binding(network, layout_of(network)).bind()


def test_parameters_that_the_host_casts_are_cast_except_for_such_a_norm() -> None:
    """Casts(to) asks the host whether it casts its layers, which cast by themselves; the network's own forward casts
    its free parameters, of which we keep cast copies."""
    network = Network()
    binding = Binding(network, layout_of(network))
    asked: list[Any] = []

    def to(layers: Any, dtype: torch.dtype) -> torch.dtype:
        asked.extend(layers)
        return dtype

    casts = OnTheFly(None, Casts(to))
    binding.cast_to = casts.cast_to(binding, torch.bfloat16)
    assert binding.cast_to is torch.bfloat16 and asked == [network.block.layer]
    binding.bind()
    assert casts.refresh(binding, False, None, None)
    assert casts.applied is not None and set(casts.applied.weights) == {"block.table"}
    assert casts.applied.weights["block.table"].dtype == torch.bfloat16
