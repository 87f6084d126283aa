"""The per-resolution cache: what is known about every shape that was seen, and how long an image took.

A step that computes less than the whole UNet (a cached pass of DeepCache, the prompt alone, a forecast) stands for a
whole one: what it saves is seen in the mean of all steps, beside the host's own time of whole ones.
"""
from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import torch

from .call import CACHED
from .key import ShapeKey

Result = TypeVar("Result")
Value = TypeVar("Value")
# Fewer times than this are chance; older ones than so many go.
ENOUGH, MOST_TIMES = 3, 32
# Of one shape; LoRAs make more of them.
MOST_VERDICTS = 64
# Of replaced functions, in a reason.
MOST_NAMED = 3
# What a step computes; HOSTS: the host's own UNet did.
WHOLE, PROMPT_ALONE, FORECAST, HOSTS = "whole", "prompt alone", "forecast", "host"
KINDS = (WHOLE, CACHED, PROMPT_ALONE, FORECAST, HOSTS)
Parts = list[tuple["Stopwatch | None", int]]


def median_of(ordered: list[float]) -> float:
    """A page may ask for thousands: the standard library's takes several times as long."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def ratio_of(own_ms: float | None, host_ms: float | None) -> float | None:
    """How many times faster ours is than the host's; None while one of the two is not known."""
    return None if not own_ms or host_ms is None else host_ms / own_ms


class Stopwatch:
    """The last times of one thing, in milliseconds. On a GPU it reads events only once they have happened.

    remembered: what an earlier process has measured, often enough; it holds until this one has.
    """

    def __init__(self) -> None:
        self._route = ""
        self.remembered: float | None = None
        self._times: deque[float] = deque(maxlen=MOST_TIMES)
        # A page and the runtime may ask at once.
        self._reading = threading.Lock()
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=MOST_TIMES)

    def time(self, device: torch.device, work: Callable[[], Result], route: str = "") -> Result:
        """What work() returns. route: see start."""
        stop = self.start(device, route)
        result = work()
        stop()
        return result

    def start(self, device: torch.device, route: str = "") -> Callable[[], None]:
        """Time what is done until the function that this returns is called; where it is not, there is no time. route:
        how it is done; the times of another route say nothing of this one, and go."""
        if route != self._route:
            with self._reading:
                self._route = route
                self._times.clear()
                self._pending.clear()
        if device.type != "cuda":
            began = time.perf_counter()
            return lambda: self._times.append((time.perf_counter() - began) * 1e3)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Events go to the current card, which need not be this one.
        begin.record(torch.cuda.current_stream(device))

        def stop() -> None:
            end.record(torch.cuda.current_stream(device))
            self._pending.append((begin, end))

        return stop

    @property
    def median_ms(self) -> float | None:
        """The median of however many times there are."""
        times = self._read()
        return median_of(sorted(times)) if times else self.remembered

    @property
    def settled_ms(self) -> float | None:
        """The median of enough times; None before that."""
        times = self._read()
        return median_of(sorted(times)) if len(times) >= ENOUGH else self.remembered

    def _read(self) -> list[float]:
        with self._reading:
            while self._pending and self._pending[0][1].query():
                begin, end = self._pending.popleft()
                self._times.append(begin.elapsed_time(end))
            return list(self._times)


class State(str, Enum):
    """cold: seen, not proved. proved: agrees with the host, runs plainly. ready: the next call replays. failed: the
    host serves this shape, reason says why."""

    COLD = "cold"
    PROVED = "proved"
    READY = "ready"
    FAILED = "failed"


@dataclass
class Verdict:
    """What was found of a shape over one network's weights and sources.

    failures: how often our forward has failed in a row; failed_in: the sampling in which it did last. of_image: whether
    a call of an image was checked, and not only noise.
    """

    state: State = State.COLD
    reason: str = ""
    no_graph: str = ""
    relative_error: float | None = None
    failures: int = 0
    failed_in: Hashable = None
    of_image: bool = False


class OfVerdict(Generic[Value]):
    """A field of an entry's verdict."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, entry: Entry, owner: type) -> Value:
        value: Value = getattr(entry.verdict, self._name)
        return value

    def __set__(self, entry: Entry, value: Value) -> None:
        setattr(entry.verdict, self._name, value)


@dataclass
class Entry:
    """A shape, and what was found of it over the weights of the last call.

    weights: whose verdict that is (BoundUNet.identity). replaced: who has replaced which functions of the host's, at
    the last call. model: its name for people. needs: how much its graph takes of
    the memory that all graphs share, alone; known from its plain calls on. waits: why it has no graph yet. misfits: how
    often functions of other extensions did not fit its graphs. kept_uses: how many of its uses the store knows.
    no_graph, of its verdict: why it has no graph and will get none.
    """

    key: ShapeKey
    model: str = ""
    weights: str = ""
    replaced: Sequence[str] = ()
    needs: int = 0
    waits: str = ""
    misfits: int = 0
    uses: int = 0
    kept_uses: int = 0
    last_used: float = field(default_factory=time.time)
    own: Stopwatch = field(default_factory=Stopwatch)
    host: Stopwatch = field(default_factory=Stopwatch)
    verdict: Verdict = field(default_factory=Verdict)
    _others: dict[str, Verdict] = field(default_factory=dict)
    state, reason, no_graph = OfVerdict[State](), OfVerdict[str](), OfVerdict[str]()
    relative_error = OfVerdict["float | None"]()

    def of_weights(self, weights: str, sampling: Hashable = None, replaced: Sequence[str] = ()) -> Entry:
        """The same entry, with what was found of it over these weights. Our forward is tried again where it has failed
        once, in another sampling; None: at another call. replaced: sentences, see BoundUNet."""
        self.replaced = replaced
        if weights != self.weights:
            self._others[self.weights] = self.verdict
            self.verdict, self.weights = self._others.pop(weights, Verdict()), weights
            if self.state is State.READY:
                self.state = State.PROVED
            while len(self._others) > MOST_VERDICTS:
                del self._others[next(iter(self._others))]
        known = self.verdict
        if known.state is State.FAILED and known.failures == 1 and (sampling is None or known.failed_in != sampling):
            known.state, known.reason = State.COLD, ""
        return self

    def forget_failures(self, weights: str) -> None:
        """These weights are given back: what has failed over them may go well another time."""
        known = self.verdict if weights == self.weights else self._others.get(weights)
        if known is not None and known.state is State.FAILED:
            known.state, known.reason, known.failures = State.COLD, "", 0

    @property
    def ratio(self) -> float | None:
        """How many times faster than the host's own forward; None while one of the two was not timed often enough."""
        return ratio_of(self.own.settled_ms, self.host.settled_ms)

    def note_use(self) -> None:
        """A call of this shape begins."""
        self.uses += 1
        self.last_used = time.time()

    def timed(self, device: torch.device, work: Callable[[], Result], route: str) -> Result:
        """What work() returns, a call of this shape. route: see Stopwatch.start."""
        self.note_use()
        return self.own.time(device, work, route)

    def blame(self, what: str, sampling: Hashable = None, is_final: bool = True) -> str:
        """Something went wrong: another backend, or the host, serves this shape over these weights. Returns the reason,
        with the backend's name. is_final: otherwise it is tried once more; see of_weights."""
        known = self.verdict
        why = "; ".join((f"{what} (backend {self.key.way})", *self.replaced[:MOST_NAMED]))
        known.state, known.reason, known.failed_in = State.FAILED, why, sampling
        known.failures = known.failures + 1 if not is_final else 2
        return known.reason


class ShapeTable:
    """Entries by key. Shared by all checkpoints of an architecture."""

    def __init__(self) -> None:
        self._entries: dict[ShapeKey, Entry] = {}
        # Pages look and purge while another thread makes images.
        self._lock = threading.Lock()

    def entry(self, key: ShapeKey, model: str = "") -> Entry:
        """The entry for a shape, made cold at its first use. model: its name for people."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(key, model)
        entry.note_use()
        return entry

    def entries(self) -> list[Entry]:
        """All entries, the last used first."""
        return sorted(self.by_key().values(), key=lambda entry: -entry.last_used)

    def by_key(self) -> dict[ShapeKey, Entry]:
        """All entries."""
        with self._lock:
            return dict(self._entries)

    def forget(self, keys: Collection[ShapeKey]) -> None:
        with self._lock:
            self._entries = {key: entry for key, entry in self._entries.items() if key not in keys}


class Step(NamedTuple):
    """A call of the UNet. own: the times of such calls; host: those of the host's own in its place. None: unknown."""

    kind: str
    own: Stopwatch | None
    host: Stopwatch | None


class Times(NamedTuple):
    """Means over steps, in milliseconds; None where one of the steps was never timed. ratio: None too where a time
    stands on too few."""

    step_ms: float | None
    host_ms: float | None
    ratio: float | None


class ImageTimes:
    """How long the UNet took in an image, or in several that are made at once, over all steps, and how long the host's
    own would have taken. seconds: what one image took, everything included; host_seconds: what one like it took by the
    host's own UNet, with OneDiff off; None where nobody has measured it. places: the (model, resolution) of its calls.
    """

    def __init__(self) -> None:
        self.steps: Counter[Step] = Counter()
        self.seconds: float | None = None
        self.host_seconds: float | None = None
        self.places: set[tuple[str, str]] = set()

    @property
    def hosts(self) -> set[Stopwatch]:
        """Whose steps are in it."""
        return {step.host for step in self.steps.copy() if step.host is not None}

    def kinds(self) -> dict[str, int]:
        """How many steps computed what."""
        counts: Counter[str] = Counter()
        for step, count in self.steps.copy().items():
            counts[step.kind] += count
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    def times(self, host: Stopwatch | None = None) -> Times:
        """Over all steps, or over those that stand for a host's."""
        steps = [(step, n) for step, n in self.steps.copy().items() if host is None or step.host is host]
        own, hosts = [(step.own, n) for step, n in steps], [(step.host, n) for step, n in steps]
        ratio = ratio_of(mean(own, attrgetter("settled_ms")), mean(hosts, attrgetter("settled_ms")))
        is_hosts = all(step.kind == HOSTS for step, _ in steps)
        return Times(
            mean(own, attrgetter("median_ms")), mean(hosts, attrgetter("median_ms")), None if is_hosts else ratio
        )


def mean(parts: Parts, value: Callable[[Stopwatch], float | None]) -> float | None:
    """Of values of stopwatches, each as often as it is told; None where one is unknown."""
    values = [(None if stopwatch is None else value(stopwatch), count) for stopwatch, count in parts]
    known = [(found, count) for found, count in values if found is not None]
    if not known or len(known) < len(values):
        return None
    return sum(found * count for found, count in known) / sum(count for _, count in known)
