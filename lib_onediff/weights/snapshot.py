"""Snapshots of objects, to find out later whether an object still computes the same: its snapshots in one process are
equal as long as it does.

No snapshot keeps a module, a tensor or a function's closure alive. Objects are identified by weak references, because
an id() may be reused.
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
from .values import CONTAINERS, FUNCTIONS, MOST_ENTRIES, safe_to_iterate

# Values of these types are their own snapshots: code computes the same with equal ones.
PLAIN_CLASSES = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size,
    torch.memory_format, torch.layout, type, types.BuiltinFunctionType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, types.ModuleType,
)
# The same as a set of exact types: a look-up is faster than isinstance, and decides for most values.
PLAIN_TYPES = frozenset(PLAIN_CLASSES)
# Compared by identity alone. A function's closure may contain a model; reached.Bodies compares it.
BY_IDENTITY = (types.FunctionType, nn.Module)
# The depth of nested containers and objects that are compared; deeper ones are compared by type and length alone.
DEEPEST = 4
# Returns the __dict__ of an object.
state_of = operator.attrgetter("__dict__")


class Same:
    """Identifies an object without keeping it alive. Two are equal only if both were made of the same object. The
    object's own == is not called."""

    __slots__ = ("reference",)

    def __init__(self, one: Any) -> None:
        self.reference = weakref.ref(one)

    def __eq__(self, other: object) -> bool:
        # weakref.ref() returns the same reference for the same live object. Comparing references with == would call the
        # object's own __eq__.
        return isinstance(other, Same) and self.reference is other.reference

    __hash__ = None  # type: ignore[assignment]


def same(value: Any) -> Any:
    """A Same of an object, to compare with a later one. For an object that does not support weak references, its class.
    """
    try:
        return Same(value)
    except TypeError:
        return type(value)


def no_object() -> None:
    """None, always: used in place of a weakref.ref until there is an object to refer to."""
    return None


def is_plain(value: Any) -> bool:
    """Whether a value can be its own snapshot: code computes the same with an equal value, and keeping the value does
    not keep a model alive."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(is_plain, value))
    if kind is types.FunctionType:
        # A closure may contain a model.
        return value.__closure__ is None
    if kind is staticmethod or kind is classmethod:
        return is_plain(value.__func__)
    if kind is property:
        return is_plain(value.fget) and is_plain(value.fset)
    return isinstance(value, PLAIN_CLASSES)


def snapshot(value: Any, depth: int = 0) -> Any:
    """The snapshot of a value: of a plain value, itself; of a container, the snapshots of its members; of a tensor, its
    MemorySpan and its count of edits; of a module or a function with a closure, its identity; of another object, its
    identity and its plain attributes. depth: the number of containers and objects around the value."""
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
    """The snapshot of a container: its type, and the snapshots of its members in their order (of a dictionary: of each
    key, followed by its value). For a container with more than MOST_ENTRIES members or more than DEEPEST deep, its type
    and length."""
    kind = type(container)
    size = len(container)
    if size > MOST_ENTRIES or depth > DEEPEST:
        return kind, size
    now = safe_to_iterate(container)
    entries: Iterable[Any] = chain.from_iterable(now.items()) if isinstance(now, dict) else now
    return kind, tuple([one if type(one) in PLAIN_TYPES else snapshot(one, depth + 1) for one in entries])


def snapshot_of_attribute(value: Any, depth: int) -> Any:
    """The snapshot of an attribute of an object that is not a module: for a plain value or a function, see snapshot;
    for any other value, its type alone."""
    if is_plain(value):
        return value
    return snapshot(value, depth + 1) if isinstance(value, FUNCTIONS) else type(value)
