"""IP-Adapters and ControlLLLite change every attention. On the Forge family they are computed within OneDiff's forward,
by its operators or by the extension's functions. On A1111 the WebUI computes the UNet, because its ControlNet extension
replaces the UNet's forward."""
from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from test_controlnet import (
    NO_PREPROCESSOR,
    ROUTES,
    controlled,
)
from webui_client import WebUI, encode, gradient
from webui_compare import (
    assert_between_graphs,
    assert_different,
    assert_same_on_and_off,
    assert_within,
    graphs_on_a_cpu,
    need,
    run_on,
)
from webui_models import Models

# Forge encodes the image itself: it must have models/ControlNetPreprocessor/CLIP-ViT-H-14.safetensors, or downloads it.
ENCODER = {"forge": "CLIP-ViT-H (IPAdapter)", "ldm_patched": "CLIP-ViT-H (IPAdapter)", "a1111": "ip-adapter_clip_h"}
# Patterns of the reason in the status, by kind of WebUI. On Forge and Neo, OneDiff's operators compute IP-Adapters
# without masks, so that the reason names no function at attentions.
BY_IP_ADAPTER = {
    "forge": r"^(?!.*patches_replace)", "ldm_patched": r"patches_replace\[attn2\]", "a1111": "controlnet runs",
}
BY_LLLITE = {
    "forge": r"^(?!.*patches_replace).*patches\[attn1_patch\].*lllite", "a1111": "controlnet runs",
}


@dataclass(frozen=True)
class Unit:
    """A unit of ControlNet's extension in a request. role: the role of its model (see webui_models.py). seed: the seed
    of its input image. masked: whether it is limited to the left half. changes: its other settings."""

    role: str
    seed: int = 1
    masked: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    name: str
    units: tuple[Unit, ...]
    request: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    checkpoint: str = "sd15"


PLAIN = Unit("ip-adapter", changes={"weight": 0.8})
PLUS = Unit("ip-adapter-plus", changes={"weight": 0.8})
SECOND = Unit("ip-adapter", 2, changes={"weight": 0.5})
MASKED = Unit("ip-adapter", masked=True)
HALF_THE_STEPS = {"guidance_end": 0.5}
IP_ADAPTERS = [
    Case("IP-Adapter", (PLAIN,)),
    Case("Plus", (PLUS,)),
    Case("two", (PLAIN, SECOND)),
    Case("two, one of them Plus", (PLUS, SECOND)),
    Case("with a mask", (MASKED,)),
    Case("with a mask, another size", (MASKED,), {"width": 128, "height": 64, "batch_size": 2}),
    Case("with a mask, an odd size", (MASKED,), {"width": 72, "height": 120, "batch_size": 2}),
    Case("two, one with a mask", (MASKED, Unit("ip-adapter-plus", 2))),
    Case("for half the steps", (Unit("ip-adapter", changes=HALF_THE_STEPS),), {"steps": 4}),
    Case("with a long prompt", (PLAIN,), {"prompt": "a " * 110}),
    Case("with a ControlNet and a LoRA", (PLAIN, Unit("controlnet")), lora=True),
    Case("Plus, with a ControlNet and a LoRA", (PLUS, Unit("controlnet")), lora=True),
    Case("SDXL", (Unit("ip-adapter-sdxl", changes={"weight": 0.5}),), checkpoint="sdxl"),
    Case("SDXL, Plus", (Unit("ip-adapter-plus-sdxl", changes={"weight": 0.5}),), checkpoint="sdxl"),
    Case("SDXL, two, one with a mask", (
        Unit("ip-adapter-sdxl", masked=True), Unit("ip-adapter-plus-sdxl", 2, changes={"weight": 0.3}),
    ), checkpoint="sdxl"),
]
LLLITES = [
    Case("ControlLLLite", (Unit("lllite"),)),
    # Its modules count their calls.
    Case("for half the steps", (Unit("lllite", changes=HALF_THE_STEPS),), {"steps": 4}),
    Case("from the second step on", (Unit("lllite", changes={"guidance_start": 0.25}),), {"steps": 4}),
    Case("two", (Unit("lllite"), Unit("lllite", 2, changes={**HALF_THE_STEPS, "weight": 0.5})), {"steps": 4}),
    Case("with an IP-Adapter, a ControlNet and a LoRA", (Unit("lllite"), PLAIN, Unit("controlnet")), lora=True),
    Case("SDXL", (Unit("lllite-sdxl"),), checkpoint="sdxl"),
    Case("SDXL, for half the steps", (Unit("lllite-sdxl", changes=HALF_THE_STEPS),), {"steps": 4}, checkpoint="sdxl"),
]


def image_embedding(role: str, seed: int) -> str:
    """The output of an IP-Adapter's image encoder, in the form that the API of A1111's extension takes."""
    random = torch.Generator().manual_seed(seed)
    file = io.BytesIO()
    if "plus" in role:
        # The adapter takes the last but one.
        torch.save({"hidden_states": [torch.randn(1, 257, 1280, generator=random)] * 2}, file)
    else:
        torch.save({"image_embeds": torch.randn(1, 1024, generator=random)}, file)
    return base64.b64encode(file.getvalue()).decode()


def unit_of(webui: WebUI, models: Models, unit: Unit) -> dict[str, Any]:
    image = gradient(64, 64).rotate(90 * unit.seed)
    changes: dict[str, Any] = {**unit.changes, "image": encode(image), "module": NO_PREPROCESSOR[webui.kind]}
    if unit.role.startswith("ip-adapter"):
        changes["module"] = ENCODER[webui.kind]
        if webui.kind == "a1111":
            changes["ipadapter_input"] = [image_embedding(unit.role, unit.seed)]
    if unit.masked:
        half = image.point(lambda value: 0)
        half.paste((255, 255, 255), (0, 0, 32, 64))
        changes["effective_region_mask" if webui.kind == "a1111" else "mask_image"] = encode(half)
    made: dict[str, Any] = controlled(webui, models.need(unit.role), **changes)
    only: dict[str, Any] = made["alwayson_scripts"]["ControlNet"]["args"][0]
    if "ipadapter_input" in only:
        del only["image"]
    return only


def prepared(webui: WebUI, models: Models, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request of a case, with its checkpoint loaded, and the same request without its units."""
    need(webui, "ControlNet")
    if webui.kind == "a1111" and case.name.endswith("odd size"):
        pytest.skip("sd-webui-controlnet rounds such a mask's size down and fails, without OneDiff too")
    units = [unit_of(webui, models, unit) for unit in case.units]
    plain = {**case.request, **({"prompt": f"a fox <lora:{models.need('lora-a')}:0.3>"} if case.lora else {})}
    models.use(case.checkpoint)
    return {**plain, "alwayson_scripts": {"ControlNet": {"args": units}}}, plain


def only_forge(webui: WebUI) -> None:
    if webui.kind != "forge":
        pytest.skip("Forge's and Forge Neo's: give the address of one with --webui URL")


def reason_for(webui: WebUI, case: Case) -> str:
    """A pattern for the reason on this WebUI; skips features that only Forge and Forge Neo have."""
    if case in LLLITES:
        if webui.kind not in BY_LLLITE:
            only_forge(webui)
        return BY_LLLITE[webui.kind]
    masked = any(unit.masked for unit in case.units)
    return BY_IP_ADAPTER["ldm_patched" if masked and webui.kind == "forge" else webui.kind]


@pytest.mark.parametrize("case", [*IP_ADAPTERS, *LLLITES], ids=lambda case: case.name)
def test_images_with_ip_adapters_and_controllllites_match_those_of_the_webui(
    webui: WebUI, sd15: Models, case: Case
) -> None:
    """No pixel differs by more than one level of 255. OneDiff or the WebUI computes them (see the file's docstring);
    the reason names the functions that run within the forward."""
    request, without = prepared(webui, sd15, case)
    reason = reason_for(webui, case)
    plain, on = assert_within(webui, request, without, reason, ROUTES[webui.kind])
    assert_different(plain, on, case.name)


def test_after_an_ip_adapter_on_a1111_onediff_computes_with_every_attention_optimization(
    webui: WebUI, sd15: Models
) -> None:
    """The extension leaves a forward on each attention module: that of the class at that time, which the class no
    longer has after another cross attention optimization is chosen."""
    if webui.kind != "a1111":
        pytest.skip("A1111's: give its address with --webui URL")
    request, without = prepared(webui, sd15, IP_ADAPTERS[0])
    run_on(webui, request, routes=("host",))
    for optimization in ("sub-quadratic", "None", "Automatic"):
        with webui.options(cross_attention_optimization=optimization):
            on, _ = assert_same_on_and_off(webui, without)
            assert "compute within" not in on.reason, on.reason


@pytest.mark.parametrize("case", [*IP_ADAPTERS, *LLLITES], ids=lambda case: case.name)
def test_images_with_ip_adapters_and_controllllites_between_graphs_match_those_of_the_webui(
    webui: WebUI, sd15: Models, case: Case
) -> None:
    """On Forge and Neo, graphs of the parts between the extension's functions are replayed; a CPU's stand-in for them
    is enough. No pixel differs by more than one level of 255."""
    only_forge(webui)
    reason = reason_for(webui, case)
    request, without = prepared(webui, sd15, case)
    with graphs_on_a_cpu(webui):
        plain, on = assert_between_graphs(webui, request, without, reason)
    assert_different(plain, on, case.name)
