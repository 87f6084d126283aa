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

# The kinds of steps, by what they compute. BY_HOST: the host's own UNet computed it.
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
# The states of an image. FAILED: the host raised an exception. UNTOLD: the host does not announce when images begin and
# end, as in pipelines of diffusers.
OPEN = "in progress"
DONE = "done"
INTERRUPTED = "interrupted"
FAILED = "failed"
UNTOLD = "untold"
# The durations in an image's log. CHECK is a part of VAE: the check of the VAE's output at the first use of a size.
UNET = "unet"
VAE = "vae"
CHECK = "check"
# The number of pieces of work with unread events from which add() reads them.
MOST_PENDING = 64


class CountedStep(NamedTuple):
    """One step in an image's log. Equal steps are counted together.

    kind: one of STEP_KINDS.
    route: one of ROUTES; "" if no network was called (a forecast).
    own: the stopwatch of such steps; None without one.
    host: the stopwatch of the host's own steps that it replaces; None without one.
    entry: the shape that was computed; None if the host computed it.
    """

    kind: str
    route: str
    place: Place
    own: Stopwatch | None
    host: Stopwatch | None
    entry: Entry | None


class Duration:
    """The total time of several pieces of work. Never waits for the GPU: reads CUDA events only once they are over."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._reading = threading.Lock()

    def add(self, took: Took) -> None:
        """Add the time of a piece of work: seconds, or the events at its begin and end."""
        if isinstance(took, float):
            self._seconds += took
            return
        self._pending.append(took)
        if len(self._pending) > MOST_PENDING:
            self._read()

    @property
    def seconds(self) -> float:
        """Seconds of the work that is finished."""
        self._read()
        return self._seconds

    def _read(self) -> None:
        with self._reading:
            while self._pending and self._pending[0][1].query():
                begin, end = self._pending.popleft()
                self._seconds += begin.elapsed_time(end) / 1e3


@dataclass(frozen=True)
class Spent:
    """The seconds of one image, by what they were spent on. None: unknown.

    unet: the number of steps times their median time, at most the time of all UNet calls.
    first_use, slower: the rest of the UNet calls' time. It is first_use, together with the VAE's check, if the image
        had a first check, capture, measurement or compilation; otherwise slower.
    vae: decodes and encodes without the check.
    inside: other images that were made for this one.
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
    """The steps of an image with one model at one resolution. A second pass, a refiner, or a face that an extension
    redraws is a part of its own.

    steps: the number of steps by kind.
    calls: the number of UNet calls by route.
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
    """Why a step policy was inactive, and at how many calls of the image for this reason."""

    reason: str
    calls: int


@dataclass(frozen=True)
class ImageRecord:
    """The numbers of one image, or of a batch that was made at once. None: unknown.

    state: OPEN, DONE, INTERRUPTED, FAILED or UNTOLD.
    images: the number of images; 0: unknown.
    seconds: for each image, everything included; of an interrupted one, until the interruption.
    host_seconds: for a similar image with OneDiff off.
    model, resolution, backend, lossy, route, reason, relative_error: of the last call; the route is "" before it.
    weights: how the network's weights are stored and changed, in words; see ShapeKey.
    parts: the steps by place, in the order of their first steps.
    steps, calls, step_ms, host_ms, ratio: of all steps; see ImagePart.
    by_host: the number of calls that the host computed, by the reason.
    first_uses: the number of calls with a first check, capture, measurement or compilation.
    backends: all pairs (backend, what it computed lossily) that computed a step.
    cache_options: the names of DeepCache's options by which parts of its steps were left out.
    policies: the counts of each step policy, by its name.
    inactive: each policy's last reason for being inactive.
    vae: (route, reason) of the last decode.
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
        """Why the image was not faster, for users: up to MOST_REASONS reasons why the host computed steps, then the
        last call's reason, joined by "; ". "" if there is none.

        Only the last call's reason if the host computed that call too. Also only that in state UNTOLD, because earlier
        calls may belong to another image.
        """
        is_one_image = self.state != UNTOLD
        earlier = list(self.by_host.items())[:MOST_REASONS] if is_one_image and self.route != HOST else []
        total = sum(self.steps.values())
        sentences = [f"{calls} of {total} steps by the WebUI: {reason}" for reason, calls in earlier]
        return "; ".join(filter(None, (*sentences, self.reason)))


class ImageLog:
    """The counts of an image in progress. Times are read from stopwatches when a record is made.

    began: time.perf_counter() at the beginning.
    steps: how often each kind of step was counted. last: the one counted last.
    durations: the times of UNET, VAE and CHECK in this image.
    replays: how often each stopwatch's replay ran. A replay is timed by its stopwatch alone, and not by durations.
    host: times the host's own calls in this image.
    is_timed: whether the time of every call is known.
    reason, first_uses, by_host, policies, inactive, cache_options, vae, inside: see ImageRecord.
    images: the number of images that are done. is_interrupted: whether the user has stopped one of them.
    """

    def __init__(self, state: str = UNTOLD) -> None:
        """state: the state of records that are made before the image ends."""
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
        """Add a step policy's counts at a call. reason: why it was inactive; "" if it was active, or is off."""
        self.policies.setdefault(name, Counter()).update(counts)
        reasons = self.inactive.setdefault(name, Counter())
        if reason:
            # Move it to the end: the record shows the last reason.
            reasons[reason] = reasons.pop(reason, 0) + 1

    def places(self) -> set[Place]:
        """The (model, resolution) pairs of its steps."""
        return {step.place for step in self.steps.copy()}

    def note_times(self) -> None:
        """Set Entry.in_image of every shape in this image: the mean times of the steps that replace the host's steps of
        this shape."""
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
        """The record of the image until now.

        state: how it ended; "" while it is in progress. images: the number of images, once they are done. seconds: for
        each image; by default the time since the log began, and None for a failed image.
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
        """See Spent. seconds: the whole time of one image. images: the number that this log's times are divided by."""
        replays = sum(count * (own.recent_ms(count) or 0.0) for own, count in self.replays.copy().items()) / 1e3
        check = self.durations[CHECK].seconds / images
        vae = max(0.0, self.durations[VAE].seconds / images - check)
        inside = sum((one.seconds or 0.0) * max(1, one.images) for one in self.inside) / images
        if not self.is_timed or not any(step.route for step in steps):
            return Spent(first_use=check, vae=vae, inside=inside)
        calls = (self.durations[UNET].seconds + replays) / images
        usual = time_of(steps)
        unet = calls if usual is None else min(calls, usual / images)
        beyond = calls - unet
        first_use = beyond + check if self.first_uses else 0.0
        slower = 0.0 if self.first_uses else beyond
        rest = None if seconds is None else max(0.0, seconds - calls - check - vae - inside)
        return Spent(unet, first_use, slower, vae, inside, rest)


def last_of(reasons: Counter[str]) -> Inactive:
    """The latest reason why a policy was inactive: note_policy keeps it at the end."""
    reason, calls = list(reasons.items())[-1]
    return Inactive(reason, calls)


def parts_of(steps: Mapping[CountedStep, int]) -> tuple[ImagePart, ...]:
    """The steps grouped by place, in the order of the places' first steps."""
    by_place: dict[Place, dict[CountedStep, int]] = {}
    for step, count in steps.items():
        by_place.setdefault(step.place, {})[step] = count
    return tuple(part_of(place, of_place) for place, of_place in by_place.items())


def part_of(place: Place, steps: Mapping[CountedStep, int]) -> ImagePart:
    """The ImagePart of a place with these steps."""
    times = times_of(steps)
    return ImagePart(*place, steps_by_kind(steps), calls_by_route(steps), times.step_ms, times.host_ms, times.ratio)


def steps_by_kind(steps: Mapping[CountedStep, int]) -> Mapping[str, int]:
    """The number of steps of each kind, in the order of STEP_KINDS."""
    counts = counted(steps, "kind")
    return {kind: counts[kind] for kind in STEP_KINDS if counts[kind]}


def calls_by_route(steps: Mapping[CountedStep, int]) -> Mapping[str, int]:
    """The number of calls by each route, in the order of ROUTES."""
    counts = counted(steps, "route")
    return {route: counts[route] for route in ROUTES if counts[route]}


def counted(steps: Mapping[CountedStep, int], name: str) -> Counter[str]:
    """The number of steps for each value of the field with this name."""
    counts: Counter[str] = Counter()
    for step, count in steps.items():
        counts[getattr(step, name)] += count
    return counts


def times_of(steps: Mapping[CountedStep, int]) -> Times:
    """The mean times of these steps.

    step_ms: from the last n times of each stopwatch, where n is its number of steps here. host_ms: from all times of
    the host's stopwatches. ratio: None also if the host computed all steps.
    """
    hosts = [(step.host, count) for step, count in steps.items()]
    step_ms = own_ms(steps)
    host_ms = mean(hosts, attrgetter("median_ms"))
    are_enough = all(step.own is not None and step.own.settled_ms is not None for step in steps)
    ratio = ratio_of(step_ms if are_enough else None, mean(hosts, attrgetter("settled_ms")))
    return Times(step_ms, host_ms, None if all(step.kind == BY_HOST for step in steps) else ratio)


def own_ms(steps: Mapping[CountedStep, int]) -> float | None:
    """The mean step in milliseconds: the median of each stopwatch over its steps here, weighted by their number. None
    if one was never timed."""
    counts: Counter[Stopwatch | None] = Counter()
    for step, count in steps.items():
        counts[step.own] += count
    return mean(counts.items(), lambda own: own.recent_ms(counts[own]))


def time_of(steps: Mapping[CountedStep, int]) -> float | None:
    """Seconds of all these steps, by their median times; None if one was never timed."""
    ms = own_ms(steps)
    return None if ms is None else ms * sum(steps.values()) / 1e3


def mean(
    parts: Iterable[tuple[Stopwatch | None, int]], value: Callable[[Stopwatch], float | None]
) -> float | None:
    """The mean of value(stopwatch), weighted by the counts; None if one is unknown. parts: (stopwatch, count) pairs."""
    values = [(None if stopwatch is None else value(stopwatch), count) for stopwatch, count in parts]
    known = [(found, count) for found, count in values if found is not None]
    if not known or len(known) < len(values):
        return None
    return sum(found * count for found, count in known) / sum(count for _, count in known)
