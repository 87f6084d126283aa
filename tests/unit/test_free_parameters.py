"""Free parameters, which belong to no layer, and norms whose weight is never cast: how they are read, bound, copied and
cast."""
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
    """A network with two free parameters, a norm of its own class, and a block with another free parameter and a
    layer."""

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


def test_free_parameters_are_bound_once_and_edits_in_place_take_effect() -> None:
    """Each bound parameter is the network's own memory, so that an edit in place takes effect without a copy."""
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
    """The copy, which is for a second GPU, has every parameter's name and shape, and the same layout can be bound to
    it."""
    network = Network()
    layout = layout_of(network)
    copy = empty_copy(Binding(network, layout), torch.device("cpu"))
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
    assert {name: parameter.shape for name, parameter in copy.named_parameters()} == shapes
    assert Binding(copy, layout).bind() == 0


def test_a_parameter_that_the_layout_does_not_have_is_refused() -> None:
    """A network with an unknown parameter may compute something else. A layout with a parameter that the network lacks
    is refused, too."""
    network = Network()
    network.third_token = nn.Parameter(torch.zeros(1))
    with pytest.raises(Refusal, match="third_token"):
        layout_of(network)
    with pytest.raises(Refusal, match="no fourth_token"):
        LeafReader(network).parameter(network, "fourth_token")


def test_a_norm_that_the_host_never_casts_may_have_another_dtype() -> None:
    """A float32 norm in a bfloat16 network is bound. With another parameter in float32, the network is refused as
    mixed."""
    network = Network().bfloat16()
    network.norm.float()
    Binding(network, layout_of(network)).bind()
    network.block.table.data = network.block.table.data.float()
    with pytest.raises(Refusal, match="mixed"):
        Binding(network, layout_of(network)).bind()


def test_free_parameters_are_cast_as_the_host_casts_its_layers_and_a_shifted_norm_is_not() -> None:
    """The host's layers cast their own weights at each use; Casts asks the host to which dtype. The network's forward
    casts its free parameters, so OneDiff keeps cast copies of those that have another dtype. The norm is not cast."""
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
