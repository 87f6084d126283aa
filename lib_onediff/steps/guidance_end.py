"""Skipping the negative prompt: from a certain step on, only the prompt's rows are computed, and their output is used
for the negative prompt's rows too. Guidance between two equal predictions gives the prompt's prediction.

Kynkäänniemi et al. 2024, "Applying Guidance in a Limited Interval Improves Sample and Distribution Quality in Diffusion
Models" (arXiv 2404.07724); Zhang et al. 2024, "T-GATE" (arXiv 2404.02747). T-GATE also keeps the outputs of the cross
attentions, which gained nothing here (.readme/developing.md).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.call import PromptRows, why_rows_stay_together
from ..core.image import PROMPT_ALONE
from ..core.inputs import take_rows
from ..core.policy import Answer, Compute, StepContext, StepMemory
from ..core.refusal import Refusal
from ..core.settings import Settings
from ..core.table import Stopwatch

# Reasons, for users, why the policy does not apply.
UNKNOWN_ROWS = "it is unknown which part of the batch belongs to the negative prompt"
SEVERAL_CALLS = (
    "besides one prompt and its negative prompt, each step computes other prompts (AND, regions), or extra passes of "
    "an extension (PAG)"
)
UNLIKE_HALVES = "prompt and negative prompt are computed from different latents, maybe by an extension or a script"
# A step that is earlier than the setting by this fraction of the sampling counts as late enough, because the fractions
# of steps are rounded.
ROUNDING = 1e-6


class GuidanceMemory(StepMemory):
    """What the policy knows of one network's calls in one run through a sampling.

    A pair is a call with the rows of prompt and negative prompt. If a timestep has pairs and other calls, more than one
    prompt and one negative prompt make the image (several prompts, areas, perturbed attention), and the policy does not
    apply.

    host: how long the host's own forward takes for a whole pair; None before the first pair, and if unknown.
    refusal: why the policy does not apply for the rest of the run, for users; "" if it applies. Never cleared.
    is_confirmed: whether the two halves of a pair were compared in this run and have equal latents.
    """

    def __init__(self) -> None:
        self.host: Stopwatch | None = None
        self.refusal = ""
        self.is_confirmed = False
        self._first_time: float | None = None
        self._time: float | None = None
        self._kinds: set[bool] = set()

    def note_call(self, time: float, is_pair: bool) -> bool:
        """Note a call at this timestep, and set `refusal` if the timestep has had both pairs and other calls. Returns
        whether the call has the timestep of the network's first call in this run: there it is not known yet which calls
        a step has, so the caller must compute the whole call."""
        if self._first_time is None:
            self._first_time = time
        if time != self._time:
            self._time = time
            self._kinds = set()
        self._kinds.add(is_pair)
        if len(self._kinds) > 1:
            self.refusal = SEVERAL_CALLS
        return time == self._first_time


class GuidanceEnd:
    """The step policy that skips the negative prompt, one object for each runtime; implements core.policy.StepPolicy.

    status: "without_negative": the number of calls without the negative prompt. "reason": the reason of answerer()'s
    Refusal of the last call, for users, which the caller of answerer() sets; "" if the policy decided about the call.
    """

    name = "guidance"
    title = "Skipping the negative prompt"
    whole_batch = True

    def __init__(self) -> None:
        self.status: dict[str, Any] = {"without_negative": 0, "reason": ""}

    def is_on(self, settings: Settings) -> bool:
        """Whether the settings skip the negative prompt at any step."""
        return settings.skip_negative_after > 0

    def answerer(self, step_context: StepContext) -> Callable[[Compute], Answer]:
        """A function that answers the call: by computing all of it in the first skip_negative_after percent of the
        steps and at the run's first step, and only the prompt's half after them. See StepPolicy.answerer.

        Raises Refusal if it is unknown which half of the call is the prompt's, if other extensions' functions compute
        in the network, or if the call's position in its sampling is unknown. Raises Refusal at every call of the run
        after a timestep has had pairs and other calls, or a pair has had halves with different latents. Raises Refusal
        with the reason "" in a warm-up. May wait for the GPU once in a run, to compare the halves' latents.
        """
        if step_context.is_warm_up:
            raise Refusal("")
        position = step_context.position()
        guided = step_context.memory_of(self.name, GuidanceMemory)
        try:
            if step_context.guidance is None:
                raise Refusal(UNKNOWN_ROWS)
            found = step_context.guidance()
        except Refusal:
            guided.note_call(position.time, is_pair=False)
            raise
        is_first = guided.note_call(position.time, is_pair=True)
        reason = guided.refusal or why_rows_stay_together(step_context.call)
        if reason:
            raise Refusal(reason)
        step = position.step
        if is_first or step.index == 0 or step.fraction < step_context.settings.skip_negative_after / 100 - ROUNDING:
            return lambda compute: self._whole(step_context, guided, compute)
        if not guided.is_confirmed:
            # Once in each run, because the comparison waits for the GPU.
            if not torch.equal(*step_context.call.latent.chunk(2)):
                guided.refusal = UNLIKE_HALVES
                raise Refusal(UNLIKE_HALVES)
            guided.is_confirmed = True
        return lambda compute: self._prompt_alone(step_context, guided, found, compute)

    def _whole(self, step_context: StepContext, guided: GuidanceMemory, compute: Compute) -> Answer:
        """The answer of the whole call. Keeps the host's times for such a call in guided.host, with which the times of
        calls with the prompt alone are compared."""
        answer = compute(step_context.call, step_context.host)
        guided.host = answer.host_times
        self.status["reason"] = ""
        return answer

    def _prompt_alone(
        self, step_context: StepContext, guided: GuidanceMemory, found: PromptRows, compute: Compute
    ) -> Answer:
        """The answer with the prompt's rows computed alone, and their output used for both halves of the batch. found:
        which half of the call is the prompt's."""
        with step_context.call_stats.standing_for(guided.host, PROMPT_ALONE):
            answer = compute(take_rows(step_context.call, found.rows), found.host)
        self.status["without_negative"] += 1
        self.status["reason"] = ""
        # The same output for the negative prompt's rows; the order of the two halves does not matter.
        return answer._replace(output=torch.cat([answer.output] * 2))
