"""Comparers find that a later value has changed exactly if a snapshot of it differs from the snapshot of the first."""
from __future__ import annotations

import functools
import gc
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lib_onediff.weights.comparers import comparer
from lib_onediff.weights.module_tree import BOOKKEEPING, ModuleStates
from lib_onediff.weights.reached import Names
from lib_onediff.weights.snapshot import snapshot


class Holder:
    """An object with whatever attributes a test gives it."""


class Frozen(OrderedDict[str, Any]):
    """As diffusers' configurations: a class derived from OrderedDict that refuses changes."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("frozen")


class Slotted:
    """An object without __dict__ and without weak references."""

    __slots__ = ("value",)


def made(**attributes: Any) -> Holder:
    holder = Holder()
    vars(holder).update(attributes)
    return holder


def with_closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def set_cell(function: Any, value: Any) -> None:
    function.__closure__[0].cell_contents = value


BARE = Holder()
HOLDER = made(a=1, b="x", tensor=torch.zeros(1), function=with_closure(1), nested={"a": 1})
FROZEN = Frozen({})
OrderedDict.__setitem__(FROZEN, "blocks", ["one", "two"])
OrderedDict.__setitem__(FROZEN, "size", 3)
LIST: list[Any] = ["a", 1, (2, 3)]
DICT: dict[str, Any] = {"a": 1, "b": BARE, "c": [1, 2]}
MODULE = nn.Linear(2, 2)
TENSOR = torch.zeros(2)
PARTIAL = functools.partial(max, 1)

# (the case's name, a value, a function that changes it in place or does nothing, a function that returns the later
# value).
CASES: list[tuple[str, Any, Callable[[], object], Callable[[], Any]]] = [
    ("bare", BARE, lambda: None, lambda: BARE),
    ("bare replaced", BARE, lambda: None, Holder),
    ("bare gets an attribute", BARE, lambda: setattr(BARE, "a", 1), lambda: BARE),
    ("bare gets another class", BARE, lambda: setattr(BARE, "__class__", SimpleNamespaceLike), lambda: BARE),
    ("object", HOLDER, lambda: None, lambda: HOLDER),
    ("attribute", HOLDER, lambda: setattr(HOLDER, "a", 2), lambda: HOLDER),
    ("attribute's type", HOLDER, lambda: setattr(HOLDER, "tensor", [1]), lambda: HOLDER),
    ("attribute of the same type", HOLDER, lambda: setattr(HOLDER, "tensor", torch.ones(3)), lambda: HOLDER),
    ("attribute gone", HOLDER, lambda: delattr(HOLDER, "b"), lambda: HOLDER),
    ("attribute renamed", HOLDER, lambda: setattr(HOLDER, "z", vars(HOLDER).pop("a")), lambda: HOLDER),
    ("function", HOLDER, lambda: setattr(HOLDER, "function", with_closure(1)), lambda: HOLDER),
    ("function made plain", HOLDER, lambda: setattr(HOLDER, "function", made), lambda: HOLDER),
    ("the cell alone", HOLDER, lambda: set_cell(vars(HOLDER)["function"], 5), lambda: HOLDER),
    ("list", LIST, lambda: None, lambda: LIST),
    ("equal list", LIST, lambda: None, lambda: list(LIST)),
    ("list as tuple", LIST, lambda: None, lambda: tuple(LIST)),
    ("list longer", LIST, lambda: LIST.append(1), lambda: LIST),
    ("list's member", LIST, lambda: LIST.__setitem__(0, "b"), lambda: LIST),
    ("list's member becomes a tensor", LIST, lambda: LIST.__setitem__(1, torch.zeros(3)), lambda: LIST),
    ("list too long", LIST, lambda: LIST.extend(range(300)), lambda: LIST),
    ("dictionary", DICT, lambda: None, lambda: DICT),
    ("dictionary's order", DICT, lambda: DICT.update(a=DICT.pop("a")), lambda: DICT),
    ("dictionary's key", DICT, lambda: DICT.update(z=DICT.pop("c")), lambda: DICT),
    ("dictionary's object", DICT, lambda: DICT.update(b=Holder()), lambda: DICT),
    ("dictionary's list", DICT, lambda: DICT["c"].append(3), lambda: DICT),
    ("frozen", FROZEN, lambda: None, lambda: FROZEN),
    ("frozen's list", FROZEN, lambda: FROZEN["blocks"].append("three"), lambda: FROZEN),
    ("frozen, by force", FROZEN, lambda: OrderedDict.__setitem__(FROZEN, "size", 4), lambda: FROZEN),
    ("frozen as dictionary", FROZEN, lambda: None, lambda: dict(FROZEN)),
    ("tuple in a dictionary", {"a": (1, 2)}, lambda: None, lambda: {"a": (1, 2)}),
    ("tensor in a tuple", {"a": (1, 2)}, lambda: None, lambda: {"a": (torch.tensor(1), 2)}),
    ("tensors in a tuple", {"a": (1, 2)}, lambda: None, lambda: {"a": (torch.ones(2), 2)}),
    ("set", {1, 2}, lambda: None, lambda: {1, 2}),
    ("set's member", {1, 2}, lambda: None, lambda: {1, 3}),
    ("module", MODULE, lambda: None, lambda: MODULE),
    ("module replaced", MODULE, lambda: None, lambda: nn.Linear(2, 2)),
    ("module by None", MODULE, lambda: None, lambda: None),
    ("tensor", TENSOR, lambda: None, lambda: TENSOR),
    ("tensor edited", TENSOR, lambda: TENSOR.add_(1), lambda: TENSOR),
    ("method", LIST.append, lambda: None, lambda: LIST.append),
    ("bound", MODULE.forward, lambda: None, lambda: MODULE.forward),
    ("bound to another", MODULE.forward, lambda: None, lambda: nn.Linear(2, 2).forward),
    ("partial", PARTIAL, lambda: None, lambda: PARTIAL),
    ("partial replaced", PARTIAL, lambda: None, lambda: functools.partial(max, 1)),
    ("pattern", re.compile("a"), lambda: None, lambda: re.compile("b")),
    ("slots", Slotted(), lambda: None, Slotted),
    ("a number", 3, lambda: None, lambda: 4),
]


class SimpleNamespaceLike:
    """Another class whose objects have a __dict__."""


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_comparer_decides_as_two_snapshots_do(case: Any) -> None:
    """comparer() and Names, which compares the values of names in dicts, find a change if and only if the snapshots of
    the value before and of the later value differ."""
    _, value, change, later = case
    kept = LIST[:], {**DICT, "c": DICT["c"][:]}, vars(HOLDER).copy(), dict(FROZEN, blocks=FROZEN["blocks"][:])
    before = snapshot(value)
    is_same = comparer(value)
    space = {"value": value}
    names = Names([space], [["value"]])
    try:
        change()
        space["value"] = later()
        assert is_same(space["value"]) == (snapshot(space["value"]) == before)
        assert names.are_unchanged([space]) == (snapshot(space["value"]) == before)
    finally:
        LIST[:] = kept[0]
        DICT.clear()
        DICT.update(kept[1])
        BARE.__class__ = Holder
        vars(BARE).clear()
        vars(HOLDER).clear()
        vars(HOLDER).update(kept[2])
        OrderedDict.clear(FROZEN)
        for name, one in kept[3].items():
            OrderedDict.__setitem__(FROZEN, name, one)


def test_a_later_object_whose_eq_raises_counts_as_a_change() -> None:
    """The comparers must not raise the object's error."""
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("cannot be compared")

        __hash__ = None  # type: ignore[assignment]

    is_same = comparer([1, 2])
    assert not is_same([1, Odd()]) and not comparer(SimpleNamespace(a=1))(Odd())


@pytest.mark.parametrize("holds", [
    lambda module: {"one": module}, lambda module: made(one=module), lambda module: [with_closure(module)],
])
def test_a_comparer_keeps_no_module_alive(holds: Callable[[Any], Any]) -> None:
    """After the module was freed, the same value with another module counts as a change. holds: makes a value that
    refers to a module."""
    module = nn.Linear(2, 2)
    reference = weakref.ref(module)
    is_same = comparer(holds(module))
    del module
    gc.collect()
    assert reference() is None and not is_same(holds(nn.Linear(2, 2)))


@pytest.mark.parametrize("spaces", [[{"a": float("nan")}], [{"a": float("nan"), "b": 1}], [{"a": float("nan")}] * 2])
def test_nan_is_unchanged_until_another_value_takes_its_place(spaces: list[dict[str, Any]]) -> None:
    """By ==, NaN differs from itself. spaces: the dicts whose values Names compares; the same dict may be there
    twice."""
    names = Names(spaces, spaces)
    assert names.are_unchanged(spaces)
    spaces[-1]["a"] = 1.0
    assert not names.are_unchanged(spaces)


def test_none_in_place_of_a_freed_module_is_a_change() -> None:
    """Names (a class) keeps only a weak reference to a module. Once the module is freed, the reference returns None,
    which must not count as equal to the None that now has the module's name."""
    space: dict[str, Any] = {"adapter": nn.Linear(2, 2)}
    names = Names([space], [["adapter"]])
    assert names.are_unchanged([space])
    space["adapter"] = None
    assert not names.are_unchanged([space])


@pytest.mark.parametrize("later", [torch.ones(3), "text", None], ids=str)
def test_a_plain_attribute_of_a_module_replaced_by_any_value_is_a_change(later: Any) -> None:
    """A plain attribute is one with a number or a text, here 1. The later value may be a tensor of several numbers, for
    which == has no single result."""
    module = nn.Linear(2, 2)
    module.scale = 1
    states = ModuleStates([module], BOOKKEEPING, {})
    assert states.are_unchanged(module)
    module.scale = later
    assert not states.are_unchanged(module)
