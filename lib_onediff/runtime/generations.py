"""The generations in progress, and by whose settings the calls inside them are computed: those of the innermost, also
for what it generates inside itself (a face's inpainting)."""
from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from ..core.image_times import ImageTimes
from ..core.settings import Settings

# Where a generation carries its settings; a copy of it carries the same.
GENERATION = "onediff_generation"


class Generation:
    """A generation's settings and why they switch OneDiff off. owner: the id of the host's object, its copies' not.
    began: by time.perf_counter()."""

    def __init__(self, owner: int, settings: Settings, why_off: str) -> None:
        self.owner, self.settings, self.why_off = owner, settings, why_off
        self.times, self.began = ImageTimes(), time.perf_counter()


class Apart(threading.local):
    """Of a thread. is_on: its calls make shapes ready, and belong to no image."""

    is_on = False


class Generations:
    """running: those in progress, the innermost last. One that has failed is over when the host has let go of it."""

    def __init__(self) -> None:
        self.running: list[weakref.ref[Generation]] = []
        self.apart = Apart()

    def begin(self, p: Any, settings: Settings, why_off: str = "") -> Generation:
        """p: what the host makes the images from. A copy of one in progress goes on with it."""
        known: Generation | None = p.__dict__.get(GENERATION)
        if known is not None and known in self.alive():
            known.settings, known.why_off = settings, why_off
            return known
        p.__dict__[GENERATION] = generation = Generation(id(p), settings, why_off)
        self.running = [*map(weakref.ref, self.alive()), weakref.ref(generation)]
        return generation

    def end(self, p: Any) -> Generation | None:
        """The generation that is over. Nothing happens at the end of a copy: it goes on without it."""
        known: Generation | None = p.__dict__.pop(GENERATION, None)
        if known is None or known.owner != id(p):
            return None
        self.running = [weakref.ref(each) for each in self.alive() if each is not known]
        return known

    @property
    def innermost(self) -> Generation | None:
        return next(reversed(self.alive()), None)

    def alive(self) -> list[Generation]:
        return [generation for one in self.running if (generation := one()) is not None]
