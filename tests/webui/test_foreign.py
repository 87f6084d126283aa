"""Images with other extensions. Functions that they register for the UNet in a known way run within OneDiff's forward.
Unknown changes of the UNet make the WebUI compute it, and the status says why. OneDiff computes the images of
extensions that do not change the UNet. Images are the same if no pixel differs by more than 1 of 255."""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from webui_client import OPTION_DEFAULTS, WebUI, encode, gradient, start_from
from webui_compare import (
    WHOLE_UNET,
    Run,
    assert_between_graphs,
    assert_different,
    assert_same,
    assert_same_on_and_off,
    assert_within,
    graphs_on_a_cpu,
    run_off,
    run_on,
)
from webui_models import Models

PROMPT = "a red fox in the snow"
# A reason contains this word if other extensions have registered functions for the UNet.
PATCHES = "patches"


# FreeU divides by the range of a feature map: at 64x64 the deepest is one pixel, and with Kohya HRFix at 128x128.
LARGER = {"width": 128, "height": 128}
LARGEST = {"width": 256, "height": 256}


def script(title: str, *args: Any) -> dict[str, Any]:
    return {"alwayson_scripts": {title: {"args": list(args)}}}


def reference(preprocessor: str) -> dict[str, Any]:
    return script("ControlNet", {
        "enabled": True, "module": preprocessor, "model": "None", "weight": 1.0, "image": encode(gradient(64, 64)),
        "resize_mode": "Just Resize", "processor_res": 64, "threshold_a": 0.5,
    })


FREEU = script("FreeU Integrated (SD 1.x, SD 2.x, SDXL)", True, 1.3, 1.4, 0.9, 0.2, 0.0, 1.0)
# sd-webui-freeu: from, until, smoothness, version, and three stages of backbone, skip, offset, width, cutoff, high end.
STAGES_OF_FREEU = (1.3, 0.9, 0.0, 0.5, 0.0, 1.0, 1.4, 0.2, 0.0, 0.5, 0.0, 1.0, 1.2, 0.7, 0.25, 1.0, 0.5, 1.1)
FREEU_OF_A1111 = script("FreeU", True, 0.0, 1.0, 0.0, "Version 2", *STAGES_OF_FREEU)
HALF_OF_FREEU = script("FreeU", True, 0.0, 0.5, 0.0, "Version 1", *STAGES_OF_FREEU)
SAG = script("SelfAttentionGuidance Integrated (SD 1.x, SD 2.x, SDXL)", True, 0.5, 2.0, 1.0)
KOHYA_HRFIX = script("Kohya HRFix Integrated", True, 3, 2.0, 0.0, 1.0, True, "bicubic", "bicubic")
PERTURBED_ATTENTION = script("PerturbedAttentionGuidance Integrated", True, 15.0, 0.0, 0.0, 1.0)
# Forge Neo has it for img2img only.
TILED = [
    {**script("MultiDiffusion Integrated", True, method, 64, 64, 32, at_once), **start_from(gradient(128, 96)),
     "width": 128, "height": 96, "denoising_strength": 1.0}
    for method, at_once in (("MultiDiffusion", 1), ("Mixture of Diffusers", 4))
]
# Two regions side by side, one line of the prompt each.
COUPLE = {"prompt": "a red fox in the snow\na castle at night", **script(
    "Forge Couple", True, True, "Basic", "", "Horizontal", "None", 0.5,
)}
BY_REGIONAL_PROMPTER = "Linear.forward was replaced by sd-webui-regional-prompter"


def regions(mode: str) -> dict[str, Any]:
    """A request to Regional Prompter with two regions side by side, and the default arguments of its author."""
    places = (True, False, "Matrix", "Columns", "Mask", "Prompt", "1,1", "0.2", False, False, False)
    others = ([], "0", "0", "0.4", "", "0", "0", False)
    return {"prompt": "a red fox BREAK a castle at night", **script("Regional Prompter", *places, mode, *others)}


DYNAMIC_THRESHOLDING = script(
    "DynamicThresholding (CFG-Fix) Integrated", True, 5.0, 0.9, "Constant", 0.0, "Constant", 0.0, 1.0, "enable",
    "MEAN", "AD", 1.0,
)


@dataclass(frozen=True)
class Foreign:
    """Another extension's feature.

    host: the kind of WebUI that has it.
    reason: a pattern that the reason in the status must match.
    request, options: switch the feature on.
    doubles_calls: whether the feature is checked by twice as many UNet calls instead of by other pixels, because with
        random weights it may not change any pixel.
    """

    name: str
    host: str
    reason: str
    request: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    doubles_calls: bool = False


WITHIN = [
    Foreign("self-attention guidance", "forge", r"patches_replace\[attn1\]", SAG, doubles_calls=True),
    Foreign("token merging on Forge", "forge", r"patches\[attn1_patch\]", options={"token_merging_ratio": 0.5}),
    Foreign("StyleAlign", "forge", r"patches_replace\[attn1\].*stylealign", {
        **script("StyleAlign Integrated", True, 0.7), "batch_size": 2,
    }),
    # They store hidden states of one call for the next call.
    *(
        Foreign(name, "forge", r"patches_replace\[attn1\].*reference", reference(name), doubles_calls=True)
        for name in ("reference_only", "reference_adain+attn")
    ),
    Foreign("self-attention guidance of reForge", "ldm_patched", r"patches_replace\[attn1\]", {
        # At 64x64 it fails in reForge itself.
        **LARGER, **script("SelfAttentionGuidance Integrated", True, 0.5, 2.0),
    }, doubles_calls=True),
    Foreign("FreeU", "forge", r"patches\[output_block_patch\]", {**FREEU, **LARGER}),
    Foreign("perturbed attention", "forge", r"patches_replace\[attn1\]", PERTURBED_ATTENTION, doubles_calls=True),
    Foreign("FreeU and Kohya HRFix", "forge", "input_block_patch", {
        **LARGEST, "alwayson_scripts": {**FREEU["alwayson_scripts"], **KOHYA_HRFIX["alwayson_scripts"]},
    }),
    Foreign("FreeU of reForge", "ldm_patched", r"patches\[output_block_patch\]", {
        **LARGER, **script("FreeU Integrated", True, 1.3, 1.4, 0.9, 0.2),
    }),
    Foreign("Kohya HRFix of reForge", "ldm_patched", "input_block_patch", {
        **script("Kohya HRFix Integrated", True, 3, 2.0, 0.0, 1.0, True, "bicubic", "bicubic"),
    }),
    Foreign("SAG and Kohya HRFix", "forge", "input_block_patch", {
        **LARGER, "alwayson_scripts": {**SAG["alwayson_scripts"], **KOHYA_HRFIX["alwayson_scripts"]},
    }, doubles_calls=True),
    Foreign("forge-couple on reForge", "ldm_patched", r"patches\[attn2_patch\] by .*couple", COUPLE),
    Foreign("forge-couple beside token merging", "forge", "couple", COUPLE, {"token_merging_ratio": 0.5}),
    Foreign("forge-couple, batch of 2, three lines and a background", "forge", "couple", {
        **LARGER, **script("Forge Couple", True, True, "Basic", "", "Vertical", "First Line", 0.5), "batch_size": 2,
        "prompt": "the sea\na red fox in the snow\na castle at night", "negative_prompt": "rain",
    }),
    Foreign("FreeU of A1111 in half of the steps, an odd size, two images", "a1111", "skips by sd-webui-freeu", {
        **HALF_OF_FREEU, "width": 136, "height": 88, "batch_size": 2, "steps": 4,
    }),
    Foreign(
        "FreeU and token merging on A1111", "a1111", "block by tomesd.*skips by sd-webui-freeu",
        {**LARGER, **FREEU_OF_A1111}, {"token_merging_ratio": 0.5},
    ),
    Foreign("Regional Prompter", "a1111", "attn2 by sd-webui-regional-prompter", regions("Attention")),
    Foreign("token merging", "a1111", r"block by tomesd", options={"token_merging_ratio": 0.5}),
    Foreign(
        "HyperTile", "a1111", "attn1 by hypertile", LARGEST,
        {"hypertile_enable_unet": True, "hypertile_swap_size_unet": 3, "hypertile_max_tile_unet": 128},
    ),
]
# Of sd-webui-controlnet, which calls the UNet twice a step: once to record, once to make the image.
REFERENCES = [
    Foreign("reference_only", "a1111", "controlnet runs", reference("reference_only")),
    Foreign("reference_adain+attn, two images, a long prompt", "a1111", "controlnet runs", {
        **reference("reference_adain+attn"), **LARGER, "batch_size": 2, "prompt": "a " * 110,
    }),
    Foreign("reference_only and FreeU", "a1111", "controlnet runs", {
        **LARGER,
        "alwayson_scripts": {**reference("reference_only")["alwayson_scripts"], **FREEU_OF_A1111["alwayson_scripts"]},
    }),
]
UNTOUCHED = [
    Foreign("dynamic thresholding", "forge", "", DYNAMIC_THRESHOLDING),
    Foreign("MultiDiffusion", "forge", "", TILED[0]),
    Foreign("Mixture of Diffusers, four tiles at once", "forge", "", TILED[1]),
]


@pytest.fixture
def graphs(webui: WebUI) -> Iterator[None]:
    with graphs_on_a_cpu(webui):
        yield


def only_on(webui: WebUI, host: str) -> None:
    if webui.kind != host:
        pytest.skip(f"this is {host}'s: give its address with --webui URL")


def assert_host_served(webui: WebUI, request: dict[str, Any], reason: str) -> Run:
    """Make a request with OneDiff on and off. Asserts that the WebUI computed all UNet calls both times, that the
    images are the same, and that the reason matches the pattern. Returns the run with OneDiff on."""
    on = run_on(webui, request, routes=("host",))
    assert re.search(reason, on.reason, re.IGNORECASE), f"the reason given was {on.reason!r}"
    off = run_off(webui, request)
    assert on.calls == off.calls
    assert_same(on, off)
    return on


def prepared(webui: WebUI, foreign: Foreign) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request with the feature, and the same request without it."""
    only_on(webui, foreign.host)
    request = dict(foreign.request)
    present = webui.get("/sdapi/v1/scripts")["img2img" if "init_images" in request else "txt2img"]
    missing = [title for title in request.get("alwayson_scripts", {}) if title.lower() not in present]
    if missing:
        pytest.skip(f"this WebUI has no {', '.join(missing)}")
    plain = {name: value for name, value in request.items() if name != "alwayson_scripts"}
    if foreign.options:
        # A1111 does not put an option back that was overridden and had never been saved: so they are saved first.
        webui.set_options(**{name: OPTION_DEFAULTS[name] for name in foreign.options})
        request["override_settings"] = foreign.options
    return request, plain


@pytest.mark.parametrize("foreign", WITHIN, ids=lambda foreign: foreign.name)
def test_functions_of_other_extensions_within_our_forward_give_the_same_image_as_the_webui(
    webui: WebUI, sd15: Models, foreign: Foreign
) -> None:
    """The reference is the WebUI's image with the same feature and without OneDiff (see assert_within). The feature
    must change the image, or double the UNet calls."""
    plain, on = assert_within(webui, *prepared(webui, foreign), foreign.reason)
    if foreign.doubles_calls:
        assert on.served(WHOLE_UNET) == 2 * plain.served(WHOLE_UNET)
    else:
        assert_different(plain, on, foreign.name)


@pytest.mark.parametrize("foreign", [*WITHIN, *UNTOUCHED], ids=lambda foreign: foreign.name)
def test_functions_of_other_extensions_between_graphs_give_the_same_image_as_the_webui(
    webui: WebUI, sd15: Models, foreign: Foreign, graphs: None
) -> None:
    """The parts of our forward between these functions are replayed as graphs, by a stand-in on a CPU. With the
    features of UNTOUCHED, the reason must name no functions of extensions."""
    plain, on = assert_between_graphs(webui, *prepared(webui, foreign), foreign.reason)
    assert foreign in WITHIN or PATCHES not in on.reason, "it is part of the graph"
    if not foreign.doubles_calls:
        assert_different(plain, on, foreign.name)


@pytest.mark.parametrize("foreign", UNTOUCHED, ids=lambda foreign: foreign.name)
def test_onediff_computes_images_of_extensions_that_do_not_change_the_unet(
    webui: WebUI, sd15: Models, foreign: Foreign
) -> None:
    """The reference is the WebUI's image with the same feature and without OneDiff. The feature must change the
    image."""
    request, plain_request = prepared(webui, foreign)
    made, _ = assert_same_on_and_off(webui, request)
    assert_different(run_on(webui, plain_request), made, foreign.name)


@pytest.mark.parametrize("checkpoint", ["sd15", "sdxl"])
@pytest.mark.parametrize("foreign", REFERENCES, ids=lambda foreign: foreign.name)
def test_the_webui_computes_images_with_a_reference_image_of_controlnet(
    webui: WebUI, sd15: Models, foreign: Foreign, checkpoint: str
) -> None:
    """With a reference preprocessor, sd-webui-controlnet calls the UNet twice in each step: for the reference image,
    whose hidden states it stores, and for the image."""
    request, plain_request = prepared(webui, foreign)
    sd15.use(checkpoint)
    plain, on = assert_within(webui, request, plain_request, foreign.reason, ("host",))
    assert on.served(("host",)) == 2 * plain.served(WHOLE_UNET)
    assert_different(plain, on, foreign.name)


def test_the_webui_computes_images_with_a_hypernetwork(webui: WebUI, sd15: Models) -> None:
    """The image is the WebUI's own. The next image, without the hypernetwork, is computed by OneDiff, and the same as
    the one before."""
    only_on(webui, "a1111")
    name = sd15.need("hypernetwork")
    plain = run_on(webui, {"prompt": PROMPT})
    made = assert_host_served(webui, {"prompt": f"{PROMPT} <hypernet:{name}:1>"}, "hypernetwork")
    assert_different(plain, made, "the hypernetwork")
    assert_same(run_on(webui, {"prompt": PROMPT}), plain)


@pytest.mark.parametrize(("role", "checkpoint"), [("lora-a", "sd15"), ("locon", "sd15"), ("sdxl-lora", "sdxl")])
def test_a_lora_that_every_layer_applies_in_its_forward_gives_the_same_image_as_the_webui(
    webui: WebUI, sd15: Models, role: str, checkpoint: str
) -> None:
    """With A1111's option lora_functional, layers apply LoRAs in their forward instead of merging them into weights.
    When the option is off again, images with and without the LoRA are the same as before. role: the LoRA among the test
    models."""
    only_on(webui, "a1111")
    request = {"prompt": f"{PROMPT} <lora:{sd15.need(role)}:0.7>"}
    sd15.use(checkpoint)
    plain = run_on(webui, {"prompt": PROMPT})
    merged = run_on(webui, request)
    with webui.options(lora_functional=True):
        # Without OneDiff, A1111 leaves the LoRA in that was merged.
        assert_same(run_on(webui, {"prompt": PROMPT}), plain)
        for changes in ({}, {"width": 72, "height": 88, "batch_size": 2}):
            made, _ = assert_same_on_and_off(webui, {**request, **changes})
            assert_different(run_on(webui, {"prompt": PROMPT, **changes}), made, "the LoRA")
    assert_same(run_on(webui, {"prompt": PROMPT}), plain)
    assert_same(run_on(webui, request), merged)


def test_the_reason_names_the_extension_that_replaced_the_forward_of_linear_layers(webui: WebUI, sd15: Models) -> None:
    """Regional Prompter's mode Latent sets lora_functional and replaces Linear.forward, so that the WebUI computes the
    image. Tested without and with a LoRA."""
    request, plain = prepared(webui, Foreign("Regional Prompter, Latent", "a1111", "", regions("Latent")))
    for lora in ("", f" <lora:{sd15.need('lora-a')}:0.7>"):
        made = assert_host_served(webui, {**request, "prompt": request["prompt"] + lora}, BY_REGIONAL_PROMPTER)
        assert_different(run_on(webui, plain), made, "the regions")
