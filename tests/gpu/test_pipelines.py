"""Whole images on a GPU in half precision, by diffusers pipelines that get embeddings instead of prompts."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_calls import last_call

pytest.importorskip("diffusers")

from tiny_model import tiny_vae

from lib_onediff.bench.models import random_unet
from lib_onediff.public import compile_pipe, uncompile_pipe
from lib_onediff.runtime.runtime import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
CONTEXT_WIDTH = 64
POOLED_WIDTH = 64
NAMES = ["StableDiffusionPipeline", "StableDiffusionXLPipeline"]


@pytest.fixture(autouse=True)
def warming_up() -> None:
    """Replaces the fixture of conftest.py, so that calls are no warm-up: in a warm-up, DeepCache would skip nothing."""


def pipeline(name: str, dtype: torch.dtype) -> Any:
    """A random pipeline without text encoders, with the same weights each time."""
    import diffusers

    xl = "XL" in name
    scheduler = diffusers.DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    unet = random_unet("tiny-sdxl" if xl else "tiny-sd15", torch.device("cpu"))
    parts: dict[str, Any] = {
        "vae": tiny_vae(0.2), "unet": unet, "text_encoder": None, "tokenizer": None, "scheduler": scheduler,
    }
    parts |= {"text_encoder_2": None, "tokenizer_2": None} if xl else {
        "safety_checker": None, "feature_extractor": None, "requires_safety_checker": False,
    }
    pipe = getattr(diffusers, name)(**parts).to("cuda", dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: Any, **arguments: Any) -> torch.Tensor:
    """The final latents of the sampler, (1, 4, height, width) in float32."""
    generator = torch.Generator().manual_seed(1)
    embed = lambda *shape: torch.randn(shape, generator=generator).to("cuda", pipe.unet.dtype)  # noqa: E731
    given = {"prompt_embeds": embed(1, 77, CONTEXT_WIDTH), "negative_prompt_embeds": embed(1, 77, CONTEXT_WIDTH)}
    if "XL" in type(pipe).__name__:
        given["pooled_prompt_embeds"] = embed(1, POOLED_WIDTH)
        given["negative_pooled_prompt_embeds"] = embed(1, POOLED_WIDTH)
    return pipe(**given, generator=generator, output_type="latent", **arguments).images.float().cpu()


@pytest.mark.parametrize("name", NAMES)
def test_in_float16_the_error_of_our_latents_is_at_most_1_25_times_that_of_the_pipeline(name: str) -> None:
    """Errors are relative to the latents of the uncompiled pipeline in float32. Two further images with the same seed
    are equal to the bit. After uncompile_pipe(), the latents equal those before compile_pipe() to the bit."""
    size = {"width": 256, "height": 256, "num_inference_steps": 8}
    reference = latents(pipeline(name, torch.float32), **size)
    pipe = pipeline(name, torch.float16)
    own = latents(pipe, **size)
    compile_pipe(pipe)
    with runtime.warming_up():
        latents(pipe, **size)
    ours = latents(pipe, **size)
    assert last_call()["route"] == "graph", last_call()["reason"]
    distance = lambda output: float((output - reference).norm() / reference.norm())  # noqa: E731
    assert distance(ours) <= 1.25 * distance(own)
    assert torch.equal(latents(pipe, **size), latents(pipe, **size)), "the same seed gives the same picture"
    uncompile_pipe(pipe)
    assert torch.equal(own, latents(pipe, **size)), "uncompiled, the pipeline gives its own latents"


# --- DeepCache: graphs of full and of cached passes, which share the deep hidden states -------------------------------


PICTURE = {"width": 256, "height": 256, "num_inference_steps": 10}
DEEPCACHE = {"deepcache_interval": 3, "deepcache_depth": 2}


def with_kernels(pipe: Any) -> Any:
    """The pipeline, after an image in a warm-up, which compiles and chooses its kernels."""
    with runtime.warming_up():
        latents(pipe, **PICTURE)
    return pipe


def counts() -> tuple[int, int, int]:
    """The numbers of replays, and of DeepCache's full and cached passes, so far."""
    now = last_call()
    return now["calls"]["graph"], now["deepcache"]["full"], now["deepcache"]["cached"]


@pytest.mark.parametrize("backend", ["native", "cudagraph"])
def test_with_deepcache_every_step_of_the_second_image_is_replayed(backend: str) -> None:
    """DeepCache computes the ten steps as five full passes and five cached ones. The first two of three images with the
    same seed are close, and the last two are equal to the bit."""
    pipe = pipeline(NAMES[1], torch.float16)
    with_kernels(compile_pipe(pipe, ignores=("vae",), backend=backend, **DEEPCACHE))
    first = latents(pipe, **PICTURE)
    before = counts()
    second = latents(pipe, **PICTURE)
    assert tuple(after - then for after, then in zip(counts(), before, strict=True)) == (10, 5, 5)
    assert float((second - first).norm() / first.norm()) < 2e-2
    assert torch.equal(latents(pipe, **PICTURE), second)


def test_with_deepcache_latents_stay_close_after_memory_is_freed_or_weights_are_moved() -> None:
    """The reference is an image before. Graphs of full and of cached passes share the deep hidden states, and must be
    made and dropped together with them: otherwise a cached pass would read states of freed memory."""
    pipe = pipeline(NAMES[0], torch.float16)
    with_kernels(compile_pipe(pipe, ignores=("vae",), **DEEPCACHE))
    first = [latents(pipe, **PICTURE) for _ in range(2)][-1]
    for disturb in (runtime.release_memory, lambda: pipe.to("cpu") and pipe.to("cuda")):
        disturb()
        for _ in range(2):
            assert float((latents(pipe, **PICTURE) - first).norm() / first.norm()) < 2e-2
