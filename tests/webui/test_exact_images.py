"""Hires fix, img2img and inpainting with the extension on and off."""
from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from webui_client import WebUI, encode, gradient, start_from
from webui_compare import assert_different, need, on_and_off, run_on
from webui_models import Models


def hires(webui: WebUI, upscaler: str, **changes: Any) -> dict[str, Any]:
    """A request whose second pass has 3 steps, at 1.5 times the size unless told otherwise."""
    request = {
        "enable_hr": True, "hr_upscaler": upscaler, "hr_scale": 1.5, "hr_second_pass_steps": 3,
        "denoising_strength": 0.7, "hr_cfg": 7,
    }
    if webui.is_neo:
        request["hr_upscaler"] = "None"  # Neo has no latent upscalers, and no others without a model of their own.
    if webui.kind == "forge":
        request["hr_additional_modules"] = ["Use same choices"]  # Without it the answer is an error 500.
    request |= changes
    if webui.kind == "ldm_patched":
        request["hr_cfg_scale"] = request["hr_cfg"]  # Classic's name for it; without it the answer is an error 500.
    return request


@pytest.mark.parametrize("changes", [
    {},
    {"hr_cfg": 1},
    {"hr_resize_x": 88, "hr_resize_y": 72},
    {"batch_size": 2, "n_iter": 2},
    {"hr_prompt": "a castle at night", "hr_negative_prompt": "fog"},
    {"hr_sampler_name": "DPM++ 2M"},
], ids=lambda changes: ", ".join(changes) or "plain")
@pytest.mark.parametrize("upscaler", ["Latent", "Lanczos"])
def test_hires_fix(webui: WebUI, sd15: Models, upscaler: str, changes: dict[str, Any]) -> None:
    need(webui, "hires fix")
    batches = changes.get("n_iter", 1)
    on, _ = on_and_off(webui, hires(webui, upscaler, **changes), least_calls=6 * batches)
    expected = (changes["hr_resize_x"], changes["hr_resize_y"]) if "hr_resize_x" in changes else (96, 96)
    if webui.is_neo:
        # Its copy with a translated page rounds to 64, others to 8.
        assert all(abs(made - wanted) <= 32 for made, wanted in zip(on.pictures.image.size, expected, strict=True))
    else:
        assert on.pictures.image.size == expected


def test_hires_prompt_shows_in_the_picture(webui: WebUI, sd15: Models) -> None:
    need(webui, "hires fix")
    plain = run_on(webui, hires(webui, "Latent"), 6)
    other = run_on(webui, hires(webui, "Latent", hr_prompt="a castle at night"), 6)
    assert_different(plain, other, "the hires prompt")


@pytest.mark.parametrize("changes", [
    {},
    {"denoising_strength": 0.9, "width": 72, "height": 88},
    {"batch_size": 2},
    {"n_iter": 2},
    {"sampler_name": "DPM++ 2M"},
    {"cfg_scale": 1},
], ids=lambda changes: ", ".join(changes) or "plain")
def test_img2img(webui: WebUI, sd15: Models, changes: dict[str, Any]) -> None:
    request = {**start_from(gradient(64, 64)), **changes}
    steps = int(request["steps"] * request["denoising_strength"])
    on_and_off(webui, request, least_calls=steps * changes.get("n_iter", 1))


def masked(**changes: Any) -> dict[str, Any]:
    """Inpainting of the right half, starting from the original picture."""
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (32, 0, 64, 64))
    given = {"mask": encode(mask), "mask_blur": 2, "inpainting_fill": 1, "inpaint_full_res": False}
    return {**start_from(gradient(64, 64)), **given, **changes}


def no_mask_here(webui: WebUI) -> None:
    if webui.is_standalone:
        pytest.skip("the standalone host takes no masks: --webui URL")


@pytest.mark.parametrize("changes", [
    {},
    {"inpainting_fill": 2},
    {"inpaint_full_res": True},
    {"width": 88, "height": 72, "batch_size": 2},
], ids=lambda changes: ", ".join(changes) or "plain")
@pytest.mark.parametrize("role", ["sd15", "inpaint"])
def test_inpainting(webui: WebUI, sd15: Models, role: str, changes: dict[str, Any]) -> None:
    no_mask_here(webui)
    sd15.use(role)
    on_and_off(webui, masked(**changes), least_calls=3)


@pytest.mark.parametrize("role", ["sd15", "inpaint"])
def test_mask_shows_in_the_picture(webui: WebUI, sd15: Models, role: str) -> None:
    no_mask_here(webui)
    sd15.use(role)
    all_of_it = encode(Image.new("L", (64, 64), 255))
    assert_different(run_on(webui, masked(), 3), run_on(webui, masked(mask=all_of_it), 3), "the mask")


def test_txt2img_with_an_inpainting_checkpoint(webui: WebUI, sd15: Models) -> None:
    sd15.use("inpaint")
    on_and_off(webui, {"width": 72, "height": 88})
    run_on(webui, {})
    assert "inpainting" in webui.status()["model"]
