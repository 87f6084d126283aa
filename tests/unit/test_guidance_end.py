"""Skipping the negative prompt: which calls compute only the batch rows of the prompt, and when the policy is
inactive. A whole call computes all rows."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import diffusers_output, relative_error
from samplings import ALONE, STEPS, WEBUI, WHOLE, Rig, Samplings, call_of, evenly_spaced  # noqa: F401
from torch import Tensor

from lib_onediff.core.call import PromptRows, half_of
from lib_onediff.core.policy import FAILED
from lib_onediff.core.refusal import Refusal
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.families.unet.patch_points import PatchPoints


def steps(whole: int, count: int = 20) -> list[str]:
    return [WHOLE] * whole + [ALONE] * (count - whole)


def refused(ours: Samplings, change: Callable[[UNetCall], UNetCall] = lambda call: call, **more: Any) -> str:
    """The policy's reason at the end of a sampling. Asserts that it is inactive, and that every call is whole."""
    for time in STEPS:
        call = change(ours.call(time))
        assert ours.run(call, **more)[0] == WHOLE
    assert ours.reason.startswith("Skipping the negative prompt is inactive: ")
    return ours.reason.removeprefix("Skipping the negative prompt is inactive: ")


@pytest.mark.parametrize(("change", "known", "why"), [
    (lambda call: replace(call, timestep=call.timestep - torch.arange(2)), {}, "different steps"),
    # Users may call the UNet of a pipeline themselves.
    (lambda call: replace(call, latent=torch.randn_like(call.latent)), {}, "different latents"),
    (lambda call: replace(call, patches=PatchPoints()), {}, "other extensions"),
    (lambda call: call, {"why_not": "the sampler's churn moves its steps"}, "the sampler's churn moves its steps"),
    (lambda call: call, {"times": STEPS[:9]}, "fewer than 10 steps"),
])
def test_calls_and_samplings_that_cannot_skip_the_negative_prompt_compute_all_rows(
    change: Callable[[UNetCall], UNetCall], known: dict[str, Any], why: str
) -> None:
    """change: changes each call. known: what the sampler reports of the sampling (fields of Sampling). why: a part of
    the reason in the status."""
    ours = Samplings("guidance")
    ours.begin(**known)
    assert why in refused(ours, change)


def refusing(reason: str) -> Callable[[], PromptRows]:
    """A StepContext.guidance that raises Refusal with this reason."""

    def guidance() -> PromptRows:
        raise Refusal(reason)

    return guidance


def test_all_rows_are_computed_if_the_host_does_not_tell_which_belong_to_the_prompt() -> None:
    """The host either gives its reason, which the status repeats, or passes nothing at all."""
    ours = Samplings("guidance")
    ours.begin()
    assert refused(ours, guidance=refusing("the host's reason")) == "the host's reason"
    with torch.no_grad():
        call = ours.call(1.0)
        ours.runtime.run(ours.unet, call, lambda: ours.host(call))
    assert ours.reason.endswith("it is unknown which part of the batch belongs to the negative prompt")


def test_steps_with_additional_calls_compute_all_rows() -> None:
    """A host makes more than one call in a step if there are several prompts. The policy counts the calls of the first
    step. The next sampling, with one call a step, is not affected."""
    ours = Samplings("guidance", skip_negative_after=1)
    ours.begin()
    for time in STEPS:
        call = ours.call(time)
        assert ours.run(call)[0] == ours.run(call, refusing("several prompts"))[0] == WHOLE
    assert ours.run(ours.call(1.0))[0] == WHOLE and "extra passes of an extension" in ours.reason
    ours.begin()
    assert ours.sample() == steps(1)


def test_moved_weights_and_a_read_status_do_not_reset_the_count_of_calls_in_the_first_step() -> None:
    """Both happen between the two calls of each step. If the second call of the first step were not counted, later
    steps would skip rows."""
    ours = Samplings("guidance", skip_negative_after=1)
    ours.begin()
    for time in STEPS:
        call = ours.call(time)
        assert ours.run(call)[0] == WHOLE
        for parameter in ours.unet.parameters():
            parameter.data = parameter.data.clone()
        ours.runtime.rows()
        assert ours.run(call, refusing("several prompts"))[0] == WHOLE


def test_after_an_error_in_the_policy_all_rows_are_computed_for_the_rest_of_the_image(
    caplog: pytest.LogCaptureFixture
) -> None:
    """The function that gives the policy the rows of the prompt raises. The output of this call equals, to the bit,
    that of a sampling without the policy, and the error is logged once."""
    ours = Samplings("guidance")
    ours.begin()

    def broken() -> PromptRows:
        raise RuntimeError("no such rows")

    plain = Samplings("guidance", skip_negative_after=0)
    plain.begin()
    call = ours.call(STEPS[0])
    assert torch.equal(ours.run(call, broken)[1], plain.run(call)[1])
    assert "no such rows" in ours.reason and any("no such rows" in fault for fault in ours.runtime.guard.faults)
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    assert ours.sample(STEPS[1:]) == steps(19, 19)
    assert ours.reason == f"Skipping the negative prompt is inactive: {FAILED}"


def test_if_the_host_fails_on_the_prompts_rows_it_computes_the_whole_call() -> None:
    """A call with half of the rows may fail where the whole one does not. The output is close to that of diffusers, and
    the policy is inactive for the rest of the image."""
    ours = Samplings("guidance")
    ours.begin()
    assert ours.sample(STEPS[:10]) == steps(10, 10)

    def fails() -> Tensor:
        raise ZeroDivisionError("half a call")

    call = ours.call(STEPS[10])
    kind, output = ours.run(call, lambda: PromptRows(half_of(2, False), fails))
    assert kind == WHOLE and relative_error(output, diffusers_output(ours.unet, call)) < 1e-5
    assert "half a call" in ours.reason and ours.sample(STEPS[11:]) == steps(9, 9)
