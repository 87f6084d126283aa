"""What others put on the UNet: functions of the host's protocol run within our forward, what we do not know goes to the
host's own UNet, with a reason, and what does not touch the UNet changes nothing."""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from webui_client import OPTION_DEFAULTS, WebUI, largest_difference
from webui_compare import WHOLE_UNET, Run, assert_different, assert_same, on_and_off, run_off, run_on
from webui_models import Models

PROMPT = "a red fox in the snow"


# FreeU divides by the range of a feature map: at 64x64 the deepest is one pixel, and with Kohya HRFix at 128x128.
LARGER, LARGEST = {"width": 128, "height": 128}, {"width": 256, "height": 256}


def script(title: str, *args: Any) -> dict[str, Any]:
    return {"alwayson_scripts": {title: {"args": list(args)}}}


FREEU = script("FreeU Integrated (SD 1.x, SD 2.x, SDXL)", True, 1.3, 1.4, 0.9, 0.2, 0.0, 1.0)
SAG = script("SelfAttentionGuidance Integrated (SD 1.x, SD 2.x, SDXL)", True, 0.5, 2.0, 1.0)
KOHYA_HRFIX = script("Kohya HRFix Integrated", True, 3, 2.0, 0.0, 1.0, True, "bicubic", "bicubic")
PERTURBED_ATTENTION = script("PerturbedAttentionGuidance Integrated", True, 15.0, 0.0, 0.0, 1.0)
MULTIDIFFUSION = script("MultiDiffusion Integrated", True, "MultiDiffusion", 64, 64, 32, 1)
DYNAMIC_THRESHOLDING = script(
    "DynamicThresholding (CFG-Fix) Integrated", True, 5.0, 0.9, "Constant", 0.0, "Constant", 0.0, 1.0, "enable",
    "MEAN", "AD", 1.0,
)


@dataclass(frozen=True)
class Foreign:
    """reason: a pattern that the reason for the host's route must contain; request and options: how to have it.

    doubles_calls: it shows in further UNet calls, while with random weights it may change no pixel.
    """

    name: str
    host: str
    reason: str
    request: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    doubles_calls: bool = False


WITHIN = [
    Foreign("FreeU", "forge", r"patches\[output_block_patch\] by .*freeu", {**FREEU, **LARGER}),
    Foreign("self-attention guidance", "forge", r"patches_replace\[attn1\]", SAG, doubles_calls=True),
    Foreign(
        "perturbed attention", "forge", r"patches_replace\[attn1\].*perturbed_attention", PERTURBED_ATTENTION,
        doubles_calls=True,
    ),
    Foreign("Kohya HRFix", "forge", r"input_block_patch_after_skip", KOHYA_HRFIX),
    Foreign("token merging on Forge", "forge", r"patches\[attn1_patch\]", options={"token_merging_ratio": 0.5}),
    Foreign("FreeU of reForge", "ldm_patched", r"patches\[output_block_patch\] by .*freelunch", {
        **LARGER, **script("FreeU Integrated", True, 1.3, 1.4, 0.9, 0.2),
    }),
    Foreign("self-attention guidance of reForge", "ldm_patched", r"patches_replace\[attn1\]", {
        # At 64x64 it fails in reForge itself.
        **LARGER, **script("SelfAttentionGuidance Integrated", True, 0.5, 2.0),
    }, doubles_calls=True),
    Foreign("Kohya HRFix of reForge", "ldm_patched", "input_block_patch_after_skip", {
        **script("Kohya HRFix Integrated", True, 3, 2.0, 0.0, 1.0, True, "bicubic", "bicubic"),
    }),
    Foreign("FreeU and Kohya HRFix", "forge", "freeu", {
        **LARGEST, "alwayson_scripts": {**FREEU["alwayson_scripts"], **KOHYA_HRFIX["alwayson_scripts"]},
    }),
    Foreign("token merging", "a1111", r"block by tomesd", options={"token_merging_ratio": 0.5}),
    Foreign(
        "HyperTile", "a1111", "attn1 by hypertile", LARGEST,
        {"hypertile_enable_unet": True, "hypertile_swap_size_unet": 3, "hypertile_max_tile_unet": 128},
    ),
]
UNTOUCHED = [
    Foreign("dynamic thresholding", "forge", "", DYNAMIC_THRESHOLDING),
    Foreign("MultiDiffusion", "forge", "", {**MULTIDIFFUSION, "width": 128}),
]


def only_on(webui: WebUI, host: str) -> None:
    if webui.kind != host:
        pytest.skip(f"this is {host}'s: give its address with --webui URL")


def assert_host_served(webui: WebUI, request: dict[str, Any], reason: str) -> Run:
    """On and off: all UNet calls the host's, and the reason of the run with the extension on. The decode is ours."""
    on = run_on(webui, request, routes=("host",))
    assert re.search(reason, on.reason, re.IGNORECASE), f"the reason given was {on.reason!r}"
    off = run_off(webui, request)
    assert on.calls == off.calls
    assert_same(on, off)
    return on


def prepared(webui: WebUI, foreign: Foreign) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request with what is foreign, and the same without."""
    only_on(webui, foreign.host)
    request = dict(foreign.request)
    plain = {name: value for name, value in request.items() if name != "alwayson_scripts"}
    if foreign.options:
        # A1111 does not put an option back that was overridden and had never been saved: so they are saved first.
        webui.set_options(**{name: OPTION_DEFAULTS[name] for name in foreign.options})
        request["override_settings"] = foreign.options
    return request, plain


@pytest.mark.parametrize("foreign", WITHIN, ids=lambda foreign: foreign.name)
def test_functions_of_the_hosts_protocol_run_within_ours(webui: WebUI, sd15: Models, foreign: Foreign) -> None:
    request, plain_request = prepared(webui, foreign)
    plain, _ = on_and_off(webui, plain_request)
    off = run_off(webui, request)
    calls = off.calls["host"]
    on = run_on(webui, request, calls)
    assert on.served(WHOLE_UNET) == calls and re.search(foreign.reason, on.reason, re.IGNORECASE), on.reason
    assert_same(on, off)
    if foreign.doubles_calls:
        assert calls == 2 * plain.served(WHOLE_UNET)
    else:
        assert_different(plain, on, foreign.name)
    assert largest_difference(run_on(webui, plain_request).pictures, plain.pictures) == 0


@pytest.mark.parametrize("foreign", UNTOUCHED, ids=lambda foreign: foreign.name)
def test_what_leaves_the_unet_alone_stays_ours(webui: WebUI, sd15: Models, foreign: Foreign) -> None:
    only_on(webui, foreign.host)
    plain_request = {name: value for name, value in foreign.request.items() if name != "alwayson_scripts"}
    made, _ = on_and_off(webui, foreign.request)
    assert_different(run_on(webui, plain_request), made, foreign.name)


def test_hypernetwork(webui: WebUI, sd15: Models) -> None:
    only_on(webui, "a1111")
    name = sd15.need("hypernetwork")
    plain = run_on(webui, {"prompt": PROMPT})
    made = assert_host_served(webui, {"prompt": f"{PROMPT} <hypernet:{name}:1>"}, "hypernetwork")
    assert_different(plain, made, "the hypernetwork")
    assert_same(run_on(webui, {"prompt": PROMPT}), plain)


def test_lora_functional(webui: WebUI, sd15: Models) -> None:
    """A1111's older way of applying a LoRA, inside every layer's forward."""
    only_on(webui, "a1111")
    request = {"prompt": f"{PROMPT} <lora:{sd15.need('lora-a')}:1>"}
    plain, merged = run_on(webui, {"prompt": PROMPT}), run_on(webui, request)
    with webui.options(lora_functional=True):
        made = assert_host_served(webui, request, "lora")
        assert_different(plain, made, "the LoRA")
    assert_same(run_on(webui, {"prompt": PROMPT}), plain)
    assert_same(run_on(webui, request), merged)
