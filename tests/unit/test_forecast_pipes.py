"""Output forecast in diffusers pipelines: by which schedulers, and why not."""
from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from builders import SMALL
from test_public_api_pipelines import inputs, pipeline, quiet

import lib_onediff
from lib_onediff.core.sampling import UNANNOUNCED, UNKNOWN_SAMPLER
from lib_onediff.runtime.runtime import runtime

__all__ = ["quiet"]
NAME, STEPS = "StableDiffusionPipeline", 12
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]


def latents(pipe: Any) -> torch.Tensor:
    return pipe(**{**inputs(NAME, 64, 64), "num_inference_steps": STEPS, "output_type": "latent"})[0]


def drawn(scheduler: str, arguments: dict[str, Any], **options: Any) -> tuple[torch.Tensor, int]:
    """The latents, and how many UNet calls were forecast."""
    pipe = pipeline(NAME, SMALL)
    pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config, **arguments)
    lib_onediff.compile_pipe(pipe, ignores=("vae",), **options)
    before = runtime.status()["forecast"]["calls"]
    return latents(pipe), runtime.status()["forecast"]["calls"] - before


@pytest.mark.parametrize(("scheduler", "arguments", "forecasts"), [
    ("EulerDiscreteScheduler", {}, 6), ("EulerDiscreteScheduler", {"use_karras_sigmas": True}, 6),
    ("DDIMScheduler", {}, 6), ("EulerAncestralDiscreteScheduler", {}, 0), ("DPMSolverMultistepScheduler", {}, 0),
    ("HeunDiscreteScheduler", {}, 0),
])
def test_schedulers_of_the_first_order(scheduler: str, arguments: dict[str, Any], forecasts: int) -> None:
    exact, none = drawn(scheduler, arguments)
    found, count = drawn(scheduler, arguments, deepcache_interval=3, deepcache_depth=0)
    assert (none, count) == (0, forecasts)
    distance = float((found - exact).norm() / exact.norm())
    reason = lib_onediff.status()["forecast"]["reason"]
    if forecasts:
        assert distance > 1e-4 and reason == ""
    else:
        assert distance < 1e-5 and "Euler and DDIM" in reason


def test_a_unet_alone_knows_no_sampler() -> None:
    # Of what another test has announced, this knows nothing.
    runtime.end_sampling()
    pipe = pipeline(NAME, SMALL)
    lib_onediff.compile_unet(pipe.unet, deepcache_interval=3, deepcache_depth=0)
    before = runtime.status()["forecast"]["calls"]
    latents(pipe)
    assert lib_onediff.status()["forecast"]["reason"] == f"Output forecast rests: {UNANNOUNCED}"
    with lib_onediff.sampling(pipe.unet):
        latents(pipe)
    assert lib_onediff.status()["forecast"]["reason"] == f"Output forecast rests: {UNKNOWN_SAMPLER}"
    assert runtime.status()["forecast"]["calls"] == before
