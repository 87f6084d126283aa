"""A Tree records the modules of a network and the code that they run. is_unchanged() is False after every change by
which the network may compute something else, so that OneDiff checks the network again. A change is said to change the
tree if is_unchanged() is False after it.

The digest of a Tree is the key under which what was found out about this code is stored on disk.
"""
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
    """An object whose method the network calls through data (an attribute or a table), not by a global name."""

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
    """A network whose forward calls methods of objects in a global table, in another object, and in its attributes."""

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
def test_a_tree_is_changed_by_each_change_of_its_modules_but_not_by_new_weight_values(change: str) -> None:
    """change: one of hooks, classes, children or attributes. A call of the network, and equal values written into a
    dictionary, do not change the tree either."""
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
def test_a_tree_is_changed_while_a_method_or_function_that_the_network_calls_is_replaced(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """owner, name: the class or module, and what is replaced in it. After the original is put back, the tree is
    unchanged."""
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
def test_replacing_a_method_of_an_object_reached_through_data_changes_the_tree_and_its_digest(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """name: where the object is, for example in a global table or an attribute (BY_DATA puts it there). After the
    original method is put back, tree and digest are as before."""
    network = ByData()
    put, replacement = BY_DATA[name]
    monkeypatch.setitem(TABLE, "torch", [Backend()])
    monkeypatch.setattr(REGISTRY, "backend", Backend())
    monkeypatch.setattr(REGISTRY, "scale", double)
    # A class of its own, whose method nothing else reaches.
    kind = type("Alone", (), {"__module__": __name__, "scale": Backend.scale})
    put(network, kind)
    tree = Tree(network, frozenset(), frozenset())
    digest = tree.digest
    with monkeypatch.context() as patch:
        patch.setattr(*replacement(network, kind), raising=False)
        assert not tree.is_unchanged(network)
        assert Tree(network, frozenset(), frozenset(), before=tree).digest != digest
    assert tree.is_unchanged(network) and Tree(network, frozenset(), frozenset()).digest == digest


def test_replacing_a_function_in_a_dictionary_of_the_network_changes_the_tree_and_its_digest() -> None:
    """The dictionary is an attribute of the network, whose forward calls this function. is_unchanged() must be False
    afterwards."""
    network = ByData()
    tree = Tree(network, frozenset(), frozenset())
    digest = tree.digest
    network.act["double"] = triple
    assert not tree.is_unchanged(network) and Tree(network, frozenset(), frozenset()).digest != digest


def test_replacing_a_function_that_only_our_operators_call_changes_the_tree_and_its_digest(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network itself does not call scaled_dot_product_attention."""
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
    """Code finds the functions that a function calls. reached: which it finds of make (called by Made's constructor)
    and compute (called by its method). Code that uses an existing object must not reach its constructor: constructors
    of a WebUI's objects reach the whole program."""
    assert {make, compute}.intersection(Code([function]).functions.values()) == reached


class ByCast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, x)


def test_another_code_object_of_a_standard_library_function_changes_the_tree_and_its_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network calls typing.cast, whose __code__ is replaced and put back."""
    network = ByCast()
    tree = Tree(network, frozenset(), frozenset())
    digest = tree.digest
    with monkeypatch.context() as patch:
        patch.setattr(cast, "__code__", (lambda typ, val: val).__code__)
        assert not tree.is_unchanged(network)
        assert Tree(network, frozenset(), frozenset()).digest != digest
    assert tree.is_unchanged(network)


def test_replacing_torch_load_or_save_does_not_change_the_tree_or_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forge Neo replaces torch.load, which no forward calls. OneDiff's code has methods of these names, which must not
    be taken for torch's."""
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
