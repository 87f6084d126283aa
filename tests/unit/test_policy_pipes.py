"""Step policies in diffusers' pipelines: skipping the negative prompt, output forecast, and samplings of too few
steps."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from builders import LCM, SMALL, SMALL_XL, a_call, diffusers_unet, relative_error, served
from test_diffusers_patches import images, load_ip_adapters
from test_public_api_pipelines import inputs, pipeline, quiet
from torch import Tensor

import lib_onediff
from lib_onediff.core.call import half_of
from lib_onediff.core.sampling import FEW_STEP_MODEL, FEW_STEPS, UNANNOUNCED, Solver, Step
from lib_onediff.hosts.diffusers.module_forward import arguments_by_name
from lib_onediff.hosts.diffusers.schedule import solver_of
from lib_onediff.hosts.diffusers.unet import (
    NO_GUIDANCE,
    NO_PIPELINE,
    UNKNOWN_HALVES,
    DiffusersForward,
    arguments_of_prompt,
)
from lib_onediff.runtime.runtime import runtime
from lib_onediff.steps.forecast import UNKNOWN_SAMPLER
from lib_onediff.steps.registry import step_policies

__all__ = ["quiet"]
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]
STEPS = 12


class Called(NamedTuple):
    """A UNet call of a pipeline, and its output."""

    given: dict[str, Any]
    output: Tensor


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Called]:
    found: list[Called] = []
    serve = DiffusersForward.serve

    def noted(self: DiffusersForward, original: Any, host: Any, unet: Any, *args: Any, **kwargs: Any) -> Any:
        answer = serve(self, original, host, unet, *args, **kwargs)
        given = arguments_by_name(unet, original, args, kwargs)
        given.pop("return_dict", None)
        found.append(Called(given, answer[0]))
        return answer

    monkeypatch.setattr(DiffusersForward, "serve", noted)
    return found


def generate(pipe: Any, steps: int = STEPS, **more: Any) -> Tensor:
    given = inputs(type(pipe).__name__, 64, 64)
    images: Tensor = pipe(**{**given, "num_inference_steps": steps, "output_type": "latent", **more})[0]
    return images


def skipped() -> tuple[int, str]:
    """The number of calls without the negative prompt, and why there were no others."""
    now = lib_onediff.status()["guidance"]
    return now["without_negative"], now["reason"]


def compiled(name: str, layout: dict[str, Any], **options: Any) -> Any:
    runtime.stepping.policies = step_policies()
    return lib_onediff.compile_pipe(pipeline(name, layout), ignores=("vae",), **{"skip_negative_after": 50, **options})


@pytest.mark.parametrize(("name", "layout", "more", "skips"), [
    ("StableDiffusionXLImg2ImgPipeline", SMALL_XL, {"steps": 16}, 6),
    ("StableDiffusionInpaintPipeline", SMALL, {"steps": 16}, 6),
    ("StableDiffusionPipeline", SMALL, {"num_images_per_prompt": 2}, 6),
])
def test_calls_that_skip_the_negative_prompt_are_close_to_diffusers_for_the_rows_of_the_prompt(
    name: str, layout: dict[str, Any], more: dict[str, Any], skips: int, called: list[Called]
) -> None:
    """skips: how many of the 12 calls, the last ones, compute only the prompt's rows. Each output is compared with
    diffusers' own forward: for these calls, of the prompt's rows, repeated for both halves of the batch."""
    oracle = diffusers_unet(**layout, sample_size=8)
    found = generate(compiled(name, layout), **more)
    assert skipped() == (skips, "") and len(called) == 12
    for index, (given, output) in enumerate(called):
        batch = given["sample"].shape[0]
        rows = half_of(batch, is_first=False)
        with torch.no_grad():
            if index < 12 - skips:
                expected = oracle(**given, return_dict=False)[0]
            else:
                expected = oracle(**arguments_of_prompt(given, rows), return_dict=False)[0].repeat(2, 1, 1, 1)
        assert relative_error(output, expected) < 1e-5, index
    exact = generate(compiled(name, layout, skip_negative_after=0), **more)
    assert skipped() == (0, "") and relative_error(found, exact) > 1e-3


def test_in_calls_that_skip_the_negative_prompt_an_ip_adapter_gets_only_the_image_of_the_prompt(
    called: list[Called]
) -> None:
    """The negative prompt's image embedding is zero. Outputs are compared with diffusers' own forward: in the last 6 of
    12 calls, of the prompt's rows."""
    pipe = compiled("StableDiffusionPipeline", SMALL)
    oracle = diffusers_unet(**SMALL, sample_size=8)
    load_ip_adapters(pipe.unet, "plain")
    load_ip_adapters(oracle, "plain")
    (embedding,) = images("plain")
    generate(pipe, ip_adapter_image_embeds=[torch.cat([torch.zeros_like(embedding[:1]), embedding[:1]])])
    assert skipped() == (6, "")
    for index, (given, output) in enumerate(called):
        batch = given["sample"].shape[0]
        alone = arguments_of_prompt(given, half_of(batch, is_first=False))
        with torch.no_grad():
            expected = oracle(**(given if index < 6 else alone), return_dict=False)[0]
        assert relative_error(output[-len(expected):], expected) < 1e-5, index


@pytest.mark.parametrize(("layout", "more"), [(SMALL, {"guidance_scale": 1.0}), (LCM, {})], ids=["off", "distilled"])
def test_without_guidance_there_is_no_negative_prompt_to_skip(layout: dict[str, Any], more: dict[str, Any]) -> None:
    """Guidance is off at a scale of 1, and in a distilled model such as LCM."""
    generate(compiled("StableDiffusionPipeline", layout), steps=16, **more)
    assert skipped() == (0, f"Skipping the negative prompt is inactive: {NO_GUIDANCE}")


def test_in_a_pipeline_of_an_unknown_class_the_negative_prompt_is_computed() -> None:
    """OneDiff knows by the pipeline's class which rows of the batch are the negative prompt's."""
    pipe = pipeline("StableDiffusionPipeline", SMALL)

    class OwnPipeline(type(pipe)):
        pass

    pipe.__class__ = OwnPipeline
    lib_onediff.compile_pipe(pipe, ignores=("vae",), skip_negative_after=50)
    generate(pipe)
    assert skipped()[1] == f"Skipping the negative prompt is inactive: {UNKNOWN_HALVES}"


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "torch.compile"])
def test_without_a_pipeline_the_negative_prompt_is_computed(wrapped: bool) -> None:
    """lib_onediff.sampling() announces a sampling of a UNet without a pipeline. wrapped: it is given the result of
    torch.compile."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL), skip_negative_after=50)
    call = replace(a_call(unet), timestep=torch.full((2,), 500.0))
    with lib_onediff.sampling(torch.compile(unet) if wrapped else unet, range(999, 0, -50)):
        served(unet, call)
    assert skipped()[1] == f"Skipping the negative prompt is inactive: {NO_PIPELINE}"
    served(unet, call)
    assert skipped()[1] == f"Skipping the negative prompt is inactive: {UNANNOUNCED}"


# --- forecasts --------------------------------------------------------------------------------------------------------


def drawn(scheduler: str, arguments: dict[str, Any], **options: Any) -> tuple[Tensor, int]:
    """The latents of a generation, and the number of its forecast outputs."""
    pipe = pipeline("StableDiffusionPipeline", SMALL)
    pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config, **arguments)
    lib_onediff.compile_pipe(pipe, ignores=("vae",), **options)
    before = runtime.status()["forecast"]["calls"]
    return generate(pipe), runtime.status()["forecast"]["calls"] - before


@pytest.mark.parametrize(("scheduler", "arguments", "forecasts"), [
    ("EulerDiscreteScheduler", {}, 6), ("EulerDiscreteScheduler", {"use_karras_sigmas": True}, 6),
    ("DDIMScheduler", {}, 6), ("EulerAncestralDiscreteScheduler", {}, 0), ("DPMSolverMultistepScheduler", {}, 0),
    ("HeunDiscreteScheduler", {}, 0),
])
def test_only_first_order_schedulers_without_noise_have_forecasts(
    scheduler: str, arguments: dict[str, Any], forecasts: int
) -> None:
    """forecasts: how many of 12 outputs are forecast. Latents are compared with those without forecasts."""
    exact, none = drawn(scheduler, arguments)
    found, count = drawn(scheduler, arguments, deepcache_interval=3, deepcache_depth=0)
    assert (none, count) == (0, forecasts)
    distance = float((found - exact).norm() / exact.norm())
    reason = lib_onediff.status()["forecast"]["reason"]
    if forecasts:
        assert distance > 1e-4 and reason == ""
    else:
        assert distance < 1e-5 and "Euler and DDIM" in reason


@pytest.mark.parametrize(("scheduler", "arguments", "solver"), [
    ("EulerDiscreteScheduler", {}, Solver.FIRST_ORDER), ("DDIMScheduler", {}, Solver.FIRST_ORDER),
    ("FlowMatchEulerDiscreteScheduler", {}, Solver.FIRST_ORDER),
    ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, Solver.OTHER),
    ("DPMSolverMultistepScheduler", {}, Solver.MULTISTEP),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, Solver.OTHER),
    ("DPMSolverMultistepScheduler", {"solver_order": 3}, Solver.OTHER),
    ("EulerAncestralDiscreteScheduler", {}, Solver.OTHER), ("HeunDiscreteScheduler", {}, Solver.OTHER),
])
def test_the_solver_of_a_scheduler_is_known_by_its_class_and_configuration(
    scheduler: str, arguments: dict[str, Any], solver: Solver
) -> None:
    """Schedulers that add noise, or compute with more outputs than the last two, have another solver; no scheduler has
    an unknown one."""
    assert solver_of(getattr(diffusers, scheduler)(**arguments)) is solver
    assert solver_of(None) is Solver.UNKNOWN


def test_without_a_pipeline_no_output_is_forecast() -> None:
    """Only the UNet is compiled, so OneDiff does not know the sampler, even within an announced sampling."""
    pipe = pipeline("StableDiffusionPipeline", SMALL)
    lib_onediff.compile_unet(pipe.unet, deepcache_interval=3, deepcache_depth=0)
    before = runtime.status()["forecast"]["calls"]
    generate(pipe)
    assert lib_onediff.status()["forecast"]["reason"] == f"Output forecast is inactive: {UNANNOUNCED}"
    with lib_onediff.sampling(pipe.unet, range(1000, 0, -50)):
        generate(pipe)
    assert lib_onediff.status()["forecast"]["reason"] == f"Output forecast is inactive: {UNKNOWN_SAMPLER}"
    assert runtime.status()["forecast"]["calls"] == before


# --- too few steps ----------------------------------------------------------------------------------------------------


CACHES: dict[str, dict[str, Any]] = {
    "deepcache": {"deepcache_interval": 3}, "forecast": {"deepcache_interval": 3, "deepcache_depth": 0},
}


@pytest.mark.parametrize(("total", "guidance_scale", "reason"), [
    (9, 7.0, FEW_STEPS), (9, 1.0, FEW_STEPS), (9, None, FEW_STEPS), (10, 7.0, ""), (10, None, ""),
    (10, 1.0, FEW_STEP_MODEL), (15, 0.0, FEW_STEP_MODEL), (15, 2.0, FEW_STEP_MODEL), (15, 2.1, ""), (16, 1.0, ""),
])
def test_policies_need_10_steps_and_16_at_a_guidance_scale_of_a_few_step_model(
    total: int, guidance_scale: float | None, reason: str
) -> None:
    """Up to a guidance scale of 2, the model is taken for one that is distilled to few steps, such as LCM or Turbo.
    total: the number of steps. reason: why policies are inactive; "" if they are active."""
    assert Step(0, total, 0.0, False).why_too_few(guidance_scale) == reason


def why_whole(pipe: Any, cache: str, steps: int, scale: float) -> str:
    """Make an image, and return why no step of it was cached or forecast; "" if one was."""
    runtime.stepping.policies = step_policies()
    before = runtime.status()["forecast"]["calls"]
    generate(pipe, steps, guidance_scale=scale)
    reason: str = lib_onediff.status()[cache]["reason"]
    spared = lib_onediff.status()["deepcache"]["cached"] + runtime.status()["forecast"]["calls"] - before
    assert bool(spared) is (reason == "")
    return reason.partition(" is inactive: ")[2]


@pytest.mark.parametrize("cache", CACHES)
def test_the_guidance_scale_of_a_pipeline_decides_how_many_steps_policies_need(cache: str) -> None:
    """cache: the policy."""
    pipe = compiled("StableDiffusionPipeline", SMALL, skip_negative_after=0, **CACHES[cache])
    assert why_whole(pipe, cache, 12, 1.5) == FEW_STEP_MODEL
    assert why_whole(pipe, cache, 12, 5.0) == ""
    assert why_whole(pipe, cache, 16, 1.5) == ""
