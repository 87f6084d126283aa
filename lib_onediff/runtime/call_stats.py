"""The last call and the last image: by which route each went and why, and how fast, for pages, the API and the console.

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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.call import CACHED
from ..core.image import (
    BY_HOST,
    CHECK,
    DONE,
    FAILED,
    GRAPH,
    HOST,
    INTERRUPTED,
    OPEN,
    PLAIN,
    ROUTES,
    UNET,
    VAE,
    WHOLE,
    CountedStep,
    ImageLog,
    ImagePart,
    ImageRecord,
)
from ..core.key import LATENT_PIXEL
from ..core.policy import Served
from ..core.settings import Settings
from ..core.table import Entry, Place, Stopwatch, start_timing

__all__ = ["GRAPH", "HOST", "PLAIN", "ROUTES", "UNET", "VAE", "CallStats", "Generation", "Generations"]
log = logging.getLogger("onediff")
# Where a generation carries its settings; a copy of it carries the same.
GENERATION = "onediff_generation"
SECONDS_UNTIL_TOLD_AGAIN = 10.0
# Of how many kinds of images the host's own seconds are known at once.
MOST_HOST_IMAGES = 100
NO_IMAGE = "no image has been made yet"


class Generation:
    """A generation's settings and why they switch OneDiff off, and the log of its images. owner: the id of the host's
    object, its copies' not. resolution: in pixels, of the sampling in progress, as the host has announced it."""

    def __init__(self, owner: int, settings: Settings, why_off: str) -> None:
        self.owner = owner
        self.settings = settings
        self.why_off = why_off
        self.log = ImageLog(OPEN)
        self.resolution: str | None = None

    def note_batch(self, p: Any, is_cut_short: bool) -> None:
        """A batch of images is computed, by the host's object or a copy of it, whose images are none of its own."""
        if self.owner == id(p):
            self.log.images += getattr(p, "batch_size", 1)
        self.log.is_interrupted |= is_cut_short


class ThisThread(threading.local):
    """State of one thread.

    is_warm_up: whether its calls are a warm-up: they make shapes ready, belong to no image, and wait for compilers and
    measurements.
    """

    is_warm_up = False


class Generations:
    """The generations in progress.

    running: references to them, the innermost last. One that has failed is over when the host has let go of it.
    this_thread: state of the thread that reads it: whether its calls are a warm-up.
    """

    def __init__(self) -> None:
        self.running: list[weakref.ref[Generation]] = []
        self.this_thread = ThisThread()

    @property
    def run_settings(self) -> tuple[Settings, str] | None:
        """The settings of the generation in progress and why they switch OneDiff off; None where this call has none."""
        if not self.running or self.this_thread.is_warm_up:
            return None
        generation = self.innermost
        return None if generation is None else (generation.settings, generation.why_off)

    @contextlib.contextmanager
    def warming_up(self, is_warm_up: bool = True) -> Iterator[None]:
        """Calls of this thread are a warm-up inside. is_warm_up: False within a warm-up makes them an image's again."""
        before = self.this_thread.is_warm_up
        self.this_thread.is_warm_up = is_warm_up
        try:
            yield
        finally:
            self.this_thread.is_warm_up = before

    def begin(self, p: Any, settings: Settings, why_off: str = "") -> Generation:
        """The generation of p, the host's processing object, which becomes the innermost one.

        A copy of the p of a generation in progress joins that generation. Where the same p begins again, its earlier
        run has failed: the log starts anew.
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
        """End the generation of p, and return it. None, and nothing ends, for a copy of its p: the generation goes
        on."""
        known: Generation | None = p.__dict__.pop(GENERATION, None)
        if known is None or known.owner != id(p):
            return None
        self.running = [weakref.ref(each) for each in self.alive() if each is not known]
        return known

    @property
    def innermost(self) -> Generation | None:
        """The generation that calls belong to; None where none is in progress."""
        return next(reversed(self.alive()), None)

    def alive(self) -> list[Generation]:
        """The generations in progress that their hosts still hold, the innermost last."""
        return [generation for one in self.running if (generation := one()) is not None]


class LastCall(NamedTuple):
    """How the last call of the UNet was computed, of an image or of a warm-up. route: None before the first call.
    reason: why not by a faster route. entry: of its shape; None for the host's own."""

    route: str | None = None
    reason: str = NO_IMAGE
    entry: Entry | None = None

    @property
    def backend(self) -> str | None:
        """Which backend computed it; None for the host."""
        return None if self.entry is None else self.entry.key.backend


class Timing(threading.local):
    """Of a thread. is_on: what it does now is timed already."""

    is_on = False


class CallStats:
    """The last UNet call, how many went by each route, and the record of the last image.

    generations: whose images are being made.
    """

    def __init__(self) -> None:
        self.generations = Generations()
        # The log of calls outside of any generation. Its records are UNTOLD; those of generations are OPEN.
        self._open = ImageLog()
        self._last = ImageRecord(reason=NO_IMAGE)
        # The log of the last call, until its image ends.
        self._latest: ImageLog | None = None
        # The steps of the last image that we have made at each place.
        self.parts: dict[Place, ImagePart] = {}
        # How many images were made at each place.
        self.images: Counter[Place] = Counter()
        self._host_seconds: dict[Hashable, float] = {}
        # Set by standing_for: the host's times and the kind of step that calls made now count with.
        self._stands_for: tuple[Stopwatch | None, str] | None = None
        self._timing = Timing()
        self.last_call = LastCall()
        # The place (model and resolution) of the last call.
        self._place = Place()
        self.calls: Counter[str] = Counter()
        self._told: dict[tuple[str, str], float] = {}

    @property
    def total(self) -> int:
        """How many UNet calls were seen."""
        return sum(self.calls.values())

    # --- the image ------------------------------------------------------------------------------------------------

    @property
    def image(self) -> ImageRecord:
        """The record of the last image; of the one in progress, from its first step on."""
        generation = self.generations.innermost
        latest = self._latest
        if generation is not None and generation.log.steps:
            return generation.log.record()
        if latest is None:
            return self._last
        return latest.record(FAILED if latest.state == OPEN else "")

    def begin_image(self) -> None:
        """Note that a sampling begins. Outside of generations and warm-ups, the image before it is over."""
        if not self.generations.this_thread.is_warm_up and self.generations.innermost is None:
            self._close()

    def _close(self) -> None:
        """End the image outside of any generation, if it has steps."""
        done = self._open
        if done.steps:
            self._open = ImageLog()
            self._end(done, done.record(), 1)

    def end_image(
        self, generation: Generation, like: Hashable, images: int = 1, is_whole: bool = True,
        seconds: float | None = None,
    ) -> ImageRecord:
        """End the images of a generation, which are done or were interrupted. Returns their record.

        like: equal for images whose seconds can be compared. images: how many there are. is_whole: False: interrupted.
        seconds: of each, by default as the clock says.
        """
        self._close()
        done = generation.log
        is_hosts = not generation.settings.enabled
        if not is_whole or done.is_interrupted:
            record = done.record(INTERRUPTED, seconds=seconds)
            images = 0
        elif is_hosts:
            record = done.record(DONE, images, seconds=seconds)
            # The fastest image counts: the host's first images load what later ones find.
            took = record.seconds or 0.0
            fastest = self._host_seconds.pop(like, took)
            self._host_seconds[like] = min(took, fastest)
            while len(self._host_seconds) > MOST_HOST_IMAGES:
                del self._host_seconds[next(iter(self._host_seconds))]
        else:
            record = done.record(DONE, images, self._host_seconds.get(like), seconds)
        self._end(done, record, images)
        outer = self.generations.innermost
        if outer is not None:
            outer.log.inside.append(record)
        return record

    def _end(self, done: ImageLog, record: ImageRecord, images: int) -> None:
        """Take a record as the last image's, and count its images and steps at their places."""
        done.note_times()
        for part in record.parts:
            if part.model is not None and part.resolution is not None:
                place = Place(part.model, part.resolution)
                self.images[place] += images
                if not part.is_hosts:
                    self.parts[place] = part
        self._last = record
        self._latest = None

    def settle(self) -> None:
        """Write the times of the image outside of any generation into the entries of its shapes now: nothing announces
        its end."""
        self._open.note_times()

    def forget(self, entries: Collection[Entry], left: Callable[[], Collection[Entry]]) -> None:
        """Forget what was counted for shapes that are gone from the table; and what was counted at a place, when no
        shape of that place is left. left: returns the entries that are still there."""
        known = set(entries)
        if not known:
            return
        places_left = {entry.place for entry in left()}
        for place in {entry.place for entry in known} - places_left:
            self.parts.pop(place, None)
            self.images.pop(place, None)
        for step in list(self._open.steps):
            if step.entry is not None and step.entry in known:
                del self._open.steps[step]

    def _log(self) -> ImageLog | None:
        """The image of the call that is being made; None where it belongs to none."""
        generations = self.generations
        if generations.this_thread.is_warm_up:
            return None
        generation = generations.innermost if generations.running else None
        return self._open if generation is None else generation.log

    def note_first_use(self) -> None:
        """Count a first use: a call that checks, captures, measures or compiles what later calls find done."""
        if (current := self._log()) is not None:
            current.first_uses += 1

    @contextlib.contextmanager
    def checking(self, device: torch.device) -> Iterator[None]:
        """Time the check of a decode, made inside, which later decodes at its size do without."""
        self.note_first_use()
        stop = start_timing(device)
        try:
            yield
        finally:
            if (current := self._log()) is not None:
                current.durations[CHECK].add(stop())

    def note_decode(self, route: str, reason: str) -> None:
        """A decode went by this route; reason: why not by a better one."""
        if (current := self._log()) is not None:
            current.vae = route, reason

    def note_policy(self, name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """What a step policy's status was before a call, and is after it."""
        if (current := self._log()) is not None:
            done = {key: after[key] - before[key] for key in after if isinstance(after[key], int)}
            current.note_policy(name, done, str(after.get("reason", "")))

    @contextlib.contextmanager
    def standing_for(self, host: Stopwatch | None, kind: str = WHOLE) -> Iterator[None]:
        """Calls made inside stand in for another call, such as the prompt's rows for a whole batch: they are counted
        against these times of the host's forward, not those of their own shape, and with this kind in place of WHOLE.
        """
        before, self._stands_for = self._stands_for, (host, kind)
        try:
            yield
        finally:
            self._stands_for = before

    def count(
        self, kind: str, own: Stopwatch | None, host: Stopwatch | None, route: str = "", entry: Entry | None = None,
        reason: str | None = None,
    ) -> Stopwatch | None:
        """Count one step.

        own: the stopwatch of such steps. host: the stopwatch of the host's steps in its place. route: of the call, if
        there was one; reason: why not by a faster one. Returns the stopwatch of the host that was used: that of
        standing_for, if the call is made inside one.
        """
        if self._stands_for is not None:
            host, stands = self._stands_for
            kind = stands if kind == WHOLE else kind
        host_times = host
        current = self._log()
        if current is None:
            return host_times
        last = current.last
        is_elsewhere = last is not None and last.place is not self._place and differ(last.place, self._place)
        if current is self._open and is_elsewhere:
            # Nobody says where an image begins: at the latest, at another size.
            self._close()
            current = self._open
        if kind == BY_HOST:
            own = host = current.host
            current.is_timed = current.is_timed and self._timing.is_on
        elif route and not self._timing.is_on and own is not None:
            current.replays[own] += 1
        step = CountedStep(kind, route, self._place, own, host, entry)
        current.steps[step] += 1
        self._latest = current
        if reason is not None:
            current.last = step
            current.reason = reason
        if reason and kind == BY_HOST:
            current.by_host[reason] += 1
        return host_times

    # --- one call -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def timing(self, network: str, device: torch.device) -> Iterator[None]:
        """Time what is done inside for the image in progress, once where it is entered within itself. network: UNET or
        VAE."""
        timing = self._timing
        current = self._log()
        if timing.is_on or current is None:
            yield
            return
        stop = start_timing(device)
        timing.is_on = True
        hosts = self.calls[HOST]
        try:
            yield
        finally:
            timing.is_on = False
            took = stop()
            # A call may have begun an image.
            current = self._log() or current
            current.durations[network].add(took)
            if network == UNET and self.calls[HOST] != hosts:
                current.host.add(took)

    def _resolution(self, latent: Tensor | None) -> str | None:
        """In pixels: the latent's, (batch, channels, ..., h, w), or what its generation has announced."""
        if latent is not None:
            height, width = latent.shape[-2:]
            return f"{width * LATENT_PIXEL}x{height * LATENT_PIXEL}"
        generation = None if self.generations.this_thread.is_warm_up else self.generations.innermost
        return None if generation is None else generation.resolution

    def note_host(
        self, reason: str, model: str | None = None, latent: Tensor | None = None, host: Stopwatch | None = None
    ) -> Stopwatch | None:
        """The host computes a call, for this reason. model, latent: its network's name and its input; None: not known.
        host: the host's times at this shape; None: not known. Returns the host's times that count for the call."""
        self._place = Place(model, self._resolution(latent))
        self.calls[HOST] += 1
        host_times = self.count(BY_HOST, host, host, HOST, None, reason)
        self._note_last(LastCall(HOST, reason))
        return host_times

    def note_served(self, served: Served) -> Stopwatch | None:
        """We have computed a call. Returns the host's times that count for it."""
        entry = served.entry
        route = served.route
        reason = served.reason
        self._place = entry.place
        self.calls[route] += 1
        kind = CACHED if entry.key.part == CACHED else WHOLE
        host_times = self.count(kind, entry.own, entry.host, route, entry, reason)
        last = self.last_call
        is_news = last.entry is not entry or last.route != route or last.reason != reason
        if is_news or log.isEnabledFor(logging.DEBUG):
            self._note_last(LastCall(route, reason, entry))
        return host_times

    def _note_last(self, call: LastCall) -> None:
        before = self.last_call
        self.last_call = call
        route = call.route
        reason = call.reason
        sentence = f"{route} route ({reason})" if reason else f"{route} route"
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s%s", sentence, f" {call.entry.key}" if call.entry else "")
        elif (route, reason) != (before.route, before.reason):
            # Two routes may take turns within a step, and one line each is enough.
            now = time.monotonic()
            if now - self._told.get((str(route), reason), float("-inf")) > SECONDS_UNTIL_TOLD_AGAIN:
                log.info("%s", sentence)
            self._told = {one: at for one, at in self._told.items() if now - at <= SECONDS_UNTIL_TOLD_AGAIN}
            self._told[str(route), reason] = now

    def explain(self, reason: str) -> None:
        """Give the last call another reason than it was noted with."""
        self.last_call = self.last_call._replace(reason=reason)
        if self._latest is not None:
            self._latest.reason = reason

    def status(self, image: ImageRecord | None = None) -> dict[str, Any]:
        """The record of an image as plain values, by default of the last one, and the calls of all; see ImageRecord."""
        image = image or self.image
        return {
            "model": image.model, "backend": image.backend, "lossy": image.lossy, "resolution": image.resolution,
            "weights": list(image.weights),
            "route": image.route or None, "reason": image.why_not_faster,
            "step_ms": image.step_ms, "host_ms": image.host_ms, "ratio": image.ratio, "image": values_of(image),
            "relative_error": image.relative_error,
            "calls": {route: self.calls[route] for route in ROUTES},
        }


def differ(one: Place, other: Place) -> bool:
    """Whether two places are not the same, by what is known of both."""
    return any(None not in pair and pair[0] != pair[1] for pair in zip(one, other, strict=True))


def values_of_part(part: ImagePart) -> dict[str, Any]:
    """What a status has of a part of an image, as plain values for JSON."""
    return {
        "model": part.model, "resolution": part.resolution, "steps": dict(part.steps), "calls": dict(part.calls),
        "step_ms": part.step_ms, "host_ms": part.host_ms, "ratio": part.ratio,
    }


def values_of(image: ImageRecord) -> dict[str, Any]:
    """What a status has of an image, as plain values for JSON."""
    return {
        "state": image.state, "images": image.images, "seconds": image.seconds, "host_seconds": image.host_seconds,
        "spent": asdict(image.spent), "steps": dict(image.steps), "calls": dict(image.calls),
        "by_host": dict(image.by_host),
        "first_uses": image.first_uses, "parts": [values_of_part(part) for part in image.parts],
        "inside": [
            {"resolution": one.resolution, "model": one.model, **values_of(one)} for one in image.inside
        ],
    }
