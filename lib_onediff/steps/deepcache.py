"""DeepCache (Ma et al. 2023, arXiv 2312.00858): the inner part of a network changes little from step to step, so most
steps compute the outer stages alone, around what an earlier step has written at the cut between both."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..core.call import CACHED, FULL, Cut, UNetCall
from ..core.policy import Answer, Compute, Moment
from ..core.refusal import Refusal
from ..core.timeline import Step
from ..options.settings import Settings
from .features import Features, Place, Record
from .prompts import Threads
from .schedule import is_whole, last_whole

PATCHES = "other extensions compute within the UNet"
NO_CUT = "this network cannot be cut in two"


class Cached:
    """The features of one network in one walk through a sampling.

    failure: why some of its calls are no cached passes.
    """

    walk = 0

    def __init__(self) -> None:
        self.features, self.threads = Features(), Threads()
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
        """GPU memory of all features, and of the prompts that they belong to."""
        return self.features.bytes() + self.threads.bytes()


class DeepCache:
    """The step policy. See steps.policy.StepPolicy."""

    name, title, whole_batch = "deepcache", "DeepCache", False

    def __init__(self) -> None:
        self._passes = dict.fromkeys((FULL, CACHED), 0)
        # Why the last call was no cached pass though the option is on; why its feature was not forecast.
        self._reason = self._reused = ""

    def is_on(self, settings: Settings) -> bool:
        return settings.cache_interval > 1

    def plan(self, moment: Moment) -> Callable[[Compute], Answer]:
        """A cached pass where the schedule has one and its feature is there; else a full pass, which makes one."""
        call, settings, sampling = moment.call, moment.settings, moment.sampling
        interval = settings.cache_interval
        if call.patches is not None:
            raise Refusal(PATCHES)
        position = moment.position
        depth = min(settings.deepcache_depth, moment.deepest())
        if depth < 1:
            raise Refusal(NO_CUT)
        cached = moment.memory_of(self.name, Cached)
        shape, prompt = cached.threads.thread(call, position.time)
        place = cached.features.place((shape, depth), moment.cut_memory)
        whole = is_whole(interval, position.step)
        # Between steps that add noise, or that a sampler of a higher order joins, the feature does not follow a line.
        reused = sampling.why_no_forecast()
        place.drop_older(cached.oldest_needed(interval, position.step, whole, not reused))
        record = place.record(prompt)
        run = PassRun(self, moment, cached, depth, place, record, forecasts=not reused)

        def answer(compute: Compute) -> Answer:
            if moment.is_counted:
                self._reused, self._reason = reused, cached.failure
            found = None if whole or record.made_at is None else run.cached_pass(compute)
            return found or run.full_pass(compute)

        return answer

    def note(self, name: str, reason: str = "") -> None:
        """A pass was computed. reason: why it was no cached one, where that is not the schedule's doing."""
        self._passes[name] += 1
        self._reason = reason

    def rest(self, reason: str) -> None:
        self._reason, self._reused = reason, ""

    def status(self) -> dict[str, Any]:
        return {**self._passes, "reason": self._reason, "reused": self._reused}


class PassRun:
    """The passes of one call."""

    def __init__(
        self, policy: DeepCache, moment: Moment, cached: Cached, depth: int, place: Place, record: Record,
        forecasts: bool,
    ) -> None:
        self._policy, self._moment, self._cached = policy, moment, cached
        self._depth, self._place, self._record, self._forecasts = depth, place, record, forecasts

    def full_pass(self, compute: Compute) -> Answer:
        """The whole network. Its feature can be used once the cached pass has shown that it repeats the output."""
        moment, place, record = self._moment, self._place, self._record
        with moment.ordered():
            place.make_room(record)
        answer = compute(self._cut(reads=False), moment.host)
        if moment.is_counted:
            self._policy.note(FULL, self._cached.failure)
        if answer.served is None:
            return answer
        with moment.ordered():
            feature = place.memory.read() if self._forecasts else None
            record.note(moment.position.step.index, answer.served.edition, feature)
        again = self._cut(reads=True)
        try:
            compute.check(again, answer.served)
            if not moment.belongs_to_image:
                # No call that makes shapes ready asks for it by itself.
                compute(again, None)
        except Refusal as refusal:
            self._cached.failure = str(refusal)
        return answer

    def cached_pass(self, compute: Compute) -> Answer | None:
        """The outer stages alone; None where the full pass has to be, because nothing that was checked serves, or the
        weights are others than those that made the feature."""
        moment = self._moment
        with moment.ordered():
            self._place.bring_back(self._record, moment.position.step.index)
        try:
            answer = compute(self._cut(reads=True), None)
        except Refusal as refusal:
            self._cached.failure = str(refusal)
            return None
        if moment.is_counted:
            self._policy.note(CACHED)
        return answer

    def _cut(self, reads: bool) -> UNetCall:
        edition = -1 if self._record.edition is None else self._record.edition
        return replace(self._moment.call, cut=Cut(self._depth, reads, self._place.memory, edition))


def depth_of(cache_layer_id: int, cache_block_id: int, layers_per_block: int = 2) -> int:
    """OneDiff's cache_layer_id and cache_block_id as a depth.

    They name the deepest layer that runs at every step: the down block (0: the outermost), and the residual block in
    it, or its downsampler (cache_block_id = layers_per_block). Raises ValueError for what is none.
    """
    if cache_layer_id < 0 or not 0 <= cache_block_id <= layers_per_block:
        raise ValueError(
            f"cache_layer_id is 0 or more and cache_block_id 0 to {layers_per_block} for this UNet, "
            f"not {cache_layer_id} and {cache_block_id}."
        )
    # The first input stage is the convolution before all blocks.
    return 1 + cache_layer_id * (layers_per_block + 1) + cache_block_id + 1
