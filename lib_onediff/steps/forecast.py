"""Sampling steps that do not run the network: a line through its last two outputs forecasts this one.

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
from torch import Tensor

from ..core.image_times import FORECAST
from ..core.policy import Answer, Compute, Moment
from ..core.refusal import Refusal
from ..core.table import Stopwatch
from ..options.settings import Settings
from .prompts import Threads
from .schedule import is_whole

PATCHES = "other extensions compute within the UNet"
# The first steps change direction: they are computed.
FIRST_COMPUTED = 3


@dataclass
class OutputHistory:
    """The last two outputs that the same weights computed of one prompt at one shape. before, last: each a step's index
    and an output, (batch, channels, height, width). host: the times of the host's own at this shape."""

    before: tuple[int, Tensor] | None = None
    last: tuple[int, Tensor] | None = None
    edition: int = -1
    host: Stopwatch | None = None

    def note(self, step: int, output: Tensor, edition: int) -> None:
        """The network was computed at this step. Of two outputs at one step the later counts."""
        if edition != self.edition:
            self.before = self.last = None
            self.edition = edition
        if self.last is not None and self.last[0] != step:
            self.before = self.last
        # The host may go on computing in its own.
        self.last = step, output.detach().clone()

    def forecast(self, step: int, edition: Callable[[], int]) -> Tensor | None:
        """The output at another step, on the line through both; None before these weights have made two. Computed
        in float32."""
        if self.before is None or self.last is None or self.edition != edition():
            return None
        (step_before, output_before), (step_last, output_last) = self.before, self.last
        weight = (step - step_before) / (step_last - step_before)
        return torch.lerp(output_before.float(), output_last.float(), weight).to(output_last.dtype)


class Histories:
    """The outputs of one network in one walk through a sampling."""

    walk = 0

    def __init__(self) -> None:
        self.threads = Threads()
        self._histories: dict[Hashable, OutputHistory] = {}

    def of(self, thread: Hashable) -> OutputHistory:
        return self._histories.setdefault(thread, OutputHistory())

    def bytes(self) -> int:
        outputs = (pair[1] for one in list(self._histories.values()) for pair in (one.before, one.last) if pair)
        return self.threads.bytes() + sum(output.nbytes for output in outputs)


class Forecast:
    """The step policy. See steps.policy.StepPolicy."""

    name, title, whole_batch = "forecast", "Output forecast", True

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self._forecasts, self._reason = 0, ""

    def is_on(self, settings: Settings) -> bool:
        return settings.forecast_interval > 1

    def plan(self, moment: Moment) -> Callable[[Compute], Answer]:
        """Only outputs that we have computed ourselves are continued, never the host's."""
        call, sampling = moment.call, moment.sampling
        if call.patches is not None:
            raise Refusal(PATCHES)
        if not moment.belongs_to_image:
            raise Refusal("")
        position = moment.position
        if no_line := sampling.why_no_forecast():
            raise Refusal(no_line)
        kept = moment.memory_of(self.name, Histories)
        history = kept.of(kept.threads.thread(call, position.time))
        index = position.step.index
        computed = index < FIRST_COMPUTED or is_whole(moment.settings.forecast_interval, position.step)

        def answer(compute: Compute) -> Answer:
            self._reason = ""
            stop = self._stopwatch.start(call.latent.device)
            output = None if computed else history.forecast(index, moment.edition)
            if output is not None:
                stop()
                self._forecasts += 1
                moment.times.note_skipped(FORECAST, self._stopwatch, history.host)
                return Answer(output)
            answer = compute(call, moment.host)
            if answer.served is not None:
                history.host = moment.times.host
                history.note(index, answer.output, answer.served.edition)
            return answer

        return answer

    def rest(self, reason: str) -> None:
        self._reason = reason

    def status(self) -> dict[str, Any]:
        return {"calls": self._forecasts, "reason": self._reason}
