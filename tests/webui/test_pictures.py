"""Pictures over the REST API."""
from __future__ import annotations

import base64

import numpy
import pytest
from PIL import Image
from webui_client import PICTURE, WebUI, encode, gradient


def test_ping(webui: WebUI) -> None:
    assert webui.get("/internal/ping") == {}


@pytest.mark.parametrize("width, height", [(64, 64), (72, 88), (128, 64)])
def test_picture_has_the_size_asked_for(webui: WebUI, width: int, height: int) -> None:
    made = webui.txt2img(width=width, height=height)
    assert made.image.size == (width, height)
    assert made.pixels.std() > 10, "the picture is all of one colour"


def test_same_seed_gives_the_same_bytes(webui: WebUI) -> None:
    first, again, other = (webui.txt2img(seed=seed) for seed in (41, 41, 42))
    assert first.files == again.files
    assert first.files != other.files


def test_prompts_matter(webui: WebUI) -> None:
    prompts = ({"prompt": "a fox"}, {"prompt": "a castle at night"}, {"prompt": "a fox", "negative_prompt": "snow"})
    pictures = [webui.txt2img(**prompt).files[0] for prompt in prompts]
    assert len(set(pictures)) == 3


def test_batch_counts_seeds_up(webui: WebUI) -> None:
    batch = webui.txt2img(seed=100, batch_size=2)
    assert len(batch.images) == 2
    assert batch.info["all_seeds"] == [100, 101]
    alone = webui.txt2img(seed=101)
    assert numpy.abs(batch.pixels[1] - alone.pixels[0]).max() <= 1


def test_infotext_is_in_the_answer_and_in_the_file(webui: WebUI) -> None:
    made = webui.txt2img(negative_prompt="rain, fog")
    infotext = made.info["infotexts"][0]
    assert infotext.startswith("a red fox in the snow\nNegative prompt: rain, fog\nSteps: 3, Sampler: Euler a")
    assert "Seed: 7" in infotext and "Size: 64x64" in infotext
    assert made.image.info["parameters"] == infotext


def test_long_prompts(webui: WebUI) -> None:
    prompt = "a very long walk through the old town " * 6
    made = webui.txt2img(prompt=prompt, negative_prompt="rain")
    other_end = webui.txt2img(prompt=prompt + "at night", negative_prompt="rain")
    assert made.files != other_end.files, "the end of a long prompt was ignored"


@pytest.mark.parametrize("sampler", ["Euler", "DPM++ 2M", "Heun", "DDIM", "UniPC", "LCM"])
def test_samplers(webui: WebUI, sampler: str) -> None:
    first, again = (webui.txt2img(sampler_name=sampler, steps=4) for _ in range(2))
    assert f"Sampler: {sampler}" in first.info["infotexts"][0]
    assert first.files == again.files


def test_img2img_keeps_what_it_starts_from(webui: WebUI) -> None:
    start = gradient(64, 64)
    # Not the start itself: a model of random weights does not even give that back.
    least, little, much = (webui.img2img(start, denoising_strength=strength, steps=10) for strength in (0.1, 0.3, 0.9))
    assert little.image.size == (64, 64)
    assert numpy.abs(little.pixels - least.pixels).mean() < numpy.abs(much.pixels - least.pixels).mean()


def test_img2img_takes_data_addresses_and_other_sizes(webui: WebUI) -> None:
    image = gradient(50, 90)
    made = webui.img2img(image, width=72, height=88, init_images=["data:image/png;base64," + encode(image)])
    assert made.image.size == (72, 88)
    assert made.parameters["init_images"] is None


def test_mask_keeps_what_is_black(webui: WebUI) -> None:
    if webui.is_standalone:
        pytest.skip("the standalone host takes no masks: --webui URL")
    start = gradient(64, 64)
    mask = Image.new("L", start.size, 0)
    mask.paste(255, (32, 0, 64, 64))
    made = webui.img2img(start, mask=encode(mask), mask_blur=0, inpainting_fill=1, inpaint_full_res=False)
    difference = numpy.abs(made.pixels[0] - numpy.asarray(start, dtype=numpy.int16))
    assert difference[:, :32].max() <= 1
    assert difference[:, 40:].mean() > 5


def test_random_seed_is_reported(webui: WebUI) -> None:
    made = webui.txt2img(seed=-1)
    assert made.info["seed"] >= 0
    assert webui.txt2img(seed=made.info["seed"]).files == made.files


def test_pictures_are_png_files(webui: WebUI) -> None:
    answer = webui.post("/sdapi/v1/txt2img", PICTURE).json()
    assert base64.b64decode(answer["images"][0]).startswith(b"\x89PNG")
