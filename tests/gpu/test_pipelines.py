"""Whole pictures on a GPU in half precision, through pipelines of diffusers."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from lib_onediff import compile_pipe, status, uncompile_pipe
from lib_onediff.accelerator import runtime
from lib_onediff.hosts.standalone import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    runtime.table.clear()
    yield
    runtime.free_graphs()


@pytest.mark.parametrize("build", [tiny_model.tiny_sd15_pipeline, tiny_model.tiny_sdxl_pipeline])
def test_a_picture_is_the_pipelines_own_to_within_half_precision(build: Any) -> None:
    pipe = build().to("cuda", torch.float16)
    exact = build().to("cuda")
    latents = {"width": 256, "height": 256, "num_inference_steps": 8}
    reference = latents_of(exact, **latents)
    own = latents_of(pipe, **latents)
    compile_pipe(pipe)
    ours = latents_of(pipe, **latents)
    assert status()["route"] == "graph", status()["reason"]
    distance = lambda a: float((a - reference).norm() / reference.norm())  # noqa: E731
    assert distance(ours) <= 1.25 * distance(own)
    assert torch.equal(ours, latents_of(pipe, **latents)), "the same seed gives the same picture"
    uncompile_pipe(pipe)
    assert torch.equal(own, latents_of(pipe, **latents)), "uncompiled, it is as it was"


def latents_of(pipe: Any, **arguments: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    return pipe("a lighthouse", generator=generator, output_type="latent", **arguments).images.float().cpu()


def test_sdxl_image_to_image_with_lcm_at_three_sizes_captures_each_once() -> None:
    from diffusers import LCMScheduler, StableDiffusionXLImg2ImgPipeline

    base = tiny_model.tiny_sdxl_pipeline()
    pipe = StableDiffusionXLImg2ImgPipeline(**base.components).to("cuda", torch.float16)
    pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
    compile_pipe(pipe, ignores=("vae",))
    care = runtime._care[pipe.unet]
    sizes = [(1024, 1024), (512, 2048), (2048, 512)]
    for width, height in [*sizes, *sizes]:
        start = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))
        latents_of(pipe, image=start, strength=0.8, num_inference_steps=5, guidance_scale=1.0)
        assert status()["route"] == "graph" and status()["resolution"] == f"{width}x{height}"
    assert care.bound.generation == 1 and len(care._runners) == 3 and len(runtime.table.entries()) == 3
