"""Where in a sampling the negative prompt ends: from there on the prompt's rows are computed alone, and their output
stands for the negative prompt's too, so whatever the host makes of both is the prompt's prediction.

Kynkäänniemi et al. 2024, "Applying Guidance in a Limited Interval Improves Sample and Distribution Quality in Diffusion
Models" (arXiv 2404.07724); Zhang et al. 2024, "T-GATE" (arXiv 2404.02747). The latter keeps the cross attentions'
outputs too, which did not pay (.readme/guidance-end.md).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..guard import Guard
from ..model.call import UNetCall
from ..model.deepcache.sampling import UNEQUAL_TIMES, Sampling, Timelines
from ..model.deepcache.timeline import Timeline
from ..model.rows import PromptRows, for_all_rows, halves, take_rows, why_not_taken
from ..shapes.image_times import PROMPT_ALONE
from ..shapes.table import Stopwatch
from ..weak_dictionary import WeakDictionary
from .call_stats import CallStats

# Which rows of a call are the prompt's, or why nobody knows. Asked only where it matters.
Guidance = Callable[[], "PromptRows | str"]
# Computes a call, or has the host's own forward of the same do it.
Compute = Callable[[UNetCall, Callable[[], Tensor]], Tensor]
RESTS = "Guidance end rests: "
NOBODY_SAYS = "the caller does not say which rows are the negative prompt's"
SEVERAL_CALLS = "a step has calls of prompt and negative prompt, and others"
UNLIKE_HALVES = "prompt and negative prompt are not computed for the same latents"
FAILED = "a fault of OneDiff"
ROUNDING = 1e-6


@dataclass(frozen=True)
class PromptCall:
    """A call of the prompt's rows alone. host: the host's own forward of the same."""

    call: UNetCall
    host: Callable[[], Tensor]


class GuidanceRun:
    """The samplings of one UNet, as far as the negative prompt goes."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        # The times of the host's own whole call.
        self.host: Stopwatch | None = None
        self._begin_again()

    def _begin_again(self) -> None:
        self._first_time: float | None = None
        self._time: float | None = None
        self._kinds: set[bool] = set()
        self._refusal = ""
        self._is_confirmed = False

    def prompt_call(
        self, end: float, sampling: Sampling, timeline: Timeline, call: UNetCall, guidance: Guidance | None
    ) -> PromptCall | str:
        """The call to make in the place of this one, or why this one is computed whole, in one line for the user; ""
        before this fraction of the sampling's steps (end). A UNet's first step in a sampling is whole, always: it shows
        what calls a step is made of."""
        reason = self._prompt_call(end, sampling, timeline, call, guidance)
        return RESTS + reason if isinstance(reason, str) and reason else reason

    def give_up(self) -> None:
        """Something went wrong: the rest of this sampling is computed whole."""
        self._refusal = FAILED

    def _prompt_call(
        self, end: float, sampling: Sampling, timeline: Timeline, call: UNetCall, guidance: Guidance | None
    ) -> PromptCall | str:
        if sampling.why_not:
            return sampling.why_not
        if timeline is not self._timeline:
            self._timeline = timeline
            self._begin_again()
        found = NOBODY_SAYS if guidance is None else guidance()
        time = sampling.read(call.timestep)
        if time is None:
            return found if isinstance(found, str) else UNEQUAL_TIMES
        step, jumped = timeline.step(time)
        if jumped:
            self._begin_again()
        if self._first_time is None:
            self._first_time = time
        self._look_for_others(time, isinstance(found, PromptRows))
        if isinstance(found, str):
            return found
        reason = step.why_too_few(sampling.guidance_scale) or self._refusal or why_not_taken(call)
        is_first = step.index == 0 or time == self._first_time
        if reason or is_first or step.fraction < end - ROUNDING:
            return reason
        if not self._is_confirmed:
            # Once a sampling: it waits for a GPU.
            if not torch.equal(*halves(call, found.rows)):
                self._refusal = UNLIKE_HALVES
                return UNLIKE_HALVES
            self._is_confirmed = True
        return PromptCall(take_rows(call, found.rows), found.host)

    def _look_for_others(self, time: float, is_pair: bool) -> None:
        """Where a timestep has calls of prompt and negative prompt and others too, more than these two make the image:
        several prompts, areas, perturbed attention."""
        if time != self._time:
            self._time, self._kinds = time, set()
        self._kinds.add(is_pair)
        if len(self._kinds) > 1:
            self._refusal = SEVERAL_CALLS


class GuidanceRoute:
    """Runs the calls of samplings whose guidance ends early."""

    def __init__(self, guard: Guard, call_stats: CallStats) -> None:
        self._guard, self._call_stats = guard, call_stats
        self._runs: WeakDictionary[nn.Module, GuidanceRun] = WeakDictionary()
        self._timelines = Timelines()

    def run(
        self, unet: nn.Module, end: float, sampling: Sampling, call: UNetCall, host: Callable[[], Tensor],
        guidance: Guidance | None, compute: Compute,
    ) -> Tensor:
        """The output of a whole call: from the fraction end of the sampling's steps on, computed by half of it."""
        run = self._runs.get(unet)
        if run is None:
            run = self._runs[unet] = GuidanceRun()
        try:
            alone = run.prompt_call(end, sampling, self._timelines.of(sampling), call, guidance)
            if not isinstance(alone, str):
                with self._call_stats.standing_for(run.host, PROMPT_ALONE):
                    output = for_all_rows(compute(alone.call, alone.host), call.latent.shape[0])
                self._call_stats.note_guidance("", without_negative=True)
                return output
            reason = alone
        except torch.cuda.OutOfMemoryError:
            # The whole call would need more.
            raise
        except Exception as error:
            # What the host raised it raises again, computing the whole.
            run.give_up()
            reason = RESTS + self._guard.note("leaving the negative prompt out", error)
        output = compute(call, host)
        run.host = self._call_stats.host
        self._call_stats.note_guidance(reason)
        return output

    def forget(self, unet: nn.Module) -> None:
        """The UNet is given back."""
        self._runs.pop(unet, None)
