"""Extensions that stand beside us, themselves: each runs where the WebUI at --webui has it in its extensions folder.

tests/webui/extensions/onediff-neighbours must be linked there too: ADetailer gets its detector from it, and SuperMerger
the address by which a test can press its button.
"""
from __future__ import annotations

import json
from typing import Any

import pytest
from PIL import Image
from test_neighbours import ROUTE
from webui_client import PICTURE, WebUI, encode, one_run, start_from
from webui_client import gradient as gradient_image
from webui_compare import (
    assert_between_graphs,
    assert_different,
    assert_same,
    assert_within,
    graphs_on_a_cpu,
    on_and_off,
    run_on,
)
from webui_models import Models


def need_script(webui: WebUI, title: str, tab: str = "txt2img") -> None:
    if title.lower() not in webui.get("/sdapi/v1/scripts")[tab]:
        pytest.skip(f"this WebUI has no {title} in its extensions folder")
    if not webui.has(f"{ROUTE}/table"):
        pytest.skip("link tests/webui/extensions/onediff-neighbours into the extensions folder of the WebUI")


def adetailer(**tab: Any) -> dict[str, Any]:
    """ADetailer over a given image, without a generation before it: a difference of 1/255 in that would grow."""
    faces = {
        "ad_model": "mediapipe_face_short", "ad_denoising_strength": 0.7, "ad_inpaint_only_masked_padding": 8,
        "ad_use_inpaint_width_height": True, "ad_inpaint_width": 64, "ad_inpaint_height": 64, **tab,
    }
    return {
        **start_from(gradient_image(128, 128)), "width": 128, "height": 128, "steps": 3,
        "alwayson_scripts": {"ADetailer": {"args": [True, True, faces]}},
    }


# Of the detector's three faces, the one whose share of the image lies between the two.
@pytest.mark.parametrize("share", [(0.1, 0.14), (0.14, 0.2), (0.3, 1.0)], ids=["wide", "square", "tall"])
def test_adetailer_over_one_face(webui: WebUI, sd15: Models, share: tuple[float, float]) -> None:
    need_script(webui, "ADetailer")
    request = adetailer(ad_mask_min_ratio=share[0], ad_mask_max_ratio=share[1])
    without = {**request, "alwayson_scripts": {}}
    plain = run_on(webui, without, least_calls=1)
    made, _ = on_and_off(webui, request, least_calls=2)
    assert_different(plain, made, "ADetailer")
    assert_same(run_on(webui, without, least_calls=1), plain)


def test_ultimate_sd_upscale(webui: WebUI, sd15: Models) -> None:
    """Two tiles without anything in common, since each begins with the image in which the one before was drawn."""
    need_script(webui, "Ultimate SD upscale", "img2img")
    tile, padding, seams, upscaler, redraw, custom_size = (64, 64), (0, 0), (64, 0.35, 16), 0, 0, 1
    request = {
        **start_from(gradient_image(128, 64)), "steps": 3, "script_name": "ultimate sd upscale", "script_args": [
            None, *tile, *padding, *seams, upscaler, True, redraw, False, 4, 0, custom_size, 128, 64, 2,
        ],
    }
    made, _ = on_and_off(webui, request, least_calls=2)
    assert made.pictures.image.size == (128, 64)


REGIONS = "Regional Prompter"
REGIONS_PROMPT = {"prompt": "a red fox in the snow BREAK a castle at night"}


def in_regions(webui: WebUI, mode: str) -> dict[str, Any]:
    """Two regions side by side. mode: "Attention" or "Latent"."""
    need_script(webui, REGIONS)
    of_neo = [True, mode, *masked_regions()]
    found = next(info for info in webui.get("/sdapi/v1/script-info") if info["name"] == REGIONS.lower())
    if len(found["args"]) == len(of_neo):
        return {**REGIONS_PROMPT, **always(REGIONS, of_neo)}
    columns = ["Matrix", "Columns", "Mask", "Prompt", "1,1", "0.2", False, False, False]
    return {**REGIONS_PROMPT, **always(REGIONS, [True, False, *columns, mode, [], "0", "0", "0.4"])}


def masked_regions() -> tuple[str, str]:
    """As the copy for Neo has them: a picture, and the prompts of its colours, which come behind the request's."""
    mask = Image.new("RGB", (64, 64), (255, 255, 255))
    mask.paste((255, 0, 0), (0, 0, 32, 64))
    mask.paste((0, 255, 0), (32, 0, 64, 64))
    regions = [{"color": [255, 0, 0], "prompt": "a fox"}, {"color": [0, 255, 0], "prompt": "a castle at night"}]
    return encode(mask), json.dumps(regions)


def always(title: str, args: list[Any]) -> dict[str, Any]:
    return {"alwayson_scripts": {title: {"args": args}}}


def skip_where_it_fails_by_itself(webui: WebUI, request: dict[str, Any]) -> None:
    answers = [
        webui.post("/sdapi/v1/txt2img", {
            **PICTURE, **request, "alwayson_scripts": {**request["alwayson_scripts"], **own["alwayson_scripts"]},
        }) for own in (one_run(enabled=False), one_run(enabled=True))
    ]
    errors = [answer.text for answer in answers if answer.status_code != 200]
    if errors:
        assert len(errors) == 2 and errors[0] == errors[1], errors
        run_on(webui, REGIONS_PROMPT)
        pytest.skip(f"this Regional Prompter fails without OneDiff too: {errors[0][:200]}")


@pytest.mark.parametrize("mode", ["Attention", "Latent"])
def test_regional_prompter(webui: WebUI, sd15: Models, mode: str) -> None:
    """By its own forward in every cross attention, or by what it does with each step's latents."""
    request = in_regions(webui, mode)
    skip_where_it_fails_by_itself(webui, request)
    if mode == "Attention":
        plain, made = assert_within(webui, request, REGIONS_PROMPT, "attn2 by scripts")
        assert_different(plain, made, "the regions")
    else:
        plain = run_on(webui, REGIONS_PROMPT)
        on_and_off(webui, request)
        assert_same(run_on(webui, REGIONS_PROMPT), plain)


def test_regional_prompter_between_graphs(webui: WebUI, sd15: Models) -> None:
    request = in_regions(webui, "Attention")
    skip_where_it_fails_by_itself(webui, request)
    with graphs_on_a_cpu(webui):
        plain, made = assert_between_graphs(webui, request, REGIONS_PROMPT, "attn2 by scripts")
    assert_different(plain, made, "the regions")


def test_supermerger(webui: WebUI, sd15: Models) -> None:
    """It loads a merge that is in no file."""
    names = [sd15.need("sd15"), sd15.need("sd15-b")]
    plain = run_on(webui, {})
    for alpha in (0.5, 0.25):
        answer = webui.post(f"{ROUTE}/merge", {"models": names, "alpha": alpha})
        if answer.status_code == 404:
            pytest.skip("this WebUI has no SuperMerger in its extensions folder, or nobody who asks for it")
        assert answer.status_code == 200 and "ERROR" not in answer.text, answer.text[:500]
        merged, _ = on_and_off(webui, {})
        assert_different(plain, merged, "the merge")
    sd15.use("sd15-b")
    on_and_off(webui, {})
    sd15.use("sd15")
    assert_same(run_on(webui, {}), plain)
