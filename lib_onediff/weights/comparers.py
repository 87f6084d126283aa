"""Comparers: functions that tell quickly whether a later value has the same snapshot as an earlier one (snapshot.py).

Making a snapshot of the later value takes several times as long, because snapshot() decides anew what kind of value it
has.
"""
from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .snapshot import BY_IDENTITY, DEEPEST, is_plain, snapshot
from .values import CONTAINERS, FUNCTIONS, MOST_ENTRIES

# Returns whether a later value has the same snapshot as the value that the comparer was made of.
Comparer = Callable[[Any], bool]


def comparer(value: Any, depth: int = 0) -> Comparer:
    """A function that takes a later value, and returns whether the snapshot of that value equals the present snapshot
    of this one. For a few later values it returns False although the snapshots are equal: for those with plain values
    that are equal and differ in type, such as 1 and True. Keeps alive no more than the snapshot does. depth: as for
    snapshot()."""
    if depth <= DEEPEST and not is_plain(value):
        if is_ordered(value):
            return comparer_of_container(value, depth)
        if isinstance(value, BY_IDENTITY):
            return comparer_of_identity(value)
        if not isinstance(value, (*CONTAINERS, Tensor, types.MethodType)):
            return comparer_of_object(value, depth)
    known = snapshot(value, depth)

    def is_same(later: Any) -> bool:
        return bool(snapshot(later, depth) == known)

    return is_same


def is_ordered(value: Any) -> bool:
    """Whether a value is a container that is compared member by member, in the order of its members: a list, a tuple, a
    dictionary or an object of a class derived from dict, with at most MOST_ENTRIES members."""
    return (type(value) in (list, tuple) or isinstance(value, dict)) and len(value) <= MOST_ENTRIES


def comparer_of_container(container: Any, depth: int) -> Comparer:
    """The comparer of a container for which is_ordered is true."""
    kind = type(container)
    members_of = members_of_dictionary if isinstance(container, dict) else tuple

    def comparer_of_member(member: Any) -> Comparer:
        return comparer(member, depth + 1)

    are_same = comparer_of_many(members_of(container), comparer_of_member)

    def is_same(later: Any) -> bool:
        return type(later) is kind and are_same(members_of(later))

    return is_same


def members_of_dictionary(dictionary: dict[Any, Any]) -> tuple[Any, ...]:
    """The keys of a dictionary, followed by its values. Calls no method of a derived class; see
    values.safe_to_iterate."""
    return (*dict.keys(dictionary), *dict.values(dictionary))


def comparer_of_identity(value: Any) -> Comparer:
    """The comparer of an object that is compared by its identity alone."""
    reference = weakref.ref(value)

    def is_same(later: Any) -> bool:
        return later is not None and reference() is later

    return is_same


def comparer_of_object(value: Any, depth: int) -> Comparer:
    """The comparer of an object by its identity, its class and its attributes; of attributes that are neither plain nor
    functions, by their types. An object that does not support weak references is compared without its identity."""
    kind = type(value)
    try:
        is_identical = comparer_of_identity(value)
    except TypeError:
        is_identical = is_any
    attributes = getattr(value, "__dict__", {}).copy()

    def is_same_without_attributes(later: Any) -> bool:
        return type(later) is kind and is_identical(later) and not getattr(later, "__dict__", None)

    if not attributes:
        return is_same_without_attributes

    def comparer_of_attribute(attribute: Any) -> Comparer:
        is_compared = isinstance(attribute, FUNCTIONS) or is_plain(attribute)
        return comparer(attribute, depth + 1) if is_compared else is_any

    names = tuple(attributes)
    are_same = comparer_of_many(tuple(attributes.values()), comparer_of_attribute)

    def is_same(later: Any) -> bool:
        if type(later) is not kind or not is_identical(later):
            return False
        state = getattr(later, "__dict__", {})
        return tuple(state) == names and are_same(tuple(state.values()))

    return is_same


def comparer_of_many(
    values: Sequence[Any], comparer_of: Callable[[Any], Comparer]
) -> Callable[[Sequence[Any]], bool]:
    """A function that takes later values, and returns whether there are as many, of the same types, and each is the
    same as the value at its position: a plain value if both are equal, any other by comparer_of(value)."""
    kinds = list(map(type, values))
    plain = [index for index, value in enumerate(values) if is_compared_by_value(value)]
    pick = operator.itemgetter(*plain) if plain else operator.itemgetter(slice(0, 0))
    known = pick(values)
    others: list[tuple[int, Comparer]] = []
    for index, value in enumerate(values):
        if not is_compared_by_value(value):
            is_same = comparer_of(value)
            if is_same is not is_any:
                others.append((index, is_same))

    def are_same(later: Sequence[Any]) -> bool:
        # The types first: == of an object of another type could do anything.
        if list(map(type, later)) != kinds or pick(later) != known:
            return False
        return all(is_same(later[index]) for index, is_same in others)

    return are_same


def is_compared_by_value(value: Any) -> bool:
    """Whether == and the type tell whether a later value has the same snapshot. False for a plain tuple or frozenset,
    because == ignores the types of its members."""
    return is_plain(value) and type(value) not in (tuple, frozenset)


def is_any(later: Any) -> bool:
    """A Comparer that always returns True."""
    return True
