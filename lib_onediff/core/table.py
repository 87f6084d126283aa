"""The table of shapes: for each shape its state, the verdicts of its checks, and its times. Also the stopwatches that
measure the times."""
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
# A measured duration: seconds, or the CUDA events at its begin and end, which the GPU may not have reached yet.
Took = float | tuple["torch.cuda.Event", "torch.cuda.Event"]
# A stopwatch's median counts as settled with at least this number of times.
ENOUGH = 3
# The number of latest times that a stopwatch keeps.
MOST_TIMES = 32
# The number of verdicts kept for one shape, besides the verdict with the weights in use. Each combination of LoRAs is
# another set of weights, and has its own verdict.
MOST_VERDICTS = 64
# The number of replaced functions named in a reason.
MOST_NAMED = 3
# Beyond this number of shapes, the least recently used are forgotten: an extension that draws each face at a size of
# its own would add shapes for ever.
MOST_SHAPES = 1000
# They are forgotten in groups, because finding the least recently used ones sorts the whole table.
FORGOTTEN_AT_ONCE = 100
# The number of most recently used shapes that are never forgotten: the image in progress may use them.
NEVER_FORGOTTEN = 100


def median_of(ordered: list[float]) -> float:
    """The median of sorted times, at least one. statistics.median takes several times as long, and a page shows
    thousands."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def ratio_of(own_ms: float | None, host_ms: float | None) -> float | None:
    """host_ms / own_ms, the speedup; None if one of the two is None, or own_ms is 0."""
    return None if not own_ms or host_ms is None else host_ms / own_ms


def start_timing(device: torch.device) -> Callable[[], Took]:
    """Start timing. Returns a function that stops and returns the duration. On a GPU, it is a pair of CUDA events: the
    first is recorded now, the second when the function is called, each in the device's current stream. Elsewhere, it is
    in seconds."""
    if device.type != "cuda":
        began = time.perf_counter()
        return lambda: time.perf_counter() - began
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    # Without a stream, events would go to torch's current GPU, which may be another one.
    begin.record(torch.cuda.current_stream(device))

    def stop() -> Took:
        end.record(torch.cuda.current_stream(device))
        return begin, end

    return stop


class Place(NamedTuple):
    """A model at a resolution: a row of the table that users see, with the entries of several shapes.

    model: its name for users, such as "SD1". resolution: in pixels, such as "512x768". None: unknown.
    """

    model: str | None = None
    resolution: str | None = None


class Times(NamedTuple):
    """The mean durations of the same steps by OneDiff (step_ms) and by the host (host_ms), in milliseconds; None if one
    of the steps was never timed.

    ratio: the speedup, host_ms / step_ms; None also while one of them has fewer than ENOUGH times.
    """

    step_ms: float | None
    host_ms: float | None
    ratio: float | None


class Stopwatch:
    """The latest MOST_TIMES durations (times) of one kind of work. Never waits for the GPU: a time counts once the GPU
    has finished the work.

    route: a word for how the work is done; see begin_route.
    add: a function that adds a time, a Took, whose work the GPU need not have finished yet.
    remembered: the median in milliseconds that an earlier process measured, None if unknown; used until this
        process has times. Only stopwatches of the host's forward have one.
    """

    def __init__(self) -> None:
        self.route = ""
        self.remembered: float | None = None
        self._times: deque[float] = deque(maxlen=MOST_TIMES)
        # Pages and the runtime read from different threads.
        self._reading = threading.Lock()
        self._unread: deque[Took] = deque(maxlen=MOST_TIMES)
        # An attribute is faster to call than a method, and each replay adds a time.
        self.add: Callable[[Took], None] = self._unread.append

    def time(self, device: torch.device, work: Callable[[], Result], route: str = "") -> Result:
        """The result of work(), whose duration is added, unless it raises. route: how work() is done; if it differs
        from the stopwatch's route, a new route begins (see begin_route)."""
        stop = self.start(device, route)
        result = work()
        stop()
        return result

    def start(self, device: torch.device, route: str = "") -> Callable[[], None]:
        """Start timing. Returns a function that stops and adds the time. route: see time."""
        if route != self.route:
            self.begin_route(route)
        stop = start_timing(device)
        return lambda: self.add(stop())

    def begin_route(self, route: str) -> None:
        """Set `route`, and drop all times, because they do not describe the new route. `remembered` stays."""
        with self._reading:
            self.route = route
            self._times.clear()
            self._unread.clear()

    @property
    def median_ms(self) -> float | None:
        """The median of all times in milliseconds; without times the remembered one, or None."""
        times = self._read()
        return median_of(sorted(times)) if times else self.remembered

    def recent_ms(self, count: int) -> float | None:
        """The median of the last `count` times in milliseconds, or of all if there are fewer; without times the
        remembered one, or None."""
        times = self._read()[-count:]
        return median_of(sorted(times)) if times else self.remembered

    @property
    def settled_ms(self) -> float | None:
        """The median in milliseconds if there are ENOUGH times; otherwise the remembered one, or None."""
        times = self._read()
        return median_of(sorted(times)) if len(times) >= ENOUGH else self.remembered

    def _read(self) -> list[float]:
        """The times kept, in milliseconds, oldest first: up to the first one whose work the GPU has not finished."""
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
    """The state of a shape with some weights.

    COLD: our output was not compared with the host's yet. PROVED: it agrees, and calls run without a graph. READY: it
    agrees and has a graph, which the next call replays. FAILED: it differs, or our forward fails: another backend or
    the host serves the shape.
    """

    COLD = "cold"
    PROVED = "proved"
    READY = "ready"
    FAILED = "failed"


@dataclass
class Verdict:
    """What checks found about a shape with one set of weights and one version of the host's code; see State.

    reason: why it is FAILED, for the user; "" otherwise.
    no_graph: why it has no graph and gets none, for the user; "" if it may get one.
    relative_error: of our output against the host's, in the last check; None before it.
    failures: how often our forward has failed in a row. 2 or more: it is not tried again (see Entry.mark_failed).
    failed_in: the sampling of the last failure; None if it was in no sampling.
    of_image: whether a call of an image was checked, and not only the noise of a warm-up.
    """

    state: State = State.COLD
    reason: str = ""
    no_graph: str = ""
    relative_error: float | None = None
    failures: int = 0
    failed_in: Hashable = None
    of_image: bool = False


class OfVerdict(Generic[Value]):
    """A descriptor for attributes of Entry: entry.state reads and writes entry.verdict.state, and so on."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, entry: Entry, owner: type) -> Value:
        value: Value = getattr(entry.verdict, self._name)
        return value

    def __set__(self, entry: Entry, value: Value) -> None:
        setattr(entry.verdict, self._name, value)


@dataclass(eq=False)
class Entry:
    """A shape, and the verdict on it with the weights of the last call. Verdicts with other weights are kept too.

    model: the model's name for users.
    weights: the digest of the weights that `verdict` belongs to (BoundNetwork.identity); see switch_to.
    replaced: sentences for users on functions of the host that extensions had replaced at the last call.
    needs: the bytes that its graph takes of the memory that all graphs share; measured in calls without a graph, 0
        before.
    waits: why it has no graph yet, for users; "" for no reason.
    misfits: how often functions of other extensions did not fit its graphs (points.DoesNotFit).
    uses: the number of calls of this shape. kept_uses: the number of these calls that are counted in the
        store on the disk.
    last_used: the time.time() of the last call.
    own: the stopwatch of our forward.
    host: the stopwatch of the host's own forward; a cached pass has that of the full pass that it replaces.
    in_image: mean times in the last image, over all steps that replace the host's steps of this shape; None before it.
    state, reason, no_graph, relative_error: the fields of `verdict`.
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

    def switch_to(self, weights: str, sampling: Hashable = None, replaced: Sequence[str] = ()) -> Entry:
        """Make the verdict for these weights the entry's verdict, a new COLD one if there is none. Called at each call
        that has no plan. Returns the entry itself.

        weights, replaced: see Entry. sampling: the present sampling; None if there is none.
        If the weights differ from those of the last call, a READY verdict becomes PROVED: its graph belonged to the
        weights that it was captured with. A verdict that has failed once becomes COLD, so that our forward is tried
        again, unless `sampling` is the sampling in which it failed.
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
        """Make a FAILED verdict for these weights COLD again; any other stays. Called when OneDiff stops serving a
        network with these weights, so that our forward is tried again when they are loaded again."""
        known = self.verdict if weights == self.weights else self._others.get(weights)
        if known is not None and known.state is State.FAILED:
            known.state = State.COLD
            known.reason = ""
            known.failures = 0

    @cached_property
    def place(self) -> Place:
        """The model and resolution of this entry: its row in the table that users see."""
        return Place(self.model, self.key.resolution)

    @property
    def ratio(self) -> float | None:
        """The speedup over the host's own forward; None while one of the two has fewer than ENOUGH times."""
        return ratio_of(self.own.settled_ms, self.host.settled_ms)

    def note_use(self) -> None:
        """Count a call of this shape in `uses`, and set `last_used` to now."""
        self.uses += 1
        self.last_used = time.time()

    def mark_failed(self, failure: str, sampling: Hashable = None, is_final: bool = True) -> str:
        """Set the verdict to FAILED, so that another backend, or the host, serves this shape with these weights.
        Returns the verdict's reason, for users: the failure, the backend's name, and up to MOST_NAMED replaced
        functions.

        failure: what went wrong, for users. sampling: the present sampling; None if there is none.
        is_final: True: our forward is not tried again, until forget_failures(). False: after a first failure,
            switch_to() lets our forward be tried once more, in another sampling.
        """
        known = self.verdict
        known.state = State.FAILED
        known.reason = "; ".join((f"{failure} (backend {self.key.backend_label})", *self.replaced[:MOST_NAMED]))
        known.failed_in = sampling
        # switch_to() tries again after one failure, so a final one counts as two.
        known.failures = 2 if is_final else known.failures + 1
        return known.reason


class ShapeTable:
    """The entries of all shapes by ShapeKey; checkpoints of one architecture share them. Safe to use from any thread.

    Beyond MOST_SHAPES, the least recently used entries are forgotten. But READY entries, the NEVER_FORGOTTEN entries
    that were used last, and those that `kept` keeps stay, so there may be more than MOST_SHAPES.
    """

    def __init__(
        self, kept: Callable[[], Callable[[Entry], bool]] = lambda: lambda entry: False,
        forgotten: Callable[[Collection[Entry]], object] = lambda entries: None,
    ) -> None:
        """kept: called before entries are forgotten to make room; returns a function that tells whether an entry must
        stay. forgotten: called with the entries that were removed to make room or by forget(). The table's lock is not
        held during these calls."""
        self._kept = kept
        self._forgotten = forgotten
        self._entries: dict[ShapeKey, Entry] = {}
        # Pages read and purge while another thread makes images.
        self._lock = threading.Lock()

    def entry(self, key: ShapeKey, model: str = "") -> Entry:
        """The entry of a shape, for a call of the shape, which is counted in Entry.uses. If there is none, a new COLD
        entry is added, and others may be forgotten. model: the model's name for users; not used if there is an entry.
        """
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
        """All entries, the most recently used first."""
        return sorted(self.by_key().values(), key=lambda entry: -entry.last_used)

    def by_key(self) -> dict[ShapeKey, Entry]:
        """A copy of the table, with the entries themselves."""
        with self._lock:
            return dict(self._entries)

    def forget(self, keys: Collection[ShapeKey]) -> None:
        """Remove the entries of these shapes, and call `forgotten` with them. Shapes without an entry are ignored."""
        with self._lock:
            gone = [entry for key in keys if (entry := self._entries.pop(key, None)) is not None]
        self._forgotten(gone)

    def _make_room(self) -> None:
        """Forget up to FORGOTTEN_AT_ONCE of the least recently used entries that need not stay."""
        is_kept = self._kept()
        old = [
            entry for entry in self.entries()[NEVER_FORGOTTEN:] if entry.state is not State.READY and not is_kept(entry)
        ]
        self.forget({entry.key for entry in old[-FORGOTTEN_AT_ONCE:]})
