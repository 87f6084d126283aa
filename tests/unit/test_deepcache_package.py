"""Pictures of diffusers pipelines with DeepCache: ours and those of its authors' package, on the same steps."""
from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from builders import SD1, SDXL, relative_error
from deepcache_builders import evenly_spaced, few_steps_suffice
from grid import grid
from test_public_api_pipelines import inputs, pipeline, quiet
from torch import Tensor

import lib_onediff
from lib_onediff.hosts.diffusers import schedule as schedulers
from lib_onediff.model.deepcache import schedule
from lib_onediff.model.deepcache.schedule import early

package = pytest.importorskip("DeepCache", reason="the package DeepCache is not installed")
__all__ = ["evenly_spaced", "few_steps_suffice", "quiet"]
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]
PIPELINES = {
    "SD1": ("StableDiffusionPipeline", SD1), "SDXL": ("StableDiffusionXLPipeline", SDXL),
    "SD1 img2img": ("StableDiffusionImg2ImgPipeline", SD1), "SDXL img2img": ("StableDiffusionXLImg2ImgPipeline", SDXL),
}


@pytest.fixture(autouse=True)
def reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package reuses deep layers with every sampler."""
    monkeypatch.setattr(schedulers, "FIRST_ORDER", ())


def latents(pipe: Any, steps: int, size: int = 64) -> Tensor:
    given = inputs(type(pipe).__name__, size, size)
    return pipe(**{**given, "num_inference_steps": steps, "output_type": "latent"}).images


class At(package.DeepCacheSDHelper):
    """The package's own blocks, whole at steps of our choosing: its own schedule skips the last step."""

    whole: Collection[int] = ()

    def is_skip_step(self, block_i: int, layer_i: int, blocktype: str = "down") -> bool:
        if self.start_timestep is None:
            self.start_timestep = self.cur_timestep
        if self.cur_timestep - self.start_timestep in self.whole:
            return False
        before = self.params
        self.params = {**before, "skip_mode": "always"}
        try:
            return super().is_skip_step(block_i, layer_i, blocktype)
        finally:
            self.params = before


def theirs(pipe: Any, steps: int, interval: int, branch: int, whole: Collection[int] | None = None) -> Tensor:
    helper = (package.DeepCacheSDHelper if whole is None else At)(pipe=pipe)
    if whole is not None:
        helper.whole = whole
    helper.set_params(cache_interval=interval, cache_branch_id=branch)
    helper.enable()
    try:
        return latents(pipe, steps)
    finally:
        helper.disable()


def ours(pipe: Any, steps: int, interval: int, branch: int) -> Tensor:
    chosen = {"deepcache_interval": interval, "deepcache_depth": branch + 1}
    lib_onediff.compile_pipe(pipe, ignores=("vae",), **chosen)
    try:
        return latents(pipe, steps)
    finally:
        lib_onediff.uncompile_pipe(pipe)


def counted() -> dict[str, Any]:
    return lib_onediff.status()["deepcache"]


@pytest.fixture
def passes() -> Iterator[Any]:
    """How many full and shallow halves were computed since."""
    before = counted()
    yield lambda: (counted()["full"] - before["full"], counted()["cached"] - before["cached"])


@grid(
    scheduler=["DDIMScheduler", "EulerDiscreteScheduler"], interval=[2, 3], branch=[0, 1, 2, 3, 5], name=["SD1", "SDXL"]
)
def test_the_same_picture_as_the_packages(
    name: str, branch: int, interval: int, scheduler: str, passes: Any
) -> None:
    """Seven steps: the package's schedule of 2 and of 3 ends with a whole step."""
    pipe = pipeline(*PIPELINES[name], scheduler)
    exact, expected = latents(pipe, 7), theirs(pipe, 7, interval, branch)
    found = ours(pipe, 7, interval, branch)
    assert relative_error(found, expected) < 1e-4
    assert relative_error(expected, exact) > 1e-3
    assert passes() == {2: (4, 3), 3: (3, 4)}[interval]


@pytest.mark.parametrize("name", ["SD1 img2img", "SDXL img2img"])
def test_the_same_picture_as_the_packages_from_an_image(name: str, passes: Any) -> None:
    """Nine steps at a strength of 0.75 are six, counted from the first."""
    pipe = pipeline(*PIPELINES[name], "DDIMScheduler")
    expected = theirs(pipe, 9, 5, 1)
    assert relative_error(ours(pipe, 9, 5, 1), expected) < 1e-4
    assert passes() == (2, 4)


@pytest.mark.parametrize("name", ["SD1", "SDXL"])
def test_but_for_the_last_step(name: str, passes: Any) -> None:
    pipe = pipeline(*PIPELINES[name])
    assert relative_error(ours(pipe, 8, 3, 0), theirs(pipe, 8, 3, 0, {0, 3, 6, 7})) < 1e-4
    assert passes() == (4, 4)


@pytest.mark.parametrize("name", ["SD1", "SDXL"])
def test_the_early_schedule_in_the_packages_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "early", early)
    pipe = pipeline(*PIPELINES[name])
    whole = {*early(9, 3), 8}
    assert whole != {0, 3, 6, 8}
    found = ours(pipe, 9, 3, 2)
    # Nine steps of random weights amplify rounding.
    assert relative_error(found, theirs(pipe, 9, 3, 2, whole)) < 3e-4


def test_onediffs_arguments(passes: Any) -> None:
    """cache_layer_id and cache_block_id of OneDiff, both 0: the second of the package's branches."""
    pipe = pipeline(*PIPELINES["SDXL"])
    expected = theirs(pipe, 7, 3, 1)
    lib_onediff.compile_pipe(pipe, ignores=("vae",), cache_interval=3, cache_layer_id=0, cache_block_id=0)
    assert relative_error(latents(pipe, 7), expected) < 1e-4
    assert passes() == (3, 4)


@grid(name=["SD1", "SD1 img2img"], scheduler=["HeunDiscreteScheduler", "KDPM2DiscreteScheduler"])
def test_schedulers_that_call_twice_a_step(name: str, scheduler: str, passes: Any) -> None:
    """A step's calls go the same way, and interval 1 is exact."""
    pipe = pipeline(*PIPELINES[name], scheduler)
    exact = latents(pipe, 8)
    assert relative_error(ours(pipe, 8, 1, 0), exact) < 1e-4
    assert passes() == (0, 0)
    ours(pipe, 8, 3, 0)
    steps = {"SD1": 8, "SD1 img2img": 6}[name]
    whole = {*range(0, steps, 3), steps - 1}
    # The first of Heun's timesteps has one call, and so has the last step of DPM2.
    assert passes() == (2 * len(whole) - 1, 2 * (steps - len(whole)))
