"""Output forecast: which steps run the UNet, the outputs of the others, and when it is inactive."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL, SMALL_XL
from samplings import FORECAST, STEPS, WHOLE, Samplings
from torch import Tensor

from lib_onediff.core.sampling import FEW_STEPS, Solver
from lib_onediff.core.settings import DEEPCACHE_OPTIONS
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.families.unet.patch_points import PatchPoints
from lib_onediff.steps.forecast import OTHER_SAMPLER, UNKNOWN_SAMPLER

# Of 20 steps with interval 3: DeepCache's whole steps, the first three, and the last.
WHOLE_OF_20 = {0, 1, 2, 3, 6, 9, 12, 16, 19}


def steps(whole: Iterable[int] = WHOLE_OF_20, count: int = 20) -> list[str]:
    return [WHOLE if index in whole else FORECAST for index in range(count)]


@pytest.mark.parametrize("config", [SMALL, SMALL_XL], ids=["SD1", "SDXL"])
def test_skipped_steps_extrapolate_the_last_two_computed_outputs(config: dict[str, Any]) -> None:
    """The extrapolation is linear over the timesteps, which are evenly spaced here. Computed steps equal, to the bit,
    those of the same sampling without a forecast."""
    ours = Samplings("forecast", config)
    plain = Samplings("forecast", config, deepcache_interval=1)
    ours.begin()
    plain.begin()
    computed: list[tuple[float, Tensor]] = []
    found = []
    for time in STEPS:
        call = ours.call(time)
        kind, output = ours.run(call)
        found.append(kind)
        if kind == WHOLE:
            assert torch.equal(output, plain.run(call)[1])
            computed.append((time, output))
            continue
        (t0, o0), (t1, o1) = computed[-2:]
        expected = o1.double() + (o1.double() - o0.double()) * ((time - t1) / (t1 - t0))
        assert output.dtype == o1.dtype and torch.allclose(output.double(), expected, atol=1e-5)
    assert found == steps()
    assert ours.runtime.status()["forecast"] == {"calls": 11, "reason": ""}
    assert ours.runtime.call_stats.image.cache_options == DEEPCACHE_OPTIONS
    # A forecast does not call the UNet, so it has no route and no time.
    assert ours.runtime.call_stats.total == 9 and ours.runtime.table.entries()[0].uses == 9


def test_outputs_are_extrapolated_separately_for_each_prompt_and_size() -> None:
    """Each step has three calls: two prompts, and the first prompt at another size. The outputs of the first prompt
    equal those of a sampling that has no other calls."""
    ours = Samplings("forecast")
    alone = Samplings("forecast")
    ours.begin()
    alone.begin()
    found = []
    for time in STEPS:
        cat = ours.call(time, names=("cat",))
        dog = ours.call(time, names=("dog",))
        of_cat = ours.run(cat)
        of_dog = ours.run(dog)
        large = ours.run(ours.call(time, names=("cat",), size=16))
        found.append(of_cat[0])
        assert of_cat[0] == of_dog[0] == large[0] and large[1].shape[-1] == 16
        assert not torch.equal(of_cat[1], of_dog[1])
        assert torch.equal(alone.run(cat)[1], of_cat[1])
    assert found == steps()


def test_after_a_change_of_weights_two_steps_are_computed() -> None:
    """Steps 10 and 11 are computed, so that no step is extrapolated from outputs of the old weights."""
    ours = Samplings("forecast")
    ours.begin()
    found = ours.sample(STEPS[:10])
    with torch.no_grad():
        ours.unet.conv_in.weight.mul_(1.5)
    assert found + ours.sample(STEPS[10:]) == steps(WHOLE_OF_20 | {10, 11})


def test_every_sampling_begins_with_computed_steps() -> None:
    """The second sampling is img2img with the last 12 of 20 steps. It must not extrapolate outputs of the first."""
    ours = Samplings("forecast")
    ours.begin()
    ours.sample(STEPS[:15])
    ours.begin()
    assert ours.sample(STEPS[8:]) == steps({0, 1, 2, 4, 8, 11}, 12)


SAMPLINGS: list[tuple[dict[str, Any], str]] = [
    ({"solver": lambda: Solver.MULTISTEP}, OTHER_SAMPLER), ({"solver": lambda: Solver.OTHER}, OTHER_SAMPLER),
    ({"solver": lambda: Solver.UNKNOWN}, UNKNOWN_SAMPLER), ({"why_not": "it jumps"}, "it jumps"),
    ({"times": STEPS[:9]}, FEW_STEPS),
]


@pytest.mark.parametrize(("more", "why"), SAMPLINGS)
def test_an_inactive_forecast_computes_every_step_and_gives_the_reason(more: dict[str, Any], why: str) -> None:
    """more: what the sampler reports of the sampling (fields of Sampling). why: the reason in the status."""
    ours = Samplings("forecast")
    ours.begin(**more)
    assert ours.sample(more.get("times", STEPS)) == [WHOLE] * len(more.get("times", STEPS))
    assert ours.reason == f"Output forecast is inactive: {why}"


@pytest.mark.parametrize(("change", "why"), [
    (lambda call: replace(call, timestep=call.timestep - torch.arange(2)), "at different steps"),
    (lambda call: replace(call, patches=PatchPoints()), "other extensions"),
])
def test_calls_that_cannot_be_forecast_are_all_computed(change: Callable[[UNetCall], UNetCall], why: str) -> None:
    """change: gives the two rows of the batch different timesteps, or marks the call as one with another extension's
    patches (PatchPoints; none is set here). why: a part of the reason in the status."""
    ours = Samplings("forecast")
    ours.begin()
    found = [ours.run(change(ours.call(time)))[0] for time in STEPS]
    assert found == [WHOLE] * 20 and why in ours.reason


def test_the_first_two_steps_without_the_negative_prompt_are_computed() -> None:
    """From step 10 on, the negative prompt is skipped, and both rows of the output are the prompt's prediction. No step
    is extrapolated from outputs of before."""
    ours = Samplings("forecast", skip_negative_after=50)
    ours.begin()
    found = []
    for time in STEPS:
        kind, output = ours.run(ours.call(time))
        found.append(FORECAST if kind == FORECAST else WHOLE)
        if time < STEPS[9]:
            assert torch.equal(output[0], output[1])
    assert found == steps(WHOLE_OF_20 | {10, 11})
