"""Output forecast, which is DeepCache at depth 0: some sampling steps do not run the network, but extrapolate its
output by a line through the last two outputs.

With first-order samplers that add no noise, the output changes smoothly from step to step: Liu et al. 2025, "From
Reusing to Forecasting" (TaylorSeer, arXiv 2503.06923); Han et al. 2026, "Spectrum" (arXiv 2603.01623). A line over the
numbers of the steps was nearer to the exact image than one over timesteps, a parabola, or Chebyshev polynomials
(.readme/developing.md). Samplers of higher orders compute with differences of outputs, which amplifies the error of the
line (.readme/measurements.md).
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from ..core.call import PATCHED
from ..core.image import FORECAST
from ..core.policy import Answer, Compute, StepContext, StepMemory
from ..core.refusal import Refusal
from ..core.sampling import Solver
from ..core.settings import DEEPCACHE_OPTIONS, Settings
from ..core.table import Stopwatch
from .deepcache import Line
from .prompts import Prompts
from .schedules import TRANSFORMER, schedule_for

# Reasons, for users, why the policy does not apply.
OTHER_SAMPLER = "it works only with the samplers Euler and DDIM, without added noise"
UNKNOWN_SAMPLER = "the sampler is unknown"
# The number of steps at the beginning that are always computed: the output changes most there.
FIRST_COMPUTED = 3
# Given to schedule_for as the kind of network. No kind has this name, so that the DeepCache authors' rule applies: the
# searched schedules are those of DeepCache.
NO_TABLE = ""


class PromptOutputs:
    """The network's outputs for one prompt at one shape.

    line: the line through the last two that OneDiff has computed. host: how long the host's own forward takes for such
        a call; None before the first call that OneDiff has computed, and if unknown.
    """

    def __init__(self) -> None:
        self.line = Line()
        self.host: Stopwatch | None = None


class ForecastMemory(StepMemory):
    """What the policy keeps for one network in one run through a sampling.

    prompts: tells the sampling's prompts apart. by_prompt: the outputs, by the call's signature and the prompt's number
        (Prompts.identify).
    """

    keeps_tensors = True

    def __init__(self) -> None:
        self.prompts = Prompts()
        self.by_prompt: defaultdict[Hashable, PromptOutputs] = defaultdict(PromptOutputs)


class Forecast:
    """The step policy that extrapolates outputs, one object for each runtime; implements core.policy.StepPolicy.

    status: "calls": the number of extrapolated calls. "reason": the reason of answerer()'s Refusal of the last call,
        for users, which the caller of answerer() sets; "" if the call was extrapolated or was to be computed.
    """

    name = "forecast"
    title = "Output forecast"
    whole_batch = True

    def __init__(self) -> None:
        self._stopwatch = Stopwatch()
        self.status: dict[str, Any] = {"calls": 0, "reason": ""}

    def is_on(self, settings: Settings) -> bool:
        """Whether the settings extrapolate outputs: a DeepCache depth of 0, with an interval above 1."""
        return settings.forecast_interval > 1

    def answerer(self, step_context: StepContext) -> Callable[[Compute], Answer]:
        """A function that answers the call by extrapolating its output. At the first FIRST_COMPUTED steps, at whole
        steps, and without two outputs of the present weights, it computes the call. Outputs that the host has computed
        are not used for the line. See StepPolicy.answerer.

        Raises Refusal if extensions compute within the network, if the sampler is not fit for a line, if the call's
        position in its sampling is unknown, or if the calls of a step cannot be told apart (Prompts). Raises Refusal
        with the reason "" in a warm-up, and for transformers with an interval of their own
        (Settings.transformer_interval).
        """
        call = step_context.call
        if call.patches is not None:
            raise Refusal(PATCHED)
        settings = step_context.settings
        options = settings.cache_options(step_context.schedule() == TRANSFORMER)
        if step_context.is_warm_up or options != DEEPCACHE_OPTIONS:
            raise Refusal("")
        position = step_context.position()
        solver = step_context.sampling.solver()
        if solver is not Solver.FIRST_ORDER:
            raise Refusal(UNKNOWN_SAMPLER if solver is Solver.UNKNOWN else OTHER_SAMPLER)
        outputs = step_context.memory_of(self.name, ForecastMemory)
        known = outputs.by_prompt[outputs.prompts.identify(call, position.time)]
        index = position.step.index
        schedule = schedule_for(NO_TABLE, position.step.total, settings.forecast_interval, 0)
        computed = index < FIRST_COMPUTED or index in schedule.whole

        def answer(compute: Compute) -> Answer:
            self.status["reason"] = ""
            stop = self._stopwatch.start(call.latent.device)
            output = None
            if not computed and known.line.values == step_context.values():
                output = known.line.at(index)
            if output is not None:
                stop()
                self.status["calls"] += 1
                step_context.call_stats.note_cache_options(options)
                step_context.call_stats.count(FORECAST, self._stopwatch, known.host)
                return Answer(output, host_times=known.host)
            answer = compute(call, step_context.host)
            if answer.served is not None:
                known.host = answer.host_times
                known.line.note(index, answer.output, answer.served.epoch.values)
            return answer

        return answer
