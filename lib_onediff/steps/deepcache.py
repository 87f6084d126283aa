"""DeepCache (Ma et al. 2023, arXiv 2312.00858): the output of a network's inner part changes little from step to step,
so most steps compute the outer part alone.

A whole step computes everything (a full pass), and writes the hidden states at the cut between both parts to memory:
the deep feature. A cached step (a cached pass) reads the feature of an earlier whole step, or one that is extrapolated
from the last two.
"""
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

# The reason of a refusal, for users.
NO_CUT = (
    "this model has no inner layers to leave out: set 'DeepCache depth' to 0, which extrapolates the model's output "
    "instead"
)
# The largest extrapolation that was measured, in multiples of the distance between the two known features' steps.
FARTHEST = 1.5


class Line:
    """Extrapolates a tensor that changes from step to step, by a line through its values at the last two computed
    steps: Liu et al. 2025, "From Reusing to Forecasting" (TaylorSeer, arXiv 2503.06923).

    values: Epoch.values of the weights that computed all known tensors; -1 before the first tensor.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, Tensor]] = []
        self.values = -1

    def note(self, step: int, computed: Tensor, values: int) -> None:
        """Add a copy of the tensor that a step has computed; only the tensors of the last two steps are kept. A second
        call for the same step replaces the tensor of the first call.

        step: its index in the sampling. values: Epoch.values of the weights; if they changed, older tensors are
            dropped.
        """
        if values != self.values:
            self._points = []
        before = [point for point in self._points if point[0] != step]
        # A copy, because the caller may overwrite its tensor.
        point = step, computed.detach().clone()
        self._points = [*before[-1:], point]
        self.values = values

    def at(self, step: int, damping: float = 1.0, farthest: float = math.inf) -> Tensor | None:
        """The extrapolated tensor of a step after the known ones, in the known tensors' dtype but computed in float32;
        None if fewer than two tensors are known. A new tensor.

        damping: a factor on the slope; 1 is the line itself, 0 gives the last tensor.
        farthest: the largest extrapolation, in multiples of the distance between the two known steps; a step that is
            farther away gets the tensor at this distance.
        """
        if len(self._points) < 2:
            return None
        (step_before, before), (step_last, last) = self._points
        beyond = min((step - step_last) / (step_last - step_before), farthest)
        return torch.lerp(before.float(), last.float(), 1 + damping * beyond).to(last.dtype)

    @property
    def last(self) -> Tensor | None:
        """The line's copy of the last computed tensor, not to be written; None before the first."""
        return self._points[-1][1] if self._points else None


@dataclass
class CachedFeature:
    """What is known of the deep feature of one prompt at one shape. Its tensor is in the slot, or in `backup`.

    made_at: the index of the whole step that computed it; None if there is no valid tensor: before the first whole
        step, while one is computed, and after one that the host computed.
    values: Epoch.values of the weights at that step; -1 before the first one.
    backup: a copy of the computed tensor, made when another prompt's feature takes the slot; None if there is none.
    line: the line through its last two computed tensors; empty if features are reused.
    """

    made_at: int | None = None
    values: int = -1
    backup: Tensor | None = None
    line: Line = field(default_factory=Line)


@dataclass
class CacheSlot:
    """The memory of the deep feature of one shape. All prompts share it, because a CUDA graph has fixed addresses.

    memory: that of the cut, which passes write and read.
    current: the feature whose tensor is in the memory now, as it was computed or extrapolated; None before the first
        one, and after drop_older has forgotten it.
    features: the features of all prompts, by the prompt's number.
    """

    memory: CutMemory
    current: CachedFeature | None = None
    features: dict[int, CachedFeature] = field(default_factory=dict)

    def make_room(self, feature: CachedFeature) -> None:
        """Give the slot to this feature, before a full pass of its prompt overwrites the memory. Another prompt's
        feature that has the slot is backed up. The feature that gets the slot is invalid (made_at is None) until the
        caller sets its made_at after the pass."""
        self._take(feature)
        feature.made_at = None
        feature.backup = None

    def bring_back(self, feature: CachedFeature, step: int, slope: float) -> None:
        """Make sure that this feature is in the memory, before a cached pass of its prompt reads it: extrapolated to
        `step` if its line has two tensors of the weights that computed the feature, else as it was computed. Another
        prompt's feature that has the slot is backed up.

        slope: the factor on the line's slope (Schedule.slope_of). The feature must have been computed (made_at is not
            None).
        """
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
        """Forget the features that were computed before the step of index `oldest`, and those that have no valid tensor
        (made_at is None)."""
        self.features = {
            prompt: feature for prompt, feature in self.features.items()
            if feature.made_at is not None and feature.made_at >= oldest
        }
        if not any(self.current is feature for feature in self.features.values()):
            self.current = None

    def _take(self, feature: CachedFeature) -> None:
        """Make this feature the current one, and back up the tensor of the feature that was, if it is another and has
        no backup yet. Does not change the memory: the caller fills it afterwards."""
        other = self.current
        self.current = feature
        if other is not None and other is not feature and other.made_at is not None and other.backup is None:
            # The slot may hold an extrapolated feature; the line has the computed one.
            kept = other.line.last
            other.backup = kept if kept is not None else self.memory.read().clone()


class DeepCacheMemory(StepMemory):
    """What DeepCache keeps for one network in one run through a sampling.

    slots: by the call's signature and the depth of the cut.
    prompts: tells the sampling's prompts apart.
    failure: why a cached pass was last refused in this run, for users; cached passes that succeed later do not clear
        it. "" if none was refused.
    """

    keeps_tensors = True

    def __init__(self) -> None:
        self.slots: dict[Hashable, CacheSlot] = {}
        self.prompts = Prompts()
        self.failure = ""


class DeepCache:
    """The step policy DeepCache, one object for each runtime; implements core.policy.StepPolicy.

    status: the numbers of calls under FULL and CACHED. "reason": "" if the last call was answered by a cached pass;
        otherwise DeepCacheMemory.failure, or the reason of answerer()'s Refusal, which the caller of answerer() sets.
    """

    name = "deepcache"
    title = "DeepCache"
    whole_batch = False

    def __init__(self, schedule_of: Callable[[str, int, int, int], Schedule] = schedule_for) -> None:
        """schedule_of: returns the whole steps of a sampling, given what schedules.schedule_for takes. Other functions
        than the default are for the search of schedules (bench)."""
        self._schedule_of = schedule_of
        self.status: dict[str, Any] = {FULL: 0, CACHED: 0, "reason": ""}

    def is_on(self, settings: Settings) -> bool:
        """Whether DeepCache is on for UNets or for transformers; answerer() refuses calls of the other kind."""
        return settings.has_cache

    def answerer(self, step_context: StepContext) -> Callable[[Compute], Answer]:
        """A function that answers the call by a cached pass if its step is not whole, its prompt has a feature, and the
        cached pass is not refused (see Passes.cached); otherwise by a full pass. See StepPolicy.answerer.

        Raises Refusal if extensions compute within the network, if DeepCache is off for this kind of network (with the
        reason ""), if the network cannot be cut, if the call's position in its sampling is unknown, or if the calls of
        a step cannot be told apart (Prompts).
        """
        call = step_context.call
        if call.patches is not None:
            raise Refusal(PATCHED)
        kind = step_context.schedule()
        is_transformer = kind == TRANSFORMER
        interval, wanted_depth = step_context.settings.cache(is_transformer)
        if interval <= 1:
            # DeepCache is on for networks of the other kind only.
            raise Refusal("")
        depth = min(wanted_depth, step_context.deepest())
        if depth < 1:
            raise Refusal(NO_CUT)
        position = step_context.position()
        cached = step_context.memory_of(self.name, DeepCacheMemory)
        shape, prompt = cached.prompts.identify(call, position.time)
        key = shape, depth
        if key not in cached.slots:
            cached.slots[key] = CacheSlot(step_context.cut_memory(key))
        slot = cached.slots[key]
        index = position.step.index
        schedule = self._schedule_of(kind, position.step.total, interval, depth)
        whole = index in schedule.whole
        sampling = step_context.sampling
        slope = schedule.slope_of(sampling.solver(), sampling.guidance_scale)
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
    """Computes one call by a full or by a cached pass. A new object for each call.

    memory: what DeepCache keeps for the network. depth: see core.call.Cut. slot: of the call's shape. feature: that of
    the call's prompt, one of slot.features. slope: the factor on the slope of the feature's line (Schedule.slope_of); 0
    reuses the last feature as it is.
    """

    step_context: StepContext
    memory: DeepCacheMemory
    depth: int
    slot: CacheSlot
    feature: CachedFeature
    slope: float

    def full(self, compute: Compute) -> Answer:
        """The answer of the whole network. The feature that the pass computes is kept; if the host computes the call,
        no feature is kept, and nothing of the following happens.

        A cached pass with this feature is checked against the answer's output (Compute.check, which does so once a
        shape). If the two outputs differ, later cached passes of this shape are refused, and memory.failure has the
        reason; the answer stays valid. In a warm-up, a cached pass is also run once, so that its graph is captured.
        """
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
                # So that the cached pass is ready too: a warm-up may be a single call.
                compute(again, None)
        except Refusal as refusal:
            self.memory.failure = str(refusal)
        return answer

    def cached(self, compute: Compute) -> Answer | None:
        """The answer of the outer part alone, with the kept feature. None if `compute` refuses the cached pass, so that
        a full pass is needed: among others, because a cached pass of this shape was not checked or has failed, or the
        feature was computed from other weights. memory.failure has the reason then."""
        with self.step_context.ordered():
            self.slot.bring_back(self.feature, self.step_context.position().step.index, self.slope)
        try:
            return compute(self._cut(reads=True), None)
        except Refusal as refusal:
            self.memory.failure = str(refusal)
            return None

    def _cut(self, reads: bool) -> Call:
        """A copy of the call with DeepCache's cut: a cached pass, which reads the feature, if `reads`; else a full
        pass, which writes it."""
        return replace(self.step_context.call, cut=Cut(self.depth, reads, self.slot.memory, self.feature.values))
