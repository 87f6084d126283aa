"""Images match those of the WebUI alone (OneDiff off; no pixel differs by more than 1 of 255) while other extensions
act around a generation: nested generations, other threads, edited weights, and modules of their own. Also images of
v-prediction and inpainting models.

For A1111 and Forge Neo. tests/webui/extensions/onediff-neighbours reproduces these actions; it must be linked into the
extensions folder of the WebUI at --webui.
"""
from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from PIL import Image
from test_exact_images import masked
from test_foreign import assert_host_served
from webui_client import PICTURE, WebUI, largest_difference, one_run, start_from
from webui_client import gradient as gradient_image
from webui_compare import (
    LARGEST_DIFFERENCE,
    WHOLE_UNET,
    Run,
    assert_different,
    assert_same,
    assert_same_on_and_off,
    need,
    run,
    run_off,
    run_on,
)
from webui_models import Models

ROUTE = "/onediff-neighbours/v1"


def need_neighbours(webui: WebUI) -> None:
    """Skip the test where the extension is not linked."""
    if "onediff neighbours" not in webui.get("/sdapi/v1/scripts")["txt2img"]:
        pytest.skip("link tests/webui/extensions/onediff-neighbours into the WebUI's extensions folder")


@pytest.fixture(autouse=True)
def beside_neighbours(webui: WebUI) -> None:
    need_neighbours(webui)


@pytest.fixture
def crops(webui: WebUI) -> list[list[int]]:
    """Sizes of nested images. The sides are multiples of 8, and of 64 on the Neo under test."""
    return [[64, 64], [64, 128] if webui.is_neo else [72, 88], [128, 64]]


def planned(**plan: Any) -> dict[str, Any]:
    """The script argument with which onediff-neighbours acts during a run. plan: see its class Plan."""
    return {"alwayson_scripts": {"OneDiff neighbours": {"args": [json.dumps(plan)]}}}


def run_without(webui: WebUI, request: dict[str, Any]) -> Run:
    """A run with OneDiff switched off in the settings, so that none of its hooks is in place."""
    with webui.options(onediff_enabled=False):
        made = run(webui, request)
    assert sum(made.calls.values()) == 0
    return made


@contextlib.contextmanager
def edited(webui: WebUI, factor: float) -> Iterator[None]:
    """A context in which weights of the UNet are multiplied by a factor, in place."""
    assert webui.post(f"{ROUTE}/edit", {"factor": factor}).status_code == 200
    try:
        yield
    finally:
        webui.post(f"{ROUTE}/edit", {"factor": None})


@pytest.mark.parametrize("nested_scripts", [False, True], ids=["scripts left out", "all scripts"])
def test_an_image_with_nested_inpaintings_matches_that_of_the_webui(
    webui: WebUI, sd15: Models, crops: list[list[int]], nested_scripts: bool
) -> None:
    """ADetailer inpaints each face in this way, at another size, inside the generation. The next image without
    inpaintings is as before. nested_scripts: whether they run all scripts, OneDiff's too; otherwise none."""
    request = {"width": 128, "height": 128}
    nested = {**request, **planned(crops=crops, nested_scripts=nested_scripts)}
    plain = run_on(webui, request)
    on = run_on(webui, nested, least_calls=3 + len(crops))
    assert on.pictures.image.width == 128 * len(crops)
    assert_same(on, run_without(webui, nested))
    assert_same(run_on(webui, request), plain)


@pytest.mark.parametrize("nested_scripts", [False, True], ids=["scripts left out", "all scripts"])
def test_onediff_off_for_a_run_is_also_off_for_its_nested_generations(
    webui: WebUI, sd15: Models, crops: list[list[int]], nested_scripts: bool
) -> None:
    """The image equals that without OneDiff's hooks. OneDiff is on in the next run. nested_scripts: whether the nested
    generations run all scripts, OneDiff's too; otherwise none."""
    nested = {"width": 128, "height": 128, **planned(crops=crops, nested_scripts=nested_scripts)}
    off = run_off(webui, nested, least_calls=3 + len(crops))
    assert largest_difference(off.pictures, run_without(webui, nested).pictures) == 0
    run_on(webui, {"width": crops[1][0], "height": crops[1][1]})


def test_onediff_computes_generations_from_another_thread(webui: WebUI, sd15: Models, crops: list[list[int]]) -> None:
    """Agent Scheduler makes such generations: here two in a row, while the API is idle. Their images match those that
    were made over the API."""
    sizes = [{"width": width, "height": height} for width, height in crops[:2]]
    requests = [{**PICTURE, **size, **one_run(enabled=True)} for size in sizes]
    ours = [run_on(webui, size) for size in sizes]
    before = webui.calls()
    answers = webui.post(f"{ROUTE}/queue", {"requests": requests})
    assert answers.status_code == 200, answers.text[:500]
    after = webui.calls()
    assert sum(after[route] - before[route] for route in WHOLE_UNET) == 2 * PICTURE["steps"]
    assert after["host"] == before["host"]
    for answer, own in zip(answers.json(), ours, strict=True):
        image = Image.open(io.BytesIO(base64.b64decode(answer["images"][0]))).convert("RGB")
        assert numpy.abs(numpy.asarray(image, dtype=numpy.int16) - own.pictures.arrays[0]).max() <= LARGEST_DIFFERENCE


def test_an_edit_of_weights_between_generations_changes_the_image_as_in_the_webui(webui: WebUI, sd15: Models) -> None:
    """SuperMerger edits weights in this way: the values change, and the parameters stay the same objects."""
    plain = run_on(webui, {})
    with edited(webui, 0.5):
        merged, _ = assert_same_on_and_off(webui, {})
    assert_different(plain, merged, "the edit")
    assert_same(run_on(webui, {}), plain)


def test_an_edit_of_weights_within_a_generation_changes_the_image_as_in_the_webui(webui: WebUI, sd15: Models) -> None:
    """The weights are edited before the second of four steps, and for this generation only."""
    request = {"steps": 4}
    plain = run_on(webui, request)
    changed, _ = assert_same_on_and_off(webui, {**request, **planned(edit_at=1)})
    assert_different(plain, changed, "the edit")
    assert_same(run_on(webui, request), plain)


def test_the_webui_computes_motion_modules(webui: WebUI, sd15: Models) -> None:
    """AnimateDiff puts modules of unknown classes into the blocks for one generation, which the WebUI then computes."""
    plain = run_on(webui, {"batch_size": 2})
    made = assert_host_served(webui, {"batch_size": 2, **planned(motion=True)}, "MotionModule")
    assert_different(plain, made, "the motion module")
    assert_same(run_on(webui, {"batch_size": 2}), plain)


@pytest.mark.parametrize("request_", [{}, start_from(gradient_image(128, 64))], ids=["txt2img", "img2img"])
def test_an_image_with_tiled_vae_matches_that_of_the_webui_and_onediff_decodes_the_next_one(
    webui: WebUI, sd15: Models, request_: dict[str, Any]
) -> None:
    """Tiled VAE sets a forward on the decoder's instance, and afterwards sets the decoder's bound method there instead
    of deleting the attribute."""
    need(webui, "img2img" if request_ else "")
    request = {"width": 128, "height": 64, **request_}
    steps = 2 if request_ else 3
    plain = run_on(webui, request, steps)
    tiled, _ = assert_same_on_and_off(webui, {**request, **planned(tiled_vae=True)}, steps)
    assert_different(plain, tiled, "the tiles")
    again = run_on(webui, request, steps)
    assert_same(again, plain)
    assert webui.status()["vae"]["route"] != "host", webui.status()["vae"]


def test_the_status_names_an_extension_that_runs_the_layers_of_the_decoder_itself(webui: WebUI, sd15: Models) -> None:
    """Tiled VAE does this, and never calls the forward that it has replaced. OneDiff does not decode this image, which
    matches the usual one, and decodes the next."""
    plain = run_on(webui, {})
    made = run_on(webui, planned(walked_vae=True))
    assert "onediff_neighbours" in webui.status()["vae"]["reason"]
    assert_same(made, plain)
    assert_same(run_on(webui, {}), plain)
    assert webui.status()["vae"]["route"] != "host"


@pytest.mark.parametrize("schedule", ["Default", "Zero Terminal SNR"])
@pytest.mark.parametrize("role", ["sd15-v", "sdxl-v"])
def test_images_of_v_prediction_models_match_those_of_the_webui(
    webui: WebUI, sd15: Models, role: str, schedule: str
) -> None:
    """schedule: the WebUI's option "Noise schedule for sampling"."""
    name = sd15.use(role)
    with webui.options(sd_noise_schedule=schedule):
        made, _ = assert_same_on_and_off(webui, {"sampler_name": "Euler", "width": 72, "height": 88})
    infotext = made.pictures.info["infotexts"][0]
    assert name.partition(".")[0] in infotext
    assert ("Noise Schedule: Zero Terminal SNR" in infotext) == (schedule != "Default")


@pytest.mark.parametrize("request_", [{}, masked()], ids=["txt2img", "inpainting"])
def test_images_of_an_sdxl_inpainting_model_match_those_of_the_webui(
    webui: WebUI, sd15: Models, request_: dict[str, Any]
) -> None:
    """The input of such a UNet has nine channels: also the mask and the masked image."""
    sd15.use("sdxl-inpaint")
    assert_same_on_and_off(webui, request_, least_calls=3)
    run_on(webui, {})
    assert "inpainting" in webui.status()["model"]
