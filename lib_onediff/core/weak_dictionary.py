"""A WeakKeyDictionary, for data about modules, that is safe to iterate while another thread changes it."""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class WeakDictionary(weakref.WeakKeyDictionary[Key, Value]):
    """A WeakKeyDictionary that can be iterated while another thread changes it: an iterator sees the dictionary as it
    was at the beginning.

    Python's own is iterated by Python code, so that even list(dictionary.values()) raises if another thread adds a key
    meanwhile. Here, items(), keys() and values() return lists.
    """

    data: dict[weakref.ref[Key], Value]

    def items(self) -> list[tuple[Key, Value]]:  # type: ignore[override]
        """(key, value) pairs, without keys that are no longer alive."""
        # dict.copy() is atomic.
        return [(key, value) for reference, value in self.data.copy().items() if (key := reference()) is not None]

    def keys(self) -> list[Key]:  # type: ignore[override]
        return [key for key, _ in self.items()]

    def values(self) -> list[Value]:  # type: ignore[override]
        return [value for _, value in self.items()]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys())
