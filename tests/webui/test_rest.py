"""A1111's REST API, as far as OneDiff's own tests and users' programs lean on it."""
from __future__ import annotations

import threading

import numpy
from PIL import Image
from webui_client import WebUI, encode, gradient
from webui_compare import need


def test_options_can_be_read_and_set(webui: WebUI) -> None:
    options = webui.get("/sdapi/v1/options")
    assert options["onediff_enabled"] is True or not webui.is_standalone
    for value in (True, False):
        assert webui.post("/sdapi/v1/options", {"onediff_low_bit_only": value}).status_code == 200
        if webui.is_standalone:
            assert webui.get("/sdapi/v1/options") == {**options, "onediff_low_bit_only": value}


def test_lists(webui: WebUI) -> None:
    samplers = [sampler["name"] for sampler in webui.get("/sdapi/v1/samplers")]
    assert {"Euler", "Euler a", "DPM++ 2M", "Heun", "DDIM", "UniPC", "LCM"} <= set(samplers)
    names = webui.get("/sdapi/v1/scripts")
    assert "onediff" in names["txt2img"] and "onediff" in names["img2img"]
    if webui.is_standalone:
        return
    described = [script for script in webui.get("/sdapi/v1/script-info") if script["name"] == "onediff"]
    assert {script["is_img2img"] for script in described} == {False, True}
    assert all(script["is_alwayson"] and script["args"][0]["value"] is True for script in described)


def test_same_seed_gives_the_same_bytes_and_a_batch_counts_seeds_up(webui: WebUI) -> None:
    first, again, other = (webui.txt2img(seed=seed) for seed in (41, 41, 42))
    assert first.files == again.files and first.files != other.files
    batch = webui.txt2img(seed=41, batch_size=2)
    assert batch.info["all_seeds"] == [41, 42]
    assert numpy.abs(batch.pixels[1] - other.pixels[0]).max() <= 1


def test_img2img_keeps_what_it_starts_from(webui: WebUI) -> None:
    start = gradient(64, 64)
    # Not the start itself: a model of random weights does not even give that back.
    least, little, much = (webui.img2img(start, denoising_strength=strength, steps=10) for strength in (0.1, 0.3, 0.9))
    assert little.image.size == (64, 64)
    assert numpy.abs(little.pixels - least.pixels).mean() < numpy.abs(much.pixels - least.pixels).mean()


def test_mask_keeps_what_is_black(webui: WebUI) -> None:
    need(webui, "masks")
    start = gradient(64, 64)
    mask = Image.new("L", start.size, 0)
    mask.paste(255, (32, 0, 64, 64))
    made = webui.img2img(start, mask=encode(mask), mask_blur=0, inpainting_fill=1, inpaint_full_res=False)
    difference = numpy.abs(made.pixels[0] - numpy.asarray(start, dtype=numpy.int16))
    assert difference[:, :32].max() <= 1
    assert difference[:, 40:].mean() > 5


def test_requests_at_the_same_time_wait_for_each_other(standalone: WebUI) -> None:
    alone = {seed: standalone.txt2img(seed=seed).files for seed in (1, 2, 3)}
    together: dict[int, list[bytes]] = {}
    workers = [
        threading.Thread(target=lambda seed=seed: together.update({seed: standalone.txt2img(seed=seed).files}))
        for seed in alone
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert together == alone
