"""DeepCache in compiled diffusers pipelines and in a user's own sampling loop: its arguments, and how it gets the
sampling's timesteps."""
from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import ONE_LAYER_A_BLOCK, SD1, SDXL, SMALL, a_call, diffusers_unet, relative_error, served
from grid import grid
from samplings import evenly_spaced, few_steps_suffice
from test_public_api_pipelines import inputs, pipeline, quiet

import lib_onediff
from lib_onediff.core.sampling import UNANNOUNCED, UNKNOWN_TIMES
from lib_onediff.runtime.runtime import runtime

__all__ = ["evenly_spaced", "few_steps_suffice", "quiet"]
NAME = "StableDiffusionPipeline"
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]


def picture(pipe: Any, steps: int = 7, **more: Any) -> torch.Tensor:
    """The final latent of a pipeline for a 64x64 image. more: arguments of the pipeline."""
    given = inputs(type(pipe).__name__, 64, 64)
    return pipe(**{**given, "num_inference_steps": steps, "output_type": "latent", **more})[0]


def full_and_cached() -> tuple[int, int]:
    """The numbers of full and of cached passes that the status has counted."""
    now = lib_onediff.status()["deepcache"]
    return now["full"], now["cached"]


def depths() -> set[int]:
    """The depths at which the table's shapes were cut into full and cached passes."""
    return {entry.key.depth for entry in runtime.table.entries() if entry.key.part}


@pytest.mark.parametrize(("config", "arguments", "depth"), [
    (SD1, {}, 2), (SD1, {"cache_layer_id": 1}, 5), (SD1, {"deepcache_depth": 7}, 7),
    (ONE_LAYER_A_BLOCK, {"cache_layer_id": 1}, 4),
])
def test_arguments_of_the_earlier_onediff_are_accepted(
    config: dict[str, Any], arguments: dict[str, int], depth: int
) -> None:
    """The earlier OneDiff's cache_interval, cache_block_id and cache_layer_id set our interval and depth. depth: the
    expected one. 7 steps at interval 3 are 3 full and 4 cached passes."""
    pipe = lib_onediff.compile_pipe(pipeline(NAME, config), ignores=("vae",), cache_interval=3, **arguments)
    picture(pipe)
    assert full_and_cached() == (3, 4) and depths() == {depth}


@pytest.mark.parametrize("wrong", [
    {"cache_interval": 0}, {"cache_interval": 2.5}, {"cache_interval": 3, "cache_block_id": 3},
    {"cache_interval": 3, "cache_layer_id": -1}, {"deepcache_depth": -1}, {"deepcache_depth": 12},
], ids=str)
def test_compile_pipe_refuses_wrong_deepcache_arguments_with_a_valueerror(wrong: dict[str, Any]) -> None:
    """The message names DeepCache or the argument."""
    pipe = pipeline(NAME, SMALL)
    with pytest.raises(ValueError, match="DeepCache|cache_layer_id|deepcache_"):
        lib_onediff.compile_pipe(pipe, ignores=("vae",), **wrong)


def test_an_image_after_an_interrupted_one_begins_with_a_full_pass() -> None:
    """The first image is interrupted after two of its eight steps. The second has full passes at the scheduled steps:
    it uses no feature of the first."""
    pipe = lib_onediff.compile_pipe(pipeline(NAME, SMALL), ignores=("vae",), cache_interval=4)

    def stop(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step >= 1
        return tensors

    picture(pipe, 8, callback_on_step_end=stop)
    assert full_and_cached() == (1, 1)
    picture(pipe, 8)
    # Full passes at steps 0, 4 and the last one.
    assert full_and_cached() == (1 + 3, 1 + 5)


def test_deepcache_uses_the_timesteps_of_a_scheduler_set_after_compile_pipe() -> None:
    """The last of the four steps must be a full pass. LCM's last timestep is far from zero, so only the new scheduler's
    timesteps tell which step is the last one."""
    from diffusers import LCMScheduler

    pipe = lib_onediff.compile_pipe(pipeline(NAME, SMALL), ignores=("vae",), cache_interval=4)
    pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
    picture(pipe, 4)
    assert full_and_cached() == (2, 2)


def test_in_a_loop_that_a_user_writes_deepcache_needs_an_announced_sampling_with_timesteps() -> None:
    """lib_onediff.sampling(unet, times) announces a sampling and its timesteps. Outside of it, or without times, the
    whole UNet computes every step, and DeepCache's reason says which of the two is missing."""
    unet = lib_onediff.compile_unet(diffusers_unet(), deepcache_interval=3)
    times = range(981, 0, -140)

    def sample() -> None:
        for time in times:
            served(unet, replace(a_call(unet), timestep=torch.full((2,), float(time))))

    for _ in range(2):
        with lib_onediff.sampling(unet, times):
            sample()
    assert full_and_cached() == (2 * 4, 2 * 4)
    for unknown, reason in (lib_onediff.sampling(unet), UNKNOWN_TIMES), (contextlib.nullcontext(), UNANNOUNCED):
        with unknown:
            sample()
        assert full_and_cached() == (2 * 4, 2 * 4) and lib_onediff.status()["deepcache"]["reason"].endswith(reason)


# --- the package of DeepCache's authors -------------------------------------------------------------------------------


def theirs(pipe: Any, steps: int, interval: int, branch: int) -> torch.Tensor:
    """The final latent with the package DeepCache, by the authors of the method."""
    package = pytest.importorskip("DeepCache", reason="the package DeepCache is not installed")
    helper = package.DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=branch)
    helper.enable()
    try:
        return picture(pipe, steps)
    finally:
        helper.disable()


def ours(pipe: Any, steps: int, interval: int, branch: int) -> torch.Tensor:
    """The final latent with OneDiff's DeepCache, at the depth that cuts the UNet where the package does."""
    lib_onediff.compile_pipe(pipe, ignores=("vae",), deepcache_interval=interval, deepcache_depth=branch + 1)
    try:
        return picture(pipe, steps)
    finally:
        lib_onediff.uncompile_pipe(pipe)


@grid(layout=[SD1, SDXL], interval=[2, 3], branch=[0, 2, 5])
def test_final_latents_are_close_to_those_of_the_package_by_the_authors_of_deepcache(
    layout: dict[str, Any], branch: int, interval: int
) -> None:
    """branch: the package's cache_branch_id. Seven steps, because the package's schedules for intervals 2 and 3 then
    end with a full pass, as ours always do. With UniPC, OneDiff reuses the deep feature unchanged, as the package does
    with every sampler."""
    name = "StableDiffusionXLPipeline" if layout is SDXL else "StableDiffusionPipeline"
    pipe = pipeline(name, layout, "UniPCMultistepScheduler")
    exact = picture(pipe)
    expected = theirs(pipe, 7, interval, branch)
    found = ours(pipe, 7, interval, branch)
    assert relative_error(found, expected) < 1e-4
    assert relative_error(expected, exact) > 1e-3
    assert full_and_cached() == {2: (4, 3), 3: (3, 4)}[interval]
