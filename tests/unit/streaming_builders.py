"""Stand-ins for CopyStream without a GPU, which copy streamed weights as early or as late as the code allows. If the
code waits for the wrong mark (a point in the order of copies), one of the two gives a wrong output."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lib_onediff.weights import bound
from lib_onediff.weights.streaming import Streaming


class EarlyCopyStream:
    """A CopyStream that copies at once when copy() is called. If marks are wrong, it overwrites weights before they are
    read."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def computed(self) -> int:
        return 0

    def copy(self, copies: Any, after: Any) -> int:
        for target, place in copies:
            target.copy_(place.bytes())
        return 0

    def wait(self, mark: int) -> None:
        pass


class LateCopyStream(EarlyCopyStream):
    """A CopyStream that copies only when wait() is called for its mark. If marks are wrong, old weights are read."""

    def copy(self, copies: Any, after: Any) -> int:
        self.waiting.append(lambda: super(LateCopyStream, self).copy(copies, after) and None)
        return len(self.waiting)

    def wait(self, mark: int) -> None:
        for one in self.waiting[:mark]:
            one()
        self.waiting[:mark] = [lambda: None] * len(self.waiting[:mark])


def use_copy_stream(monkeypatch: pytest.MonkeyPatch, copy_stream: Callable[[], EarlyCopyStream]) -> None:
    """Have streamed weights copied by stand-ins of this class."""
    monkeypatch.setattr(bound, "streaming_of", lambda of, units, memory: Streaming(
        of, units, copy_stream(), memory, pinned=False
    ))
