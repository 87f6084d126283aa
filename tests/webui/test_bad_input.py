"""What cannot be made: each time one sentence, and the host lives on."""
from __future__ import annotations

from typing import Any

import pytest
import requests
from PIL import Image
from webui_client import PICTURE, WebUI, encode, gradient, one_run


def nested(times: int) -> list[Any]:
    """A list in a list, and so on."""
    values: list[Any] = []
    for _ in range(times):
        values = [values]
    return values


TXT2IMG = {
    "no multiple of 8": {"width": 65},
    "size 0": {"height": 0},
    "negative size": {"width": -64},
    "huge size": {"width": 100000},
    "size just too large": {"height": 2056},
    "size that is no number": {"width": "wide"},
    "unknown sampler": {"sampler_name": "Magic"},
    "unknown schedule": {"scheduler": "Magic"},
    "schedule that the sampler does not take": {"sampler_name": "Euler a", "scheduler": "Karras"},
    "no steps": {"steps": 0},
    "too many steps": {"steps": 1000},
    "no pictures": {"batch_size": 0},
    "too many pictures": {"batch_size": 1000},
    "too many batches": {"n_iter": 1000},
    "cfg that is no number": {"cfg_scale": "much"},
    "cfg out of range": {"cfg_scale": 1e9},
    "seed out of range": {"seed": 2**70},
    "unknown script": {"alwayson_scripts": {"Nobody": {"args": []}}},
    "script without args": {"alwayson_scripts": {"OneDiff": [True]}},
    "unknown option": {"override_settings": {"no_such_option": 1}},
    "option of the wrong kind": {"override_settings": {"onediff_enabled": "maybe"}},
    "hires fix": {"enable_hr": True},
    "half a character": {"prompt": "\ud800"},
    "half a character in the negative prompt": {"negative_prompt": "a \udfff"},
    "half a character in a name": {"sampler_name": "\ud800"},
    "half a character in an unknown option": {"override_settings": {"\ud800": 1}},
    "half a character in an option": {"override_settings": {"onediff_prewarm": "\ud800"}},
    "prompt without end": {"prompt": "a" * 100_000},
    "prompt of emoji alone": {"prompt": "\N{FOX FACE}" * 10_000},
    "argument without end": {"alwayson_scripts": {"OneDiff": {"args": [nested(600)]}}},
    "option without end": {"override_settings": {"onediff_prewarm": nested(900)}},
}
IMG2IMG = {
    "no image": {"init_images": []},
    "broken base64": {"init_images": ["%%%"]},
    "base64 of something else": {"init_images": ["aGVsbG8="]},
    "cut-off picture": {"init_images": [encode(gradient(64, 64))[:120]]},
    "picture of another format": {"init_images": [encode(gradient(64, 64), "BMP")]},
    "animation": {"init_images": [encode(gradient(64, 64), "GIF")]},
    "an address": {"init_images": ["http://127.0.0.1/picture.png"]},
    "broken mask": {"mask": "%%%"},
    "more images than are used": {"init_images": [encode(gradient(64, 64))] * 2},
    "more pixels than anybody needs": {"init_images": [encode(Image.new("1", (13300, 13300)))]},
    "a mask of more pixels": {"mask": encode(Image.new("1", (13300, 13300)))},
    "strength out of range": {"denoising_strength": 1.5},
    "nothing left to do": {"denoising_strength": 0.01},
    "unknown resize mode": {"resize_mode": 7},
}


def assert_sentence(answer: requests.Response) -> None:
    assert 400 <= answer.status_code < 500, answer.text[:300]
    detail = answer.json()["detail"]
    assert isinstance(detail, str) and detail.endswith("."), detail
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("changes", TXT2IMG.values(), ids=TXT2IMG.keys())
def test_txt2img_refuses(standalone: WebUI, changes: dict[str, Any]) -> None:
    assert_sentence(standalone.post("/sdapi/v1/txt2img", {**PICTURE, **changes}))


@pytest.mark.parametrize("changes", IMG2IMG.values(), ids=IMG2IMG.keys())
def test_img2img_refuses(standalone: WebUI, changes: dict[str, Any]) -> None:
    body = {**PICTURE, "init_images": [encode(gradient(64, 64))], "denoising_strength": 0.6, "steps": 5, **changes}
    assert_sentence(standalone.post("/sdapi/v1/img2img", body))


def test_bodies_that_are_no_json(standalone: WebUI) -> None:
    for body in (b"", b"{", b"[]", b"\xff\xfe"):
        answer = requests.post(
            standalone.url + "/sdapi/v1/txt2img", data=body, headers={"content-type": "application/json"}, timeout=30
        )
        assert_sentence(answer)


def test_not_a_number(standalone: WebUI) -> None:
    answer = requests.post(
        standalone.url + "/sdapi/v1/txt2img", data=b'{"cfg_scale": NaN, "width": 64, "height": 64}',
        headers={"content-type": "application/json"}, timeout=30,
    )
    assert_sentence(answer)


@pytest.mark.parametrize("options", [
    {"no_such_option": 1}, {"onediff_backend": "warp"}, {"onediff_enabled": 1}, {"\ud800": 1},
    {"onediff_prewarm": "\ud800"},
], ids=ascii)
def test_options_refuse(standalone: WebUI, options: dict[str, Any]) -> None:
    before = standalone.get("/sdapi/v1/options")
    assert_sentence(standalone.post("/sdapi/v1/options", options))
    assert standalone.get("/sdapi/v1/options") == before


def test_half_a_character_in_a_script_argument_is_repeated_as_it_came(standalone: WebUI) -> None:
    made = standalone.post("/sdapi/v1/txt2img", {**PICTURE, **one_run(backend="\ud800")})
    assert made.status_code == 200
    assert made.json()["parameters"]["alwayson_scripts"] == one_run(backend="\ud800")["alwayson_scripts"]


def test_refusals_are_as_the_schema_says(standalone: WebUI) -> None:
    described = standalone.get("/openapi.json")
    for path, methods in described["paths"].items():
        for told in methods.values():
            schema = told["responses"]["422"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Problem"}, path
    assert described["components"]["schemas"]["Problem"]["properties"].keys() == {"detail"}
    for body in ({"width": "wide"}, {"width": 65}):
        assert set(standalone.post("/sdapi/v1/txt2img", body).json()) == {"detail"}
    assert set(standalone.post("/onediff/v1/prewarm", {"sizes": 5}).json()) == {"detail"}


def test_unusable_size_names_a_usable_one(standalone: WebUI) -> None:
    answer = standalone.post("/sdapi/v1/txt2img", {**PICTURE, "width": 65})
    assert answer.json()["detail"] == "width is 65; it must be a multiple of 8, for example 64 or 72."


def test_host_lives_on(webui: WebUI) -> None:
    assert webui.txt2img().image.size == (64, 64)
    assert webui.get("/sdapi/v1/progress")["progress"] == 0
