"""What copies weights to a GPU, on a machine without one: as early, or as late, as marks allow."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lib_onediff.weights import bound
from lib_onediff.weights.streaming import Streaming


class Early:
    """A CopyStream that copies as soon as it is told to: over what is still to be read, if its marks are wrong."""

    def __init__(self) -> None:
        self.behind: list[Callable[[], None]] = []

    def computed(self) -> int:
        return 0

    def copy(self, copies: Any, after: Any) -> int:
        for target, place in copies:
            target.copy_(place.bytes())
        return 0

    def wait(self, mark: int) -> None:
        pass


class Late(Early):
    """A CopyStream that copies when somebody waits for it, and no sooner: what is read before is what was there."""

    def copy(self, copies: Any, after: Any) -> int:
        self.behind.append(lambda: super(Late, self).copy(copies, after) and None)
        return len(self.behind)

    def wait(self, mark: int) -> None:
        for one in self.behind[:mark]:
            one()
        self.behind[:mark] = [lambda: None] * len(self.behind[:mark])


def use_lane(monkeypatch: pytest.MonkeyPatch, lane: Callable[[], Early]) -> None:
    """Weights that are away go by this."""
    monkeypatch.setattr(bound, "streaming_of", lambda of, units, memory: Streaming(
        of, units, lane(), memory, pinned=False
    ))
