"""emoji-dit, the shipped transformer: it draws what the prompts say, in the demo and with DeepCache."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_emoji_model import judge, seen  # noqa: F401
from test_standalone_host import generate

pytest.importorskip("diffusers.models.transformers.transformer_cosmos", reason="needs diffusers 0.33")

import lib_onediff
from lib_onediff.bench.images import draw_prompts, held_out
from lib_onediff.bench.judge import Judge
from lib_onediff.core.quality import compare
from lib_onediff.core.refusal import Refusal
from lib_onediff.demo import models
from lib_onediff.demo.models import LoadedModel

HOW = {"steps": 8, "cfg_scale": 4.0, "sampler_name": "Euler"}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return models.load_model("emoji-dit")


@pytest.fixture
def compiled(model: LoadedModel) -> Iterator[Any]:
    pipe = model.text_pipeline
    yield pipe
    lib_onediff.uncompile_pipe(pipe)


@pytest.mark.parametrize("size", [(256, 256), (192, 128)])
def test_images_show_the_emoji_of_the_prompt(model: LoadedModel, judge: Judge, size: tuple[int, int]) -> None:  # noqa: F811
    """judge: a small classifier of emojis and backgrounds."""
    width, height = size
    made = generate(model, prompt="a red apple on a blue background", seed=1, width=width, height=height, **HOW)
    assert seen(judge, made.images) == [("red apple", "blue")]


@pytest.mark.parametrize(("changes", "said"), [
    ({"width": 264}, "multiple of 16"), ({"sampler_name": "Euler a"}, "choose from Euler"),
])
def test_unsupported_sizes_and_samplers_are_refused(
    model: LoadedModel, changes: dict[str, Any], said: str
) -> None:
    """changes: the wrong argument. said: a part of the refusal."""
    with pytest.raises(Refusal, match=said):
        generate(model, **{"width": 256, "height": 256, **HOW, **changes})


@torch.no_grad()
def test_compiled_emoji_dit_gives_the_image_of_diffusers_and_a_similar_one_with_deepcache(compiled: Any) -> None:
    """Without DeepCache, pixels differ by 1 of 255 at most. With DeepCache at interval 2, 5 of 12 steps are cached, and
    the PSNR is between 12 and 60 dB: similar, but not the same."""
    wanted = held_out(1)
    compiled.set_progress_bar_config(disable=True)
    exact = draw_prompts(compiled, wanted, 12)
    lib_onediff.compile_pipe(compiled)
    assert compare(draw_prompts(compiled, wanted, 12)[0], exact[0]).largest <= 1
    assert lib_onediff.status()["model"] == "Cosmos"
    lib_onediff.compile_pipe(compiled, deepcache_interval=2)
    near = draw_prompts(compiled, wanted, 12)
    counted = lib_onediff.status()["deepcache"]
    assert counted["reason"] == "" and counted["cached"] == 5
    assert 12 < compare(near[0], exact[0]).psnr < 60
