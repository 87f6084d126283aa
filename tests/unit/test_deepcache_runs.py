"""DeepCache in samplings: which calls are full and which are cached passes, and their outputs."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from builders import SMALL, SMALL_XL, relative_error
from grid import grid
from samplings import (  # noqa: F401
    STEPS,
    Rig,
    call_of,
    equal_distances,
    few_steps_suffice,
    memories,
    passes,
)
from torch import Tensor

from lib_onediff.core.sampling import UNANNOUNCED
from lib_onediff.families.unet.call import Control
from lib_onediff.steps.schedules import SLOPE

BOTH = ("cat", "ugly")
ALONE = ("cat",)
DOG = ("dog", "ugly")


@grid(interval=[2, 3, 20], total=[20, 7, 1, 2])
def test_full_passes_are_computed_at_the_scheduled_steps(interval: int, total: int) -> None:
    """Every interval-th step and the last one. passes() lists "full" or "cached" for each step."""
    rig = Rig(deepcache_interval=interval)
    for _ in range(2):
        rig.begin(STEPS[:total])
        found = rig.sample(STEPS[:total])
        assert found == passes([*range(0, total, interval), total - 1], total)
        assert found.count("full") == math.ceil(total / interval) + bool((total - 1) % interval)
    counted = rig.runtime.status()["deepcache"]
    assert counted["full"] + counted["cached"] == 2 * total


class One(NamedTuple):
    """A call of a sampling, and the expected pass: "full" or "cached"."""

    time: float
    half: str
    names: Sequence[str] = BOTH
    size: int = 8
    tokens: int = 77


EIGHT = list(zip(STEPS, passes([0, 3, 6, 7], 8), strict=False))
HALVES = {
    "the negative prompt in a call of its own, and longer": [
        One(time, half, names, tokens=tokens)
        for time, half in EIGHT for names, tokens in ((ALONE, 77), (["ugly"], 154))
    ],
    # The negative prompt is left out at some steps, or a call of its own: each new combination begins with a full pass.
    "a batch that changes": [
        One(STEPS[index], half, names) for index, (names, half) in enumerate([
            (BOTH, "full"), (BOTH, "cached"), (ALONE, "full"), (ALONE, "full"), (BOTH, "full"), (ALONE, "cached"),
            (ALONE, "full"), (BOTH, "full"),
        ])
    ],
    "a prompt that changes": [
        One(STEPS[index], half, names) for index, (names, half) in enumerate([
            (BOTH, "full"), (BOTH, "cached"), (DOG, "full"), (DOG, "full"), (DOG, "cached"), (BOTH, "full"),
            (BOTH, "full"), (BOTH, "full"),
        ])
    ],
    "two sizes": [One(time, half, size=size) for time, half in EIGHT for size in (8, 9)],
    "Heun": [One(STEPS[0], "full"), *(One(time, half) for time, half in EIGHT[1:] for _ in range(2))],
    "DPM2 and DPM++ SDE": [
        One(moment, half, names) for time, half in EIGHT for moment in (time, time - 23.4)[: 1 + (time > STEPS[7])]
        for names in (ALONE, ["ugly"])
    ],
    # And a step that DPM adaptive rejects.
    "Restart": [
        One(STEPS[index], half) for index, half in zip(
            [0, 1, 2, 3, 4, 1, 2, 3],
            ["full", "cached", "cached", "full", "cached", "full", "cached", "full"], strict=True,
        )
    ],
}


@pytest.mark.parametrize("calls", HALVES.values(), ids=HALVES)
def test_calls_of_the_same_prompt_and_shape_share_a_feature_and_new_ones_are_full(calls: list[One]) -> None:
    """calls: those of a sampling, each with the expected pass. rig.check compares each output with the Oracle's, which
    has the feature of the same prompt."""
    rig = Rig(SMALL_XL)
    rig.begin(STEPS[:8])
    for number, (time, half, names, size, tokens) in enumerate(calls):
        call = call_of(rig.unet, time, names, size, tokens, seed=number)
        rig.check(call, f"{names} {size} {tokens}", half)
    assert rig.reason == ""


@pytest.mark.usefixtures("unchecked")
def test_a_controlnet_that_ends_makes_the_next_step_whole() -> None:
    """Steps 0 and 1 have residuals of a ControlNet, and step 2 has none: its features are others."""
    rig = Rig()
    rig.begin(STEPS[:6])
    for index, half in enumerate(["full", "cached", "full", "full", "cached", "full"]):
        call = call_of(rig.unet, STEPS[index])
        if index < 2:
            ones = torch.ones(2, 16, 8, 8)
            call = replace(call, control=Control(input=(ones,), output=(None, None, None, ones)))
        rig.check(call, str(index < 2), half)


def test_tiles_are_recognised_and_every_step_is_whole() -> None:
    """Three calls at each timestep with the same prompt and size, as tiled samplers make them: nothing shows which tile
    a feature is of."""
    rig = Rig()
    rig.begin()
    for time in STEPS:
        for tile in range(3):
            rig.run(call_of(rig.unet, time, seed=tile))
    assert "cached" not in rig.log and "tiles" in rig.reason


# --- between samplings --------------------------------------------------------------------------------------------


def test_every_sampling_begins_with_a_whole_step() -> None:
    """Three samplings: one after an interruption, img2img that begins where another one stopped, and one that the host
    does not announce, in which DeepCache is inactive."""
    rig = Rig()
    rig.begin(STEPS)
    assert rig.sample(STEPS[:5]) == passes([0, 3], 5)
    rig.begin(STEPS)
    assert rig.sample(STEPS[12:]) == passes([0, 3, 6, 7], 8) and memories(rig)
    rig.runtime.end_sampling()
    assert set(rig.sample(STEPS[2:5])) == {"whole"} and not memories(rig)
    assert rig.reason == f"DeepCache is inactive: {UNANNOUNCED}"


def test_a_refiner_begins_with_a_whole_step() -> None:
    """The refiner is another UNet, which gets the sampling's later steps without an announcement of its own. Its first
    step is full because it has no feature yet; the others are as scheduled for the whole sampling."""
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
def test_a_change_of_weights_makes_the_next_step_whole(path: str, in_place: bool) -> None:
    """Step 2 would be a cached pass. In both parts of the UNet, edited in place or replaced by another tensor."""
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


def test_releasing_memory_frees_the_features_and_makes_the_next_step_whole() -> None:
    rig = Rig()
    rig.begin()
    rig.sample(STEPS[:2])
    rig.runtime.release_memory()
    assert not memories(rig)
    assert rig.sample(STEPS[2:5]) == ["full", "full", "cached"]


# --- extrapolated features ----------------------------------------------------------------------------------------


def on_the_line(computed: list[tuple[int, Tensor]], step: int) -> Tensor:
    """The extrapolated feature of a step; the last one before two are known. computed: (step, feature)."""
    if len(computed) < 2:
        return computed[-1][1]
    (step_before, before), (step_last, last) = computed[-2:]
    return last + SLOPE * (step - step_last) / (step_last - step_before) * (last - before)


@pytest.mark.parametrize("config", [SMALL, SMALL_XL], ids=["SD1", "SDXL"])
def test_cached_passes_use_the_extrapolated_feature_of_their_prompt(config: dict) -> None:
    """Each output is compared with the Oracle's: its cached pass with the feature on the line through the last two of
    the same prompt. From the second one on, that is another output than with the last feature alone."""
    rig = Rig(config)
    rig.begin(STEPS[:11], why_no_forecast=lambda: "")
    computed: dict[str, list[tuple[int, Tensor]]] = {"cat": [], "ugly": []}
    for step, half in enumerate(passes([0, 3, 6, 9, 10], 11)):
        for name in computed:
            call = call_of(rig.unet, STEPS[step], [name])
            output = rig.run(call)
            assert rig.log[-1] == half
            if half == "full":
                whole, feature = rig.oracle.whole(call)
                computed[name].append((step, feature))
                assert relative_error(output, whole) < 1e-5
            else:
                assert relative_error(output, rig.oracle.shallow(call, on_the_line(computed[name], step))) < 1e-5
                reused = rig.oracle.shallow(call, computed[name][-1][1])
                assert (relative_error(output, reused) > 1e-4) is (len(computed[name]) > 1)
