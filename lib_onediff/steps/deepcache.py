"""DeepCache (Ma et al. 2023, arXiv 2312.00858): the inner part of a network changes little from step to step, so most
steps compute the outer stages alone, around what an earlier step has written at the cut between both."""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.call import CACHED, FULL, PATCHED, Call, Cut, CutMemory
from ..core.policy import Answer, Compute, StepContext, StepMemory
from ..core.refusal import Refusal
from ..core.settings import Settings
from .prompts import Prompts
from .schedules import TRANSFORMER, Schedule, schedule_for

NO_CUT = "this network has no inner part to leave out; depth 0 extrapolates whole steps instead"
# The largest extrapolation that was measured, in multiples of the interval between the two features' steps.
FARTHEST = 1.5


class Line:
    """A line through the last two tensors that the same weights computed, over their steps: Liu et al. 2025, "From
    Reusing to Forecasting" (TaylorSeer, arXiv 2503.06923). values: of the weights (Epoch.values)."""

    def __init__(self) -> None:
        self._points: list[tuple[int, Tensor]] = []
        self.values = -1

    def note(self, step: int, computed: Tensor, values: int) -> None:
        """Add the tensor that a step computed. It replaces an earlier one of the same step."""
        if values != self.values:
            self._points = []
        before = [point for point in self._points if point[0] != step]
        # The caller may go on computing in its tensor.
        point = step, computed.detach().clone()
        self._points = [*before[-1:], point]
        self.values = values

    def at(self, step: int, damping: float = 1.0, farthest: float = math.inf) -> Tensor | None:
        """The tensor of a later step, extrapolated in float32; None before two are known.

        damping: factor on the extrapolation; 1 is the line itself. farthest: the largest extrapolation, in multiples of
        the interval between the two steps; later steps get the tensor of that point.
        """
        if len(self._points) < 2:
            return None
        (step_before, before), (step_last, last) = self._points
        beyond = min((step - step_last) / (step_last - step_before), farthest)
        return torch.lerp(before.float(), last.float(), 1 + damping * beyond).to(last.dtype)

    @property
    def last(self) -> Tensor | None:
        """The last tensor that was computed; None before the first."""
        return self._points[-1][1] if self._points else None


@dataclass
class CachedFeature:
    """The deep feature of one prompt at one shape.

    made_at: the step that computed it; None before the first. values: of the weights then. backup: its values while
    another prompt's feature is in the slot. line: through the last two computed ones, if forecasts are wanted.
    """

    made_at: int | None = None
    values: int = -1
    backup: Tensor | None = None
    line: Line = field(default_factory=Line)


@dataclass
class CacheSlot:
    """The memory of a shape's deep feature, which all prompts share: graphs read and write one address.

    current: the prompt's feature that is in it now. features: of every prompt, by its number.
    """

    memory: CutMemory
    current: CachedFeature | None = None
    features: dict[int, CachedFeature] = field(default_factory=dict)

    def make_room(self, feature: CachedFeature) -> None:
        """Prepare the slot for this feature's next values; another prompt's are backed up."""
        self._take(feature)
        feature.made_at = None
        feature.backup = None

    def bring_back(self, feature: CachedFeature, step: int, slope: float) -> None:
        """Put this feature's values into the slot, forecast for a step if it has a line. slope: see Passes."""
        content = None
        if feature.line.values == feature.values:
            content = feature.line.at(step, slope, FARTHEST)
        if content is None and self.current is not feature:
            content = feature.backup
            assert content is not None, "_take backs up the feature that it replaces"
        self._take(feature)
        if content is not None:
            self.memory.write(content)

    def drop_older(self, oldest: int) -> None:
        """Forget the features that were computed before a step."""
        self.features = {
            prompt: feature for prompt, feature in self.features.items()
            if feature.made_at is not None and feature.made_at >= oldest
        }
        if not any(self.current is feature for feature in self.features.values()):
            self.current = None

    def _take(self, feature: CachedFeature) -> None:
        other = self.current
        self.current = feature
        if other is not None and other is not feature and other.made_at is not None and other.backup is None:
            # The slot may hold a forecast: the line has the computed values.
            kept = other.line.last
            other.backup = kept if kept is not None else self.memory.read().clone()


class Cached(StepMemory):
    """The features of one network in one run through a sampling, by shape and depth.

    failure: why some calls that could be cached passes are full ones.
    """

    keeps_tensors = True

    def __init__(self) -> None:
        self.slots: dict[Hashable, CacheSlot] = {}
        self.prompts = Prompts()
        self.failure = ""


class DeepCache:
    """The step policy. See core.policy.StepPolicy."""

    name = "deepcache"
    title = "DeepCache"
    whole_batch = False

    def __init__(self, schedule_of: Callable[[str, int, int], Schedule] = schedule_for) -> None:
        """schedule_of: returns the whole steps of a sampling; see schedules.schedule_for."""
        self._schedule_of = schedule_of
        self.status: dict[str, Any] = {FULL: 0, CACHED: 0, "reason": ""}

    def is_on(self, settings: Settings) -> bool:
        return settings.has_cache

    def answerer(self, step_context: StepContext) -> Callable[[Compute], Answer]:
        """A cached pass if the schedule has one and the feature exists; otherwise a full pass, which computes it."""
        call = step_context.call
        if call.patches is not None:
            raise Refusal(PATCHED)
        kind = step_context.schedule()
        is_transformer = kind == TRANSFORMER
        interval, wanted_depth = step_context.settings.cache(is_transformer)
        if interval <= 1:
            # Only networks of the other kind have it.
            raise Refusal("")
        depth = min(wanted_depth, step_context.deepest())
        if depth < 1:
            raise Refusal(NO_CUT)
        position = step_context.position()
        cached = step_context.memory_of(self.name, Cached)
        shape, prompt = cached.prompts.identify(call, position.time)
        key = shape, depth
        if key not in cached.slots:
            cached.slots[key] = CacheSlot(step_context.cut_memory(key))
        slot = cached.slots[key]
        index = position.step.index
        schedule = self._schedule_of(kind, position.step.total, interval)
        whole = index in schedule.whole
        # With added noise, or a sampler of a higher order, features do not lie on a line.
        slope = 0.0 if step_context.sampling.why_no_forecast() else schedule.slope
        # A line needs the feature of the whole step before this one.
        slot.drop_older(schedule.last_whole(index, before=whole and slope > 0))
        feature = slot.features.setdefault(prompt, CachedFeature())
        passes = Passes(step_context, cached, depth, slot, feature, slope)
        options = step_context.settings.cache_options(is_transformer)

        def answer(compute: Compute) -> Answer:
            answered = None if whole or feature.made_at is None else passes.cached(compute)
            name = FULL if answered is None else CACHED
            if answered is None:
                answered = passes.full(compute)
            else:
                step_context.call_stats.note_cache_options(options)
            if step_context.is_counted:
                self.status[name] += 1
                self.status["reason"] = cached.failure if name == FULL else ""
            return answered

        return answer


@dataclass(frozen=True)
class Passes:
    """Both passes of one call. slope: see schedules.Schedule; 0: the last feature is reused."""

    step_context: StepContext
    memory: Cached
    depth: int
    slot: CacheSlot
    feature: CachedFeature
    slope: float

    def full(self, compute: Compute) -> Answer:
        """The whole network. Its feature can be used once the cached pass has shown that it repeats the output."""
        step_context = self.step_context
        slot = self.slot
        feature = self.feature
        with step_context.ordered():
            slot.make_room(feature)
        answer = compute(self._cut(reads=False), step_context.host)
        if answer.served is None:
            return answer
        with step_context.ordered():
            feature.made_at = step_context.position().step.index
            feature.values = answer.served.epoch.values
            if self.slope:
                feature.line.note(feature.made_at, slot.memory.read(), feature.values)
            else:
                feature.line = Line()
        again = self._cut(reads=True)
        try:
            compute.check(again, answer.served)
            if step_context.is_warm_up:
                # A warm-up makes no cached passes otherwise.
                compute(again, None)
        except Refusal as refusal:
            self.memory.failure = str(refusal)
        return answer

    def cached(self, compute: Compute) -> Answer | None:
        """The outer stages alone; None if the full pass is needed, because no checked shape serves the call, or the
        feature was computed from other weights."""
        with self.step_context.ordered():
            self.slot.bring_back(self.feature, self.step_context.position().step.index, self.slope)
        try:
            return compute(self._cut(reads=True), None)
        except Refusal as refusal:
            self.memory.failure = str(refusal)
            return None

    def _cut(self, reads: bool) -> Call:
        return replace(self.step_context.call, cut=Cut(self.depth, reads, self.slot.memory, self.feature.values))
