"""Whose settings hold: those of the innermost generation in progress, also for what it generates inside itself."""
from __future__ import annotations

import weakref
from typing import Any

from ..options.settings import Settings

# Where a generation carries its settings; a copy of it carries the same.
NAME = "onediff_generation"


class Generation:
    """A generation's settings and why they switch OneDiff off. owner: the id of the host's object, its copies' not."""

    def __init__(self, owner: int, settings: Settings, why_off: str) -> None:
        self.owner, self.settings, self.why_off = owner, settings, why_off


class Generations:
    """Those in progress, the innermost last. One that has failed is over when the host has let go of it."""

    def __init__(self) -> None:
        self._running: list[weakref.ref[Generation]] = []

    def begin(self, p: Any, settings: Settings, why_off: str = "") -> None:
        """p: what the host makes the images from. A copy of one in progress goes on with it."""
        known = p.__dict__.get(NAME)
        if known is not None and known in self._alive():
            known.settings, known.why_off = settings, why_off
            return
        p.__dict__[NAME] = generation = Generation(id(p), settings, why_off)
        self._running = [*map(weakref.ref, self._alive()), weakref.ref(generation)]

    def end(self, p: Any) -> None:
        """Nothing happens at the end of a copy: the generation goes on without it."""
        known = p.__dict__.pop(NAME, None)
        if known is not None and known.owner == id(p):
            self._running = [weakref.ref(each) for each in self._alive() if each is not known]

    @property
    def innermost(self) -> Generation | None:
        return next(reversed(self._alive()), None)

    def _alive(self) -> list[Generation]:
        return [generation for reference in self._running if (generation := reference()) is not None]
