"""Guidance end and output forecast on a real GPU: what is left out, what the graphs compute, and that it repeats."""
from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from test_pipelines import latents, pipeline

from lib_onediff import compile_pipe, status
from lib_onediff.runtime.runtime import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
NAMES = ["StableDiffusionPipeline", "StableDiffusionXLPipeline"]
IMAGE = {"width": 256, "height": 256, "num_inference_steps": 12}
# Of 12 steps: the second half without the negative prompt; computed are 0, 1, 2, 4, 8 and 11.
OPTIONS = {"guidance_end": 0.5}, {"forecast_interval": 3}
LEFT_OUT = {"guidance_end": 6, "forecast_interval": 6}


@pytest.fixture(autouse=True)
def wait_for_compile() -> None:
    """Not for whole tests: calls that wait for kernels are computed whole."""


def counted() -> dict[str, int]:
    now = status()
    return {"guidance_end": now["guidance"]["without_negative"], "forecast_interval": now["forecast"]["calls"],
            "graph": now["calls"]["graph"]}


@pytest.mark.parametrize("options", OPTIONS, ids=LEFT_OUT)
@pytest.mark.parametrize("backend", ["native", "cudagraph"])
def test_what_is_computed_is_replayed_and_repeats(backend: str, options: dict[str, Any]) -> None:
    pipe = compile_pipe(pipeline(NAMES[1], torch.float16), ignores=("vae",), backend=backend, **options)
    with runtime.wait_for_compile():
        latents(pipe, **IMAGE)
    for _ in range(2):
        latents(pipe, **IMAGE)
    before, second = counted(), latents(pipe, **IMAGE)
    after, (name,) = counted(), options
    assert after[name] - before[name] == LEFT_OUT[name]
    assert after["graph"] - before["graph"] == 12 - (LEFT_OUT[name] if name == "forecast_interval" else 0)
    assert torch.equal(latents(pipe, **IMAGE), second)
