"""DeepCache on a real GPU: graphs of both halves around one deep feature."""
from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from test_pipelines import latents, pipeline

from lib_onediff.public import compile_pipe, status, uncompile_pipe
from lib_onediff.runtime.runtime import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
NAMES = ["StableDiffusionPipeline", "StableDiffusionXLPipeline"]
PICTURE = {"width": 256, "height": 256, "num_inference_steps": 10}
DEEPCACHE = {"deepcache_interval": 3, "deepcache_depth": 2}


@pytest.fixture(autouse=True)
def wait_for_compile() -> None:
    """Not for whole tests: a call that waits for kernels makes every step whole."""


def with_kernels(pipe: Any) -> Any:
    """The pipe, once its kernels are compiled."""
    with runtime.wait_for_compile():
        latents(pipe, **PICTURE)
    return pipe


def counted() -> tuple[int, int, int]:
    now = status()
    return now["calls"]["graph"], now["deepcache"]["full"], now["deepcache"]["cached"]


def cached(pipe: Any, pictures: int = 1, **options: Any) -> torch.Tensor:
    """The last of several equal pictures."""
    with_kernels(compile_pipe(pipe, ignores=("vae",), **DEEPCACHE, **options))
    for _ in range(pictures):
        output = latents(pipe, **PICTURE)
    uncompile_pipe(pipe)
    return output


@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_picture_is_the_plain_one_to_within_half_precision(name: str) -> None:
    reference = cached(pipeline(name, torch.float32), backend="eager")
    plain = cached(pipeline(name, torch.float16), backend="eager")
    replayed = cached(pipeline(name, torch.float16), pictures=2)
    distance = lambda output: float((output - reference).norm() / reference.norm())  # noqa: E731
    assert distance(replayed) <= 1.25 * distance(plain)


@pytest.mark.parametrize("backend", ["native", "cudagraph"])
def test_every_call_of_the_second_picture_is_replayed(backend: str) -> None:
    pipe = pipeline(NAMES[1], torch.float16)
    with_kernels(compile_pipe(pipe, ignores=("vae",), backend=backend, **DEEPCACHE))
    first = latents(pipe, **PICTURE)
    before = counted()
    second = latents(pipe, **PICTURE)
    assert tuple(after - then for after, then in zip(counted(), before, strict=True)) == (10, 5, 5)
    assert float((second - first).norm() / first.norm()) < 2e-2
    assert torch.equal(latents(pipe, **PICTURE), second)


def test_new_weights_and_freed_memory_between_pictures() -> None:
    """The graphs and the feature that they share come and go together."""
    pipe = pipeline(NAMES[0], torch.float16)
    first = cached(pipe, pictures=2)
    with_kernels(compile_pipe(pipe, ignores=("vae",), **DEEPCACHE))
    for disturb in (runtime.release_memory, lambda: pipe.to("cpu") and pipe.to("cuda")):
        disturb()
        for _ in range(2):
            assert float((latents(pipe, **PICTURE) - first).norm() / first.norm()) < 2e-2
