"""The log of one image, which counts its calls, and the record made of it when the image is done.

A step that computes less than the whole UNet (a cached pass, the prompt alone, a forecast) counts as one step. So the
mean over all steps, compared with the host's, shows how much such steps save.
"""
from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch

from .call import CACHED
from .table import Entry, Place, Stopwatch, Times, Took, ratio_of

# The kinds of steps, by what is computed. WHOLE: the whole network. CACHED: a cached pass. PROMPT_ALONE: the prompt's
# rows, without the negative prompt's. FORECAST: nothing, the output is extrapolated. BY_HOST: the host's own forward.
WHOLE = "whole"
PROMPT_ALONE = "prompt alone"
FORECAST = "forecast"
BY_HOST = "host"
STEP_KINDS = (WHOLE, CACHED, PROMPT_ALONE, FORECAST, BY_HOST)
# The routes of a UNet call: a CUDA graph, our forward operator by operator, or the host's forward.
GRAPH = "graph"
PLAIN = "plain"
HOST = "host"
ROUTES = (GRAPH, PLAIN, HOST)
# The largest number of reasons shown for steps that the host computed.
MOST_REASONS = 2
# The states of an image. FAILED: the host raised an exception. UNTOLD: unknown, because the host does not announce when
# images begin and end, as in pipelines of diffusers.
OPEN = "in progress"
DONE = "done"
INTERRUPTED = "interrupted"
FAILED = "failed"
UNTOLD = "untold"
# The durations in an image's log. CHECK is a part of VAE: the check of the VAE's output at the first use of a size.
UNET = "unet"
VAE = "vae"
CHECK = "check"
# With more pieces of work than this whose events are unread, Duration.add() reads them.
MOST_PENDING = 64


class CountedStep(NamedTuple):
    """One step in an image's log, without its number: equal steps are counted together.

    kind: one of STEP_KINDS.
    route: one of ROUTES; "" if no network was called (a forecast).
    place: the model and the resolution.
    own: the stopwatch of such steps; None without one.
    host: the stopwatch of the host's own steps, which such a step replaces; None without one.
    entry: the entry of the shape that was computed; None if the host computed it.
    """

    kind: str
    route: str
    place: Place
    own: Stopwatch | None
    host: Stopwatch | None
    entry: Entry | None


class Duration:
    """The sum of the durations of several pieces of work. Never waits for the GPU: work that it has not finished yet is
    added later."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._reading = threading.Lock()

    def add(self, took: Took) -> None:
        """Add the duration of a piece of work: seconds, or the CUDA events at its begin and end."""
        if isinstance(took, float):
            self._seconds += took
            return
        self._pending.append(took)
        if len(self._pending) > MOST_PENDING:
            self._read()

    @property
    def seconds(self) -> float:
        """The sum, in seconds, for the work that is finished."""
        self._read()
        return self._seconds

    def _read(self) -> None:
        """Add the durations of the oldest pending work, up to the first piece that the GPU has not finished."""
        with self._reading:
            while self._pending and self._pending[0][1].query():
                begin, end = self._pending.popleft()
                self._seconds += begin.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class Spent:
    """The seconds of one image, by what they were spent on. None: unknown.

    unet: the number of steps times their median duration, at most the duration of all UNet calls; that duration itself
        if a step has no times.
    first_use, slower: the rest of the UNet calls' duration. In an image with a first check, capture, measurement or
        compilation, all of it counts as first_use, which then also has the VAE's check, and slower is 0. In any other
        image it is slower: the calls took longer than usual.
    vae: decodes and encodes without the check.
    inside: other images that were made for this one, such as a face that an extension redraws.
    rest: everything else, such as the text encoder, other extensions, saving.
    """

    unet: float | None = None
    first_use: float | None = None
    slower: float | None = None
    vae: float | None = None
    inside: float | None = None
    rest: float | None = None


@dataclass(frozen=True)
class ImagePart:
    """The steps of an image with one model at one resolution. A second pass (hires fix) or a refiner is a part of its
    own.

    model, resolution: see Place.
    steps: the number of steps by kind (one of STEP_KINDS).
    calls: the number of UNet calls by route (one of ROUTES).
    step_ms, host_ms, ratio: see Times; ratio is None also if the host computed all steps.
    """

    model: str | None
    resolution: str | None
    steps: Mapping[str, int]
    calls: Mapping[str, int]
    step_ms: float | None
    host_ms: float | None
    ratio: float | None

    @property
    def is_hosts(self) -> bool:
        """Whether the host computed all steps."""
        return set(self.steps) == {BY_HOST}


@dataclass(frozen=True)
class Inactive:
    """Why a step policy was inactive. reason: for the user. calls: at how many calls of the image for this reason."""

    reason: str
    calls: int


@dataclass(frozen=True)
class ImageRecord:
    """The numbers of one image, or of a batch that was made at once. None: unknown.

    state: OPEN, DONE, INTERRUPTED, FAILED or UNTOLD.
    images: the number of images; 0: unknown.
    seconds: the duration of making one image, everything included; of an interrupted one, until the interruption.
    host_seconds: the same for a similar image with OneDiff off.
    spent: the seconds by what they were spent on.
    model, resolution, backend, lossy, route, reason, relative_error: of the last call; the route is "" before it.
    weights: how the network's weights are stored and changed, in words; see ShapeKey.
    parts: the steps by place, in the order of their first steps.
    steps, calls, step_ms, host_ms, ratio: of all steps; see ImagePart.
    by_host: the number of calls that the host computed, by the reason, the most frequent first.
    first_uses: the number of calls with a first check, capture, measurement or compilation.
    backends: all pairs (backend, what it computed lossily) that computed a step.
    cache_options: the names of those options of DeepCache that took effect in this image (Settings.cache_options).
    policies: by the name of each step policy, what it has counted in this image.
    inactive: by the name of each policy that was inactive at a call, its last reason.
    vae: (route, reason) of the last decode; ("", "") before it.
    inside: the images that were made while this one was in progress.
    """

    state: str = UNTOLD
    images: int = 0
    seconds: float | None = None
    host_seconds: float | None = None
    spent: Spent = Spent()
    model: str | None = None
    resolution: str | None = None
    backend: str | None = None
    lossy: str = ""
    weights: tuple[str, ...] = ()
    route: str = ""
    reason: str = ""
    relative_error: float | None = None
    parts: tuple[ImagePart, ...] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)
    step_ms: float | None = None
    host_ms: float | None = None
    ratio: float | None = None
    by_host: Mapping[str, int] = field(default_factory=dict)
    first_uses: int = 0
    backends: frozenset[tuple[str, str]] = frozenset()
    cache_options: frozenset[str] = frozenset()
    policies: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    inactive: Mapping[str, Inactive] = field(default_factory=dict)
    vae: tuple[str, str] = ("", "")
    inside: tuple[ImageRecord, ...] = ()

    @property
    def why_not_faster(self) -> str:
        """Why the image was not faster, for users: the most frequent reasons (up to MOST_REASONS) why the host computed
        calls, each with its number of calls, then the last call's reason, joined by "; ". "" if there is none.

        It is the last call's reason alone if the host computed the last call, and in state UNTOLD, where earlier calls
        may belong to another image.
        """
        is_one_image = self.state != UNTOLD
        earlier = list(self.by_host.items())[:MOST_REASONS] if is_one_image and self.route != HOST else []
        total = sum(self.steps.values())
        sentences = [f"{calls} of {total} steps without OneDiff: {reason}" for reason, calls in earlier]
        return "; ".join(filter(None, (*sentences, self.reason)))


class ImageLog:
    """The counts of an image in progress. CallStats writes to its attributes at each call; times are read from
    stopwatches when a record is made.

    state: the state of records that are made before the image ends.
    began: time.perf_counter() at the beginning.
    steps: how often each CountedStep occurred. last: the latest one; None before it.
    durations: for UNET, VAE and CHECK each, the Duration of such work in this image.
    replays: by the stopwatch that times them, the number of replays, whose time is not in durations[UNET].
    host: the stopwatch of the host's own calls in this image.
    is_timed: whether the duration of every call is known.
    reason, first_uses, by_host, policies, cache_options, vae, inside: see ImageRecord.
    inactive: by the name of each policy, how often it was inactive by the reason, the latest reason last.
    images: the number of images that are done. is_interrupted: whether the user has stopped one of them.
    """

    def __init__(self, state: str = UNTOLD) -> None:
        """state: UNTOLD, or OPEN if the host will announce the end."""
        self.state = state
        self.began = time.perf_counter()
        self.steps: Counter[CountedStep] = Counter()
        self.durations = {UNET: Duration(), VAE: Duration(), CHECK: Duration()}
        self.replays: Counter[Stopwatch] = Counter()
        self.host = Stopwatch()
        self.last: CountedStep | None = None
        self.reason = ""
        self.first_uses = 0
        self.images = 0
        self.is_timed = True
        self.is_interrupted = False
        self.by_host: Counter[str] = Counter()
        self.policies: dict[str, Counter[str]] = {}
        self.inactive: dict[str, Counter[str]] = {}
        self.cache_options: set[str] = set()
        self.vae = ("", "")
        self.inside: list[ImageRecord] = []

    def note_policy(self, name: str, counts: Mapping[str, int], reason: str) -> None:
        """Count one call for a step policy. name: the policy's. counts: the policy's counts at this call, which are
        added to its counts at earlier calls. reason: why it was inactive; "" if it was active, or is off."""
        self.policies.setdefault(name, Counter()).update(counts)
        reasons = self.inactive.setdefault(name, Counter())
        if reason:
            # Move it to the end: the record shows the last reason.
            reasons[reason] = reasons.pop(reason, 0) + 1

    def places(self) -> set[Place]:
        """The places (model, resolution) of all steps so far."""
        return {step.place for step in self.steps.copy()}

    def note_times(self) -> None:
        """Set Entry.in_image of the entry of each whole step in this image: the mean times over all steps that replace
        the same step of the host, cached and extrapolated ones included. Called when the image is done."""
        steps = self.steps.copy()
        for step in steps:
            entry = step.entry
            if entry is None:
                continue
            if entry.host is step.host and not entry.key.is_cached_pass:
                entry.in_image = times_of({one: n for one, n in steps.items() if one.host is entry.host})

    def record(
        self, state: str = "", images: int = 0, host_seconds: float | None = None, seconds: float | None = None,
    ) -> ImageRecord:
        """A new record of the image up to now. The log is not changed, and can go on.

        state: how it ended; "" while it is in progress: then `state` of the log. images: how many images were made at
        once, 0 if unknown. host_seconds, seconds: see ImageRecord. seconds None: the time since the log began, divided
        by images, is recorded if the image has ended and has not failed.
        """
        steps = dict(self.steps.copy())
        last = self.last
        if seconds is None and state not in ("", FAILED):
            seconds = (time.perf_counter() - self.began) / max(1, images)
        times = times_of(steps)
        entry = None if last is None else last.entry
        return ImageRecord(
            state=state or self.state, images=images, seconds=seconds, host_seconds=host_seconds,
            spent=self._spent(steps, seconds, max(1, images)),
            model=None if last is None else last.place.model,
            resolution=None if last is None else last.place.resolution,
            backend=None if entry is None else entry.key.backend, lossy="" if entry is None else str(entry.key.lossy),
            route="" if last is None else last.route, reason=self.reason,
            weights=() if entry is None else entry.key.weights,
            relative_error=None if entry is None else entry.relative_error,
            parts=parts_of(steps),
            steps=steps_by_kind(steps), calls=calls_by_route(steps), step_ms=times.step_ms, host_ms=times.host_ms,
            ratio=times.ratio, by_host=dict(self.by_host.most_common()), first_uses=self.first_uses,
            backends=frozenset(
                (step.entry.key.backend, str(step.entry.key.lossy)) for step in steps if step.entry is not None
            ),
            cache_options=frozenset(self.cache_options),
            policies={name: dict(done) for name, done in self.policies.items()},
            inactive={name: last_of(reasons) for name, reasons in self.inactive.items() if reasons},
            vae=self.vae, inside=tuple(self.inside),
        )

    def _spent(self, steps: Mapping[CountedStep, int], seconds: float | None, images: int) -> Spent:
        """How the seconds of one image were spent. If no network was called, or a call's duration is unknown, only the
        VAE's seconds (the check's as first_use) and those of images inside are given.

        seconds: all seconds of the image; None if unknown: then `rest` is None. images: how many images the counts are
        of, at least 1: all durations are divided by it.
        """
        replays = sum(count * (own.recent_ms(count) or 0.0) for own, count in self.replays.copy().items()) / 1e3
        check = self.durations[CHECK].seconds / images
        vae = max(0.0, self.durations[VAE].seconds / images - check)
        inside = sum((one.seconds or 0.0) * max(1, one.images) for one in self.inside) / images
        if not self.is_timed or not any(step.route for step in steps):
            return Spent(first_use=check, vae=vae, inside=inside)
        calls = (self.durations[UNET].seconds + replays) / images
        usual = seconds_of(steps)
        unet = calls if usual is None else min(calls, usual / images)
        beyond = calls - unet
        first_use = beyond + check if self.first_uses else 0.0
        slower = 0.0 if self.first_uses else beyond
        rest = None if seconds is None else max(0.0, seconds - calls - check - vae - inside)
        return Spent(unet, first_use, slower, vae, inside, rest)


def last_of(reasons: Counter[str]) -> Inactive:
    """The latest reason why a policy was inactive, with its number of calls. reasons: as ImageLog.note_policy keeps
    them, with the latest one last; not empty."""
    reason, calls = list(reasons.items())[-1]
    return Inactive(reason, calls)


def parts_of(steps: Mapping[CountedStep, int]) -> tuple[ImagePart, ...]:
    """The steps grouped by place, in the order of the places' first steps. steps, here and below: how often each
    CountedStep occurred."""
    by_place: dict[Place, dict[CountedStep, int]] = {}
    for step, count in steps.items():
        by_place.setdefault(step.place, {})[step] = count
    return tuple(part_of(place, of_place) for place, of_place in by_place.items())


def part_of(place: Place, steps: Mapping[CountedStep, int]) -> ImagePart:
    """The ImagePart of one place. steps: all of that place."""
    times = times_of(steps)
    return ImagePart(*place, steps_by_kind(steps), calls_by_route(steps), times.step_ms, times.host_ms, times.ratio)


def steps_by_kind(steps: Mapping[CountedStep, int]) -> Mapping[str, int]:
    """The number of steps of each kind that occurred, in the order of STEP_KINDS."""
    counts = counts_by("kind", steps)
    return {kind: counts[kind] for kind in STEP_KINDS if counts[kind]}


def calls_by_route(steps: Mapping[CountedStep, int]) -> Mapping[str, int]:
    """The number of UNet calls by each route that occurred, in the order of ROUTES. Steps without a call are left out.
    """
    counts = counts_by("route", steps)
    return {route: counts[route] for route in ROUTES if counts[route]}


def counts_by(field_name: str, steps: Mapping[CountedStep, int]) -> Counter[str]:
    """The number of steps for each value of this field of CountedStep."""
    counts: Counter[str] = Counter()
    for step, count in steps.items():
        counts[getattr(step, field_name)] += count
    return counts


def times_of(steps: Mapping[CountedStep, int]) -> Times:
    """The mean durations of these steps (see Times).

    step_ms: see own_ms. host_ms: the mean duration of the host's own steps that these replace, from all times of the
    host's stopwatches. ratio: None also if the host computed all steps.
    """
    hosts = [(step.host, count) for step, count in steps.items()]
    step_ms = own_ms(steps)
    host_ms = weighted_mean(hosts, attrgetter("median_ms"))
    are_enough = all(step.own is not None and step.own.settled_ms is not None for step in steps)
    ratio = ratio_of(step_ms if are_enough else None, weighted_mean(hosts, attrgetter("settled_ms")))
    return Times(step_ms, host_ms, None if all(step.kind == BY_HOST for step in steps) else ratio)


def own_ms(steps: Mapping[CountedStep, int]) -> float | None:
    """The mean duration of these steps in milliseconds. The steps of each stopwatch count with its median over the last
    n times, where n is the number of these steps. None if there are no steps, or one has no time."""
    counts: Counter[Stopwatch | None] = Counter()
    for step, count in steps.items():
        counts[step.own] += count
    return weighted_mean(counts.items(), lambda own: own.recent_ms(counts[own]))


def seconds_of(steps: Mapping[CountedStep, int]) -> float | None:
    """The duration of all these steps together, in seconds, by own_ms; None if own_ms is None."""
    ms = own_ms(steps)
    return None if ms is None else ms * sum(steps.values()) / 1e3


def weighted_mean(
    parts: Iterable[tuple[Stopwatch | None, int]], value: Callable[[Stopwatch], float | None]
) -> float | None:
    """The mean of value(stopwatch) over (stopwatch, count) pairs, weighted by the counts. None if there are no pairs, a
    stopwatch is None, or a value is None."""
    values = [(None if stopwatch is None else value(stopwatch), count) for stopwatch, count in parts]
    known = [(found, count) for found, count in values if found is not None]
    if not known or len(known) < len(values):
        return None
    return sum(found * count for found, count in known) / sum(count for _, count in known)
