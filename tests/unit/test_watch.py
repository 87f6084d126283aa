"""Any change of a module tree that makes it compute something else is noticed."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from lib_onediff.weights.code import Code
from lib_onediff.weights.module_tree import Tree


def louder(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 1.1


def quieter(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 0.9


def before(module: nn.Module, inputs: Any) -> None:
    return None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)
        self.kept = {"scale": 1.0, "many": [1, 2]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


class Backend:
    """Code that is reached through data, without a name."""

    factor = 1.0

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x


def times(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: factor * x


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


class Registry:
    def __init__(self) -> None:
        self.backend = Backend()
        self.scale = double


TABLE = {"torch": [Backend()]}
REGISTRY = Registry()


class ByData(nn.Module):
    """Its code calls methods of objects in a table, in an object and in its own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Backend()
        self.many = {"first": Backend()}
        self.act = {"double": double}
        self.bound = Backend()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = TABLE["torch"][0].scale(REGISTRY.backend.scale(REGISTRY.scale(x)))
        return self.bound.scale(self.own.scale(self.act["double"](self.many["first"].scale(x))))


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
def test_every_change_of_a_module_tree_is_noticed_but_not_of_its_weights_values(change: str) -> None:
    """Nor a call, nor a dictionary that is written with equal values."""
    network: Any = Block()
    for module in (network, network.first):
        module.register_forward_hook(louder)
    tree = Tree(network, frozenset(), frozenset())
    assert tree.is_unchanged(network) and tree.is_unchanged(network)
    network(torch.ones(1, 2))
    network.kept.update(scale=1.0)
    with torch.no_grad():
        network.first.weight.mul_(2)
    assert tree.is_unchanged(network), "a value is no part of it"
    assert not tree.is_unchanged(Block())
    CHANGES[change](network)
    assert not tree.is_unchanged(network)


@pytest.mark.parametrize(("owner", "name"), [
    (nn.LayerNorm, "forward"), (nn.functional, "layer_norm"), (nn.functional, "linear"), (Block, "forward"),
])
def test_replaced_code_of_classes_and_functions_is_noticed_until_it_is_put_back(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Block()
    tree = Tree(network, frozenset(), frozenset())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kwargs: args[0])
        assert not tree.is_unchanged(network)
    assert tree.is_unchanged(network)


BY_DATA: dict[str, tuple[Callable[[Any, Any], object], Callable[[Any, Any], Any]]] = {
    "a table of the file": (
        lambda network, kind: TABLE["torch"].__setitem__(0, kind()), lambda network, kind: (kind, "scale", triple)),
    "an object in an object": (
        lambda network, kind: setattr(REGISTRY, "backend", kind()), lambda network, kind: (kind, "scale", triple)),
    "an object on the module": (
        lambda network, kind: setattr(network, "own", kind()), lambda network, kind: (kind, "scale", triple)),
    "an object in a table on the module": (
        lambda network, kind: network.many.update(first=kind()), lambda network, kind: (kind, "scale", triple)),
    "a function of an object": (
        lambda network, kind: setattr(REGISTRY, "scale", times(2)),
        lambda network, kind: (REGISTRY, "scale", times(3))),
    "a method hidden by an object's own": (
        lambda network, kind: None,
        lambda network, kind: (network.bound, "scale", times(3))),
}


@pytest.mark.parametrize("name", BY_DATA)
def test_replaced_methods_of_objects_that_the_code_reaches_through_data_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BY_DATA: where the object lies (put), and the method that is replaced. The digest names the code in the store."""
    network = ByData()
    put, replacement = BY_DATA[name]
    monkeypatch.setitem(TABLE, "torch", [Backend()])
    monkeypatch.setattr(REGISTRY, "backend", Backend())
    monkeypatch.setattr(REGISTRY, "scale", double)
    # Its methods are only reached in this way.
    kind = type("Alone", (), {"__module__": __name__, "scale": Backend.scale})
    put(network, kind)
    tree = Tree(network, frozenset(), frozenset())
    digest = tree.digest
    with monkeypatch.context() as patch:
        patch.setattr(*replacement(network, kind), raising=False)
        assert not tree.is_unchanged(network)
        assert Tree(network, frozenset(), frozenset(), before=tree).digest != digest
    assert tree.is_unchanged(network) and Tree(network, frozenset(), frozenset()).digest == digest


def test_another_function_in_a_table_on_the_module_is_noticed() -> None:
    network = ByData()
    tree = Tree(network, frozenset(), frozenset())
    digest = tree.digest
    network.act["double"] = triple
    assert not tree.is_unchanged(network) and Tree(network, frozenset(), frozenset()).digest != digest


def test_a_replaced_function_that_our_operators_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Block()
    tree = Tree(network, frozenset(), frozenset())
    digest = tree.digest
    real = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: real(*args, **kwargs))
    assert not tree.is_unchanged(network) and Tree(network, frozenset(), frozenset()).digest != digest


class Made:
    def __init__(self) -> None:
        make()

    def run(self) -> None:
        compute()


def make() -> None:
    pass


def compute() -> None:
    pass


THERE = Made()


def with_an_object() -> None:
    THERE.run()


def with_a_class() -> None:
    Made().run()


@pytest.mark.parametrize("function, reached", [(with_an_object, {compute}), (with_a_class, {make, compute})])
def test_a_constructor_is_reached_only_from_code_that_names_the_class(function: Any, reached: set[Any]) -> None:
    """reached: of the functions make (called by the constructor) and compute (by the method). WebUIs have objects from
    their start, whose constructors reach the whole program."""
    assert {make, compute}.intersection(Code([function]).functions.values()) == reached


class ByCast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, x)


def test_another_body_of_a_function_of_the_standard_library_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = ByCast()
    tree = Tree(network, frozenset(), frozenset())
    digest = tree.digest
    with monkeypatch.context() as patch:
        patch.setattr(cast, "__code__", (lambda typ, val: val).__code__)
        assert not tree.is_unchanged(network)
        assert Tree(network, frozenset(), frozenset()).digest != digest
    assert tree.is_unchanged(network)


def test_replacing_torch_load_or_save_keeps_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forge Neo replaces torch.load; OneDiff's own code has methods of that name."""
    network = Block()
    tree = Tree(network, frozenset(), frozenset())
    digest = tree.digest
    held = object()
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, lambda *args, **kwargs: held)
    assert tree.is_unchanged(network)
    again = Tree(network, frozenset(), frozenset())
    assert again.digest == digest
    assert not any(named.label in ("torch.load", "torch.save") for named in again.reached.named())
