"""What was done last, by which route and why, and how fast: for the status line, the API and the console.

Generations are those in progress, and by whose settings the calls inside them are computed: by those of the innermost,
also for what it generates inside itself (a face's inpainting).
"""
from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from ..core.call import CACHED, FULL
from ..core.key import ShapeKey
from ..core.policy import Served
from ..core.settings import Settings
from ..core.table import HOSTS, WHOLE, Entry, ImageTimes, Step, Stopwatch, Times
from ..core.weak_dictionary import WeakDictionary

log = logging.getLogger("onediff")
# Where a generation carries its settings; a copy of it carries the same.
GENERATION = "onediff_generation"
GRAPH, PLAIN, HOST = ROUTES = ("graph", "plain", "host")
SECONDS_UNTIL_TOLD_AGAIN = 10.0
# Of how many kinds of images the host's own seconds are known at once.
MOST_HOST_IMAGES = 100


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


class CallStats:
    """The last UNet call, how many went by each route, and the times of the last image.

    generations: whose images are being made. entry: at which a call is tried, or was made; None where nothing is known
    of it yet.
    """

    def __init__(self) -> None:
        self.generations = Generations()
        self.image = ImageTimes()
        self._host_seconds: dict[Hashable, float] = {}
        # The last image's times of each whole shape, by the host's stopwatch.
        self._shapes: WeakDictionary[Stopwatch, Times] = WeakDictionary()
        # By which the host's own time of a cached pass is known.
        self._full_passes: dict[ShapeKey, Stopwatch] = {}
        # The host's own in the place of the last call; of the call that is being made, where that is not its shape's.
        self.host: Stopwatch | None = None
        self._stands_for: tuple[Stopwatch | None, str] | None = None
        self.route: str | None = None
        self.reason = "no image has been made yet"
        self.entry: Entry | None = None
        self.calls: Counter[str] = Counter()
        # By (model, resolution): how many images were made.
        self.images: Counter[tuple[str, str]] = Counter()
        self._told: dict[tuple[str, str], float] = {}

    @property
    def total(self) -> int:
        """How many UNet calls were seen."""
        return sum(self.calls.values())

    # --- the image ------------------------------------------------------------------------------------------------

    def show(self, image: ImageTimes | None = None) -> None:
        """The last image is this one from now on; by default, one that begins."""
        for host in self.image.hosts:
            self._shapes[host] = self.image.times(host)
        if self.image.seconds is None:
            # Nobody has said that it is done.
            self.images.update(self.image.places)
        self.image = ImageTimes() if image is None else image

    def image_made(
        self, image: ImageTimes, seconds: float, like: Hashable, is_hosts: bool, count: int = 1
    ) -> None:
        """Images are done, so many at once, each in so many seconds. like: equal for images whose seconds can be
        compared. is_hosts: whether OneDiff was off for them."""
        image.seconds = seconds
        self.images.update({place: count for place in image.places})
        if is_hosts:
            # The host's first images load what later ones find.
            known = self._host_seconds.pop(like, seconds)
            self._host_seconds[like] = min(known, seconds)
            while len(self._host_seconds) > MOST_HOST_IMAGES:
                del self._host_seconds[next(iter(self._host_seconds))]
        else:
            image.host_seconds = self._host_seconds.get(like)
        self.show(image)

    def times_of(self, entry: Entry) -> Times | None:
        """The means of the last image over all steps that stood for this shape's whole ones; None where none did."""
        return self.image.times(entry.host) if entry.host in self.image.hosts else self._shapes.get(entry.host)

    @contextlib.contextmanager
    def standing_for(self, host: Stopwatch | None, kind: str = WHOLE) -> Iterator[None]:
        """The host would take host's time for calls made inside. kind: what those are that are otherwise whole."""
        before, self._stands_for = self._stands_for, (host, kind)
        try:
            yield
        finally:
            self._stands_for = before

    def count(self, kind: str, own: Stopwatch | None, host: Stopwatch | None) -> None:
        """A step of this kind was made, in the time that own has taken; host would have taken host's."""
        if self._stands_for is not None:
            host, stands = self._stands_for
            kind = stands if kind == WHOLE else kind
        generations = self.generations
        is_apart = generations.apart.is_on
        running = generations.alive() if generations.running and not is_apart else ()
        images = [generation.times for generation in running]
        if not images:
            # Nobody says where an image begins: at the latest, with another shape.
            if is_apart or host is not None and self.host not in (None, host):
                self.show()
            images = [self.image]
        self.host = host
        step = Step(kind, own, host)
        for image in images:
            if step not in image.steps and self.entry is not None and not is_apart:
                image.places.add((self.entry.model, self.entry.key.resolution))
            image.steps[step] += 1

    def _count_call(self, route: str) -> None:
        entry = self.entry
        if route == HOST or entry is None:
            host = None if entry is None else entry.host
            self.count(HOSTS, host, host)
            return
        host = entry.host
        is_cached = entry.key.part == CACHED
        if is_cached:
            host = self._full_passes.get(replace(entry.key, part=FULL))
        elif entry.key.part:
            self._full_passes[entry.key] = host
        self.count(CACHED if is_cached else WHOLE, entry.own, host)

    # --- the last call --------------------------------------------------------------------------------------------

    def note(self, route: str, reason: str) -> None:
        """The call went by this route; reason: why not by a faster one."""
        self.calls[route] += 1
        self._count_call(route)
        changed = (route, reason) != (self.route, self.reason)
        self.route, self.reason = route, reason
        sentence = f"{route} route" + (f" ({reason})" if reason else "")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s%s", sentence, f" {self.entry.key}" if self.entry else "")
        elif changed:
            # Two routes may take turns within a step, and one line each is enough.
            now = time.monotonic()
            if now - self._told.get((route, reason), float("-inf")) > SECONDS_UNTIL_TOLD_AGAIN:
                log.info("%s", sentence)
            self._told[route, reason] = now

    def note_served(self, served: Served) -> None:
        """We have computed the call."""
        self.entry = served.entry
        self.note(served.route, served.reason)

    def status(self) -> dict[str, Any]:
        """As plain values. step_ms and host_ms are means over all steps of the last image, of the median of each kind
        of step; None where one was not timed. ratio, host_ms / step_ms, is None until all were timed often enough, and
        where the host made the image."""
        entry, image = self.entry, self.image
        times = image.times()
        return {
            "model": entry.model if entry else None,
            "backend": entry.key.backend if entry else None,
            "lossy": str(entry.key.lossy) if entry else "",
            "resolution": entry.key.resolution if entry else None,
            "route": self.route,
            "reason": self.reason,
            "step_ms": times.step_ms,
            "host_ms": times.host_ms,
            "ratio": times.ratio,
            "image": {"seconds": image.seconds, "host_seconds": image.host_seconds, "steps": image.kinds()},
            "relative_error": entry.relative_error if entry else None,
            "calls": {route: self.calls[route] for route in ROUTES},
        }
