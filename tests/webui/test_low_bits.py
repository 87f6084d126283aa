"""Forge's Diffusion in Low Bits: LoRAs on the fly and weights in float8 are ours, and the host's images.

The LoRAs must be mild (tell them with --model lora-a=NAME): with one of large random numbers the host's own forward in
float32 is a quarter away from float64's, and nothing can be compared.
"""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_controlnet import controlled, controlnet  # noqa: F401
from test_loras import PROMPT, make_all, with_lora
from webui_client import WebUI
from webui_compare import assert_different, assert_same, on_and_off, run_off, run_on
from webui_models import Models

# What the list on the page sets; the API sets it as an option.
OPTION = "forge_unet_storage_dtype"
KINDS = ["Automatic (fp16 LoRA)", "float8-e4m3fn", "float8-e4m3fn (fp16 LoRA)", "float8-e5m2 (fp16 LoRA)"]


def choose(models: Models, kind: str) -> None:
    """The list on the page loads the checkpoint anew; the API does so for another checkpoint alone."""
    models.webui.set_options(**{OPTION: kind})
    models.use("sd15-b")
    models.webui.make({"prompt": PROMPT, "steps": 1, "width": 64, "height": 64})
    models.use("sd15")


@pytest.fixture(params=KINDS)
def low_bits(request: pytest.FixtureRequest, webui: WebUI, sd15: Models) -> Iterator[str]:
    if webui.kind != "forge":
        pytest.skip("this is Forge's and Forge Neo's: give its address with --webui URL")
    choose(sd15, request.param)
    yield request.param
    choose(sd15, "Automatic")


def test_loras_and_weights_in_low_bits(webui: WebUI, sd15: Models, low_bits: str) -> None:
    one, other = sd15.need("lora-a"), sd15.need("lora-b")
    prompts = [
        PROMPT, with_lora(one, 1), with_lora(one, 0.5), with_lora(other, 1),
        with_lora(one, 0.7) + f" <lora:{other}:0.7>", PROMPT,
    ]
    on = make_all(run_on, webui, prompts)
    off = make_all(run_off, webui, prompts)
    for mine, hosts in zip(on, off, strict=True):
        assert_same(mine, hosts)
    for index, first in enumerate(on[:4]):
        assert_different(first, on[index + 1], "the LoRA")
    for runs in (on, off):
        assert (runs[0].pictures.arrays[0] == runs[-1].pictures.arrays[0]).all()


def test_locon_on_the_fly(webui: WebUI, sd15: Models, low_bits: str) -> None:
    plain = run_on(webui, {"prompt": PROMPT})
    with_it, _ = on_and_off(webui, {"prompt": with_lora(sd15.need("locon"), 1)})
    assert_different(plain, with_it, "the LoCon")


def test_controlnet_beside_a_lora_on_the_fly(
    webui: WebUI, sd15: Models, controlnet: str, low_bits: str,  # noqa: F811
) -> None:
    request = {**controlled(webui, controlnet), "prompt": with_lora(sd15.need("lora-a"), 1)}
    without = run_on(webui, controlled(webui, controlnet))
    with_it, _ = on_and_off(webui, request)
    assert_different(without, with_it, "the LoRA")
