"""Samplings with too few steps to leave anything out: by their number, and by their CFG scale with it."""
from __future__ import annotations

from typing import Any

import pytest
from builders import SMALL
from test_public_api_pipelines import inputs, pipeline, quiet

import lib_onediff
from lib_onediff.core.timeline import FEW_STEP_MODEL, FEW_STEPS, Step
from lib_onediff.runtime.runtime import runtime
from lib_onediff.steps.registry import step_policies

__all__ = ["quiet"]
NAME = "StableDiffusionPipeline"
CACHES: dict[str, dict[str, Any]] = {
    "deepcache": {"deepcache_interval": 3},
    "forecast": {"deepcache_interval": 3, "deepcache_depth": 0},
}
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]


@pytest.mark.parametrize(("total", "guidance_scale", "reason"), [
    (9, 7.0, FEW_STEPS), (9, 1.0, FEW_STEPS), (9, None, FEW_STEPS), (10, 7.0, ""), (10, None, ""),
    (10, 1.0, FEW_STEP_MODEL), (15, 0.0, FEW_STEP_MODEL), (15, 2.0, FEW_STEP_MODEL), (15, 2.1, ""), (16, 1.0, ""),
    (None, 1.0, ""),
])
def test_the_rule(total: int | None, guidance_scale: float | None, reason: str) -> None:
    assert Step(0, total, 0.0, False).why_too_few(guidance_scale) == reason


def compiled(config: dict[str, Any], **options: Any) -> Any:
    runtime.end_sampling()
    return lib_onediff.compile_pipe(pipeline(NAME, config), ignores=("vae",), **options)


def told(pipe: Any, cache: str, steps: int, scale: float, **more: Any) -> str:
    given = {**inputs(NAME, 64, 64), "num_inference_steps": steps, "guidance_scale": scale, **more}
    runtime.stepping.policies = step_policies()
    before = runtime.status()["forecast"]["calls"]
    pipe(**{**given, "output_type": "latent"})
    reason: str = lib_onediff.status()[cache]["reason"]
    spared = lib_onediff.status()["deepcache"]["cached"] + runtime.status()["forecast"]["calls"] - before
    assert bool(spared) is (reason == "")
    return reason.partition(" rests: ")[2]


@pytest.mark.parametrize("cache", CACHES)
def test_a_pipelines_guidance_scale(cache: str) -> None:
    pipe = compiled(SMALL, **CACHES[cache])
    assert told(pipe, cache, 12, 1.5) == FEW_STEP_MODEL
    assert told(pipe, cache, 12, 5.0) == ""
    assert told(pipe, cache, 16, 1.5) == ""
