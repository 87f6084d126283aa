"""Images with ControlNet match those of the WebUI alone (OneDiff off; no pixel differs by more than 1 of 255). Forge
passes ControlNet's output to the UNet, and OneDiff computes the UNet; A1111's extension runs the UNet's blocks itself,
so the WebUI computes those calls."""
from __future__ import annotations

from typing import Any

import pytest
from test_exact_images import hires
from webui_client import WebUI, encode, gradient, start_from
from webui_compare import Run, assert_different, assert_same, assert_same_on_and_off, need, run, run_on
from webui_models import Models

# By the WebUI's kind: the routes of calls with ControlNet.
ROUTES = {"forge": ("plain", "graph"), "ldm_patched": ("plain", "graph"), "a1111": ("host",)}
NO_PREPROCESSOR = {"forge": "None", "ldm_patched": "None", "a1111": "none"}


def controlled(webui: WebUI, model: str, **changes: Any) -> dict[str, Any]:
    """A request with one ControlNet unit and no preprocessor."""
    unit = {
        "enabled": True, "module": NO_PREPROCESSOR[webui.kind], "model": model, "weight": 1.0,
        "image": encode(gradient(64, 64)), "resize_mode": "Just Resize", "processor_res": 64,
        "control_mode": "Balanced", **changes,
    }
    return {"alwayson_scripts": {"ControlNet": {"args": [unit]}}}


@pytest.fixture
def controlnet(webui: WebUI, sd15: Models) -> str:
    """The name of a ControlNet model for SD 1.5, on a WebUI with ControlNet."""
    need(webui, "ControlNet")
    return sd15.need("controlnet")


def assert_same_by_its_route(webui: WebUI, request: dict[str, Any], plain: Run, least_calls: int | None = None) -> None:
    """Assert that a request with ControlNet takes the WebUI's ROUTES, that its image matches the one with OneDiff off,
    and that the image differs from `plain`, the run without ControlNet. least_calls: see run_on."""
    on = run_on(webui, request, least_calls, ROUTES[webui.kind])
    off = run(webui, request, enabled=False)
    assert off.served(("graph", "plain")) == 0, off.calls
    assert_same(on, off)
    assert_different(plain, on, "the ControlNet")


@pytest.mark.parametrize(("role", "checkpoint"), [("t2i-adapter", "sd15"), ("controlnet-sdxl", "sdxl")])
def test_images_with_t2i_adapters_and_sdxl_controlnets_match_those_of_the_webui(
    webui: WebUI, sd15: Models, role: str, checkpoint: str
) -> None:
    """The next image without the model is as before. role: the role of the T2I-Adapter or ControlNet (see
    webui_models.py)."""
    need(webui, "ControlNet")
    request = controlled(webui, sd15.need(role))
    sd15.use(checkpoint)
    plain = run_on(webui, {})
    assert_same_by_its_route(webui, request, plain)
    assert_same(run_on(webui, {}), plain)


def test_an_image_with_a_controlnet_and_a_hires_pass_matches_that_of_the_webui(webui: WebUI, controlnet: str) -> None:
    plain = run_on(webui, hires(webui, "Latent"), 6)
    request = {**hires(webui, "Latent"), **controlled(webui, controlnet)}
    assert_same_by_its_route(webui, request, plain)


def test_an_img2img_image_with_a_controlnet_matches_that_of_the_webui(webui: WebUI, controlnet: str) -> None:
    request = {**start_from(gradient(64, 64)), "steps": 8}
    assert_same_by_its_route(webui, {**request, **controlled(webui, controlnet)}, run_on(webui, request, 4), 4)


@pytest.mark.parametrize("changes", [
    {},
    {"width": 72, "height": 88},
    {"batch_size": 2, "n_iter": 2},
    {"prompt": "a " * 110},
    {"cfg_scale": 1},
], ids=lambda changes: ", ".join(changes) or "plain")
def test_images_with_a_controlnet_match_the_webui_and_the_next_without_it_are_as_before(
    webui: WebUI, controlnet: str, changes: dict[str, Any]
) -> None:
    """changes: what differs from the usual request."""
    request = {**controlled(webui, controlnet), **changes}
    plain = run_on(webui, changes)
    assert_same_by_its_route(webui, request, plain)
    assert_same(run_on(webui, changes), plain)


@pytest.mark.parametrize("changes", [
    {"weight": 0.5},
    {"guidance_end": 0.1},
    {"guidance_start": 0.5},
    {"control_mode": "ControlNet is more important"},
], ids=lambda changes: next(iter(changes)))
def test_images_with_settings_of_a_controlnet_unit_match_those_of_the_webui(
    webui: WebUI, controlnet: str, changes: dict[str, Any]
) -> None:
    """The setting also changes the image. changes: one setting of the unit."""
    steps = {"steps": 4}
    whole = run_on(webui, {**controlled(webui, controlnet), **steps}, routes=ROUTES[webui.kind])
    request = {**controlled(webui, controlnet, **changes), **steps}
    on = run_on(webui, request, routes=ROUTES[webui.kind])
    assert_same(on, run(webui, request, enabled=False))
    # reForge's own images are the same in every control mode: it compares the mode with the mode's text.
    if "control_mode" not in changes or not webui.status()["release"].startswith("reForge"):
        assert_different(whole, on, str(changes))


def test_a_prompt_and_a_lora_between_two_images_with_a_controlnet_affect_only_their_own_images(
    webui: WebUI, sd15: Models, controlnet: str
) -> None:
    """Four requests: with ControlNet; with ControlNet, another prompt and a LoRA; with these but without ControlNet;
    and the first one again. The second and third images match those of the WebUI, and the fourth one the first."""
    lora = f"a red fox in the snow <lora:{sd15.need('lora-a')}:1>"
    request = {**controlled(webui, controlnet), "prompt": lora}
    first = run_on(webui, controlled(webui, controlnet), routes=ROUTES[webui.kind])
    on = run_on(webui, request, routes=ROUTES[webui.kind])
    assert_same(on, run(webui, request, enabled=False))
    assert_different(first, on, "the LoRA")
    assert_same_on_and_off(webui, {"prompt": lora})
    assert_same(run_on(webui, controlled(webui, controlnet), routes=ROUTES[webui.kind]), first)
