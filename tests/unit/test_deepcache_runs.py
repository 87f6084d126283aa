"""DeepCache in samplings as hosts make them: which calls are whole, and what the others answer."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from builders import SD1, SDXL, SMALL, SMALL_XL, diffusers_output, diffusers_unet, relative_error
from deepcache_builders import (  # noqa: F401
    EVERY_THIRD,
    STEPS,
    Rig,
    call_of,
    equal_distances,
    feature_bytes,
    few_steps_suffice,
    passes,
)
from grid import grid

from lib_onediff.core.call import Control
from lib_onediff.core.sampling import UNANNOUNCED
from lib_onediff.options.settings import Settings
from lib_onediff.steps.prompts import PromptNumbers


@pytest.mark.parametrize("config", [SD1, SDXL], ids=["SD1", "SDXL"])
@pytest.mark.parametrize("depth", [1, 3, 11])
def test_a_sampling_at_every_depth(config: dict, depth: int) -> None:
    rig = Rig.of(config, deepcache_depth=depth)
    rig.oracle.depth = min(depth, 11 if config is SD1 else 8)
    rig.begin(STEPS[:7])
    for time, deepcache in zip(STEPS, passes([0, 3, 6], 7), strict=False):
        rig.check(call_of(rig.unet, time), "a", deepcache)


def test_interval_one_is_exact_and_keeps_nothing() -> None:
    rig, plain = Rig.of(deepcache_interval=1), Rig.of(deepcache_interval=1)
    rig.begin()
    plain.begin()
    for time in STEPS:
        call = call_of(rig.unet, time)
        assert torch.equal(rig.run(call), plain.run(call))
        assert relative_error(rig.run(call), diffusers_output(rig.unet, call)) < 1e-5
    assert set(rig.log) == {"whole"}
    assert feature_bytes(rig) == 0
    assert rig.runtime.status()["deepcache"] == {"full": 0, "cached": 0, "reason": "", "reused": ""}


@grid(interval=[2, 3, 5, 20], total=[20, 7, 1, 2])
def test_the_deep_part_is_computed_exactly_as_scheduled(interval: int, total: int) -> None:
    rig = Rig.of(deepcache_interval=interval)
    for _ in range(2):
        rig.begin(STEPS[:total])
        found = rig.sample(STEPS[:total])
        assert found == passes([*range(0, total, interval), total - 1], total)
        assert found.count("full") == math.ceil(total / interval) + bool((total - 1) % interval)
    counted = rig.runtime.status()["deepcache"]
    assert counted["full"] + counted["cached"] == 2 * total


def test_without_a_hosts_help_the_last_step_is_whole_too() -> None:
    rig = Rig.of()
    rig.begin(None)
    assert rig.sample(STEPS) == passes([0, 3, 6, 9, 12, 15, 18, 19], 20)


# --- prompts and batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [77, 154])
@pytest.mark.parametrize("config", [SMALL, SMALL_XL], ids=["SD1", "SDXL"])
def test_prompt_and_negative_prompt_in_calls_of_their_own(config: dict, tokens: int) -> None:
    """Of the same length or not: each reads its own feature."""
    rig = Rig.of(config)
    rig.begin(STEPS[:8])
    for time, deepcache in zip(STEPS, passes([0, 3, 6, 7], 8), strict=False):
        rig.check(call_of(rig.unet, time, ["cat"]), "cat", deepcache)
        rig.check(call_of(rig.unet, time, ["ugly"], tokens=tokens), "ugly", deepcache)


def test_a_batch_that_changes_inside_a_sampling() -> None:
    """The negative prompt is left out at some steps, and is split off at others: what is new is whole."""
    rig = Rig.of()
    rig.begin(STEPS[:10])
    both, alone = ["cat", "ugly"], ["cat"]
    calls = [(both, "full"), (both, "cached"), (alone, "full"), (alone, "full"), (both, "full"), (alone, "cached"),
             (alone, "full"), (both, "full"), (both, "cached"), (both, "full")]
    for time, (names, deepcache) in zip(STEPS, calls, strict=False):
        rig.check(call_of(rig.unet, time, names), "+".join(names), deepcache)


def test_a_prompt_that_changes_inside_a_sampling() -> None:
    rig = Rig.of()
    rig.begin(STEPS[:8])
    names = ["cat", "cat", "dog", "dog", "dog", "cat", "cat", "cat"]
    expected = ["full", "cached", "full", "full", "cached", "full", "full", "full"]
    for time, name, deepcache in zip(STEPS, names, expected, strict=False):
        rig.check(call_of(rig.unet, time, [name, "ugly"]), name, deepcache)


def test_words_that_take_turns_read_features_of_their_own() -> None:
    rig = Rig.of(deepcache_interval=4)
    rig.begin(STEPS[:9])
    expected = ["full", "full", "cached", "cached", "full", "full", "cached", "cached", "full"]
    for index, deepcache in enumerate(expected):
        name = ("cat", "dog")[index % 2]
        rig.check(call_of(rig.unet, STEPS[index], [name, "ugly"]), name, deepcache)


def test_sizes_do_not_read_each_others_features() -> None:
    rig = Rig.of()
    rig.begin(STEPS[:6])
    for time, deepcache in zip(STEPS, passes([0, 3, 5], 6), strict=False):
        for size in (8, 9):
            rig.check(call_of(rig.unet, time, size=size), str(size), deepcache)


def test_control_that_ends_inside_a_sampling_makes_the_next_step_whole() -> None:
    # The host of these tests adds no residuals.
    rig = Rig.of(verify=False)
    rig.begin(STEPS[:6])
    for index, deepcache in enumerate(["full", "cached", "full", "full", "cached", "full"]):
        call = call_of(rig.unet, STEPS[index])
        if index < 2:
            ones = torch.ones(2, 16, 8, 8)
            call = replace(call, control=Control(input=(ones,), output=(None, None, None, ones)))
        rig.check(call, str(index < 2), deepcache)


def test_features_of_a_batch_with_several_timesteps_are_not_used() -> None:
    rig = Rig.of()
    rig.begin()
    call = call_of(rig.unet, 951.0)
    rig.run(replace(call, timestep=torch.tensor([951.0, 901.0])))
    assert rig.log == ["whole"] and "different steps" in rig.reason


# --- samplers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [True, False])
def test_heun_calls_twice_at_a_timestep(announced: bool) -> None:
    times = [STEPS[0], *(time for time in STEPS[1:10] for _ in range(2))]
    rig = Rig.of()
    rig.begin(STEPS[:10] if announced else None)
    rig.log.clear()
    steps = [STEPS.index(time) for time in times]
    for time, step in zip(times, steps, strict=True):
        rig.check(call_of(rig.unet, time, seed=len(rig.log)), "a", "full" if step in (0, 3, 6, 9) else "cached")
    assert rig.reason == ""


def test_a_second_call_between_two_steps_goes_as_the_first() -> None:
    """DPM2 and DPM++ SDE, with prompt and negative prompt apart."""
    rig = Rig.of()
    known = STEPS[:8]
    rig.begin(known)
    for index, time in enumerate(known):
        deepcache = "full" if index in (0, 3, 6, 7) else "cached"
        for moment in (time, time - 23.4)[:1 + (index < 7)]:
            for name in ("cat", "ugly"):
                rig.check(call_of(rig.unet, moment, [name]), name, deepcache)


def test_a_sampler_that_goes_back_up_begins_with_a_whole_step() -> None:
    """Restart, and a step that DPM adaptive rejects."""
    rig = Rig.of()
    rig.begin(STEPS)
    expected = ["full", "cached", "cached", "full", "cached", "full", "cached", "full"]
    for index, deepcache in zip([0, 1, 2, 3, 4, 1, 2, 3], expected, strict=True):
        rig.check(call_of(rig.unet, STEPS[index]), "a", deepcache)


def test_tiles_are_noticed_and_every_step_is_whole() -> None:
    rig = Rig.of()
    rig.begin()
    for time in STEPS:
        for tile in range(3):
            rig.run(call_of(rig.unet, time, seed=tile))
    assert "cached" not in rig.log and "tiles" in rig.reason


# --- between samplings --------------------------------------------------------------------------------------------


def test_a_new_sampling_begins_with_a_whole_step_wherever_the_last_one_ended() -> None:
    """Interrupted; then img2img, whose timesteps go on where the others stopped."""
    rig = Rig.of()
    rig.begin(STEPS)
    assert rig.sample(STEPS[:5]) == passes([0, 3], 5)
    rig.begin(STEPS)
    assert rig.sample(STEPS[12:]) == passes([0, 3, 6, 7], 8)


def test_settings_that_change_begin_anew() -> None:
    rig = Rig.of()
    rig.begin()
    rig.sample(STEPS[:2])
    rig.runtime.configure(Settings(**EVERY_THIRD, deepcache_depth=2))
    rig.oracle.depth = 2
    rig.check(call_of(rig.unet, STEPS[2]), "a", "full")
    rig.runtime.configure(Settings())
    rig.run(call_of(rig.unet, STEPS[3]))
    assert rig.log[-1] == "whole" and feature_bytes(rig) == 0


def test_the_hires_pass_does_as_the_first_or_without() -> None:
    rig = Rig.of(deepcache_hires="off")
    rig.begin()
    assert rig.sample(STEPS[:6]) == passes([0, 3], 6)
    rig.begin(second_pass=True)
    assert set(rig.sample(STEPS[10:])) == {"whole"}
    rig.runtime.configure(Settings(**EVERY_THIRD))
    rig.begin(second_pass=True)
    assert rig.sample(STEPS[10:]) == passes([0, 3, 6, 9], 10)


def test_a_refiner_begins_with_a_whole_step_and_the_last_step_is_its_own() -> None:
    base = Rig.of(SMALL_XL)
    refiner = Rig.of(SMALL, seed=1, runtime=base.runtime)
    for _ in range(2):
        base.begin(STEPS)
        assert base.sample(STEPS[:8]) == passes([0, 3, 6], 8)
        # Nobody announces the second UNet.
        refiner.log.clear()
        for index, time in enumerate(STEPS[8:]):
            refiner.check(call_of(refiner.unet, time), "a", "full" if index in (0, 1, 4, 7, 10, 11) else "cached")


@pytest.mark.parametrize("path", ["down_blocks.0.resnets.0.conv1", "mid_block.resnets.0.conv1"])
@pytest.mark.parametrize("in_place", [True, False])
def test_weights_that_change_inside_a_sampling_make_the_next_step_whole(path: str, in_place: bool) -> None:
    rig = Rig.of()
    rig.begin()
    rig.sample(STEPS[:2])
    for unet in (rig.unet, rig.oracle.unet):
        layer = unet.get_submodule(path)
        with torch.no_grad():
            if in_place:
                layer.weight.mul_(1.5)
            else:
                layer.weight.data = layer.weight.data * 1.5
    rig.run(call_of(rig.unet, STEPS[2]))
    assert rig.log[-1] == "full"
    rig.run(call_of(rig.unet, STEPS[3]))
    rig.run(call_of(rig.unet, STEPS[4]))
    assert rig.log[-2:] == ["full", "cached"]


def test_where_nobody_says_when_a_sampling_begins_every_step_is_whole() -> None:
    rig = Rig.of()
    assert set(rig.sample(STEPS[:6])) == {"whole"} and rig.reason == f"DeepCache rests: {UNANNOUNCED}"
    rig.begin()
    assert rig.sample(STEPS[:2]) == ["full", "cached"] and feature_bytes(rig) > 0
    # The next timesteps would go on where these stopped.
    rig.runtime.end_sampling()
    assert set(rig.sample(STEPS[2:5])) == {"whole"} and feature_bytes(rig) == 0


def test_a_release_gives_the_features_back() -> None:
    rig = Rig.of()
    rig.begin()
    rig.sample(STEPS[:2])
    assert feature_bytes(rig) > 0
    rig.runtime.release_memory()
    assert feature_bytes(rig) == 0
    assert rig.sample(STEPS[2:5]) == ["full", "full", "cached"]


def test_prompts_known_by_their_content_are_counted_and_given_back() -> None:
    call, prompts = call_of(diffusers_unet(**SMALL_XL), STEPS[0]), PromptNumbers()
    first = prompts.number(call.context, call.y)
    assert prompts.bytes() == call.context.nbytes + call.y.nbytes
    assert prompts.number(call.context.clone(), call.y.clone()) == first


def test_a_reason_of_the_hosts_is_passed_on() -> None:
    rig = Rig.of()
    rig.begin(why_not="this sampler chooses its steps while it runs")
    assert set(rig.sample(STEPS[:4])) == {"whole"}
    assert rig.reason == "DeepCache rests: this sampler chooses its steps while it runs"
