"""DeepCache (Ma et al. 2023, arXiv 2312.00858): the inner part of a network changes little from step to step, so most
steps compute the outer stages alone, around what an earlier step has written at the cut between both."""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.call import CACHED, FULL, PATCHED, Call, Cut, CutMemory
from ..core.policy import Answer, Compute, Moment, StepMemory
from ..core.refusal import Refusal
from ..core.sampling import Step
from ..core.settings import Settings
from .prompts import Threads

NO_CUT = "this network has no inner part to leave out; depth 0 extrapolates whole steps instead"
# The authors' exponent, and how their search for one that leaves as many different steps goes down.
POWER, POWER_STEP = 1.4, 0.02
ROUNDING = 1e-6
# How far a forecast goes along its line, of the whole way: the line misses more the farther it goes
# (.readme/speed-and-quality.md).
DAMPING = 0.5
# The farthest that was measured, in distances between the two features.
FARTHEST = 1.5


def is_whole(interval: int, step: Step) -> bool:
    """Whether this step computes the whole network: about one in interval. The first and the last step always do."""
    return last_whole(interval, step) == step.index


def last_whole(interval: int, step: Step, before: bool = False) -> int:
    """The index of the last step that computes the whole network, up to this one or before it: what was kept before is
    too old."""
    if not before and (interval <= 1 or step.is_last):
        return step.index
    return max((index for index in early(step.total, interval) if index <= step.index - before), default=0)


@lru_cache(maxsize=256)
def early(total: int, interval: int) -> frozenset[int]:
    """The whole steps of a sampling with total steps: as many as at equal distances, close together at the beginning
    and ever rarer. It is the DeepCache authors' non-uniform schedule with its center at the first step.

    Where the power would put two of them on one step, a smaller one is taken.
    """
    count, power = -(-total // interval), POWER
    while True:
        chosen = frozenset(math.trunc(total * (index / count) ** power + ROUNDING) for index in range(count))
        if len(chosen) == count:
            return chosen
        power = max(1.0, power - POWER_STEP)


class Line:
    """The last two tensors that the same weights have computed, each with its step: Liu et al. 2025, "From Reusing to
    Forecasting" (TaylorSeer, arXiv 2503.06923). values: of the weights (Epoch.values)."""

    def __init__(self) -> None:
        self._points: list[tuple[int, Tensor]] = []
        self.values = -1

    def note(self, step: int, computed: Tensor, values: int) -> None:
        """A step has computed this. Of two at one step the later counts."""
        known = self._points if values == self.values else []
        # Whose tensor it is may go on computing in it.
        self._points = [*[point for point in known if point[0] != step][-1:], (step, computed.detach().clone())]
        self.values = values

    def at(self, step: int, damping: float = 1.0, farthest: float = math.inf) -> Tensor | None:
        """The tensor of a later step, computed in float32; None before two are known.

        damping: how far it goes along the line, of the whole way. farthest: in distances between the two; beyond, it
        stays where it is then.
        """
        if len(self._points) < 2:
            return None
        (step_before, before), (step_last, last) = self._points
        distance = min((step - step_last) / (step_last - step_before), farthest)
        return torch.lerp(before.float(), last.float(), 1 + damping * distance).to(last.dtype)

    @property
    def last(self) -> Tensor | None:
        """The last that was computed; None before that."""
        return self._points[-1][1] if self._points else None


@dataclass
class Record:
    """The deep feature of one prompt at one shape. made_at: the step that made it, None before the first; values:
    of the weights then. aside: its values while another prompt's lie at the shape's address. line: through the last two
    computed ones, where forecasts are wanted."""

    made_at: int | None = None
    values: int = -1
    aside: Tensor | None = None
    line: Line = field(default_factory=Line)


@dataclass
class Place:
    """The address of a shape's deep feature, whose feature lies there now, and everybody's records."""

    memory: CutMemory
    occupant: Record | None = None
    records: dict[int, Record] = field(default_factory=dict)

    def make_room(self, record: Record) -> None:
        """Let this record's feature be written: what lies there of another prompt is put aside."""
        self._take(record)
        record.made_at = record.aside = None

    def bring_back(self, record: Record, step: int) -> None:
        """Let this record's feature be read, as it is at a step where that is forecast."""
        feature = record.line.at(step, DAMPING, FARTHEST) if record.line.values == record.values else None
        if feature is None and self.occupant is not record:
            feature = record.aside
            assert feature is not None, "whoever took the place has put it aside"
        self._take(record)
        if feature is not None:
            self.memory.write(feature)

    def drop_older(self, oldest: int) -> None:
        """Forget the features that were made before a step."""
        self.records = {
            prompt: record for prompt, record in self.records.items()
            if record.made_at is not None and record.made_at >= oldest
        }
        if not any(self.occupant is record for record in self.records.values()):
            self.occupant = None

    def _take(self, record: Record) -> None:
        other, self.occupant = self.occupant, record
        if other is not None and other is not record and other.made_at is not None and other.aside is None:
            kept = other.line.last
            # What lies there may be a forecast.
            other.aside = kept if kept is not None else self.memory.read().clone()


class Cached(StepMemory):
    """The features of one network in one walk through a sampling, by shape and depth.

    failure: why some of its calls are no cached passes.
    """

    keeps_tensors = True

    def __init__(self) -> None:
        self.places: dict[Hashable, Place] = {}
        self.threads = Threads()
        self.failure = ""


class DeepCache:
    """The step policy. See core.policy.StepPolicy."""

    name, title, whole_batch = "deepcache", "DeepCache", False

    def __init__(self) -> None:
        self.status: dict[str, Any] = {FULL: 0, CACHED: 0, "reason": ""}

    def is_on(self, settings: Settings) -> bool:
        return settings.cache_interval > 1

    def plan(self, moment: Moment) -> Callable[[Compute], Answer]:
        """A cached pass where the schedule has one and its feature is there; else a full pass, which makes one."""
        call, interval = moment.call, moment.settings.cache_interval
        if call.patches is not None:
            raise Refusal(PATCHED)
        depth = min(moment.settings.deepcache_depth, moment.deepest())
        if depth < 1:
            raise Refusal(NO_CUT)
        position = moment.position()
        cached = moment.memory_of(self.name, Cached)
        shape, prompt = cached.threads.thread(call, position.time)
        key = shape, depth
        if key not in cached.places:
            cached.places[key] = Place(moment.cut_memory(key))
        place, whole = cached.places[key], is_whole(interval, position.step)
        # Between steps that add noise, or that a sampler of a higher order joins, the feature does not follow a line.
        forecasts = not moment.sampling.why_no_forecast()
        # A line needs what the whole step before this one has made.
        place.drop_older(last_whole(interval, position.step, before=whole and forecasts))
        record = place.records.setdefault(prompt, Record())
        passes = Passes(moment, cached, depth, place, record, forecasts)

        def answer(compute: Compute) -> Answer:
            answered = None if whole or record.made_at is None else passes.cached(compute)
            name = FULL if answered is None else CACHED
            answered = answered or passes.full(compute)
            if moment.is_counted:
                self.status[name] += 1
                self.status["reason"] = cached.failure if name == FULL else ""
            return answered

        return answer


@dataclass(frozen=True)
class Passes:
    """Both passes of one call."""

    moment: Moment
    memory: Cached
    depth: int
    place: Place
    record: Record
    forecasts: bool

    def full(self, compute: Compute) -> Answer:
        """The whole network. Its feature can be used once the cached pass has shown that it repeats the output."""
        moment, place, record = self.moment, self.place, self.record
        with moment.ordered():
            place.make_room(record)
        answer = compute(self._cut(reads=False), moment.host)
        if answer.served is None:
            return answer
        with moment.ordered():
            record.made_at, record.values = moment.position().step.index, answer.served.epoch.values
            if self.forecasts:
                record.line.note(record.made_at, place.memory.read(), record.values)
            else:
                record.line = Line()
        again = self._cut(reads=True)
        try:
            compute.check(again, answer.served)
            if moment.is_warm_up:
                # No call that makes shapes ready asks for it by itself.
                compute(again, None)
        except Refusal as refusal:
            self.memory.failure = str(refusal)
        return answer

    def cached(self, compute: Compute) -> Answer | None:
        """The outer stages alone; None where the full pass has to be, because nothing that was checked serves, or the
        weights are others than those that made the feature."""
        with self.moment.ordered():
            self.place.bring_back(self.record, self.moment.position().step.index)
        try:
            return compute(self._cut(reads=True), None)
        except Refusal as refusal:
            self.memory.failure = str(refusal)
            return None

    def _cut(self, reads: bool) -> Call:
        return replace(self.moment.call, cut=Cut(self.depth, reads, self.place.memory, self.record.values))
