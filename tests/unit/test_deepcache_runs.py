"""DeepCache in samplings: which calls are full passes and which are cached ones, and their outputs.

A full pass computes the whole UNet and stores the deep layers' output (the feature); a cached pass computes the shallow
layers alone, with a stored feature. A Rig is a UNet with DeepCache in the runtime. Its Oracle computes the same passes
by our forward without the runtime, and is the reference for outputs.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from builders import SMALL, SMALL_XL, relative_error
from grid import grid
from samplings import (  # noqa: F401
    STEPS,
    Rig,
    call_of,
    evenly_spaced,
    few_steps_suffice,
    memories,
    passes,
)
from torch import Tensor

from lib_onediff.core.sampling import UNANNOUNCED, Solver
from lib_onediff.families.unet.call import Control
from lib_onediff.steps.schedules import schedule_for

# Names of prompts, one for each row of a call's batch: a prompt and a negative prompt.
BOTH = ("cat", "ugly")
ALONE = ("cat",)
DOG = ("dog", "ugly")


@grid(interval=[2, 3, 20], total=[20, 7, 1, 2])
def test_full_passes_are_computed_at_the_scheduled_steps(interval: int, total: int) -> None:
    """Full passes are computed at every interval-th step and at the last one, in each of two samplings. total: the
    number of steps. passes() lists "full" or "cached" for each step."""
    rig = Rig(deepcache_interval=interval)
    for _ in range(2):
        rig.begin(STEPS[:total])
        found = rig.sample(STEPS[:total])
        assert found == passes([*range(0, total, interval), total - 1], total)
        assert found.count("full") == math.ceil(total / interval) + bool((total - 1) % interval)
    counted = rig.runtime.status()["deepcache"]
    assert counted["full"] + counted["cached"] == 2 * total


class ExpectedPass(NamedTuple):
    """A call of a sampling, and its expected pass: "full" or "cached". names: the prompts, one for each row of the
    batch. size: the width and height of the latent."""

    time: float
    expected: str
    names: Sequence[str] = BOTH
    size: int = 8
    tokens: int = 77


EIGHT = list(zip(STEPS, passes([0, 3, 6, 7], 8), strict=False))
SAMPLINGS = {
    "the negative prompt in a call of its own, and longer": [
        ExpectedPass(time, expected, names, tokens=tokens)
        for time, expected in EIGHT for names, tokens in ((ALONE, 77), (["ugly"], 154))
    ],
    # The negative prompt is left out at some steps, or a call of its own: each new combination begins with a full pass.
    "a batch that changes": [
        ExpectedPass(STEPS[index], expected, names) for index, (names, expected) in enumerate([
            (BOTH, "full"), (BOTH, "cached"), (ALONE, "full"), (ALONE, "full"), (BOTH, "full"), (ALONE, "cached"),
            (ALONE, "full"), (BOTH, "full"),
        ])
    ],
    "a prompt that changes": [
        ExpectedPass(STEPS[index], expected, names) for index, (names, expected) in enumerate([
            (BOTH, "full"), (BOTH, "cached"), (DOG, "full"), (DOG, "full"), (DOG, "cached"), (BOTH, "full"),
            (BOTH, "full"), (BOTH, "full"),
        ])
    ],
    "two sizes": [ExpectedPass(time, expected, size=size) for time, expected in EIGHT for size in (8, 9)],
    "Heun": [
        ExpectedPass(STEPS[0], "full"),
        *(ExpectedPass(time, expected) for time, expected in EIGHT[1:] for _ in range(2)),
    ],
    "DPM2 and DPM++ SDE": [
        ExpectedPass(moment, expected, names)
        for time, expected in EIGHT for moment in (time, time - 23.4)[: 1 + (time > STEPS[7])]
        for names in (ALONE, ["ugly"])
    ],
    # And a step that DPM adaptive rejects.
    "Restart": [
        ExpectedPass(STEPS[index], expected) for index, expected in zip(
            [0, 1, 2, 3, 4, 1, 2, 3],
            ["full", "cached", "cached", "full", "cached", "full", "cached", "full"], strict=True,
        )
    ],
}


@pytest.mark.parametrize("calls", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_cached_pass_uses_the_feature_of_the_same_prompt_and_shape(calls: list[ExpectedPass]) -> None:
    """calls: those of a sampling, each with its expected pass; a new prompt or shape begins with a full pass. Each
    output is compared with the Oracle's, which keeps one feature for each combination of prompts and shape."""
    rig = Rig(SMALL_XL)
    rig.begin(STEPS[:8])
    for number, (time, expected, names, size, tokens) in enumerate(calls):
        call = call_of(rig.unet, time, names, size, tokens, seed=number)
        rig.check(call, f"{names} {size} {tokens}", expected)
    assert rig.reason == ""


@pytest.mark.usefixtures("unchecked")
def test_the_step_after_a_controlnet_ends_is_a_full_pass() -> None:
    """Steps 0 and 1 have residuals of a ControlNet, and step 2 has none: it cannot use a feature with residuals in it.
    Without the change, step 2 would be a cached pass."""
    rig = Rig()
    rig.begin(STEPS[:6])
    for index, expected in enumerate(["full", "cached", "full", "full", "cached", "full"]):
        call = call_of(rig.unet, STEPS[index])
        if index < 2:
            ones = torch.ones(2, 16, 8, 8)
            call = replace(call, control=Control(input=(ones,), output=(None, None, None, ones)))
        rig.check(call, str(index < 2), expected)


def test_tiled_samplings_have_no_cached_pass() -> None:
    """Three calls at each timestep with the same prompt and size, as tiled samplers make them: nothing shows to which
    tile a feature belongs. DeepCache's reason names tiles."""
    rig = Rig()
    rig.begin()
    for time in STEPS:
        for tile in range(3):
            rig.run(call_of(rig.unet, time, seed=tile))
    assert "cached" not in rig.log and "tiles" in rig.reason


# --- between samplings --------------------------------------------------------------------------------------------


def test_every_sampling_begins_with_a_full_pass() -> None:
    """The first sampling is interrupted after five steps. The second is img2img, which begins in the middle of the
    schedule and uses no feature of the first. In the third, which the host does not announce, DeepCache is inactive."""
    rig = Rig()
    rig.begin(STEPS)
    assert rig.sample(STEPS[:5]) == passes([0, 3], 5)
    rig.begin(STEPS)
    assert rig.sample(STEPS[12:]) == passes([0, 3, 6, 7], 8) and memories(rig)
    rig.runtime.end_sampling()
    assert set(rig.sample(STEPS[2:5])) == {"whole"} and not memories(rig)
    assert rig.reason == f"DeepCache is inactive: {UNANNOUNCED}"


def test_a_refiner_begins_with_a_full_pass() -> None:
    """The refiner is another UNet, which computes the last 12 steps of a sampling announced for the base UNet. Its
    first pass is full because it has no feature yet; its further passes are as scheduled for the whole sampling."""
    base = Rig(SMALL_XL)
    refiner = Rig(SMALL, seed=1, runtime=base.runtime)
    for _ in range(2):
        base.begin(STEPS)
        assert base.sample(STEPS[:8]) == passes([0, 3, 6], 8)
        # The host does not announce the sampling of the refiner.
        refiner.log.clear()
        for index, time in enumerate(STEPS[8:]):
            refiner.check(call_of(refiner.unet, time), "a", "full" if index in (0, 1, 4, 7, 10, 11) else "cached")


@pytest.mark.parametrize("path", ["down_blocks.0.resnets.0.conv1", "mid_block.resnets.0.conv1"])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_step_after_a_change_of_weights_is_a_full_pass(path: str, in_place: bool) -> None:
    """The change comes before step 2, which would be a cached pass without it. path: a layer of the shallow or the deep
    part of the UNet. in_place: whether its weight is edited in place or replaced by another tensor."""
    rig = Rig()
    rig.begin()
    rig.sample(STEPS[:2])
    for unet in (rig.unet, rig.oracle.unet):
        layer = unet.get_submodule(path)
        with torch.no_grad():
            if in_place:
                layer.weight.mul_(1.5)
            else:
                layer.weight.data = layer.weight.data * 1.5
    assert rig.sample(STEPS[2:5]) == ["full", "full", "cached"]


def test_release_memory_frees_the_features_so_that_the_next_step_is_a_full_pass() -> None:
    """It is called before step 2, which would be a cached pass without it."""
    rig = Rig()
    rig.begin()
    rig.sample(STEPS[:2])
    rig.runtime.release_memory()
    assert not memories(rig)
    assert rig.sample(STEPS[2:5]) == ["full", "full", "cached"]


# --- extrapolated features ----------------------------------------------------------------------------------------


def on_the_line(computed: list[tuple[int, Tensor]], step: int, slope: float) -> Tensor:
    """The feature extrapolated to a step from the last two of `computed`, a list of (step, feature); the only one if
    there is one."""
    if len(computed) < 2:
        return computed[-1][1]
    (step_before, before), (step_last, last) = computed[-2:]
    return last + slope * (step - step_last) / (step_last - step_before) * (last - before)


@pytest.mark.parametrize("config", [SMALL, SMALL_XL], ids=["SD1", "SDXL"])
@pytest.mark.parametrize(("solver", "interval", "slope"), [
    (Solver.FIRST_ORDER, 3, 0.5), (Solver.FIRST_ORDER, 2, 0.75), (Solver.MULTISTEP, 3, 0.5), (Solver.MULTISTEP, 2, 0.5),
    (Solver.OTHER, 2, 0.0), (Solver.UNKNOWN, 2, 0.0),
], ids=str)
def test_cached_passes_use_the_feature_of_their_prompt_extrapolated_as_the_sampler_allows(
    config: dict[str, Any], solver: Solver, interval: int, slope: float
) -> None:
    """Each output of the first 12 of 30 steps, at a CFG scale of 4, is compared with the Oracle's cached pass, whose
    feature is extrapolated from the last two of the same prompt. slope: the expected factor on the change between these
    two; 0 uses the last feature unchanged."""
    rig = Rig(config, deepcache_interval=interval)
    times = [float(time) for time in range(990, 0, -33)]
    rig.begin(times, solver=lambda: solver, guidance_scale=4.0)
    computed: dict[str, list[tuple[int, Tensor]]] = {"cat": [], "ugly": []}
    whole_steps = schedule_for("unet", 30, interval, 1).whole
    for step, expected in enumerate(passes(whole_steps, 12)):
        for name in computed:
            call = call_of(rig.unet, times[step], [name])
            output = rig.run(call)
            assert rig.log[-1] == expected
            if expected == "full":
                whole, feature = rig.oracle.whole(call)
                computed[name].append((step, feature))
                assert relative_error(output, whole) < 1e-5
            else:
                feature = on_the_line(computed[name], step, slope)
                assert relative_error(output, rig.oracle.shallow(call, feature)) < 1e-5
                reused = rig.oracle.shallow(call, computed[name][-1][1])
                assert (relative_error(output, reused) > 1e-4) is (slope > 0 and len(computed[name]) > 1)
