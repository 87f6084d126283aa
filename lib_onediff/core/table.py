"""What is known about every shape that was seen, and the stopwatches that time it."""
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch

from .key import ShapeKey

Result = TypeVar("Result")
Value = TypeVar("Value")
# How long something took: in seconds, or as the events at its beginning and its end, which a GPU has yet to reach.
Took = float | tuple["torch.cuda.Event", "torch.cuda.Event"]
# Fewer times than this are chance.
ENOUGH = 3
# A stopwatch keeps so many times: the oldest go.
MOST_TIMES = 32
# Of one shape; LoRAs make more of them.
MOST_VERDICTS = 64
# Of replaced functions, in a reason.
MOST_NAMED = 3
# An extension that draws each face at a size of its own makes shapes for ever. Beyond this number the least recently
# used are forgotten.
MOST_SHAPES = 1000
# So many are forgotten at once that their order is looked at seldom.
FORGOTTEN_AT_ONCE = 100
# The shapes that were used last are never forgotten: the image in progress may use them.
LEAST_RECENT = 100


def median_of(ordered: list[float]) -> float:
    """A page may ask for thousands: the standard library's takes several times as long."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def ratio_of(own_ms: float | None, host_ms: float | None) -> float | None:
    """How many times faster ours is than the host's; None while one of the two is not known."""
    return None if not own_ms or host_ms is None else host_ms / own_ms


def start_timing(device: torch.device) -> Callable[[], Took]:
    """Begin to time what is done until the function that this returns is called, which returns how long it took."""
    if device.type != "cuda":
        began = time.perf_counter()
        return lambda: time.perf_counter() - began
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    # Events go to the current card, which need not be this one.
    begin.record(torch.cuda.current_stream(device))

    def stop() -> Took:
        end.record(torch.cuda.current_stream(device))
        return begin, end

    return stop


class Place(NamedTuple):
    """Where a shape or a call belongs. model: its name for people ("SD1"); resolution: in pixels ("512x768"). None: not
    known."""

    model: str | None = None
    resolution: str | None = None


class Times(NamedTuple):
    """Means over steps, in milliseconds; None where one of the steps was never timed. ratio: None too where a time
    stands on too few."""

    step_ms: float | None
    host_ms: float | None
    ratio: float | None


class Stopwatch:
    """The last times of one thing, in milliseconds. On a GPU it reads events only once they have happened.

    route: how the thing is done: the times of another route say nothing of this one. add: adds a time.
    remembered: what an earlier process has measured, often enough; it holds until this one has.
    """

    def __init__(self) -> None:
        self.route = ""
        self.remembered: float | None = None
        self._times: deque[float] = deque(maxlen=MOST_TIMES)
        # A page and the runtime may ask at once.
        self._reading = threading.Lock()
        self._unread: deque[Took] = deque(maxlen=MOST_TIMES)
        # No method: replays add a time at every step.
        self.add: Callable[[Took], None] = self._unread.append

    def time(self, device: torch.device, work: Callable[[], Result], route: str = "") -> Result:
        """What work() returns; how long it takes is added, unless it raises. route: see begin_route."""
        stop = self.start(device, route)
        result = work()
        stop()
        return result

    def start(self, device: torch.device, route: str = "") -> Callable[[], None]:
        """Time what is done until the function that this returns is called; where it is not, there is no time. route:
        see begin_route."""
        if route != self.route:
            self.begin_route(route)
        stop = start_timing(device)
        return lambda: self.add(stop())

    def begin_route(self, route: str) -> None:
        """From now on, the thing is done by this route; the times until now go."""
        with self._reading:
            self.route = route
            self._times.clear()
            self._unread.clear()

    @property
    def median_ms(self) -> float | None:
        """The median of however many times there are."""
        times = self._read()
        return median_of(sorted(times)) if times else self.remembered

    def recent_ms(self, count: int) -> float | None:
        """The median of the last times, so many at most."""
        times = self._read()[-count:]
        return median_of(sorted(times)) if times else self.remembered

    @property
    def settled_ms(self) -> float | None:
        """The median of enough times; None before that."""
        times = self._read()
        return median_of(sorted(times)) if len(times) >= ENOUGH else self.remembered

    def _read(self) -> list[float]:
        """The times, in milliseconds, but for those whose end the GPU has yet to reach and what follows them."""
        with self._reading:
            while self._unread:
                took = self._unread[0]
                if isinstance(took, float):
                    milliseconds = took * 1e3
                elif took[1].query():
                    milliseconds = took[0].elapsed_time(took[1])
                else:
                    break
                self._unread.popleft()
                self._times.append(milliseconds)
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


@dataclass(eq=False)
class Entry:
    """A shape, and the verdict on it over the weights of the last call.

    model: its name for people. weights: the digest of the weights that verdict belongs to (BoundUNet.identity).
    replaced: who has replaced which functions of the host's, at the last call. needs: bytes of the memory shared by all
    graphs that its graph takes, not counting what other graphs need; measured in calls without a graph, 0 before.
    waits: why it has no graph yet. misfits: how often functions of other extensions did not fit its graphs. uses: the
    number of its calls. kept_uses: how many of these are in the store. own: the times of our forward. host: those of
    the host's own forward; a cached pass has those of the full pass that it replaces. in_image: the mean times in the
    last image, over all steps that the host would have computed as full passes of this shape; None before one.
    state, reason, no_graph, relative_error: those of the verdict. no_graph: why it has no graph and will get none.
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
    in_image: Times | None = None
    verdict: Verdict = field(default_factory=Verdict)
    _others: dict[str, Verdict] = field(default_factory=dict)
    state = OfVerdict[State]()
    reason = OfVerdict[str]()
    no_graph = OfVerdict[str]()
    relative_error = OfVerdict["float | None"]()

    def of_weights(self, weights: str, sampling: Hashable = None, replaced: Sequence[str] = ()) -> Entry:
        """Switches this entry to its verdict over these weights, a new one where there is none, and returns the entry.

        READY becomes PROVED, because a graph is of the weights that it was captured with. A verdict that has failed
        once is COLD again, so that our forward is tried again, in another sampling than it failed in; sampling None,
        outside of any: at any later call. replaced: sentences, see BoundUNet.
        """
        self.replaced = replaced
        if weights != self.weights:
            self._others[self.weights] = self.verdict
            self.verdict = self._others.pop(weights, Verdict())
            self.weights = weights
            if self.state is State.READY:
                self.state = State.PROVED
            while len(self._others) > MOST_VERDICTS:
                del self._others[next(iter(self._others))]
        known = self.verdict
        if known.state is State.FAILED and known.failures == 1 and (sampling is None or known.failed_in != sampling):
            known.state = State.COLD
            known.reason = ""
        return self

    def forget_failures(self, weights: str) -> None:
        """These weights are given back: what has failed over them may go well another time."""
        known = self.verdict if weights == self.weights else self._others.get(weights)
        if known is not None and known.state is State.FAILED:
            known.state = State.COLD
            known.reason = ""
            known.failures = 0

    @cached_property
    def place(self) -> Place:
        """Its row in the table."""
        return Place(self.model, self.key.resolution)

    @property
    def ratio(self) -> float | None:
        """How many times faster than the host's own forward; None while one of the two was not timed often enough."""
        return ratio_of(self.own.settled_ms, self.host.settled_ms)

    def note_use(self) -> None:
        """A call of this shape begins."""
        self.uses += 1
        self.last_used = time.time()

    def blame(self, what: str, sampling: Hashable = None, is_final: bool = True) -> str:
        """Mark this shape as failed over these weights, so that another backend, or the host, serves it. Returns the
        reason for users: what went wrong, with the backend's name.

        is_final: it is not tried again. False: a first failure is forgiven in another sampling than this; of_weights
        looks for failures == 1, so 2 is never forgiven.
        """
        known = self.verdict
        known.state = State.FAILED
        known.reason = "; ".join((f"{what} (backend {self.key.backend_label})", *self.replaced[:MOST_NAMED]))
        known.failed_in = sampling
        known.failures = 2 if is_final else known.failures + 1
        return known.reason


class ShapeTable:
    """Entries by key. Shared by all checkpoints of an architecture. Holds at most MOST_SHAPES, but for those that are
    kept: with a graph, or pinned."""

    def __init__(
        self, kept: Callable[[], Callable[[Entry], bool]] = lambda: lambda entry: False,
        forgotten: Callable[[Collection[Entry]], object] = lambda entries: None,
    ) -> None:
        """kept: called once before entries are forgotten; returns a function that says whether an entry must stay.
        forgotten: called with the entries that are gone."""
        self._kept = kept
        self._forgotten = forgotten
        self._entries: dict[ShapeKey, Entry] = {}
        # Pages look and purge while another thread makes images.
        self._lock = threading.Lock()

    def entry(self, key: ShapeKey, model: str = "") -> Entry:
        """The entry for a shape, made cold at its first use. model: its name for people."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(key, model)
            is_full = len(self._entries) > MOST_SHAPES
        entry.note_use()
        if is_full and entry.uses == 1:
            self._make_room()
        return entry

    def entries(self) -> list[Entry]:
        """All entries, the last used first."""
        return sorted(self.by_key().values(), key=lambda entry: -entry.last_used)

    def by_key(self) -> dict[ShapeKey, Entry]:
        """All entries."""
        with self._lock:
            return dict(self._entries)

    def forget(self, keys: Collection[ShapeKey]) -> None:
        """Drop the entries of these shapes."""
        with self._lock:
            gone = [entry for key in keys if (entry := self._entries.pop(key, None)) is not None]
        self._forgotten(gone)

    def _make_room(self) -> None:
        """Forget the least recently used entries that need not stay."""
        is_kept = self._kept()
        old = [
            entry for entry in self.entries()[LEAST_RECENT:] if entry.state is not State.READY and not is_kept(entry)
        ]
        self.forget({entry.key for entry in old[-FORGOTTEN_AT_ONCE:]})
