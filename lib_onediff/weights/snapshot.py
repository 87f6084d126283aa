"""Snapshots of objects, to tell later in the same process whether they are still the same.

Two snapshots are equal as long as what computes with the object finds the same in it. No snapshot keeps a module, a
tensor or a function's closure alive. Objects are recognised by weak references: an id() may come again.
"""
from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..core.edits import edit_count
from .contents import MemorySpan
from .values import CONTAINERS, FUNCTIONS, MOST_ENTRIES, as_it_is

# Equal values of these types are the same to any computation.
PLAIN_CLASSES = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size,
    torch.memory_format, torch.layout, type, types.BuiltinFunctionType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, types.ModuleType,
)
# The same, without subclasses: a look-up in it is faster than isinstance, and answers for most values.
PLAIN_TYPES = frozenset(PLAIN_CLASSES)
# Recognised as objects. A closure may hold a model: what it holds is compared where its code is reached.
BY_IDENTITY = (types.FunctionType, nn.Module)
# Containers within containers, and objects within objects. What lies deeper is known by its type and its length.
DEEPEST = 4
state_of = operator.attrgetter("__dict__")


class Same:
    """Equals a Same of the same object, and no other. Keeps nothing alive."""

    __slots__ = ("reference",)

    def __init__(self, one: Any) -> None:
        self.reference = weakref.ref(one)

    def __eq__(self, other: object) -> bool:
        # A live object has one plain weak reference: comparing these never calls an __eq__ of the object's own.
        return isinstance(other, Same) and self.reference is other.reference

    __hash__ = None  # type: ignore[assignment]


def same(value: Any) -> Any:
    """A Same of an object; of an object that takes no weak reference, its class."""
    try:
        return Same(value)
    except TypeError:
        return type(value)


def no_object() -> None:
    """A stand-in for a weakref.ref that has no object yet: returns None."""
    return None


def is_plain(value: Any) -> bool:
    """Whether a value is its own snapshot: equal values compute the same, and it keeps no model alive."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(is_plain, value))
    if kind is types.FunctionType:
        # A closure may hold a model.
        return value.__closure__ is None
    if kind is staticmethod or kind is classmethod:
        return is_plain(value.__func__)
    if kind is property:
        return is_plain(value.fget) and is_plain(value.fset)
    return isinstance(value, PLAIN_CLASSES)


def snapshot(value: Any, depth: int = 0) -> Any:
    """The snapshot of a value: of a container, of what is in it; of a tensor, of where it lies and how often it was
    edited; of another object, of its identity and its plain attributes. depth: how many objects it lies in."""
    if is_plain(value):
        return value
    if isinstance(value, CONTAINERS):
        return snapshot_of_container(value, depth)
    if isinstance(value, Tensor):
        return MemorySpan.of(value), edit_count(value)
    if isinstance(value, types.MethodType):
        function = snapshot(value.__func__, depth + 1)
        return types.MethodType, function, snapshot(value.__self__, depth + 1)
    identity = same(value)
    if isinstance(value, BY_IDENTITY):
        return identity
    state = getattr(value, "__dict__", {})
    if not state or depth > DEEPEST:
        return identity, type(value), None
    attributes = {name: snapshot_of_attribute(one, depth) for name, one in state.copy().items()}
    return identity, type(value), attributes


def snapshot_of_container(container: Any, depth: int) -> tuple[Any, ...]:
    kind = type(container)
    size = len(container)
    if size > MOST_ENTRIES or depth > DEEPEST:
        return kind, size
    now = as_it_is(container)
    entries: Iterable[Any] = chain.from_iterable(now.items()) if isinstance(now, dict) else now
    return kind, tuple([one if type(one) in PLAIN_TYPES else snapshot(one, depth + 1) for one in entries])


def snapshot_of_attribute(value: Any, depth: int) -> Any:
    """Of an attribute of an object that is no module: plain values and code. Anything else in it is known by its type.
    """
    if is_plain(value):
        return value
    return snapshot(value, depth + 1) if isinstance(value, FUNCTIONS) else type(value)
