"""Forge's Diffusion in Low Bits: LoRA on the fly and weights in float8 are the host's, with the reason, and exactly."""
from __future__ import annotations

import pytest
from test_loras import PROMPT, with_lora
from webui_client import WebUI
from webui_compare import assert_different, assert_same, run, run_off, run_on
from webui_models import Models

# What the list on Forge's page sets; its API sets it as an option.
OPTION = "forge_unet_storage_dtype"


def choose(models: Models, kind: str) -> None:
    """The list on the page loads the checkpoint anew; the API does so for another checkpoint alone."""
    models.webui.set_options(**{OPTION: kind})
    models.use("sd15-b")
    models.use("sd15")


@pytest.mark.parametrize(("kind", "reason"), [
    ("Automatic (fp16 LoRA)", "a LoRA is applied at every call"), ("float8-e4m3fn", "float8"),
])
def test_low_bits_are_the_hosts(webui: WebUI, sd15: Models, kind: str, reason: str) -> None:
    if webui.kind != "forge":
        pytest.skip("this is Forge's: give its address with --webui URL")
    request = {"prompt": with_lora(sd15.need("lora-a"), 1)}
    plain, merged = run_on(webui, {"prompt": PROMPT}), run_on(webui, request)
    choose(sd15, kind)
    try:
        on, off = run(webui, request, enabled=True), run_off(webui, request)
        assert on.served(("graph", "plain", "blocks")) == 0 and reason in on.reason, on.reason
        assert_same(on, off)
        assert_different(on, plain, "the LoRA")
    finally:
        choose(sd15, "Automatic")
    assert_same(run_on(webui, request), merged)
