"""emoji-sd, the model shipped with the demo, draws what the prompt says. A small classifier (the judge) names the emoji
and the background of an image."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from test_standalone_host import generate

from lib_onediff.bench.judge import Judge, load_judge
from lib_onediff.core.quality import pixels_of
from lib_onediff.demo import models
from lib_onediff.demo.models import LoadedModel

JUDGE = Path(models.__file__).with_name("emoji-judge.safetensors")
HOW = {"steps": 7, "cfg_scale": 4.0}
SQUARE = {"width": 256, "height": 256, **HOW}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return models.load_model(None)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return load_judge(JUDGE)


def seen(judge: Judge, images: list[Image.Image]) -> list[tuple[str, str]]:
    """For each image, the name of the emoji that the judge finds most likely, and the colour of the background."""
    values = torch.stack([torch.tensor(pixels_of(image)).permute(2, 0, 1) for image in images])
    emoji, ground = (likely.argmax(1).tolist() for likely in judge(values))
    return [(judge.names[one], judge.backgrounds[other]) for one, other in zip(emoji, ground, strict=True)]


@pytest.mark.parametrize("sampler", ["DPM++ 2M", "Euler", "DDIM"])
def test_an_image_shows_the_emoji_and_the_background_of_its_prompt(
    model: LoadedModel, judge: Judge, sampler: str
) -> None:
    """The image has 256x256 pixels and is made in 7 steps. The judge must name a red apple on a blue background."""
    made = generate(model, prompt="a red apple on a blue background", sampler_name=sampler, seed=1, **SQUARE)
    assert seen(judge, made.images) == [("red apple", "blue")]
