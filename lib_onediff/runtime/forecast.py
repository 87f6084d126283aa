"""Sampling steps that do not run the UNet: a line through its last two outputs forecasts this one.

With samplers of the first order that add no noise, the output changes smoothly from step to step: Liu et al. 2025,
"From Reusing to Forecasting" (TaylorSeer, arXiv 2503.06923); Han et al. 2026, "Spectrum" (arXiv 2603.01623). A line
over the steps' numbers was nearer to the exact image than one over timesteps, a parabola, or Chebyshev polynomials.
Samplers of higher orders go on from differences of outputs, and magnify the line's errors (.readme/forecast.md).
"""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..guard import Guard
from ..model.call import UNetCall
from ..model.deepcache.options import DeepCacheOptions
from ..model.deepcache.prompts import TILES, FirstTimestep, PromptNumbers
from ..model.deepcache.sampling import UNEQUAL_TIMES, Sampling, Timelines
from ..model.deepcache.schedule import is_whole
from ..model.deepcache.timeline import Step, Timeline
from ..shapes.table import Stopwatch
from ..weak_dictionary import WeakDictionary
from .call_stats import HOST, CallStats
from .session import signature

RESTS = "Output forecast rests: "
PATCHES = "other extensions compute within the UNet"
FAILED = "a fault of OneDiff"
# The first steps change direction: they are computed.
FIRST_COMPUTED = 3


@dataclass
class OutputHistory:
    """The last two outputs that the same weights computed of one prompt at one shape. before, last: each a step's index
    and an output, (batch, channels, height, width). host: the times of the host's own at this shape."""

    before: tuple[int, Tensor] | None = None
    last: tuple[int, Tensor] | None = None
    weights: Any = None
    host: Stopwatch | None = None

    def note(self, step: int, output: Tensor, weights: Any) -> None:
        """The UNet was computed at this step. Of two outputs at one step the later counts."""
        if weights != self.weights:
            self.before = self.last = None
            self.weights = weights
        if self.last is not None and self.last[0] != step:
            self.before = self.last
        # The host may go on computing in its own.
        self.last = step, output.detach().clone()

    def forecast(self, step: int, weights: Callable[[], Any]) -> Tensor | None:
        """The output at another step, on the line through both; None before these weights have made two. Computed
        in float32."""
        if self.before is None or self.last is None or self.weights != weights():
            return None
        (step_before, output_before), (step_last, output_last) = self.before, self.last
        weight = (step - step_before) / (step_last - step_before)
        return torch.lerp(output_before.float(), output_last.float(), weight).to(output_last.dtype)


class ForecastRun:
    """The samplings of one UNet, as far as forecasts go."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        self._begin_again()

    def _begin_again(self) -> None:
        self._histories: dict[Hashable, OutputHistory] = {}
        self._prompts = PromptNumbers()
        self._first_timestep = FirstTimestep()
        self.refusal = ""

    def look(
        self, interval: int, sampling: Sampling, timeline: Timeline, call: UNetCall
    ) -> tuple[OutputHistory, int, bool] | str:
        """The history of a call, its step's index, and whether the schedule wants it computed; or why it is computed in
        any case, in one line for the user."""
        reason = sampling.why_not or sampling.why_no_forecast()
        if reason:
            return reason
        time = sampling.read(call.timestep)
        if time is None:
            return UNEQUAL_TIMES
        step, jumped = timeline.step(time)
        if jumped or timeline is not self._timeline:
            self._timeline = timeline
            self._begin_again()
        if too_few := step.why_too_few(sampling.guidance_scale):
            return too_few
        which = signature(call), self._prompts.number(call.context, call.y)
        if self._first_timestep.comes_again(time, which):
            self.refusal = TILES
        if self.refusal:
            return self.refusal
        return self._histories.setdefault(which, OutputHistory()), step.index, is_computed(interval, step)


def is_computed(interval: int, step: Step) -> bool:
    """Whether this step runs the UNet: as DeepCache's whole steps, and the first ones."""
    return step.index < FIRST_COMPUTED or is_whole(DeepCacheOptions(interval), step)


class ForecastRoute:
    """Answers calls by forecasts, where that is chosen."""

    def __init__(self, guard: Guard, call_stats: CallStats) -> None:
        self._guard, self._call_stats = guard, call_stats
        self._runs: WeakDictionary[nn.Module, ForecastRun] = WeakDictionary()
        self._timelines = Timelines()

    def run(
        self, unet: nn.Module, interval: int, sampling: Sampling, call: UNetCall, compute: Callable[[], Tensor],
        weights: Callable[[], Any],
    ) -> Tensor:
        """The output of a call: computed, or a forecast between computed ones. Only outputs that we have computed
        ourselves are continued, never the host's."""
        run = self._runs.get(unet)
        if run is None:
            run = self._runs[unet] = ForecastRun()
        history, step, reason = None, 0, PATCHES if call.patches is not None else ""
        try:
            found = reason or run.look(interval, sampling, self._timelines.of(sampling), call)
            if isinstance(found, str):
                reason = found
            else:
                history, step, must_compute = found
                stop = self._call_stats.forecasting.start(call.latent.device)
                output = None if must_compute else history.forecast(step, weights)
                if output is not None:
                    stop()
                    self._call_stats.note_forecast(history.host)
                    return output
        except Exception as error:
            run.refusal = FAILED
            history, reason = None, self._guard.note("forecasting an output", error)
        output = compute()
        if history is not None and self._call_stats.route != HOST:
            history.host = self._call_stats.host
            self._guard.attempt("noting an output", lambda: history.note(step, output, weights()))
        self._call_stats.note_computed(reason and RESTS + reason)
        return output

    def forget(self, unet: nn.Module) -> None:
        """The UNet is given back."""
        self._runs.pop(unet, None)
