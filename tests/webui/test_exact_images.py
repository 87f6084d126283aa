"""txt2img, hires fix, img2img and inpainting with OneDiff on and off: the images match, which means that no pixel
differs by more than one level of 255; OneDiff computes every UNet call as a whole, and every decode."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from PIL import Image
from webui_client import WebUI, encode, gradient, start_from
from webui_compare import Run, assert_different, assert_same_on_and_off, need, run_on, steps_of
from webui_models import Models, stem

# One token a word in every tokenizer; a chunk takes 75.
LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z "
WORDS_110, WORDS_190 = (" ".join((LETTERS * 8).split()[:count]) for count in (110, 190))


@dataclass(frozen=True)
class Case:
    """A request, as its differences from PICTURE.

    needs: a feature that some WebUIs lack. fewer_calls: how many fewer calls than steps the sampler makes. parted:
    whether the prompts have different token counts, which some WebUIs compute in two calls. elsewhere: differences for
    other architectures than SD 1.5.
    """

    name: str
    request: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    fewer_calls: int = 0
    parted: bool = False
    elsewhere: bool = False

    def least_calls(self, webui: WebUI) -> int:
        calls = steps_of(self.request) - self.fewer_calls
        return 2 * calls if self.parted and webui.kind == "a1111" else calls


def size(width: int, height: int) -> Case:
    return Case(f"{width}x{height}", {"width": width, "height": height}, elsewhere=True)


def prompts(name: str, prompt: str, negative: str, **more: Any) -> Case:
    given = {"needs": "long prompts", "parted": True, **more}
    return Case(name, {"prompt": prompt, "negative_prompt": negative}, **given)


def sampler(name: str, fewer_calls: int = 0, elsewhere: bool = False) -> Case:
    return Case(name, {"sampler_name": name, "steps": 4}, fewer_calls=fewer_calls, elsewhere=elsewhere)


CASES = [
    size(64, 64), size(72, 88), size(192, 64),
    Case("batch 2", {"batch_size": 2}, elsewhere=True),
    Case("two batches of 2 at 72x88", {"n_iter": 2, "batch_size": 2, "width": 72, "height": 88}),
    prompts("154 tokens, short negative", WORDS_110, "rain"),
    prompts("77 tokens, long negative", "a fox", WORDS_110),
    prompts("231 tokens, 154 of negative", WORDS_190, WORDS_110, elsewhere=True),
    prompts("231 tokens, long negative", WORDS_190, WORDS_190[::-1], parted=False),
    prompts("AND of two", "a fox :1.1 AND a castle at night :0.7", "rain", needs="AND prompts", parted=False,
            elsewhere=True),
    prompts("AND of long and short", f"a fox AND {WORDS_110}", "rain", needs="AND prompts", parted=False),
    Case("cfg 1", {"cfg_scale": 1}, elsewhere=True),
    sampler("Euler"), sampler("DPM++ 2M"), sampler("DPM++ SDE", elsewhere=True), sampler("Heun"),
    sampler("DDIM", fewer_calls=1), sampler("UniPC"), sampler("LCM"),
    Case("tiling at 72x88", {"tiling": True, "width": 72, "height": 88}, needs="tiling"),
]


def assert_same_with_our_decodes(
    webui: WebUI, request: dict[str, Any], least_calls: int | None = None
) -> tuple[Run, int]:
    """As assert_same_on_and_off. Asserts also that OneDiff makes all decodes while it is on, and none while it is off.
    Returns the run with OneDiff and the number of its decodes."""
    before = webui.status()["vae"]["calls"]
    on, _ = assert_same_on_and_off(webui, request, least_calls)
    after = webui.status()["vae"]
    ours, hosts = (after["calls"][route] - before[route] for route in ("ours", "host"))
    assert ours == hosts > 0 and after["reason"] == "OneDiff is switched off", after
    return on, ours


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_txt2img_images_match_those_of_the_webui_and_onediff_computes_every_call_and_decode(
    webui: WebUI, sd15: Models, case: Case
) -> None:
    need(webui, case.needs)
    assert_same_with_our_decodes(webui, case.request, case.least_calls(webui))


@pytest.fixture(scope="module", params=["sdxl", "sd2", "inpaint"])
def other_architecture(request: pytest.FixtureRequest, models: Models) -> Iterator[str]:
    """Load a checkpoint of another architecture, and SD 1.5 again afterwards."""
    name = models.use(request.param)
    infotext = run_on(models.webui, {}).pictures.info["infotexts"][0]
    assert f"Model: {stem(name)}," in infotext, infotext
    yield request.param
    models.use("sd15")


@pytest.mark.parametrize("case", [case for case in CASES if case.elsewhere], ids=lambda case: case.name)
def test_txt2img_images_of_other_architectures_match_those_of_the_webui(
    webui: WebUI, other_architecture: str, case: Case
) -> None:
    need(webui, case.needs)
    assert_same_with_our_decodes(webui, case.request, case.least_calls(webui))
    assert other_architecture != "inpaint" or "inpainting" in webui.status()["model"]


# --- other passes -----------------------------------------------------------------------------------------------------


def hires(webui: WebUI, upscaler: str, **changes: Any) -> dict[str, Any]:
    """A request whose second pass has 3 steps, at 1.5 times the size unless the changes say otherwise."""
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
    {}, {"hr_cfg": 1}, {"hr_resize_x": 88, "hr_resize_y": 72}, {"batch_size": 2, "n_iter": 2},
    {"hr_prompt": "a castle at night", "hr_negative_prompt": "fog"}, {"hr_sampler_name": "DPM++ 2M"},
], ids=lambda changes: ", ".join(changes) or "plain")
@pytest.mark.parametrize("upscaler", ["Latent", "Lanczos"])
def test_hires_fix_images_match_those_of_the_webui(
    webui: WebUI, sd15: Models, upscaler: str, changes: dict[str, Any]
) -> None:
    """Lanczos, an upscaler of pixels, needs a decode of the first pass, so that there are two decodes. changes: fields
    of the request."""
    need(webui, "hires fix")
    on, decodes = assert_same_with_our_decodes(webui, hires(webui, upscaler, **changes), 6 * changes.get("n_iter", 1))
    assert changes or decodes == (1 if upscaler == "Latent" else 2) or webui.is_neo
    expected = (changes["hr_resize_x"], changes["hr_resize_y"]) if "hr_resize_x" in changes else (96, 96)
    # Neo's copy with a translated page rounds to 64, others to 8.
    slack = 32 if webui.is_neo else 0
    assert all(abs(made - wanted) <= slack for made, wanted in zip(on.pictures.image.size, expected, strict=True))
    if "hr_prompt" in changes:
        assert_different(run_on(webui, hires(webui, upscaler), 6), on, "the hires prompt")


@pytest.mark.parametrize("changes", [
    {}, {"denoising_strength": 0.9, "width": 72, "height": 88}, {"batch_size": 2, "n_iter": 2},
    {"sampler_name": "DPM++ 2M"}, {"cfg_scale": 1},
], ids=lambda changes: ", ".join(changes) or "plain")
def test_img2img_images_match_those_of_the_webui(webui: WebUI, sd15: Models, changes: dict[str, Any]) -> None:
    need(webui, "img2img")
    request = {**start_from(gradient(64, 64)), **changes}
    steps = int(request["steps"] * request["denoising_strength"])
    assert_same_with_our_decodes(webui, request, steps * changes.get("n_iter", 1))


def masked(**changes: Any) -> dict[str, Any]:
    """A request that inpaints the right half of the original image."""
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (32, 0, 64, 64))
    given = {"mask": encode(mask), "mask_blur": 2, "inpainting_fill": 1, "inpaint_full_res": False}
    return {**start_from(gradient(64, 64)), **given, **changes}


@pytest.mark.parametrize("changes", [
    {}, {"inpainting_fill": 2}, {"inpaint_full_res": True}, {"width": 88, "height": 72, "batch_size": 2},
], ids=lambda changes: ", ".join(changes) or "plain")
@pytest.mark.parametrize("role", ["sd15", "inpaint"])
def test_inpainted_images_match_those_of_the_webui(
    webui: WebUI, sd15: Models, role: str, changes: dict[str, Any]
) -> None:
    """The right half is inpainted, with an SD 1.5 and an inpainting checkpoint (role)."""
    need(webui, "masks")
    sd15.use(role)
    on, _ = assert_same_on_and_off(webui, masked(**changes), least_calls=3)
    if not changes:
        all_of_it = encode(Image.new("L", (64, 64), 255))
        assert_different(on, run_on(webui, masked(mask=all_of_it), 3), "the mask")
