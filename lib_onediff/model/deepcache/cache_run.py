"""Where a UNet is in its sampling, and what that means for its next call."""
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any

from ..call import DeepCachePass, DeepFeature, UNetCall
from ..layout import UNetLayout
from .buffers import Features, Place, Record
from .forward import deepest
from .options import DeepCacheOptions
from .prompts import TILES, FirstTimestep, PromptNumbers
from .sampling import UNEQUAL_TIMES, Sampling
from .schedule import is_whole, last_whole
from .timeline import Step, Timeline, timeline_of

RESTS = "DeepCache rests: "
GraphRecord = Callable[[], Collection[DeepFeature]]


@dataclass(frozen=True)
class StepPlan:
    """What DeepCache says of one call. is_whole: whether the schedule wants the whole UNet; forecasts: whether a cached
    pass gets a forecast of the deep feature; why_reused: why not, where that is wanted, in one line."""

    step: Step
    depth: int
    place: Place
    record: Record
    is_whole: bool
    forecasts: bool = False
    why_reused: str = ""

    @property
    def full(self) -> DeepCachePass:
        return DeepCachePass(self.depth, False, self.place.feature)

    @property
    def cached(self) -> DeepCachePass:
        return DeepCachePass(self.depth, True, self.place.feature)

    def may_use_cache(self, weights: Any) -> bool:
        """Whether this call can do with a feature that is there, made by these weights."""
        return not self.is_whole and self.record.made_at is not None and self.record.weights == weights

    def prepare(self, is_cached_pass: bool) -> None:
        """Have the place ready for a half: to be written, or with this call's feature in it."""
        if is_cached_pass:
            self.place.bring_back(self.record, self.step.index)
        else:
            self.place.make_room(self.record)

    def note_full(self, weights: Any) -> None:
        """The whole UNet was computed by these weights, and its feature lies in the place."""
        self.record.note(self.step.index, weights, self.place.feature.read() if self.forecasts else None)


class CacheRun:
    """The DeepCache of one UNet: it lasts from sampling to sampling.

    reason: why no call of this sampling is a cached pass; failure: why some are not; each one line for the user.
    """

    def __init__(self) -> None:
        self.reason = self.failure = ""
        self._sampling: Sampling | None = None
        self._choice: DeepCacheOptions | None = None
        self._timeline: Timeline | None = None
        self._features = Features()
        # The last two whole steps.
        self._whole_steps = (0, 0)
        self._begin_again(())

    def plan(
        self, choice: DeepCacheOptions, sampling: Sampling, layout: UNetLayout, call: UNetCall, shape: Hashable,
        held: GraphRecord,
    ) -> StepPlan | None:
        """What to do with a call; None where DeepCache cannot be for this call, and reason says why.

        shape: two calls of the same shape have deep features of the same shape. held:
        the features that graphs write and read.
        """
        if sampling.why_not:
            self.rest(held, sampling.why_not)
            return None
        time = sampling.read(call.timestep)
        if time is None:
            self.reason = RESTS + UNEQUAL_TIMES
            return None
        if sampling is not self._sampling or choice != self._choice or self._timeline is None:
            self._sampling, self._choice = sampling, choice
            self._timeline = timeline_of(sampling.times(), sampling.count())
            self._begin_again(held())
        step, jumped = self._timeline.step(time)
        if jumped:
            self._begin_again(held())
        if too_few := step.why_too_few(sampling.guidance_scale):
            self.reason = RESTS + too_few
            return None
        depth = min(choice.depth, deepest(layout))
        prompt = self._prompts.number(call.context, call.y)
        place = self._features.place((shape, depth))
        if self._first_timestep.comes_again(time, (shape, prompt)):
            self.reason = RESTS + TILES
        whole = is_whole(choice, step)
        # Between steps that add noise, or that a sampler of a higher order joins, the feature does not follow a line.
        why_reused = sampling.why_no_forecast()
        forecasts = not why_reused
        if whole and step.index != self._whole_steps[1]:
            self._whole_steps = self._whole_steps[1], step.index
        # A line needs what the whole step before this one has made.
        place.drop_older(self._whole_steps[0] if whole and forecasts else last_whole(choice, step))
        record = place.records.setdefault(prompt, Record())
        return StepPlan(step, depth, place, record, bool(self.reason) or whole, forecasts, why_reused)

    def forget(self) -> None:
        """Trust no feature, and keep none, nor any prompt."""
        self._features.forget(())
        self._prompts.forget()

    def bytes(self) -> int:
        """GPU memory of all deep features, and of the prompts that they belong to."""
        return self._features.bytes() + self._prompts.bytes()

    def rest(self, held: GraphRecord, reason: str = "") -> None:
        """DeepCache is off, or rests for a reason: what it knew of a sampling is over."""
        if self._sampling is not None:
            self._sampling = None
            self._begin_again(held())
        self.reason = reason and RESTS + reason

    def _begin_again(self, held: Collection[DeepFeature]) -> None:
        self._features.forget(held)
        self._prompts = PromptNumbers()
        self._whole_steps = (0, 0)
        self._first_timestep = FirstTimestep()
        self.reason = self.failure = ""
