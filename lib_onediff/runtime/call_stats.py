"""Statistics of the last call and the last image: route, reason and times, for pages, the API and the console.

A place is a model at a resolution (core.table.Place). A generation is the work of one click on Generate. Its calls are
counted in its own log. Calls outside of generations, such as those of a diffusers pipeline or of a user's own loop over
a UNet, are counted in one more log, in state UNTOLD; warm-ups are in no log.
"""
from __future__ import annotations

import contextlib
import logging
import threading
import time
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
    WHOLE,
    CountedStep,
    ImageLog,
    ImagePart,
    ImageRecord,
)
from ..core.key import LATENT_PIXEL
from ..core.policy import Served
from ..core.table import Entry, Place, Stopwatch, start_timing
from .generations import Generation, Generations

log = logging.getLogger("onediff")
# The same line is logged again only after this time.
SECONDS_UNTIL_LOGGED_AGAIN = 10.0
# The number of kinds of images (the argument `like` of end_image) for which the host's duration is kept.
MOST_HOST_IMAGES = 100
# The reason in the status before the first call.
NO_IMAGE = "no image has been made yet"
# The console's line for a call, by its route. ": " and the reason follow, if there is a reason.
SENTENCES = {
    GRAPH: "OneDiff: the steps are replayed as a CUDA graph",
    PLAIN: "OneDiff: the steps run without a CUDA graph",
    HOST: "OneDiff: the steps run without OneDiff",
}


class LastCall(NamedTuple):
    """The last call of a network, in an image or a warm-up.

    route: one of ROUTES; None before the first call.
    reason: why it took no faster route, for users; "" if it took the fastest; NO_IMAGE before the first call.
    entry: the entry of the call's shape; None if the host computed the call, and before the first call.
    """

    route: str | None = None
    reason: str = NO_IMAGE
    entry: Entry | None = None

    @property
    def backend(self) -> str | None:
        """The name of the backend that computed the call; None if the host did, or before the first call."""
        return None if self.entry is None else self.entry.key.backend


class Timing(threading.local):
    """State of one thread. is_on: whether the thread is inside of a CallStats.timing context."""

    is_on = False


class CallStats:
    """Counts calls and images: the last call, the number of calls by route, and the record of the last image.

    generations: the generations in progress. Their logs receive the steps that are counted here.
    last_call: the last call of any network, for the status line.
    parts: for each place where OneDiff has computed steps, the ImagePart of the last such image.
    images: the number of finished images at each place.
    calls: the number of calls of UNets and transformers by route, warm-ups included.
    """

    def __init__(self) -> None:
        self.generations = Generations()
        # The log of calls outside of any generation, with state UNTOLD.
        self._open = ImageLog()
        self._last = ImageRecord(reason=NO_IMAGE)
        # The log of the last call, until its image ends.
        self._latest: ImageLog | None = None
        self.parts: dict[Place, ImagePart] = {}
        self.images: Counter[Place] = Counter()
        self._host_seconds: dict[Hashable, float] = {}
        # Set by standing_for: the host's stopwatch and the kind of step with which calls are counted.
        self._stands_for: tuple[Stopwatch | None, str] | None = None
        self._timing = Timing()
        self.last_call = LastCall()
        # The place of the last call.
        self._place = Place()
        self.calls: Counter[str] = Counter()
        self._logged: dict[tuple[str, str], float] = {}

    @property
    def total(self) -> int:
        """The number of calls of UNets and transformers on all routes."""
        return sum(self.calls.values())

    # --- the image ------------------------------------------------------------------------------------------------

    @property
    def image(self) -> ImageRecord:
        """The record of the image in progress, from its first step on; before it, the record of the last image. The
        record of a generation that has ended without end_image() is in state FAILED, because the host raised an
        exception in it."""
        generation = self.generations.innermost
        latest = self._latest
        if generation is not None and generation.log.steps:
            return generation.log.record()
        if latest is None:
            return self._last
        return latest.record(FAILED if latest.state == OPEN else "")

    def begin_image(self) -> None:
        """Note that a sampling begins. Outside of generations, that ends the image of the calls before; in a generation
        or a warm-up, it does nothing."""
        if not self.generations.this_thread.is_warm_up and self.generations.innermost is None:
            self._close()

    def _close(self) -> None:
        """End the image of the calls outside of generations: keep its record, and begin a new log. Does nothing if
        there were no such calls."""
        done = self._open
        if done.steps:
            self._open = ImageLog()
            self._end(done, done.record(), 1)

    def end_image(
        self, generation: Generation, like: Hashable, images: int = 1, is_whole: bool = True,
        seconds: float | None = None,
    ) -> ImageRecord:
        """End the images of a generation, which are done or were interrupted. Returns one record for all of them, and
        keeps it as the last image's. A generation inside of another one adds its record to the outer one's log too.

        like: a key that is equal for images whose durations can be compared. If OneDiff was off in the generation, the
        shortest duration for this key is kept, and becomes ImageRecord.host_seconds of later images with OneDiff.
        images: the number of images. is_whole: False if the user interrupted them: then none is counted, and no
        duration kept. seconds: the duration of each image; None: the time since the generation began, divided by the
        number of images.
        """
        self._close()
        done = generation.log
        is_hosts = not generation.settings.enabled
        if not is_whole or done.is_interrupted:
            record = done.record(INTERRUPTED, seconds=seconds)
            images = 0
        elif is_hosts:
            record = done.record(DONE, images, seconds=seconds)
            # The fastest image counts, because the host's first ones also load and compile.
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
        """Keep a record as the last image's, count the images at each place of the record, and write its mean times
        into the entries of its shapes. done: the log that the record was made from. images: how many to count; 0 after
        an interruption."""
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
        """Write the mean times of calls outside of any generation into the entries of their shapes now, because nothing
        announces the end of their image."""
        self._open.note_times()

    def forget(self, entries: Collection[Entry], left: Callable[[], Collection[Entry]]) -> None:
        """Forget the `parts` and `images` of places at which no entry is left, and in the log outside of generations
        the steps of removed entries. entries: the entries that were removed from the table. left: returns the remaining
        ones; called only if `entries` is not empty."""
        known = set(entries)
        if not known:
            return
        places_left = {entry.place for entry in left()}
        for place in {entry.place for entry in known} - places_left:
            self.parts.pop(place, None)
            self.images.pop(place, None)
        forgotten = [step for step in self._open.steps if step.entry is not None and step.entry in known]
        for step in forgotten:
            del self._open.steps[step]
        if forgotten and not self._open.steps:
            self._open = ImageLog()

    def _log(self) -> ImageLog | None:
        """The log of the image that this thread's present call belongs to: the log of the innermost generation, or
        outside of generations the one in state UNTOLD. None in a warm-up, which is not counted."""
        generations = self.generations
        if generations.this_thread.is_warm_up:
            return None
        generation = generations.innermost if generations.running else None
        return self._open if generation is None else generation.log

    def note_first_use(self) -> None:
        """Count a first use in the present image: a check, capture, measurement or compilation that later calls do not
        need. Users see by it why this image took longer."""
        if (current := self._log()) is not None:
            current.first_uses += 1

    @contextlib.contextmanager
    def checking(self, device: torch.device) -> Iterator[None]:
        """A context around the comparison of a decode with the host's decode. Counts a first use, and adds the
        context's time to the present image under CHECK, so that users see which part of the VAE's time later decodes at
        this size do not take."""
        self.note_first_use()
        stop = start_timing(device)
        try:
            yield
        finally:
            if (current := self._log()) is not None:
                current.durations[CHECK].add(stop())

    def note_cache_options(self, names: Collection[str]) -> None:
        """Note, for the present image, the names of options by which a part of the present step is not computed, such
        as DeepCache's."""
        if (current := self._log()) is not None:
            current.cache_options.update(names)

    def note_decode(self, route: str, reason: str) -> None:
        """Note the route of a decode in the present image. reason: why the decode took no better route, for users; ""
        if it took the best."""
        if (current := self._log()) is not None:
            current.vae = route, reason

    def note_policy(self, name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Add a step policy's counts at one call to the present image. name: the policy's name. before, after: the
        policy's status before and after the call: counts by name, of which the differences are added, and as "reason"
        why the policy is inactive; "" if it is active."""
        if (current := self._log()) is not None:
            done = {key: after[key] - before[key] for key in after if isinstance(after[key], int)}
            current.note_policy(name, done, str(after.get("reason", "")))

    @contextlib.contextmanager
    def standing_for(self, host: Stopwatch | None, kind: str = WHOLE) -> Iterator[None]:
        """A context in which calls are counted as a replacement for a larger call of the host, such as the rows of the
        prompt alone in place of the whole batch. One such context inside of another replaces the outer one.

        host: the stopwatch of the host's larger call, which count() uses for the calls instead of the stopwatch that it
        is given; None: unknown. kind: the kind of step that count() uses instead of WHOLE; other kinds stay.
        """
        before = self._stands_for
        self._stands_for = (host, kind)
        try:
            yield
        finally:
            self._stands_for = before

    def count(
        self, kind: str, own: Stopwatch | None, host: Stopwatch | None, route: str = "", entry: Entry | None = None,
        reason: str | None = None,
    ) -> Stopwatch | None:
        """Count one step in the present image; in a warm-up, count none. Outside of generations, a step at another
        place than the step before ends the image and begins a new one. Returns the stopwatch of the host's steps that
        this step replaces: `host`, or in a standing_for context the context's stopwatch; None if that is unknown.

        kind: how the step was computed: WHOLE, CACHED, BY_HOST and so on. own: the stopwatch of steps of this kind and
        shape; for BY_HOST, the image's own stopwatch of such steps is used instead. host: the stopwatch of the host's
        steps that this step replaces. route: the route of the call; "" for a step without a call. entry: the entry of
        the call's shape. reason: why the call took no faster route, for users; None keeps the last reason, for a step
        without a call.
        """
        if self._stands_for is not None:
            host, kind_of_the_other = self._stands_for
            kind = kind_of_the_other if kind == WHOLE else kind
        host_times = host
        current = self._log()
        if current is None:
            return host_times
        last = current.last
        is_elsewhere = last is not None and last.place is not self._place and differ(last.place, self._place)
        if current is self._open and is_elsewhere:
            # Outside of generations, another model or size begins another image.
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
        """A context around a call, whose time is added to the image in progress. Inside of another timing context in
        this thread, and in a warm-up, it does nothing. network: UNET or VAE, as which the time counts; UNET for every
        network that makes steps. If the host computes the UNet's call, the time also counts as the host's. device: the
        device on which the call runs; the context does not wait for it."""
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
            # The call may have begun another image.
            current = self._log() or current
            current.durations[network].add(took)
            if network == UNET and self.calls[HOST] != hosts:
                current.host.add(took)

    def _resolution(self, latent: Tensor | None) -> str | None:
        """The resolution in pixels, width x height ("512x768"): of a latent (batch, channels, ..., h, w); without a
        latent, the resolution that the generation has announced. None if that is unknown, and without a latent in a
        warm-up or outside of generations."""
        if latent is not None:
            height, width = latent.shape[-2:]
            return f"{width * LATENT_PIXEL}x{height * LATENT_PIXEL}"
        generation = None if self.generations.this_thread.is_warm_up else self.generations.innermost
        return None if generation is None else generation.resolution

    def note_host(
        self, reason: str, model: str | None = None, latent: Tensor | None = None, host: Stopwatch | None = None
    ) -> Stopwatch | None:
        """Count a call that the host computes, keep it as last_call, and log its reason (see _note_last). Returns the
        stopwatch of the host's calls like it; None if unknown; see count.

        reason: why OneDiff does not compute the call, for users. model: the network's name for users. latent: the input
        of the call. host: the host's stopwatch at this shape. model, latent and host are None if unknown.
        """
        self._place = Place(model, self._resolution(latent))
        self.calls[HOST] += 1
        host_times = self.count(BY_HOST, host, host, HOST, None, reason)
        self._note_last(LastCall(HOST, reason))
        return host_times

    def note_served(self, served: Served) -> Stopwatch | None:
        """Count a call that OneDiff has computed, keep it as last_call, and log a change of route or reason (see
        _note_last). Returns the stopwatch of the host's calls that it replaces; None if unknown; see count."""
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
        """Keep a call as last_call. Logs its route and reason if one of them differs from the call's before, but the
        same line only once in SECONDS_UNTIL_LOGGED_AGAIN; at log level DEBUG, logs every call."""
        before = self.last_call
        self.last_call = call
        route = call.route
        reason = call.reason
        served = SENTENCES.get(str(route), "")
        sentence = f"{served}: {reason}" if reason else served
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s%s", sentence, f" {call.entry.key}" if call.entry else "")
        elif (route, reason) != (before.route, before.reason):
            # Two routes may alternate within a step. Each is logged once.
            now = time.monotonic()
            if now - self._logged.get((str(route), reason), float("-inf")) > SECONDS_UNTIL_LOGGED_AGAIN:
                log.info("%s", sentence)
            self._logged = {one: at for one, at in self._logged.items() if now - at <= SECONDS_UNTIL_LOGGED_AGAIN}
            self._logged[str(route), reason] = now

    def explain(self, reason: str) -> None:
        """Replace the reason of the last call, also in the log of its image if the image has not ended, after more is
        known about the call. reason: for users."""
        self.last_call = self.last_call._replace(reason=reason)
        if self._latest is not None:
            self._latest.reason = reason

    def status(self, image: ImageRecord | None = None) -> dict[str, Any]:
        """The record of an image as plain values for JSON, and under "calls" the number of this process's calls by
        route. image: None for CallStats.image. See ImageRecord for the values."""
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
    """Whether two places have different models or different resolutions. A model or resolution that is None (unknown)
    in either place counts as equal."""
    return any(None not in pair and pair[0] != pair[1] for pair in zip(one, other, strict=True))


def values_of_part(part: ImagePart) -> dict[str, Any]:
    """A part of an image (its steps at one place) as plain values for JSON; see ImagePart."""
    return {
        "model": part.model, "resolution": part.resolution, "steps": dict(part.steps), "calls": dict(part.calls),
        "step_ms": part.step_ms, "host_ms": part.host_ms, "ratio": part.ratio,
    }


def values_of(image: ImageRecord) -> dict[str, Any]:
    """An image's record as plain values for JSON, with its parts and the images inside of it; see ImageRecord."""
    return {
        "state": image.state, "images": image.images, "seconds": image.seconds, "host_seconds": image.host_seconds,
        "spent": asdict(image.spent), "steps": dict(image.steps), "calls": dict(image.calls),
        "by_host": dict(image.by_host),
        "first_uses": image.first_uses, "parts": [values_of_part(part) for part in image.parts],
        "inside": [
            {"resolution": one.resolution, "model": one.model, **values_of(one)} for one in image.inside
        ],
    }
