"""DeepCache (Ma et al. 2023, arXiv 2312.00858): the inner part of a network changes little from step to step, so most
steps compute the outer stages alone, around what an earlier step has written at the cut between both."""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from ..core.call import CACHED, FULL, Call, Cut
from ..core.policy import Answer, Compute, Moment
from ..core.refusal import Refusal
from ..core.rows import PATCHED
from ..core.settings import Settings
from ..core.timeline import Step
from .features import Place, Record
from .prompts import Threads
from .schedule import is_whole, last_whole

NO_CUT = "this network has no inner part to leave out; depth 0 extrapolates whole steps instead"


class Cached:
    """The features of one network in one walk through a sampling, by shape and depth.

    failure: why some of its calls are no cached passes.
    """

    walk: object = None

    def __init__(self) -> None:
        self.places: dict[Hashable, Place] = {}
        self.threads = Threads()
        self.failure = ""
        # The last two whole steps.
        self._whole_steps = (0, 0)

    def oldest_needed(self, interval: int, step: Step, is_whole_step: bool, forecasts: bool) -> int:
        """The step before which no feature is needed any more. A line needs what the whole step before this one has
        made."""
        if is_whole_step and step.index != self._whole_steps[1]:
            self._whole_steps = self._whole_steps[1], step.index
        return self._whole_steps[0] if is_whole_step and forecasts else last_whole(interval, step)

    def bytes(self) -> int:
        """GPU memory of all features in use, those that graphs write and read included, and of their prompts."""
        return self.threads.bytes() + sum(place.bytes() for place in list(self.places.values()))


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
        position = moment.position
        cached = moment.memory_of(self.name, Cached)
        shape, prompt = cached.threads.thread(call, position.time)
        key = shape, depth
        if key not in cached.places:
            cached.places[key] = Place(moment.cut_memory(key))
        place, whole = cached.places[key], is_whole(interval, position.step)
        # Between steps that add noise, or that a sampler of a higher order joins, the feature does not follow a line.
        forecasts = not moment.sampling.why_no_forecast()
        place.drop_older(cached.oldest_needed(interval, position.step, whole, forecasts))
        record = place.record(prompt)
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
            feature = place.memory.read() if self.forecasts else None
            record.note(moment.position.step.index, answer.served.edition, feature)
        again = self._cut(reads=True)
        try:
            compute.check(again, answer.served)
            if not moment.belongs_to_image:
                # No call that makes shapes ready asks for it by itself.
                compute(again, None)
        except Refusal as refusal:
            self.memory.failure = str(refusal)
        return answer

    def cached(self, compute: Compute) -> Answer | None:
        """The outer stages alone; None where the full pass has to be, because nothing that was checked serves, or the
        weights are others than those that made the feature."""
        with self.moment.ordered():
            self.place.bring_back(self.record, self.moment.position.step.index)
        try:
            return compute(self._cut(reads=True), None)
        except Refusal as refusal:
            self.memory.failure = str(refusal)
            return None

    def _cut(self, reads: bool) -> Call:
        return replace(self.moment.call, cut=Cut(self.depth, reads, self.place.memory, self.record.edition))
