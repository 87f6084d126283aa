"""Guidance that ends early: which calls are computed by the prompt's rows alone, what they answer, why not others."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import diffusers_output, relative_error
from samplings import ALONE, STEPS, WEBUI, WHOLE, Rig, Samplings, call_of, equal_distances  # noqa: F401
from torch import Tensor

from lib_onediff.core.call import PromptRows, half_of
from lib_onediff.core.refusal import Refusal
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.families.unet.patch_points import PatchPoints


def steps(whole: int, count: int = 20) -> list[str]:
    return [WHOLE] * whole + [ALONE] * (count - whole)


def refused(ours: Samplings, change: Callable[[UNetCall], UNetCall] = lambda call: call, **more: Any) -> str:
    """The reason at the end of a sampling that is computed whole."""
    for time in STEPS:
        call = change(ours.call(time))
        assert ours.run(call, **more)[0] == WHOLE
    assert ours.reason.startswith("Skipping the negative prompt is inactive: ")
    return ours.reason.removeprefix("Skipping the negative prompt is inactive: ")


@pytest.mark.parametrize(("change", "known", "why"), [
    (lambda call: replace(call, timestep=call.timestep - torch.arange(2)), {}, "different steps"),
    # As where somebody calls a pipeline's UNet himself.
    (lambda call: replace(call, latent=torch.randn_like(call.latent)), {}, "the same latents"),
    (lambda call: replace(call, patches=PatchPoints()), {}, "other extensions"),
    (lambda call: call, {"why_not": "the sampler's churn moves its steps"}, "the sampler's churn moves its steps"),
    (lambda call: call, {"times": STEPS[:9]}, "fewer than 10 steps"),
])
def test_calls_and_samplings_that_are_computed_whole(
    change: Callable[[UNetCall], UNetCall], known: dict[str, Any], why: str
) -> None:
    ours = Samplings("guidance")
    ours.begin(**known)
    assert why in refused(ours, change)


def refusing(reason: str) -> Callable[[], PromptRows]:
    """A host that does not know which rows are the prompt's."""

    def guidance() -> PromptRows:
        raise Refusal(reason)

    return guidance


def test_a_host_that_cannot_tell_the_rows() -> None:
    ours = Samplings("guidance")
    ours.begin()
    assert refused(ours, guidance=refusing("the host's reason")) == "the host's reason"
    with torch.no_grad():
        call = ours.call(1.0)
        ours.runtime.run(ours.unet, call, lambda: ours.host(call))
    assert ours.reason.endswith("the caller does not say which rows are the negative prompt's")


def test_a_step_with_other_calls_beside_prompt_and_negative_prompt() -> None:
    """Several prompts that do not fit into one call: the first step shows it."""
    ours = Samplings("guidance", skip_negative_after=1)
    ours.begin()
    for time in STEPS:
        call = ours.call(time)
        assert ours.run(call)[0] == ours.run(call, refusing("several prompts"))[0] == WHOLE
    assert ours.run(ours.call(1.0))[0] == WHOLE and "other calls besides" in ours.reason
    ours.begin()
    assert ours.sample() == steps(1)


def test_what_the_first_step_has_shown_stays_where_weights_move_and_a_page_looks() -> None:
    """Or else a step's other calls would be forgotten between two of them."""
    ours = Samplings("guidance", skip_negative_after=1)
    ours.begin()
    for time in STEPS:
        call = ours.call(time)
        assert ours.run(call)[0] == WHOLE
        for parameter in ours.unet.parameters():
            parameter.data = parameter.data.clone()
        ours.runtime.rows()
        assert ours.run(call, refusing("several prompts"))[0] == WHOLE


def test_a_fault_of_ours_runs_the_whole_call(caplog: pytest.LogCaptureFixture) -> None:
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
    assert ours.reason == "Skipping the negative prompt is inactive: a fault of OneDiff"


def test_where_the_host_fails_on_half_it_runs_the_whole() -> None:
    ours = Samplings("guidance")
    ours.begin()
    assert ours.sample(STEPS[:10]) == steps(10, 10)

    def fails() -> Tensor:
        raise ZeroDivisionError("half a call")

    call = ours.call(STEPS[10])
    kind, output = ours.run(call, lambda: PromptRows(half_of(2, False), fails))
    assert kind == WHOLE and relative_error(output, diffusers_output(ours.unet, call)) < 1e-5
    assert "half a call" in ours.reason and ours.sample(STEPS[11:]) == steps(9, 9)
