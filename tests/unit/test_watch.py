"""A module tree that computes otherwise is noticed, whatever of it has changed."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lib_onediff.weights.watch import Tree


def louder(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 1.1


def quieter(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 0.9


def before(module: nn.Module, inputs: Any) -> None:
    return None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)
        self.kept = {"scale": 1.0, "many": [1, 2]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


class Other(nn.Linear):
    pass


def exchanged_hook(network: Any, place: int) -> None:
    hooks = list(network.modules())[place]._forward_hooks
    hooks[next(iter(hooks))] = quieter


def swapped(network: Any) -> None:
    network.first, network.second = network.second, network.first


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda network: network.norm.register_forward_hook(louder),
    "another hook in the place of the first": lambda network: exchanged_hook(network, 0),
    "another hook in the place of the last": lambda network: exchanged_hook(network, 1),
    "a hook that goes": lambda network: network.first._forward_hooks.clear(),
    "a hook of another kind": lambda network: network.second.register_forward_pre_hook(before),
    "a class": lambda network: setattr(network.first, "__class__", Other),
    "two children that change places": swapped,
    "a child that goes": lambda network: delattr(network, "norm"),
    "a child that comes": lambda network: network.add_module("more", nn.SiLU()),
    "another child of the same class": lambda network: setattr(network, "first", nn.Linear(2, 2)),
    "a number": lambda network: setattr(network.norm, "eps", 0.5),
    "an attribute that comes": lambda network: setattr(network.norm, "scale", 0.5),
    "an attribute that goes": lambda network: delattr(network, "kept"),
    "within a dictionary": lambda network: network.kept.update(scale=2.0),
    "within a list in a dictionary": lambda network: network.kept["many"].append(3),
    "a forward on the instance": lambda network: setattr(network.second, "forward", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_nothing_else(change: str) -> None:
    network: Any = Block()
    for module in (network, network.first):
        module.register_forward_hook(louder)
    tree = Tree(network, frozenset(), frozenset())
    assert tree.stands(network) and tree.stands(network)
    network(torch.ones(1, 2))
    network.kept.update(scale=1.0)
    with torch.no_grad():
        network.first.weight.mul_(2)
    assert tree.stands(network), "a value is no part of it"
    assert not tree.stands(Block())
    CHANGES[change](network)
    assert not tree.stands(network)


@pytest.mark.parametrize(("owner", "name"), [
    (nn.LayerNorm, "forward"), (nn.functional, "layer_norm"), (nn.functional, "linear"), (Block, "forward"),
])
def test_code_that_is_replaced_is_noticed_and_so_is_its_return(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Block()
    tree = Tree(network, frozenset(), frozenset())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kwargs: args[0])
        assert not tree.stands(network)
    assert tree.stands(network)
