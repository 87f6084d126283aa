"""A weak dictionary that can be iterated while another thread changes it, for what is known of each module."""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class WeakDictionary(weakref.WeakKeyDictionary[Key, Value]):
    """A WeakKeyDictionary that may change while another thread iterates over it: that thread sees it as it was.

    Python's own iterates in Python code, so that even list(dictionary.values()) fails when a key is added meanwhile.
    """

    data: dict[weakref.ref[Key], Value]

    # Lists, where a dictionary has views of itself: that is what this class is for.
    def items(self) -> list[tuple[Key, Value]]:  # type: ignore[override]
        # A copy of a plain dictionary is made at one stroke.
        return [(key, value) for reference, value in self.data.copy().items() if (key := reference()) is not None]

    def keys(self) -> list[Key]:  # type: ignore[override]
        return [key for key, _ in self.items()]

    def values(self) -> list[Value]:  # type: ignore[override]
        return [value for _, value in self.items()]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys())
