"""Weights that the WebUI stores in float8, as A1111's "FP8 weight" and Forge's "Diffusion in Low Bits" do: OneDiff
computes with them, LoRAs included, and makes the images of the WebUI alone.

The LoRAs must be mild (give them with --model lora-a=NAME): with large random numbers, the WebUI's own forward in
float32 differs by a quarter from float64, so nothing can be compared.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from test_controlnet import (  # noqa: F401
    ROUTES,
    controlled,
    controlnet,
)
from test_loras import PROMPT, make_all, with_lora
from webui_client import WebUI, largest_difference
from webui_compare import Run, assert_different, assert_same, assert_same_on_and_off, run, run_off, run_on
from webui_models import Models

# --- Forge: what the list on the page sets; the API sets it as an option ----------------------------------------------

OPTION = "forge_unet_storage_dtype"
KINDS = ["Automatic (fp16 LoRA)", "float8-e4m3fn", "float8-e4m3fn (fp16 LoRA)", "float8-e5m2 (fp16 LoRA)"]


def choose(models: Models, kind: str) -> None:
    """Choose the option and have the checkpoint loaded anew. The list on the page does that by itself, the API only for
    another checkpoint."""
    models.webui.set_options(**{OPTION: kind})
    models.use("sd15-b")
    models.webui.make({"prompt": PROMPT, "steps": 1, "width": 64, "height": 64})
    models.use("sd15")


@pytest.fixture(params=KINDS)
def low_bits(request: pytest.FixtureRequest, webui: WebUI, sd15: Models) -> Iterator[str]:
    """Forge or Forge Neo with each value of its option "Diffusion in Low Bits"."""
    if webui.kind != "forge":
        pytest.skip("this is Forge's and Forge Neo's: give its address with --webui URL")
    choose(sd15, request.param)
    yield request.param
    choose(sd15, "Automatic")


def test_images_with_float8_weights_and_loras_are_the_same_with_and_without_onediff(
    webui: WebUI, sd15: Models, low_bits: str
) -> None:
    """No pixel differs by more than 1 of 255. Requests differ in their LoRAs. Each image differs from the previous one;
    the last one, without a LoRA, equals the first bit for bit."""
    one, other, locon = (sd15.need(role) for role in ("lora-a", "lora-b", "locon"))
    prompts = [
        PROMPT, with_lora(one, 1), with_lora(one, 0.5), with_lora(other, 1),
        with_lora(one, 0.7) + f" <lora:{other}:0.7>", with_lora(locon, 1), PROMPT,
    ]
    on = make_all(run_on, webui, prompts)
    off = make_all(run_off, webui, prompts)
    for mine, hosts in zip(on, off, strict=True):
        assert_same(mine, hosts)
    for index, first in enumerate(on[:-1]):
        assert_different(first, on[index + 1], "the LoRA")
    for runs in (on, off):
        assert (runs[0].pictures.arrays[0] == runs[-1].pictures.arrays[0]).all()


def test_an_image_with_float8_weights_a_controlnet_and_a_lora_is_the_same_with_and_without_onediff(
    webui: WebUI, sd15: Models, controlnet: str, low_bits: str,  # noqa: F811
) -> None:
    """No pixel differs by more than 1 of 255. The image without the LoRA is another one."""
    without = run_on(webui, controlled(webui, controlnet))
    request = {**controlled(webui, controlnet), "prompt": with_lora(sd15.need("lora-a"), 1)}
    with_it, _ = assert_same_on_and_off(webui, request)
    assert_different(without, with_it, "the LoRA")


# --- A1111: on a CPU the host then computes in bfloat16, and another order of the same sums makes another image: what
# another of its attention functions makes of the same request is the yardstick ---------------------------------------

OTHER_ATTENTION = "sdp - scaled dot product"
# Mean distances of 255: what no eye sees, and how much of the distance between with and without FP8 ours may be.
UNSEEN = 0.5
SHARE_OF_FP8 = 0.25
MOST_OF_ROUNDING = 1.5


def store(webui: WebUI, how: str) -> None:
    webui.set_options(fp8_storage=how)


@pytest.fixture
def a1111(webui: WebUI, sd15: Models) -> Iterator[WebUI]:
    """A1111 with the option switched off after it was on: from then on it holds the checkpoint's weights in half
    precision."""
    if webui.kind != "a1111":
        pytest.skip("this is A1111's: give its address with --webui URL")
    store(webui, "Enable")
    store(webui, "Disable")
    yield webui
    webui.set_options(fp8_storage="Disable", cache_fp16_weight=False)


def distance(one: Run, other: Run) -> float:
    """The mean difference of two runs' pixels, of 255, without a ControlNet's map after the images."""
    pairs = zip(one.pictures.arrays, other.pictures.arrays, strict=False)
    return float(numpy.mean([numpy.abs(mine - yours).mean() for mine, yours in pairs]))


def assert_near(webui: WebUI, request: dict[str, Any], on: Run, off: Run) -> float:
    """Assert that the image with OneDiff is about as near to that of the WebUI alone as the WebUI's with another of its
    attention functions. Returns the distance between the first two."""
    webui.set_options(cross_attention_optimization=OTHER_ATTENTION)
    try:
        rounding = distance(run(webui, request, enabled=False), off)
    finally:
        webui.set_options(cross_attention_optimization="Automatic")
    far = distance(on, off)
    assert far <= max(UNSEEN, MOST_OF_ROUNDING * rounding)
    return far


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_images_follow_the_fp8_option_of_a1111_with_loras_and_another_checkpoint(
    a1111: WebUI, sd15: Models, cached: bool
) -> None:
    """Images are near to those of the WebUI alone (assert_near). After the option is switched off, images equal those
    from before bit for bit. OneDiff's runs come first, so that no run of the WebUI alone merges a LoRA for them.
    cached: A1111's option "Cache FP16 weight for LoRA"."""
    without = run_off(a1111, {})
    plain = run_on(a1111, {})
    a1111.set_options(cache_fp16_weight=cached)
    store(a1111, "Enable")
    one = sd15.need("lora-a")
    other = sd15.need("lora-b")
    prompts = [
        PROMPT, with_lora(one, 1), with_lora(one, 0.5), with_lora(one, 0.7) + f" <lora:{other}:0.7>",
        with_lora(sd15.need("locon"), 1), PROMPT,
    ]
    on = make_all(run_on, a1111, prompts)
    off = make_all(run_off, a1111, prompts)
    for prompt, mine, hosts in zip(prompts, on, off, strict=True):
        far = assert_near(a1111, {"prompt": prompt}, mine, hosts)
    assert far < SHARE_OF_FP8 * distance(off[-1], without), "the option changes no more than we do"
    for request in ({"batch_size": 2, "width": 72, "height": 88}, {"prompt": "a " * 110}):
        assert_near(a1111, request, run_on(a1111, request), run_off(a1111, request))
    store(a1111, "Disable")
    for before, after in ((plain, run_on(a1111, {})), (without, run_off(a1111, {}))):
        assert largest_difference(after.pictures, before.pictures) == 0
    store(a1111, "Enable")
    for role in ("sd15-b", "sd15"):
        sd15.use(role)
        assert_near(a1111, {}, run_on(a1111, {}), run_off(a1111, {}))
