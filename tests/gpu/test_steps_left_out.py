"""Guidance end and output forecast on a real GPU: what is left out, what the graphs compute, and that it repeats."""
from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from test_pipelines import latents, pipeline

from lib_onediff import compile_pipe, status, uncompile_pipe
from lib_onediff.runtime.runtime import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
NAMES = ["StableDiffusionPipeline", "StableDiffusionXLPipeline"]
IMAGE = {"width": 256, "height": 256, "num_inference_steps": 12}
# Of 12 steps: the second half without the negative prompt; computed are 0, 1, 2, 4, 8 and 11.
OPTIONS = {"guidance": {"guidance_end": 0.5}, "forecast": {"deepcache_interval": 3, "deepcache_depth": 0}}
LEFT_OUT = 6


@pytest.fixture(autouse=True)
def wait_for_compile() -> None:
    """Not for whole tests: calls that wait for kernels are computed whole."""


def counted() -> dict[str, int]:
    now = status()
    return {"guidance": now["guidance"]["without_negative"], "forecast": now["forecast"]["calls"],
            "graph": now["calls"]["graph"]}


def drawn(dtype: torch.dtype, name: str, images: int = 1, **options: Any) -> torch.Tensor:
    """The last of several equal images."""
    pipe = compile_pipe(pipeline(name, dtype), ignores=("vae",), **options)
    with runtime.wait_for_compile():
        latents(pipe, **IMAGE)
    for _ in range(images):
        output = latents(pipe, **IMAGE)
    uncompile_pipe(pipe)
    return output


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_replayed_in_half_precision_it_is_as_near_to_the_same_in_float32_as_plain(
    name: str, options: dict[str, Any]
) -> None:
    reference = drawn(torch.float32, name, backend="eager", **options)
    plain = drawn(torch.float16, name, backend="eager", **options)
    replayed = drawn(torch.float16, name, images=3, **options)
    distance = lambda output: float((output - reference).norm() / reference.norm())  # noqa: E731
    assert distance(replayed) <= 1.25 * distance(plain)
    assert float((drawn(torch.float32, name, backend="eager") - reference).norm() / reference.norm()) > 1e-3


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("backend", ["native", "cudagraph"])
def test_what_is_computed_is_replayed_and_repeats(backend: str, kind: str) -> None:
    pipe = compile_pipe(pipeline(NAMES[1], torch.float16), ignores=("vae",), backend=backend, **OPTIONS[kind])
    with runtime.wait_for_compile():
        latents(pipe, **IMAGE)
    for _ in range(2):
        latents(pipe, **IMAGE)
    before, second = counted(), latents(pipe, **IMAGE)
    after = counted()
    assert after[kind] - before[kind] == LEFT_OUT
    assert after["graph"] - before["graph"] == 12 - (LEFT_OUT if kind == "forecast" else 0)
    assert torch.equal(latents(pipe, **IMAGE), second)
