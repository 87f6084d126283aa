"""The decoding of pictures with the extension on and off: who decodes, and the same pixels."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_exact_images import hires
from webui_client import WebUI, gradient, start_from
from webui_compare import Run, assert_different, assert_same, need, run_off, run_on
from webui_models import Models

ROUTES = ("ours", "host")


def decoded(webui: WebUI, make: Callable[..., Run], request: dict[str, Any], steps: int) -> tuple[Run, dict[str, int]]:
    """A run, and how many decodes took each route meanwhile."""
    before = webui.status()["vae"]["calls"]
    made = make(webui, request, steps)
    after = webui.status()["vae"]["calls"]
    return made, {route: after[route] - before[route] for route in ROUTES}


def on_and_off(webui: WebUI, request: dict[str, Any], steps: int = 3) -> tuple[Run, int]:
    """The run with the extension on, and how many decodes it made; all ours, and with the extension off none."""
    on, ours = decoded(webui, run_on, request, steps)
    told = webui.status()["vae"]
    assert (told["route"], told["reason"]) == ("ours", "")
    assert told["relative_error"] is not None
    off, theirs = decoded(webui, run_off, request, steps)
    told = webui.status()["vae"]
    assert told["route"] == "host" and told["reason"] == "OneDiff is switched off"
    assert ours["host"] == 0 and theirs["ours"] == 0
    assert ours["ours"] == theirs["host"] > 0, f"on {ours}, off {theirs}"
    assert_same(on, off)
    return on, ours["ours"]


@pytest.mark.parametrize("request_", [
    {}, {"width": 72, "height": 88}, {"width": 192, "height": 64}, {"batch_size": 2, "n_iter": 2},
], ids=lambda request: ", ".join(map(str, request.values())) or "64x64")
def test_txt2img(webui: WebUI, sd15: Models, request_: dict[str, Any]) -> None:
    pictures, decodes = on_and_off(webui, request_)
    count = request_.get("batch_size", 1) * request_.get("n_iter", 1)
    # Forge decodes a batch at once.
    assert decodes == count or (webui.kind == "forge" and decodes == request_["n_iter"])


@pytest.mark.parametrize("role", ["sdxl", "sd2"])
def test_other_architectures(webui: WebUI, sd15: Models, role: str) -> None:
    sd15.use(role)
    on_and_off(webui, {"width": 72, "height": 88})


def test_img2img(webui: WebUI, sd15: Models) -> None:
    on_and_off(webui, start_from(gradient(64, 64)), steps=1)


@pytest.mark.parametrize(("upscaler", "passes"), [("Latent", 1), ("Lanczos", 2)])
def test_hires_fix(webui: WebUI, sd15: Models, upscaler: str, passes: int) -> None:
    """Between pixels and pixels an upscaler needs the first pass decoded, within the sampling."""
    need(webui, "hires fix")
    _, decodes = on_and_off(webui, hires(webui, upscaler), steps=6)
    assert decodes == passes


def test_tiling(webui: WebUI, sd15: Models) -> None:
    need(webui, "tiling")
    plain, _ = on_and_off(webui, {})
    tiled, _ = on_and_off(webui, {"tiling": True})
    assert_different(plain, tiled, "tiling")


def test_another_vae_for_one_picture(webui: WebUI, sd15: Models) -> None:
    need(webui, "checkpoint switch")
    vae = sd15.need("vae")
    option, none = ("forge_additional_modules", []) if webui.kind == "forge" else ("sd_vae", "None")
    with webui.options(**{option: none}):
        plain, _ = on_and_off(webui, {})
        webui.set_options(**{option: [vae] if webui.kind == "forge" else vae})
        other, _ = on_and_off(webui, {})
        webui.set_options(**{option: none})
        again, _ = on_and_off(webui, {})
    assert_different(plain, other, "the VAE")
    assert_same(plain, again)


def test_switched_off_for_all(webui: WebUI, sd15: Models) -> None:
    """Out of the WebUI altogether: no decode is even seen."""
    plain, _ = on_and_off(webui, {})
    with webui.options(onediff_enabled=False):
        before = webui.status()["vae"]["calls"]
        assert_same(Run(webui.txt2img(), {}, ""), plain)
        assert webui.status()["vae"]["calls"] == before
    on_and_off(webui, {})
