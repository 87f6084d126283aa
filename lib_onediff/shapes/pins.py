"""Which resolutions stay when graphs make room: the user's wish, kept with what was measured on this machine."""
from __future__ import annotations

from ..ops.choices import Choices

NAME = "pinned"


class Pins:
    """Pairs of model and resolution ("SD1", "512x512"). They outlive the process where a store is attached."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def all(self) -> frozenset[tuple[str, str]]:
        """Every pinned (model, resolution)."""
        stored = self._choices.get(NAME)
        # Anybody may have written the store.
        pairs = stored if isinstance(stored, list) else []
        return frozenset(
            (pair[0], pair[1]) for pair in pairs
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(word, str) for word in pair)
        )

    def set(self, model: str, resolution: str, pinned: bool) -> None:
        """Pin, or unpin."""
        pairs = self.all()
        changed = pairs | {(model, resolution)} if pinned else pairs - {(model, resolution)}
        if changed != pairs:
            self.replace(changed)

    def replace(self, pairs: frozenset[tuple[str, str]]) -> None:
        """Pin these and no others."""
        self._choices.set(NAME, sorted(map(list, pairs)))
