"""Sampling steps that do not run the network: a line through its last two outputs forecasts this one.

With samplers of the first order that add no noise, the output changes smoothly from step to step: Liu et al. 2025,
"From Reusing to Forecasting" (TaylorSeer, arXiv 2503.06923); Han et al. 2026, "Spectrum" (arXiv 2603.01623). A line
over the steps' numbers was nearer to the exact image than one over timesteps, a parabola, or Chebyshev polynomials.
Samplers of higher orders go on from differences of outputs, and magnify the line's errors
(.readme/speed-and-quality.md).
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from ..core.call import PATCHED
from ..core.image import FORECAST
from ..core.policy import Answer, Compute, Moment, StepMemory
from ..core.refusal import Refusal
from ..core.settings import Settings
from ..core.table import Stopwatch
from .deepcache import Line, is_whole
from .prompts import Threads

# The first steps change direction: they are computed.
FIRST_COMPUTED = 3


class Output:
    """The line through what a prompt's calls of one shape have given. host: the times of the host's own."""

    def __init__(self) -> None:
        self.line = Line()
        self.host: Stopwatch | None = None


class Outputs(StepMemory):
    """The outputs of one network in one walk through a sampling, by shape and prompt."""

    keeps_tensors = True

    def __init__(self) -> None:
        self.threads = Threads()
        self.by_thread: defaultdict[Hashable, Output] = defaultdict(Output)


class Forecast:
    """The step policy. See core.policy.StepPolicy."""

    name, title, whole_batch = "forecast", "Output forecast", True

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self.status: dict[str, Any] = {"calls": 0, "reason": ""}

    def is_on(self, settings: Settings) -> bool:
        return settings.forecast_interval > 1

    def plan(self, moment: Moment) -> Callable[[Compute], Answer]:
        """Only outputs that we have computed ourselves are continued, never the host's."""
        call, sampling = moment.call, moment.sampling
        if call.patches is not None:
            raise Refusal(PATCHED)
        if moment.is_warm_up:
            raise Refusal("")
        position = moment.position()
        if no_line := sampling.why_no_forecast():
            raise Refusal(no_line)
        outputs = moment.memory_of(self.name, Outputs)
        known = outputs.by_thread[outputs.threads.thread(call, position.time)]
        index = position.step.index
        computed = index < FIRST_COMPUTED or is_whole(moment.settings.forecast_interval, position.step)

        def answer(compute: Compute) -> Answer:
            self.status["reason"] = ""
            stop = self._stopwatch.start(call.latent.device)
            output = None if computed or known.line.values != moment.values() else known.line.at(index)
            if output is not None:
                stop()
                self.status["calls"] += 1
                moment.times.count(FORECAST, self._stopwatch, known.host)
                return Answer(output, host_times=known.host)
            answer = compute(call, moment.host)
            if answer.served is not None:
                known.host = answer.host_times
                known.line.note(index, answer.output, answer.served.epoch.values)
            return answer

        return answer
