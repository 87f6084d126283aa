"""Pictures of diffusers pipelines with DeepCache: ours and those of its authors' package, on the same steps."""
from __future__ import annotations

from typing import Any

import pytest
from builders import SD1, SDXL, relative_error
from deepcache_builders import equal_distances, few_steps_suffice
from grid import grid
from test_public_api_pipelines import inputs, pipeline, quiet
from torch import Tensor

import lib_onediff

package = pytest.importorskip("DeepCache", reason="the package DeepCache is not installed")
__all__ = ["equal_distances", "few_steps_suffice", "quiet"]
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]


def latents(pipe: Any, steps: int, size: int = 64) -> Tensor:
    given = inputs(type(pipe).__name__, size, size)
    return pipe(**{**given, "num_inference_steps": steps, "output_type": "latent"}).images


def theirs(pipe: Any, steps: int, interval: int, branch: int) -> Tensor:
    helper = package.DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=interval, cache_branch_id=branch)
    helper.enable()
    try:
        return latents(pipe, steps)
    finally:
        helper.disable()


def ours(pipe: Any, steps: int, interval: int, branch: int) -> Tensor:
    lib_onediff.compile_pipe(pipe, ignores=("vae",), deepcache_interval=interval, deepcache_depth=branch + 1)
    try:
        return latents(pipe, steps)
    finally:
        lib_onediff.uncompile_pipe(pipe)


@grid(layout=[SD1, SDXL], interval=[2, 3], branch=[0, 2, 5])
def test_the_same_picture_as_the_packages(layout: dict[str, Any], branch: int, interval: int) -> None:
    """Seven steps: the package's schedule of 2 and of 3 ends with a whole step. A sampler of a higher order has no line
    through features."""
    name = "StableDiffusionXLPipeline" if layout is SDXL else "StableDiffusionPipeline"
    pipe = pipeline(name, layout, "DPMSolverMultistepScheduler")
    before = lib_onediff.status()["deepcache"]
    exact, expected = latents(pipe, 7), theirs(pipe, 7, interval, branch)
    found = ours(pipe, 7, interval, branch)
    assert relative_error(found, expected) < 1e-4
    assert relative_error(expected, exact) > 1e-3
    after = lib_onediff.status()["deepcache"]
    assert (after["full"] - before["full"], after["cached"] - before["cached"]) == {2: (4, 3), 3: (3, 4)}[interval]
