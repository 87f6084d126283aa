"""The generations in progress, with their settings and the logs of their images.

Calls belong to the innermost generation, and so do the calls of images that an extension makes inside of it, such as a
face's inpainting. Calls of a warm-up belong to no generation.
"""
from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from ..core.image import OPEN, ImageLog
from ..core.settings import Settings

# The attribute of the host's processing object that has its Generation. A copy of the object has the same Generation.
GENERATION = "onediff_generation"


class Generation:
    """A generation in progress: its settings, and the log of its images.

    owner: id() of the host's processing object. A copy of that object belongs to this generation, but has another id.
    settings: the settings for the calls of this generation.
    why_off: why OneDiff is off in these settings, for users, if it is for another reason than the user's switch; else
        "".
    log: the calls and times of the images so far.
    resolution: the size in pixels ("512x768") of the sampling in progress; None if the host has not announced it.
    """

    def __init__(self, owner: int, settings: Settings, why_off: str) -> None:
        self.owner = owner
        self.settings = settings
        self.why_off = why_off
        self.log = ImageLog(OPEN)
        self.resolution: str | None = None

    def note_batch(self, p: Any, is_cut_short: bool) -> None:
        """Add the number of a finished batch's images to the log. p: the host's processing object of the batch. If p is
        a copy of the owner, as extensions make for images of their own, its images are not counted. is_cut_short:
        whether the user has interrupted the batch: then the log is marked as interrupted, for a copy too."""
        if self.owner == id(p):
            self.log.images += getattr(p, "batch_size", 1)
        self.log.is_interrupted |= is_cut_short


class ThisThread(threading.local):
    """State of the thread that reads or sets it; every thread has its own.

    is_warm_up: whether the thread's calls are a warm-up: they make shapes ready, belong to no image, and may wait for
        compilations and measurements.
    """

    is_warm_up = False


class Generations:
    """The generations in progress. Only the host's script begins and ends them; pipelines of diffusers have none.

    running: weak references to the generations, the innermost last. The host's processing object holds the strong
        reference, so that a generation that fails, and is never ended, disappears together with that object.
    this_thread: see ThisThread.
    """

    def __init__(self) -> None:
        self.running: list[weakref.ref[Generation]] = []
        self.this_thread = ThisThread()

    @property
    def run_settings(self) -> tuple[Settings, str] | None:
        """(settings, why_off) of the innermost generation in progress. None outside of generations and in this thread's
        warm-ups: there, the settings of the network or of the runtime apply."""
        if not self.running or self.this_thread.is_warm_up:
            return None
        generation = self.innermost
        return None if generation is None else (generation.settings, generation.why_off)

    @contextlib.contextmanager
    def warming_up(self, is_warm_up: bool = True) -> Iterator[None]:
        """A context in which this thread's calls are a warm-up. is_warm_up: False for a context inside of a warm-up in
        which calls are those of an image again."""
        before = self.this_thread.is_warm_up
        self.this_thread.is_warm_up = is_warm_up
        try:
            yield
        finally:
            self.this_thread.is_warm_up = before

    def begin(self, p: Any, settings: Settings, why_off: str = "") -> Generation:
        """Begin the generation of p, the host's processing object, as the innermost one, and return it. It is stored as
        an attribute of p (GENERATION), which copies of p share.

        If p has a generation in progress already, that one is returned, with these settings in place of its own, and
        does not become the innermost one again. If p is its owner, an earlier run of p has failed, so the log is
        emptied; if p is a copy of the owner, the log goes on. why_off: see Generation.
        """
        known: Generation | None = p.__dict__.get(GENERATION)
        if known is not None and known in self.alive():
            known.settings = settings
            known.why_off = why_off
            if known.owner == id(p):
                known.log = ImageLog(OPEN)
            return known
        generation = Generation(id(p), settings, why_off)
        p.__dict__[GENERATION] = generation
        self.running = [*map(weakref.ref, self.alive()), weakref.ref(generation)]
        return generation

    def end(self, p: Any) -> Generation | None:
        """End the generation of p, the host's processing object, and return it. Returns None if p has no generation. If
        p is a copy of the generation's owner, returns None too: the generation goes on, and p does not belong to it any
        more."""
        known: Generation | None = p.__dict__.pop(GENERATION, None)
        if known is None or known.owner != id(p):
            return None
        self.running = [weakref.ref(each) for each in self.alive() if each is not known]
        return known

    @property
    def innermost(self) -> Generation | None:
        """The generation that calls belong to; None if none is in progress."""
        return next(reversed(self.alive()), None)

    def alive(self) -> list[Generation]:
        """The generations in progress whose processing objects the host still has, the innermost last."""
        return [generation for one in self.running if (generation := one()) is not None]
