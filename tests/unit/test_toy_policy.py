"""A step policy is a class of its own: one that only this file knows works in a runtime that is given it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import SMALL, diffusers_output, diffusers_unet, relative_error
from deepcache_builders import STEPS, WEBUI, call_of
from torch import Tensor

from lib_onediff.core.policy import Answer, Compute, Moment, StepPolicy
from lib_onediff.core.refusal import Refusal
from lib_onediff.core.sampling import UNANNOUNCED, Sampling
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import Runtime


class Last:
    """The output of the last step that was computed."""

    walk = 0
    output: Tensor | None = None

    def bytes(self) -> int:
        return 0 if self.output is None else self.output.nbytes


class EverySecond:
    """Answers every second step with the output of the one before. See steps.policy.StepPolicy."""

    name, title = "every_second", "Every second step"

    def __init__(self, whole_batch: bool) -> None:
        self.whole_batch = whole_batch
        self.answered, self.reason = 0, ""

    def is_on(self, settings: Settings) -> bool:
        return settings.enabled

    def plan(self, moment: Moment) -> Callable[[Compute], Answer]:
        if moment.position.step.index == 4:
            raise Refusal("the fifth step is whole")
        memory, is_odd = moment.memory_of(self.name, Last), bool(moment.position.step.index % 2)

        def answer(compute: Compute) -> Answer:
            if is_odd and memory.output is not None:
                self.answered, self.reason = self.answered + 1, ""
                return Answer(memory.output)
            answered = compute(moment.call, moment.host)
            memory.output = answered.output.clone()
            return answered

        return answer

    def rest(self, reason: str) -> None:
        self.reason = reason

    def status(self) -> dict[str, Any]:
        return {"answered": self.answered, "reason": self.reason}


@pytest.mark.parametrize("whole_batch", [True, False])
def test_it_answers_counts_rests_and_keeps_its_memory_within_a_sampling(whole_batch: bool) -> None:
    policy: StepPolicy = EverySecond(whole_batch)
    runtime, unet = Runtime(policies=[policy]), diffusers_unet(**SMALL)
    runtime.adopt(unet, host_traits=WEBUI)

    @torch.no_grad()
    def step(index: int) -> int:
        """The step whose output is the answer to this one."""
        call = call_of(unet, STEPS[index])
        output = runtime.run(unet, call, lambda: diffusers_output(unet, call))
        errors = [relative_error(output, diffusers_output(unet, call_of(unet, time))) for time in STEPS[: index + 1]]
        assert min(errors) < 1e-5
        return errors.index(min(errors))

    for _ in range(2):
        runtime.begin_sampling(unet, Sampling(times=lambda: STEPS))
        # The fifth step leaves nothing behind.
        assert [step(index) for index in range(7)] == [0, 0, 2, 2, 4, 2, 6]
        assert runtime.managed_unet(unet).step_memories[policy.name].bytes() > 0
        runtime.end_sampling()
        assert not runtime.managed_unet(unet).step_memories
    assert runtime.status()["every_second"] == {"answered": 6, "reason": ""}
    assert step(1) == 1, "no sampling was announced"
    assert runtime.status()["every_second"]["reason"] == f"Every second step rests: {UNANNOUNCED}"
